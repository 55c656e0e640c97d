"""Global prototype pairs from the devices' local ones: completion, then multimodal clustering (AproMFL).

Completion:  a prototype p^a without modality b gets  p^b = sum_o softmax_o(cos(p^a, q_o^a)) q_o^b  over the O nearest
multimodal prototypes q.  Clustering, as on a device without labels:  K-means on the mean over the modalities of
p^m/|p^m|, global pairs = the clusters' means of each modality.
With more than two modalities the cosine is the mean over the modalities that both have. Every row is normalised first,
so that class means (not normalised on the devices) and cluster means count alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.prototypes.adaptive import Pairs, normalised
from edgefl.prototypes.kmeans import kmeans
from edgefl.prototypes.table import Array, ClassMeans, class_means, empty

Flags = npt.NDArray[np.bool_]
#: One device's tables by modality; rows at the same index are one pair.
Tables = Mapping[str, ClassMeans]

#: The paper's K, global pairs, and O, multimodal prototypes that complete one.
CLUSTERS, NEIGHBOURS = 10, 10


def complete(
    devices: Mapping[str, Tables],
    rng: np.random.Generator,
    *,
    clusters: float = CLUSTERS,
    neighbours: float = NEIGHBOURS,
) -> tuple[dict[str, ClassMeans], dict[str, Any]]:
    """The global tables of the devices' local ones (of unit rows, pairs by index), and the record of how they came.

    A row's count: how many prototypes it is the mean of. Without a multimodal prototype nothing can be completed: each
    set of modalities is then clustered by itself, in rows of its own. No prototypes at all: tables without rows. The
    order of ``devices`` does not matter. In the record: ``prototypes``, how many came; ``multimodal``, how many with
    several modalities; ``completed`` and ``lacking``, modality -> how many got a partner or stayed without;
    ``skipped``, why nothing was completed, or ""; ``pairs``, how many there are now.
    Raises ModelError, naming the device, for tables that are no pairs or of another width, and for options below 1.
    """
    if clusters < 1 or neighbours < 1:
        raise ModelError(f"global prototypes need clusters and neighbours >= 1, got {clusters} and {neighbours}")
    rows, has = _gather(devices)
    several = np.sum(list(has.values()), axis=0) > 1  # [R]
    whole, held = partners(rows, has, int(neighbours))
    lacking = {m: int((~flags).sum()) for m, flags in held.items()}
    tables = _cluster(whole, held, rng, int(clusters))
    return tables, {
        "prototypes": _count(has),
        "multimodal": int(several.sum()),
        "completed": {m: int((held[m] & ~has[m]).sum()) for m in has},
        "lacking": lacking,
        "skipped": "no multimodal device took part" if any(lacking.values()) and not several.any() else "",
        "pairs": len(Pairs(tables)),
    }


def partners(
    rows: Mapping[str, Array], has: Mapping[str, Flags], neighbours: int = NEIGHBOURS
) -> tuple[dict[str, Array], dict[str, Flags]]:
    """``rows`` (modality -> [R, d], of length 1 where ``has`` [R], else 0) and ``has`` with what can be completed.

    Only rows that came with several modalities lend their halves; ``neighbours`` is clamped to how many there are.
    """
    whole, held = {m: h.copy() for m, h in rows.items()}, {m: flags.copy() for m, flags in has.items()}
    several = np.flatnonzero(np.sum(list(has.values()), axis=0) > 1)
    lent, lends = {m: h[several] for m, h in rows.items()}, {m: flags[several] for m, flags in has.items()}  # [L, d]
    for pattern, members in _patterns(has):
        common = np.sum([lends[a] for a in pattern], axis=0)  # [L], modalities that a lender shares with these members
        cosines = np.sum([rows[a][members] @ lent[a].T for a in pattern], axis=0)  # [n, L]; an absent row adds 0
        for b in has.keys() - set(pattern):
            lenders = (common > 0) & lends[b]
            if lenders.any():
                alike = (cosines / np.maximum(common, 1))[:, lenders]
                whole[b][members] = _mixed(alike, lent[b][lenders], neighbours)
                held[b][members] = True
    return whole, held


def _mixed(cosines: Array, rows: Array, neighbours: int) -> Array:
    """sum_o softmax_o(cosine_o) row_o [n, d] over the nearest of the ``rows`` [L, d], by their ``cosines`` [n, L]."""
    scores = np.asarray(cosines, np.float32)
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, :neighbours]
    best = np.take_along_axis(scores, nearest, axis=1)
    powers = np.exp(best - best.max(axis=1, keepdims=True))
    weights = powers / powers.sum(axis=1, keepdims=True)
    weights /= weights.sum(axis=1, keepdims=True)  # the rounded weights' own sum, so that they sum to one
    return np.asarray(np.einsum("bk,bkd->bd", weights, rows[nearest]), np.float32)


def _gather(devices: Mapping[str, Tables]) -> tuple[dict[str, Array], dict[str, Flags]]:
    """All devices' rows that have a modality, devices sorted: modality -> [R, d] of length 1 or 0, and -> [R]."""
    widths = _widths(devices)
    rows: dict[str, list[Array]] = {m: [] for m in widths}
    has: dict[str, list[Flags]] = {m: [] for m in widths}
    for _, tables in sorted(devices.items()):
        given = {m: tables.get(m, empty(len(Pairs(dict(tables))), width)) for m, width in widths.items()}
        some = np.any([table.present for table in given.values()], axis=0)
        for m, table in given.items():
            rows[m].append(normalised(table.means[some]) * table.present[some, None])
            has[m].append(table.present[some])
    return {m: np.concatenate(parts) for m, parts in rows.items()}, {m: np.concatenate(p) for m, p in has.items()}


def _widths(devices: Mapping[str, Tables]) -> dict[str, int]:
    widths: dict[str, int] = {}  # all alike: a cluster is one of means over the modalities
    for device, tables in sorted(devices.items()):
        try:
            Pairs(dict(tables))
        except ModelError as error:
            raise ModelError(f"device '{device}': {error.message}", remedy=error.remedy) from None
        for m, table in tables.items():
            width = next(iter(widths.values()), table.means.shape[1])
            widths[m] = width
            if table.means.shape[1] != width:
                raise ModelError(
                    f"device '{device}' has prototypes of '{m}' of width {table.means.shape[1]}, others of {width}",
                    remedy="All devices of a run need mappings to one width.",
                )
    return dict(sorted(widths.items()))


def _count(has: Mapping[str, Flags]) -> int:
    return next((len(flags) for flags in has.values()), 0)


def _patterns(has: Mapping[str, Flags]) -> list[tuple[tuple[str, ...], npt.NDArray[np.int64]]]:
    """(the modalities, the rows [n] that have just these), the fullest first."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row in range(_count(has)):
        found.setdefault(tuple(m for m in has if has[m][row]), []).append(row)
    return [(p, np.array(found[p], np.int64)) for p in sorted(found, key=lambda p: (-len(p), p))]


def _cluster(
    rows: Mapping[str, Array], has: Mapping[str, Flags], rng: np.random.Generator, clusters: int
) -> dict[str, ClassMeans]:
    """K-means of the rows of each set of modalities: one set, unless some could not be completed."""
    units = {m: normalised(h) for m, h in rows.items()}  # a partner is shorter than 1
    labels = np.empty(_count(has), np.int64)
    total = 0
    for pattern, members in _patterns(has):
        found = kmeans(np.mean([units[m][members] for m in pattern], axis=0), clusters, rng)
        labels[members] = total + found.labels
        total += len(found.centres)
    means = {m: class_means(h, np.where(has[m], labels, -1), total) for m, h in units.items()}
    return {m: ClassMeans(normalised(table.means), table.counts) for m, table in means.items()}
