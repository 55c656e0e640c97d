"""Levels of a numeric target: regression as classification over them.

level_k: the k / (K - 1) quantile of the targets. A target y between two neighbouring levels a <= y <= b is the pair of
weights (b - y) / (b - a) and (y - a) / (b - a), whose mean is y; the answer is sum_k p_k level_k. Cross entropy on such
weights is a histogram loss (Imani and White, arXiv 1806.04613); on 353 training rows it overfits less than squares.
A level's name is a class's, "~12.5": wherever label names travel, levels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgefl.errors import DataError

Targets = npt.NDArray[np.float64]
_MARK = "~"
#: Levels of a target at most: ten samples between two of them with the 350 rows of a small table.
MOST_LEVELS = 33


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
