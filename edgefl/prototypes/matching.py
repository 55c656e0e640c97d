"""Matching a representation to classes, and mixing the other modality's prototypes (ProtoMix, arXiv 2312.13508).

s_c = -distance(h, P[c]) or cosine(h, P[c]);  top k;  weights = softmax(s / T);  mask = sum_j weights_j Q[index_j].
The ONNX bundles hold the same arithmetic in their graph (``edgefl.models.matching``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.prototypes.library import Array, ClassMeans

Metric = Literal["cosine", "l1", "l2"]
Index = npt.NDArray[np.int64]

#: Norms below this count as this, so that a zero vector has cosine 0 with everything (the same guard as in torch).
_SMALLEST_NORM = 1e-12


def _cosine(h: Array, means: Array) -> Array:
    return np.asarray(_unit(h) @ _unit(means).T, np.float32)


def _l1(h: Array, means: Array) -> Array:
    return np.stack([-np.abs(h - row).sum(axis=1) for row in means], axis=1)  # by class: no [B, C, d] array


def _l2(h: Array, means: Array) -> Array:
    return np.stack([-np.sqrt(((h - row) ** 2).sum(axis=1)) for row in means], axis=1)


#: Score functions (h [B, d], means [C, d]) -> [B, C]; larger is nearer.
METRICS: dict[str, Callable[[Array, Array], Array]] = {"cosine": _cosine, "l1": _l1, "l2": _l2}


def match(
    h: npt.ArrayLike,
    table: ClassMeans,
    metric: Metric = "cosine",
    k: int = 1,
    temperature: float = 1.0,
    among: npt.NDArray[np.bool_] | None = None,
) -> tuple[Index, Array]:
    """The ``k`` nearest classes of each row of ``h`` [B, d]: index [B, k], best first; weights [B, k], sum 1.

    Absent classes never match. ``among`` [C] narrows the choice further, for instance to the classes that the other
    modality's table holds as well. ``k`` is clamped to the number of classes left; equal scores: the lower class first.
    Raises ModelError when no class is left, the widths differ, or a setting is out of range.
    """
    rows = np.asarray(h, np.float32)
    if metric not in METRICS:
        raise ModelError(f"unknown metric {metric!r}", remedy=f"Choose one of: {', '.join(METRICS)}.")
    if k < 1 or temperature <= 0:
        raise ModelError(f"matching needs k >= 1 and temperature > 0, got k = {k}, temperature = {temperature}")
    if rows.ndim != 2 or rows.shape[1] != table.means.shape[1]:
        raise ModelError(f"representations {list(rows.shape)} do not fit prototypes {list(table.means.shape)}")
    candidates = np.flatnonzero(table.present if among is None else table.present & among)
    if not candidates.size:
        raise ModelError("no class has a prototype yet", remedy="Train at least one round with prototypes first.")
    scores = METRICS[metric](rows, table.means[candidates])  # [B, C']
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, candidates.size)]
    weights = _softmax(np.take_along_axis(scores, nearest, axis=1) / np.float32(temperature))
    return candidates[nearest].astype(np.int64), weights


def mix(index: Index, weights: Array, other: ClassMeans) -> Array:
    """The weighted mean of ``other``'s rows at ``index`` [B, k]: [B, d].

    A class absent from ``other`` is left out and the rest renormalised; where none of the k is there, the row is zero
    (the zero mask).
    """
    usable = weights * other.present[index]
    total = usable.sum(axis=1, keepdims=True)
    shares = usable / np.where(total > 0, total, np.float32(1))
    return np.asarray(np.einsum("bk,bkd->bd", shares, other.means[index]), np.float32)


def _unit(rows: Array) -> Array:
    norms = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return np.asarray(rows / np.maximum(norms, np.float32(_SMALLEST_NORM)), np.float32)


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
