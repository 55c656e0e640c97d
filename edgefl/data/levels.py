"""Levels of a numeric target: regression as probabilities over them.

level_k: the k / (K - 1) quantile of the targets. A target y between two neighbouring levels a <= y <= b is the pair of
weights (b - y) / (b - a) and (y - a) / (b - a), whose mean is y; the answer is sum_k p_k level_k. What is learned is
the continuous ranked probability score between the levels (Gneiting and Raftery 2007, eq. 20). A level's name is a
class's, "~12.5": wherever label names travel, levels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgefl.errors import DataError
from edgefl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Targets = npt.NDArray[np.float64]
_MARK = "~"
#: Levels of a target at most: ten samples between two of them with the 350 rows of a small table.
MOST_LEVELS = 33
#: Share of the predicted distribution within a number's interval.
CENTRAL = 0.8


def level_names(targets: Targets) -> tuple[str, ...]:
    """Names of the levels of these targets, ascending; NaN: no target. Raises DataError for infinite ones."""
    known = targets[~np.isnan(targets)]
    if not np.isfinite(known).all():
        raise DataError("a target is infinite", remedy="Leave the target of that sample empty, or correct it.")
    levels = np.unique(np.quantile(known, np.linspace(0, 1, MOST_LEVELS))) if len(known) else known
    return tuple(dict.fromkeys(f"{_MARK}{level:.9g}" for level in levels))


def levels_in(names: Sequence[str]) -> Targets | None:
    """The levels that label names stand for [K], ascending; None: they are classes."""
    if not names or not all(name.startswith(_MARK) for name in names):
        return None
    try:
        levels = np.array([float(name[len(_MARK) :]) for name in names])
    except ValueError:
        return None
    return levels if all(map(math.isfinite, levels)) and (np.diff(levels) > 0).all() else None


def plain_levels(names: Sequence[str]) -> tuple[str, ...] | None:
    """The levels that label names stand for as texts of numbers; None: they are classes."""
    return None if levels_in(names) is None else tuple(name[len(_MARK) :] for name in names)


def nearest_level(targets: Targets, levels: Targets) -> npt.NDArray[np.int64]:
    """Number of the level nearest to each target [N]; -1 where it is NaN."""
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.nan_to_num(targets))
    return np.where(np.isnan(targets), -1, nearest).astype(np.int64)


def as_labels(targets: Targets, names: Sequence[str] = ()) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Each target's nearest level [N] (-1: none), and the levels' names: ``names`` where they are levels, else its own.

    Raises DataError as ``level_names`` does.
    """
    chosen = tuple(names) if levels_in(names) is not None else level_names(targets)
    levels = levels_in(chosen)
    labels = np.full(len(targets), -1, np.int64) if levels is None else nearest_level(targets, levels)
    return labels, chosen


def expected_value(probabilities: npt.ArrayLike, levels: Targets) -> Targets:
    """The mean of the levels [N] under probabilities [N, K]."""
    return np.asarray(probabilities, np.float64) @ levels


def central_interval(probabilities: npt.ArrayLike, levels: Targets) -> list[float]:
    """Bounds [2] of the middle ``CENTRAL`` of one distribution [K] over the levels [K].

    As much lies below as above; between two levels P(level below) + p / 2 is linear.
    """
    p = np.asarray(probabilities, np.float64)
    bounds: list[float] = np.interp(((1 - CENTRAL) / 2, (1 + CENTRAL) / 2), p.cumsum() - p / 2, levels).tolist()
    return bounds


def between_levels(targets: Tensor, levels: npt.ArrayLike) -> Tensor:
    """Weights [N, K] of the levels [K] whose mean is each target [N]; of the first one where it is NaN.

    A target beyond the levels is the nearest of them.
    """
    points = torch.as_tensor(np.asarray(levels), dtype=targets.dtype, device=targets.device)
    inside = targets.nan_to_num(nan=float("-inf")).clamp(points[0], points[-1])
    upper = torch.searchsorted(points, inside.contiguous()).clamp(1, len(points) - 1)
    share = (inside - points[upper - 1]) / (points[upper] - points[upper - 1])
    weights = torch.zeros(len(targets), len(points), dtype=targets.dtype, device=targets.device)
    return weights.scatter_(1, upper[:, None], share[:, None]).scatter_(1, upper[:, None] - 1, 1 - share[:, None])


def ranked_probability_score(logits: Tensor, targets: Tensor, levels: npt.ArrayLike) -> Tensor:
    """Ranked probability score of ``logits`` [N, K] over the levels [K]: the mean over targets [N] that are no NaN.

    sum_k (P_k - W_k)^2 (level_(k+1) - level_k) over the mean of these differences; P and W are cumulated probabilities
    and weights (``between_levels``). 0 when no target is known.
    """
    steps = torch.as_tensor(np.diff(np.asarray(levels)), dtype=logits.dtype, device=logits.device)
    apart = (logits.softmax(dim=1) - between_levels(targets, levels)).cumsum(dim=1)[:, :-1]
    scores = (apart.square() * (steps / steps.mean())).sum(dim=1)
    known = ~targets.isnan()
    return torch.where(known, scores, 0.0).sum() / known.sum().clamp(min=1)


def target_errors(predicted: npt.ArrayLike, truth: npt.ArrayLike) -> dict[str, float]:
    """r2, mae and rmse of numbers ``predicted`` [N] against ``truth`` [N]; N has to be 1 or more.

    r2 = 1 - sum (y - p)^2 / sum (y - mean y)^2; where all of ``truth`` are equal 1 if each is met, else 0. mae and rmse
    have the target's unit.
    """
    p, y = np.asarray(predicted, np.float64), np.asarray(truth, np.float64)
    squares, spread = float(((y - p) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return {
        "r2": 1 - squares / spread if spread else float(squares == 0),
        "mae": float(np.abs(y - p).mean()),
        "rmse": math.sqrt(squares / len(y)),
    }
