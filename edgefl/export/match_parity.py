"""Are the prototype rows and weights an ONNX file found those of ``edgefl.prototypes``? In scores.

A softmax at T = 0.01 turns the rounding of two nearly equal cosines into weights up to 25 times as far apart, and a tie
at the edge of the best k into another choice: both right. So a choice is judged by the scores it was made from:
cosines, or distances and logarithms of probabilities as shares of the largest, since their rounding grows with them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgefl.prototypes.matching import Scored
from edgefl.prototypes.table import Array, ClassMeans

#: Largest difference in scores. Rounding of cosines came to 1.4e-6 at most (two trained models, two sensors, 60 random
#: inputs each, every mask); 2e-5 is 0.2 % of a weight at T = 0.01, and of a plain softmax 0.002 %;
#: of a classifier's weights 0.002 % times the largest -ln p at hand, 87 at most.
SCORE_TOLERANCE = 2e-5
#: A weight below this counts as this in logarithms: at most 1e-6 of a row enters the mix.
_SMALLEST_WEIGHT = 1e-6


def shortfall(found: Scored, rows: npt.NDArray[np.int64], k: int) -> float:
    """How much larger the best score left out is than the smallest chosen; the largest over the samples, 0: none is.

    ``rows`` [B, k] as the file chose them, -1 where it chose none. Infinite: too few or too many rows, one twice, or
    one that must not match.
    """
    worst, scale = 0.0, _scale(found)
    for near, chosen in zip(found.scores, rows, strict=True):
        kept = chosen[chosen >= 0]
        if not len(kept) == min(k, found.among.sum()) == len(set(kept.tolist())) or not found.among[kept].all():
            return float("inf")
        left = found.among.copy()
        left[kept] = False
        if left.any() and len(kept):
            worst = np.maximum(worst, (near[left].max() - near[kept].min()) / scale)
    return float(worst)


def weight_difference(found: Scored, rows: npt.NDArray[np.int64], weights: Array, temperature: float) -> float:
    """The largest difference of log(weight) times the temperature: what a score must be off to give that weight.

    Against the softmax over the rows the file chose. What no rounding of scores gives counts with its full size: a
    weight without a row, a negative one, and a sum that is not 1 (0 without any row).
    """
    picked = np.take_along_axis(found.scores.astype(np.float64), rows.clip(min=0), axis=1)
    scores = np.where(rows >= 0, picked / temperature, -np.inf)
    best = scores.max(axis=1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(best), best, 0.0))
    expected = powers / np.maximum(powers.sum(axis=1, keepdims=True), _SMALLEST_WEIGHT)
    logs = [np.log(np.maximum(w.astype(np.float64), _SMALLEST_WEIGHT)) for w in (weights, expected)]
    off = temperature * np.abs(logs[0] - logs[1]) / _scale(found)
    links = np.where(rows >= 0, off, np.abs(weights)).max(initial=0.0)
    sums = np.abs(weights.sum(axis=1) - (rows >= 0).any(axis=1)).max(initial=0.0)
    return float(np.max([links, sums, -weights.min(initial=0.0)]))  # np.max keeps what is not a number


def _scale(found: Scored) -> float:
    """1, or the largest score in use where that is larger."""
    return max(1.0, float(np.abs(found.scores[:, found.among]).max(initial=0.0)))


def mixed(rows: npt.NDArray[np.int64], weights: Array, other: ClassMeans) -> Array:
    """The stand-ins [B, d] the file's choice gives; a row of -1 gives nothing."""
    shares = np.where(rows >= 0, weights, np.float32(0))
    return np.asarray(np.einsum("bk,bkd->bd", shares, other.means[rows.clip(min=0)]), np.float32)
