"""Adaptive prototypes (AproMFL, arXiv 2502.04400): class means where there are labels, else K-means clusters.

On the server the devices' pairs become global ones. Completion:  a prototype p^a without modality b gets
p^b = sum_o softmax_o(cos(p^a, q_o^a)) q_o^b  over the O nearest multimodal prototypes q.  Clustering, as on a device
without labels:  K-means on the mean over the modalities of p^m/|p^m|, global pairs = the clusters' means of each
modality. With more than two modalities the cosine is the mean over the modalities that both have. Every row is
normalised first, so that class means (not normalised on the devices) and cluster means count alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.mean import Load, Outcome
from edgefl.aggregation.prototype_merge import of_pairs
from edgefl.models.spec import ModelSpec, answered
from edgefl.plan.job import Candidate, Job
from edgefl.plan.training_samples import held_out, usable_samples
from edgefl.prototypes.kmeans import kmeans
from edgefl.prototypes.pairs import LOCAL_CLUSTERS, Flags, normalised, pair_count
from edgefl.prototypes.table import Array, ClassMeans, class_means, empty
from edgefl.registry import MIN_COUNT, Option, register
from edgefl.roles import Prototypes

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset
    from edgefl.models.staged import StagedModel
    from edgefl.training.forward import Auxiliary

#: One device's tables by modality; rows at the same index are one pair.
Tables = Mapping[str, ClassMeans]

#: The paper's K, global pairs, and O, multimodal prototypes that complete one.
CLUSTERS, NEIGHBOURS = 10, 10


def local(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> Mapping[str, ClassMeans]:
    """Class means or cluster centres of a device's projections, by its private heads if it has any."""
    from edgefl.training.forward import local_prototypes  # loads torch

    return local_prototypes(job, model, auxiliary, dataset, rng).tables


def rows(model: ModelSpec, *, clusters: float) -> dict[str, tuple[int, int]]:
    """A table of global prototypes a modality; rows at one index are a pair."""
    return dict.fromkeys(model.encoders, (int(clusters), model.head.out))


def local_rows(
    job: Job, candidate: Candidate, own: Sequence[str], *, local_clusters: float, min_count: float
) -> dict[str, tuple[int, int]]:
    """Classes of its label sets where the device has labels; else clusters of its samples with all its modalities.

    Without those of the hold-out.
    """
    if job.model.classes and any(candidate.class_counts):
        count = len(answered(job.model, job.stage.trained)) or job.model.classes
    else:
        complete = min((candidate.samples[m] for m in own), default=0)
        judged = usable_samples(job.slots, candidate.samples, list(job.model.encoders), 0)
        trained = complete - round(held_out(job.hyper, judged) * min(1.0, complete / max(1, judged)))
        count = min(int(local_clusters), int(trained // min_count))
    return dict.fromkeys(own, (count, job.model.head.out)) if count else {}


def complete(
    devices: Mapping[str, Tables],
    rng: np.random.Generator,
    *,
    clusters: float = CLUSTERS,
    neighbours: float = NEIGHBOURS,
) -> tuple[dict[str, ClassMeans], dict[str, object]]:
    """The global tables of the devices' local ones (of unit rows, pairs by index), and the record of how they came.

    A row's count: how many prototypes it is the mean of. Without a multimodal prototype nothing can be completed: each
    set of modalities is then clustered by itself, in rows of its own. No prototypes at all: tables without rows. The
    order of ``devices`` does not matter. In the record: ``prototypes``, how many came; ``multimodal``, how many with
    several modalities; ``completed`` and ``lacking``, modality -> how many got a partner or stayed without;
    ``skipped``, why nothing was completed, or ""; ``pairs``, how many there are now.
    ``devices`` are checked to be pairs of one width, by which they are left out of a round.
    """
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
        "pairs": pair_count(tables),
    }


def merge(
    loaders: Mapping[str, Load],
    previous: Load | None,
    rng: np.random.Generator,
    *,
    clusters: float = CLUSTERS,
    neighbours: float = NEIGHBOURS,
) -> Outcome:
    """The global pairs of this round's devices; those of the round before are forgotten, as in the paper."""
    return of_pairs(loaders, partial(complete, rng=rng, clusters=clusters, neighbours=neighbours))


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
    width = next((table.means.shape[1] for tables in devices.values() for table in tables.values()), 0)
    modalities = sorted({m for tables in devices.values() for m in tables})
    rows: dict[str, list[Array]] = {m: [] for m in modalities}
    has: dict[str, list[Flags]] = {m: [] for m in modalities}
    for _, tables in sorted(devices.items()):
        given = {m: tables.get(m, empty(pair_count(tables), width)) for m in modalities}
        some = np.any([table.present for table in given.values()], axis=0)
        for m, table in given.items():
            rows[m].append(normalised(table.means[some]) * table.present[some, None])
            has[m].append(table.present[some])
    return {m: np.concatenate(parts) for m, parts in rows.items()}, {m: np.concatenate(p) for m, p in has.items()}


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


register(
    Prototypes(
        "adaptive",
        "class means where there are labels, else K-means; completed and clustered on the server (AproMFL)",
        {
            "min_count": MIN_COUNT,
            "local_clusters": Option(LOCAL_CLUSTERS, "prototypes of a device without labels", least=1),
            "clusters": Option(CLUSTERS, "global prototypes", least=1),
            "neighbours": Option(NEIGHBOURS, "multimodal prototypes that complete a unimodal one", least=1),
        },
        per_round=True,
        local=local,
        merge=merge,
        rows=rows,
        local_rows=local_rows,
    )
)
