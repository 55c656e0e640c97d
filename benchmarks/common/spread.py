"""Figures over seeds: mean and deviation, and differences that are paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy.stats import t as student


def spread(values: Sequence[float], *, signed: bool = False, digits: int = 1) -> str:
    """ "89.8 ± 1.6"; of one value the value alone. ``signed``: differences, with their sign."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if signed else ''}.{digits}f}{deviation}"


class Summary(NamedTuple):
    """Mean and standard deviation over seeds; ``seeds``: how many there are."""

    mean: float
    deviation: float
    seeds: int

    def text(self) -> str:
        """Such as 91.3 ± 0.4."""
        return f"{self.mean:.1f}" + (f" ± {self.deviation:.1f}" if self.seeds > 1 else "")


def over(numbers: Iterable[float]) -> Summary | None:
    """Mean and deviation; None of nothing."""
    values = list(numbers)
    if not values:
        return None
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


class Interval(NamedTuple):
    """A mean of differences that are paired by seed, and the interval of 95 % that it lies in (Student's t)."""

    mean: float
    low: float
    high: float
    seeds: int


def interval(differences: Sequence[float]) -> Interval | None:
    """Of one seed it has no ends; None of none."""
    if not differences:
        return None
    mean, seeds = statistics.fmean(differences), len(differences)
    if seeds == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = float(student.ppf(0.975, seeds - 1)) * statistics.stdev(differences) / math.sqrt(seeds)
    return Interval(mean, mean - half, mean + half, seeds)
