"""What a schedule's runs cost in all and reach in the end, and both against end-to-end training of the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

from benchmarks.accuracy.claims.judge import MEASURES, complete
from benchmarks.accuracy.claims.outcome import Outcome, Point
from benchmarks.common.spread import Interval, Summary, interval, over

#: End-to-end training with all rounds, which the others are held against.
REFERENCE = "end-to-end 36"
#: Points below the reference's last accuracy that count as no loss, and as a small one.
MARGINS = (0.5, 2.0)
#: Evaluations that an accuracy on the way is the mean of: one of them moves by points.
TRAILING = 3

Verdict = Literal["yes", "no", "undecided"]


class Spent(NamedTuple):
    """All devices' costs until an evaluation: tensors down and up, FLOPs as counted, seconds inside steps."""

    mib: float
    gflop: float
    seconds: float


class Memory(NamedTuple):
    """Predicted step memory of the dearest stage, MiB, and how many times less than the reference's."""

    mib: float
    less: float


class Row(NamedTuple):
    """A method in a task. ``reached``: margin -> of its runs that came within it on the way, the median costs there.

    ``less``: how many times less than the reference it took in all; ``reaching``: margin -> in how many runs it did.
    """

    method: str
    last: Summary
    difference: Interval
    total: Spent
    less: Spent
    reached: Mapping[float, Spent | None]
    reaching: Mapping[float, int]
    memory: Memory


def spent(point: Point) -> Spent:
    """The costs at an evaluation."""
    return Spent(point.payload_bytes / 2**20, point.flops / 1e9, point.compute_s)


def within(difference: Interval, margin: float) -> Verdict:
    """Whether a method is no more than ``margin`` points behind, by the ends of the interval."""
    if difference.low >= -margin:
        return "yes"
    return "no" if difference.high < -margin else "undecided"


def last(row: Outcome) -> float:
    """Accuracy of the model that the run ends with, in percent."""
    found = MEASURES["last accuracy"](row)
    assert found is not None
    return found


def first_at(row: Outcome, accuracy: float) -> Spent | None:
    """The costs at the first evaluation from which the trailing mean is ``accuracy`` percent or more."""
    number = complete()
    values = [value for point in row.curve if (value := number(point)) is not None]
    for i, point in enumerate(row.curve):
        if fmean(values[max(0, i - TRAILING + 1) : i + 1]) >= accuracy:
            return spent(point)
    return None


def rows_of(outcomes: Iterable[Outcome], methods: Sequence[str]) -> list[Row]:
    """One task's rows, in the order of ``methods``, over the seeds that a method and the reference have."""
    runs = {(one.method, one.seed): one for one in outcomes if not one.error}
    found = []
    for method in methods:
        seeds = [seed for name, seed in runs if name == method and (REFERENCE, seed) in runs]
        if seeds:
            found.append(_row(method, [(runs[method, seed], runs[REFERENCE, seed]) for seed in sorted(seeds)]))
    return found


def _row(method: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> Row:
    own = over(last(one) for one, _ in pairs)
    difference = interval([last(one) - last(whole) for one, whole in pairs])
    assert own is not None and difference is not None  # noqa: PT018 - of at least one pair
    totals = [spent(one.curve[-1]) for one, _ in pairs]
    wholes = [spent(whole.curve[-1]) for _, whole in pairs]
    there = {m: [first_at(one, last(whole) - m) for one, whole in pairs] for m in MARGINS}
    reached = {m: [one for one in values if one is not None] for m, values in there.items()}
    return Row(
        method,
        own,
        difference,
        _each(totals, fmean),
        _each([_times(whole, cost) for whole, cost in zip(wholes, totals, strict=True)], fmean),
        {m: _each(values, median) if values else None for m, values in reached.items()},
        {m: len(values) for m, values in reached.items()},
        _memory(pairs),
    )


def _memory(pairs: Sequence[tuple[Outcome, Outcome]]) -> Memory:
    peaks = [(one.step_peak_predicted, whole.step_peak_predicted) for one, whole in pairs]
    return Memory(max(own for own, _ in peaks) / 2**20, min(whole / own for own, whole in peaks))


def _times(whole: Spent, own: Spent) -> Spent:
    return Spent(*(w / t for w, t in zip(whole, own, strict=True)))


def _columns(values: Sequence[Spent]) -> list[tuple[float, ...]]:
    return list(zip(*values, strict=True))


def _each(values: Sequence[Spent], pick: Callable[[Sequence[float]], float]) -> Spent:
    return Spent(*(pick(column) for column in _columns(values)))
