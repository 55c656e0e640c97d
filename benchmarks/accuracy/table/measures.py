"""What the table reads from finished runs: one number a run, and its mean and deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from scipy.stats import t as student

from benchmarks.accuracy.table.collect import Outcome

#: A number of one run; None: it has none.
Measure = Callable[[Outcome], float | None]
#: Masks by which a method fills in what is missing at inference, the most particular first.
_MASKS = ("prototype", "reconstruction", "zero")


def complete(row: Outcome) -> float | None:
    """Accuracy on test samples that have everything, in percent."""
    return next((100 * value for name, value in row.metrics.items() if name.endswith("|none|accuracy")), None)


def alone(row: Outcome, mask: str = "") -> float | None:
    """The mean accuracy with one modality, in percent; the others by ``mask``, else by the method's own."""
    for name in (mask,) if mask else _MASKS:
        found = [100 * v for (given, how), v in _accuracies(row).items() if how == name and "+" not in given]
        if found:
            return statistics.fmean(found)
    return None


def as_trained(row: Outcome) -> float | None:
    """The accuracy to expect on samples that have what the fleet's training samples have, in percent."""
    known = {(_modalities(given), mask): value for (given, mask), value in _accuracies(row).items()}
    found = 0.0
    for given, share in row.patterns.items():
        masks = ("none",) if "+" in given else _MASKS
        value = next((known[pair] for mask in masks if (pair := (_modalities(given), mask)) in known), None)
        if value is None:
            return None
        found += 100 * share * value
    return found if row.patterns else None


def _modalities(given: str) -> frozenset[str]:
    """In whatever order they are told."""
    return frozenset(given.split("+"))


def rsum(row: Outcome) -> float | None:
    """Recalls at 1, 5 and 10, both ways, in percent, added up: at most 600."""
    return next((value for name, value in row.metrics.items() if name.endswith("|rsum")), None)


def known_rsum(row: Outcome) -> float | None:
    """RSum of the models as devices received them last, on the pairs that they set apart: mean over devices."""
    return row.own.get("received|rsum")


def own_rsum(row: Outcome) -> float | None:
    """RSum of the devices' own models after their last training, on the same pairs."""
    return row.own.get("trained|rsum")


def own_accuracy(row: Outcome) -> float | None:
    """The devices' own models on their own samples, after their last training: mean over devices, in percent."""
    return _own(row, "trained|accuracy")


def own_recall(row: Outcome) -> float | None:
    """The same for retrieval: recall at 1, mean of both ways."""
    return _own(row, "trained|recall")


def payload_mib(row: Outcome) -> float:
    """Tensors sent and received by all devices."""
    return row.payload_bytes / 2**20


def gflop(row: Outcome) -> float:
    """What all devices computed."""
    return row.flops / 1e9


def step_mib(row: Outcome) -> float:
    """What training adds to the idle trainer: the median of the stage that takes most."""
    return row.step_peak_bytes / 2**20


class Summary(NamedTuple):
    """Mean and standard deviation over seeds; ``seeds``: how many there are."""

    mean: float
    deviation: float
    seeds: int

    def text(self, digits: int = 1) -> str:
        """Such as 91.3 ± 0.4."""
        spread = f" ± {self.deviation:.{digits}f}" if self.seeds > 1 else ""
        return f"{self.mean:.{digits}f}{spread}"


def summary(rows: Sequence[Outcome], measure: Measure) -> Summary | None:
    """Over the runs that have the number; None when none has."""
    return over(value for row in rows if (value := measure(row)) is not None)


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


def _accuracies(row: Outcome) -> Mapping[tuple[str, str], float]:
    found = {}
    for name, value in row.metrics.items():
        given, mask, metric = name.split("|")
        if metric == "accuracy":
            found[given, mask] = value
    return found


def _own(row: Outcome, name: str) -> float | None:
    return 100 * row.own[name] if name in row.own else None
