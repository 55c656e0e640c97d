"""Are the prototype rows and weights an ONNX file found those of ``edgefl.prototypes.matching``? In cosines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgefl.prototypes.library import Array, ClassMeans
from edgefl.prototypes.mask import TEMPERATURE, TOP_K

#: A weight below this counts as this: its logarithm says no more.
_SMALLEST_WEIGHT = 1e-6


def shortfall(cosines: Array, among: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64]) -> float:
    """By how much the worst row chosen is further away than the best one left out, over all samples; 0: none is.

    ``cosines`` [B, P] with each prototype, of which those ``among`` [P] may match; ``rows`` [B, k] as the file chose
    them, -1 where it chose none. Infinite: too few or too many rows, one twice, or one that must not match.
    """
    worst = 0.0
    for own, chosen in zip(cosines, rows, strict=True):
        kept = chosen[chosen >= 0]
        allowed = len(kept) == min(TOP_K, among.sum()) == len(set(kept.tolist())) and kept.max(initial=-1) < len(among)
        if not allowed or not among[kept].all():
            return float("inf")
        left = among.copy()
        left[kept] = False
        worst = max(worst, float(own[left].max(initial=-2.0) - own[kept].min(initial=2.0)))
    return worst


def weight_difference(cosines: Array, rows: npt.NDArray[np.int64], weights: Array) -> float:
    """The largest difference of log(weight) times the temperature: what a cosine must be off to give that weight.

    Against the softmax over the rows the file chose; a weight without a row counts with its full size.
    """
    scores = np.where(rows >= 0, np.take_along_axis(cosines, rows.clip(min=0), axis=1) / TEMPERATURE, -np.inf)
    powers = np.exp(scores - np.maximum(scores.max(axis=1, keepdims=True), -1e9))
    expected = powers / np.maximum(powers.sum(axis=1, keepdims=True), _SMALLEST_WEIGHT)
    logs = [np.log(np.maximum(w.astype(np.float64), _SMALLEST_WEIGHT)) for w in (weights, expected)]
    off = TEMPERATURE * np.abs(logs[0] - logs[1])
    return float(np.where(rows >= 0, off, np.abs(weights)).max(initial=0.0))


def mixed(rows: npt.NDArray[np.int64], weights: Array, other: ClassMeans) -> Array:
    """The stand-ins [B, d] the file's choice gives; a row of -1 gives nothing."""
    shares = np.where(rows >= 0, weights, np.float32(0))
    return np.asarray(np.einsum("bk,bkd->bd", shares, other.means[rows.clip(min=0)]), np.float32)
