"""Judging: one number a run, differences paired by seed with their interval, and the verdict on a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.accuracy.claims.outcome import Outcome, Point
from benchmarks.common.spread import Interval, Summary, interval, over

#: A number of one run; None: it has none.
Measure = Callable[[Outcome], float | None]
#: The last part of the rounds, over which accuracies are averaged: one evaluation moves by points.
LATE = 1 / 3
#: Masks by which a method fills in what is missing at inference, the most particular first.
_MASKS = ("prototype", "reconstruction", "zero")


def late(row: Outcome, number: Callable[[Point], float | None], pick: Callable[[list[float]], float] = fmean) -> Any:
    """``number`` over the evaluations in the last third of the rounds; None where there is none."""
    if not row.curve:
        return None
    last = row.curve[-1].round
    values = [number(point) for point in row.curve if point.round > last * (1 - LATE)]
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def complete(metric: str = "accuracy") -> Callable[[Point], float | None]:
    """On test samples that have everything, in percent."""

    def number(point: Point) -> float | None:
        return next((100 * v for name, v in point.metrics.items() if name.endswith(f"|none|{metric}")), None)

    return number


def alone(mask: str = "") -> Callable[[Point], float | None]:
    """The mean accuracy with one modality, in percent; the others by ``mask``, else by the method's own."""

    def number(point: Point) -> float | None:
        for how in (mask,) if mask else _MASKS:
            found = [
                100 * v
                for name, v in point.metrics.items()
                if name.endswith(f"|{how}|accuracy") and "+" not in name.split("|")[0]
            ]
            if found:
                return fmean(found)
        return None

    return number


def _own(row: Outcome, name: str) -> float | None:
    return 100 * row.own[name] if name in row.own else None


#: Measures by the names that the files of this folder use.
MEASURES: Mapping[str, Measure] = {
    "accuracy": lambda row: late(row, complete()),
    "best accuracy": lambda row: late(row, complete(), max),
    "last accuracy": lambda row: complete()(row.curve[-1]) if row.curve else None,
    "macro F1": lambda row: late(row, complete("macro_f1")),
    "one modality": lambda row: late(row, alone()),
    "one modality, zeros": lambda row: late(row, alone("zero")),
    "one modality, prototypes": lambda row: late(row, alone("prototype")),
    "devices' accuracy": lambda row: _own(row, "trained|accuracy"),
    "devices' accuracy, as received": lambda row: _own(row, "received|accuracy"),
    "devices' recall at 1": lambda row: _own(row, "trained|recall"),
    "payload, MiB": lambda row: row.curve[-1].payload_bytes / 2**20 if row.curve else None,
    "GFLOP": lambda row: row.curve[-1].flops / 1e9 if row.curve else None,
    "step memory, MiB": lambda row: row.step_peak_predicted / 2**20 or None,
}


class Comparison(NamedTuple):
    """One line of evidence: ``left`` above ``right`` by more than ``margin`` (``lower``: below it by more).

    ``falling``: a condition; compared is what each loses from there to ``condition``. ``effect``: the paper's own
    difference in points, the mean of its figures; None: it gives none. ``bound``: what could be had at best, a method
    (``BASELINES`` too) or a number, with which come the headroom and whether the claim is tested at all.
    """

    task: str
    condition: str
    left: str
    right: str
    measure: str
    margin: float = 0.0
    lower: bool = False
    right_measure: str = ""
    falling: str = ""
    effect: float | None = None
    bound: str | float = ""

    @property
    def against(self) -> str:
        """What ``left`` is compared with, in words: a method, or another measure of its own."""
        return self.right_measure or self.right


class Claim(NamedTuple):
    """What a paper claims, the paper's own effect in words, and the comparisons: yes when all are, no when one is."""

    text: str
    effect: str
    comparisons: tuple[Comparison, ...]
    note: str = ""


class Finding(NamedTuple):
    """A comparison with its figures. ``gain``: by how much it holds beyond its margin, paired by seed.

    ``headroom``: how far ``right`` is from the bound; None: no bound is told.
    """

    asked: Comparison
    left: Summary
    right: Summary
    gain: Interval
    headroom: float | None = None

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``: yes or no where the interval of 95 % leaves out the bound that is claimed."""
        if self.gain.low > 0:
            return "yes"
        if self.gain.high < 0:
            return "no"
        effect = self.asked.effect
        below = effect is not None and self.gain.high + self.asked.margin < effect
        return SMALLER if below else "undecided"

    @property
    def tested(self) -> bool:
        """Whether ``right`` leaves room for the paper's effect, as far as both are known."""
        return self.headroom is None or self.asked.effect is None or self.headroom >= self.asked.effect

    @property
    def difference(self) -> tuple[float, float, float]:
        """Left minus right: mean, and the interval's lower and upper end (infinite with one seed)."""
        sign, margin = (-1 if self.asked.lower else 1), self.asked.margin
        mean, low, high = (sign * (value + margin) for value in self.gain[:3])
        return mean, min(low, high), max(low, high)


#: Neither yes nor no, and the whole interval is below the effect that the paper reports.
SMALLER = "smaller than the paper's"
VERDICTS = ("yes", "no", SMALLER, "undecided")
#: Bounds that a task's simple baseline gives: with all modalities, and the mean of each alone.
BASELINES = ("baseline", "baseline alone")
Rows = Mapping[tuple[str, str, str], Mapping[int, Outcome]]


def claims_of(values: Mapping[str, Any]) -> list[Claim]:
    """The claims of a paper's file. A comparison without ``tasks`` and ``conditions`` is of all there are."""
    found = []
    for one in values["claims"]:
        lines = [line for asked in one["compare"] for line in _comparisons(asked, values["tasks"])]
        found.append(Claim(one["claim"], one.get("paper", ""), tuple(lines), one.get("note", "")))
    return found


def _comparisons(asked: Mapping[str, Any], tasks: Mapping[str, Any]) -> list[Comparison]:
    given = {name: value for name, value in asked.items() if name not in {"tasks", "conditions", "right", "effect"}}
    rights = asked["right"] if isinstance(asked["right"], list) else [asked["right"]]
    return [
        Comparison(task=task, condition=condition, right=right, effect=_effect(asked, task, condition, right), **given)
        for task in asked.get("tasks", tasks)
        for condition in asked.get("conditions", tasks[task]["conditions"])
        for right in rights
    ]


def _effect(asked: Mapping[str, Any], *names: str) -> float | None:
    """The paper's effect: one of all comparisons, or by a task, condition or rival; None where it gives none."""
    effect = asked.get("effect")
    return next((effect[name] for name in names if name in effect), None) if isinstance(effect, Mapping) else effect


def judged(asked: Comparison, rows: Rows, baseline: Mapping[str, float] | None = None) -> Finding | None:
    """A comparison's figures, over the seeds that both sides have; None where there is none.

    ``baseline``: those of ``BASELINES`` that the task has, in percent.
    """
    left = _values(asked, asked.left, asked.measure, rows)
    right = _values(asked, asked.right, asked.right_measure or asked.measure, rows)
    shared = sorted(left.keys() & right.keys())
    sign = -1 if asked.lower else 1
    gain = interval([sign * (left[seed] - right[seed]) - asked.margin for seed in shared])
    sides = [over(side[seed] for seed in shared) for side in (left, right)]
    if gain is None or sides[0] is None or sides[1] is None:
        return None
    bound = _bound(asked, rows, baseline or {})
    return Finding(asked, sides[0], sides[1], gain, None if bound is None else sign * (bound - sides[1].mean))


def _bound(asked: Comparison, rows: Rows, baseline: Mapping[str, float]) -> float | None:
    """The bound in the comparison's measure; of a method, in whichever condition it ran: its data are complete."""
    if not isinstance(asked.bound, str):
        return float(asked.bound)
    if asked.bound in BASELINES:
        return baseline.get(asked.bound)
    every = (runs for (task, _, method), runs in rows.items() if (task, method) == (asked.task, asked.bound))
    found = [value for runs in every for row in runs.values() if (value := MEASURES[asked.measure](row)) is not None]
    return fmean(found) if found else None


def _values(asked: Comparison, method: str, measure: str, rows: Rows) -> dict[int, float]:
    def at(condition: str) -> dict[int, float]:
        found = rows.get((asked.task, condition, method), {})
        return {seed: value for seed, row in found.items() if (value := MEASURES[measure](row)) is not None}

    values = at(asked.condition)
    if not asked.falling:
        return values
    before = at(asked.falling)
    return {seed: before[seed] - value for seed, value in values.items() if seed in before}


def verdict(findings: Sequence[Finding | None]) -> str:
    """By the comparisons that leave room for the paper's effect, or by all where none does; "not run" without runs.

    yes when every one is, no when one is, SMALLER when those that are not yes are that, else undecided.
    """
    known = [one for one in findings if one is not None]
    if not known:
        return "not run"
    told = {one.verdict for one in known if one.tested} or {one.verdict for one in known}
    if told == {"yes"}:
        return "yes" if len(known) == len(findings) else "yes so far"
    if "no" in told:
        return "no"
    return SMALLER if told <= {"yes", SMALLER} else "undecided"


def is_tested(findings: Sequence[Finding | None]) -> bool:
    """Whether a comparison of the claim leaves room for the paper's effect."""
    return any(one.tested for one in findings if one is not None)
