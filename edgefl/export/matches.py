"""Are the prototype rows and weights an ONNX file found those of ``edgefl.prototypes.matching``? In cosines.

A softmax at T = 0.01 turns the rounding of two nearly equal cosines into weights up to 25 times as far apart, and a tie
at the edge of the best k into another choice: both right. So a choice is judged by the cosines it was made from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgefl.prototypes.library import Array, ClassMeans
from edgefl.prototypes.mask import TEMPERATURE, TOP_K

#: Largest difference in cosines. Rounding came to 1.4e-6 at most (two trained models, two sensors, 60 random inputs
#: each, every mask); 2e-5 is 0.2 % of a weight.
COSINE_TOLERANCE = 2e-5
#: A weight below this counts as this in logarithms: at most 1e-6 of a row enters the mix.
_SMALLEST_WEIGHT = 1e-6


def shortfall(cosines: Array, among: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64]) -> float:
    """How much larger the best cosine left out is than the smallest chosen; the largest over the samples, 0: none is.

    ``cosines`` [B, P] with each prototype, of which those ``among`` [P] may match; ``rows`` [B, k] as the file chose
    them, -1 where it chose none. Infinite: too few or too many rows, one twice, or one that must not match.
    """
    worst = 0.0
    for near, chosen in zip(cosines, rows, strict=True):
        kept = chosen[chosen >= 0]
        if not len(kept) == min(TOP_K, among.sum()) == len(set(kept.tolist())) or not among[kept].all():
            return float("inf")
        left = among.copy()
        left[kept] = False
        worst = np.maximum(worst, near[left].max(initial=-2.0) - near[kept].min(initial=2.0))
    return float(worst)


def weight_difference(cosines: Array, rows: npt.NDArray[np.int64], weights: Array) -> float:
    """The largest difference of log(weight) times the temperature: what a cosine must be off to give that weight.

    Against the softmax over the rows the file chose. What no rounding of cosines gives counts with its full size: a
    weight without a row, a negative one, and a sum that is not 1 (0 without any row).
    """
    scores = np.where(rows >= 0, np.take_along_axis(cosines, rows.clip(min=0), axis=1) / TEMPERATURE, -np.inf)
    powers = np.exp(scores - np.maximum(scores.max(axis=1, keepdims=True), -1e9))
    expected = powers / np.maximum(powers.sum(axis=1, keepdims=True), _SMALLEST_WEIGHT)
    logs = [np.log(np.maximum(w.astype(np.float64), _SMALLEST_WEIGHT)) for w in (weights, expected)]
    off = TEMPERATURE * np.abs(logs[0] - logs[1])
    links = np.where(rows >= 0, off, np.abs(weights)).max(initial=0.0)
    sums = np.abs(weights.sum(axis=1) - (rows >= 0).any(axis=1)).max(initial=0.0)
    return float(np.max([links, sums, -weights.min(initial=0.0)]))  # np.max keeps what is not a number


def mixed(rows: npt.NDArray[np.int64], weights: Array, other: ClassMeans) -> Array:
    """The stand-ins [B, d] the file's choice gives; a row of -1 gives nothing."""
    shares = np.where(rows >= 0, weights, np.float32(0))
    return np.asarray(np.einsum("bk,bkd->bd", shares, other.means[rows.clip(min=0)]), np.float32)
