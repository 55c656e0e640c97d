"""Local prototypes of a device, with labels or without (AproMFL): pairs of modalities' mean embeddings.

With labels:  p_c^m = mean of f^m(x_i) over y_i = c.  Without:  e_i = mean over m of f^m(x_i)/|f^m(x_i)|, K-means on e,
p_k^m = mean of f^m(x_i)/|f^m(x_i)| over the samples of cluster k; their cluster is the samples' pseudo-label.
D-A9: K is clamped to the number of distinct points. One table [K, d] a modality, with counts [K]: rows at the same
index are one pair, count 0 means no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.prototypes.kmeans import Labels, kmeans
from edgefl.prototypes.table import Array, ClassMeans, class_means, empty

Flags = npt.NDArray[np.bool_]

#: Clusters of a device without labels. Ours: the paper's text names no number (docs/decisions/0029).
LOCAL_CLUSTERS = 20
#: Lengths below this count as this, so that a zero vector stays zero (the same guard as in matching).
_SMALLEST_NORM = 1e-12


class Local(NamedTuple):
    """Local prototypes: a table a modality, and each sample's class or pseudo-label ``labels`` [N], -1 for none."""

    tables: dict[str, ClassMeans]
    labels: Labels


def pair_count(tables: Mapping[str, ClassMeans]) -> int:
    """How many pairs the tables hold. Raises ModelError when they have different numbers of rows: they are none."""
    rows = {m: len(table.counts) for m, table in tables.items()}
    if len(set(rows.values())) > 1:
        raise ModelError(
            f"tables of {', '.join(f'{n} ({m})' for m, n in sorted(rows.items()))} rows are not pairs",
            remedy="Make the tables together, so that rows at the same index belong together.",
        )
    return max(rows.values(), default=0)


def local_pairs(
    projections: Mapping[str, Array],
    has: Mapping[str, Flags],
    labels: npt.ArrayLike | None,
    classes: int,
    rng: np.random.Generator,
    *,
    clusters: int = LOCAL_CLUSTERS,
) -> Local:
    """Class means of each modality when any of ``labels`` [N] is there (-1: none, left out), else ``by_clusters``.

    ``projections``: modality -> f's output [N, d] before normalisation; ``has``: modality -> [N], which rows are real.
    Raises ModelError for labels out of range.
    """
    known = np.full(0, -1) if labels is None else np.asarray(labels, np.int64)
    if not (known >= 0).any():
        return by_clusters(projections, has, rng, clusters=clusters)
    return Local(
        {m: class_means(h, np.where(has[m], known, -1), classes) for m, h in sorted(projections.items())}, known
    )


def by_clusters(
    projections: Mapping[str, Array],
    has: Mapping[str, Flags],
    rng: np.random.Generator,
    *,
    clusters: int = LOCAL_CLUSTERS,
) -> Local:
    """Means of K-means clusters of the samples that have every modality; tables without rows when none has.

    The modalities' embeddings share one width d. Incomplete samples have the pseudo-label -1.
    """
    units = {m: normalised(h) for m, h in sorted(projections.items())}
    count = max((len(h) for h in units.values()), default=0)
    if len({h.shape[1] for h in units.values()}) > 1:
        widths = ", ".join(f"{h.shape[1]} ({m})" for m, h in units.items())
        raise ModelError(f"the mean over modalities needs embeddings of one width, not {widths}")
    labels = np.full(count, -1, np.int64)
    complete = np.all([has[m] for m in units], axis=0) if units else np.zeros(0, bool)
    if not complete.any():
        return Local({m: empty(0, h.shape[1]) for m, h in units.items()}, labels)
    found = kmeans(np.mean([h[complete] for h in units.values()], axis=0), clusters, rng)
    labels[complete] = found.labels
    return Local({m: class_means(h, labels, len(found.centres)) for m, h in units.items()}, labels)


def normalised(rows: npt.ArrayLike) -> Array:
    """``rows`` [N, d], each of length 1; zero rows stay zero."""
    h = np.asarray(rows, np.float32)
    norms = np.linalg.norm(h, axis=-1, keepdims=True)
    return np.asarray(h / np.maximum(norms, np.float32(_SMALLEST_NORM)), np.float32)
