"""Figures of several runs side by side: scores after the last evaluated rounds, and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from edgefl.records import FIGURES, ORACLE, Figure
from edgefl.report import quality, resources, units
from edgefl.report.attendance import Attendance, attendance
from edgefl.report.writers import MEANINGS
from edgefl.run_records import RunReport

#: Figures of the fleet that are compared, in this order: peaks of any device, else sums over devices and rounds.
COMPARED = (
    *("step_peak_bytes", "process_peak_bytes", "cuda_allocated_peak_bytes", "flops", "payload_up_bytes"),
    *("payload_down_bytes", "wire_up_bytes", "wire_down_bytes", "compute_s", "energy_j"),
)
#: Evaluated rounds beside which the last score is shown.
RECENT = 4


class Line(msgspec.Struct, frozen=True):
    """One figure of every run. ``group``: scores, recent (the same over the last rounds), reference (of simple models)
    or costs; ``unit``: base unit, or share."""

    group: str
    name: str
    unit: str
    figures: tuple[Figure, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each run's figure divided by the first run's; None for shares and lower bounds."""
        first = self.figures[0]
        return tuple(None if self.unit == "share" else _ratio(figure, first) for figure in self.figures)

    @property
    def points(self) -> tuple[float | None, ...]:
        """Each run's share minus the first run's, in percentage points; None for other figures."""
        first = self.figures[0].value
        known = first is not None and self.unit == "share"
        return tuple(
            100 * (one.value - first) if known and one.value is not None else None  # type: ignore[operator]
            for one in self.figures
        )


def _ratio(figure: Figure, first: Figure) -> float | None:
    if figure.value is None or not first.value or figure.reason or first.reason:
        return None
    return figure.value / first.value


def against(line: Line, index: int) -> str:
    """Text of a run's figure against the first run's: points of a share, else the multiple.

    ≥ of a lower bound, ≤ where the first run's is one; nothing where both are.
    """
    if (points := line.points[index]) is not None:
        return f"{points:+.1f}".replace("-", "−")
    if (times := multiple(line, index)) is None:
        return ""
    bound = "≥ " if line.figures[index].reason else "≤ " if line.figures[0].reason else ""
    return f"{bound}{units.number(times)}×"


def multiple(line: Line, index: int) -> float | None:
    """Multiple of the first run's figure, also for one bound; None for shares or two bounds."""
    figure, first = line.figures[index], line.figures[0]
    if line.unit == "share" or figure.value is None or not first.value or (figure.reason and first.reason):
        return None
    return figure.value / first.value


_Condition = tuple[str, tuple[str, ...], str]  # metric, modalities given, mask
_Scores = dict[_Condition, list[float]]  # of the last rounds, oldest first
#: What is shown of the last scores.
OF_RECENT: dict[str, Callable[[list[float]], float]] = {"median": median, "lowest": min, "highest": max}


def scores(runs: Sequence[RunReport]) -> Iterator[Line]:
    """Score lines by input modalities and mask after the last evaluated round, by each run's primary metric.

    Then the median, the lowest and the highest of its last rounds, unless each run was evaluated once only.
    """
    found = [_recent(run) for run in runs]
    several = any(len(values) > 1 for recent in found for values in recent.values())
    for condition in dict.fromkeys(condition for recent in found for condition in recent):
        metric, given, mask = condition
        name = f"{metric}, {' + '.join(given)}" + f", {mask} mask" * (mask != "none")
        unit = "share" if units.is_share(metric) else ""
        yield Line("scores", name, unit, tuple(_score(one, condition) for one in found))
        for of in OF_RECENT if several else ():
            yield Line("recent", recent_name(name, of), unit, tuple(_score(one, condition, of) for one in found))


def references(runs: Sequence[RunReport]) -> Iterator[Line]:
    """Score lines of the baseline models on each run's samples, if any."""
    every = dict.fromkeys((run.reference.metric, name) for run in runs for name in run.reference.scores)
    for metric, name in every:
        figures = [
            Figure(run.reference.scores[name], "measured", f"fitted on {run.reference.samples} samples in one place")
            if run.reference.metric == metric and name in run.reference.scores
            else Figure(reason="not fitted: the run's shares or their labels are not here, or scikit-learn is not")
            for run in runs
        ]
        yield Line("reference", f"{metric}, {name}", "share" if units.is_share(metric) else "", tuple(figures))


def recent_name(name: str, of: str) -> str:
    """ "accuracy, acc: median of the last 4 rounds"."""
    return f"{name}: {of} of the last {RECENT} rounds"


def _score(recent: _Scores, condition: _Condition, of: str = "") -> Figure:
    """The last score under a condition, or the median, lowest or highest of the last rounds."""
    if condition not in recent:
        return Figure(reason=_why(recent, condition))
    values = recent[condition]
    if not of:
        return Figure(values[-1], "measured", "test set")
    rounds = f"the last {len(values)} evaluated rounds" if len(values) > 1 else "the one evaluated round"
    return Figure(OF_RECENT[of](values), "measured", f"test set, {of} of {rounds}")


def _recent(run: RunReport) -> _Scores:
    """Last ``RECENT`` scores, oldest first, for each test condition.

    A condition: (primary metric, available modalities, stand-in for the missing ones). Only conditions of the last
    evaluated round, without the oracle.
    """
    metric = quality.primary_metric(run)
    rows = [row for row in quality.latest(run.evaluations) if row.metric == metric and row.missing != ORACLE]
    rows.sort(key=lambda row: (-len(row.available), row.available, row.missing))
    found: _Scores = {(row.metric, row.available, row.missing): [] for row in rows}
    for row in sorted(run.evaluations, key=lambda row: (row.stage, row.round)):
        if (condition := (row.metric, row.available, row.missing)) in found:
            found[condition].append(row.value)
    return {condition: values[-RECENT:] for condition, values in found.items()}


def _why(scores: _Scores, condition: _Condition) -> str:
    """Reason for a run's missing score under this condition."""
    metric, given, mask = condition
    if not scores:
        return "not evaluated"
    measured = {name for name, _, _ in scores}
    if metric not in measured:
        return f"measured by {', '.join(sorted(measured))}"
    there = {modality for _, modalities, _ in scores for modality in modalities}
    if absent := [modality for modality in given if modality not in there]:
        return f"its model has no {', '.join(absent)}"
    return f"{mask} mask not evaluated" if mask != "none" else "this input not evaluated"


def costs(runs: Sequence[RunReport]) -> Iterator[Line]:
    """Cost lines. If runs missed different rounds, sums are lower bounds; the reason names the rounds."""
    works, unequal = [attendance(run) for run in runs], missed_unequally(runs)
    for name in COMPARED:
        figures = tuple(resources.fleet(name, run) for run in runs)
        if name not in resources.PEAKS and unequal:
            figures = tuple(_bounded(figure, work) for figure, work in zip(figures, works, strict=True))
        if any(figure.value is not None for figure in figures) or not name.startswith("cuda"):
            yield Line("costs", MEANINGS[name], FIGURES[name], figures)
    yield Line("costs", "whole run", "s", tuple(map(_took, runs)))
    yield Line("costs", "in rounds", "s", tuple(map(_in_rounds, runs)))
    yield Line("costs", "between rounds", "s", tuple(map(_between, runs)))
    for name, counts in (("rounds", list(map(rounds_done, runs))), ("device rounds", [work.trained for work in works])):
        yield Line("costs", name, "rounds", tuple(Figure(float(one), "counted", "ledger") for one in counts))


def missed_unequally(runs: Sequence[RunReport]) -> bool:
    """True if the runs' devices missed different rounds, so that sums are of different work."""
    return len({tuple((one.device, one.trained) for one in attendance(run).missed) for run in runs}) > 1


def _bounded(figure: Figure, work: Attendance) -> Figure:
    """The sum with missed rounds as a reason, which makes it a lower bound."""
    if figure.value is None or not work.missed:
        return figure
    why = f"without {work.of - work.trained} of {work.of} device rounds: {'; '.join(one.text for one in work.missed)}"
    return msgspec.structs.replace(figure, reason="; ".join(filter(None, (why, figure.reason))))


def rounds_done(run: RunReport) -> int:
    """Number of finished rounds."""
    return sum(row.status == "done" for row in run.rounds)


def _took(run: RunReport) -> Figure:
    if run.finished_at is None:
        return Figure(reason=f"the run is {run.status or 'not over'}")
    return Figure(run.finished_at - run.started_at, "measured", "coordinator's clock")


def _in_rounds(run: RunReport) -> Figure:
    """Seconds from each round's start to its end."""
    spent = [row.ended_at - row.started_at for row in run.rounds if row.ended_at is not None]
    return Figure(sum(spent), "measured", "coordinator's clock") if spent else Figure(reason="no round has ended")


def _between(run: RunReport) -> Figure:
    """Seconds of the run outside of its rounds."""
    whole, inside = _took(run), _in_rounds(run)
    if whole.value is None or inside.value is None:
        return whole if whole.value is None else inside
    return msgspec.structs.replace(whole, value=max(0.0, whole.value - inside.value))
