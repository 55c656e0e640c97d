"""Runs side by side: scores, memory, FLOPs, bytes, time and energy against the first run, and settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from edgefl.records import FIGURES, Figure, kind_of_machine
from edgefl.report import quality, resources, units
from edgefl.report.folding import listed
from edgefl.report.grid import Cell, Column, Grid, letters, measurement_cell, print_grids, table
from edgefl.report.settings import Setting, configured, differing
from edgefl.report.writers import MEANINGS
from edgefl.run_records import RunReport

#: Figures of the fleet that are compared, in this order: peaks of any device, else sums over devices and rounds.
COMPARED = (
    *("step_peak_bytes", "process_peak_bytes", "cuda_allocated_peak_bytes", "flops", "payload_up_bytes"),
    *("payload_down_bytes", "wire_up_bytes", "wire_down_bytes", "compute_s", "energy_j"),
)
#: Of these, what the sentence on top tells, and runs that it tells them of.
_TOLD, _NAMED = ("step_peak_bytes", "flops", "payload_up_bytes"), 3


class Line(msgspec.Struct, frozen=True):
    """One figure of every run. ``group``: scores or costs; ``unit``: base unit, or share."""

    group: str
    name: str
    unit: str
    figures: tuple[Figure, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each run's figure over the first one's; shares, which have points, and lower bounds have none."""
        first = self.figures[0]
        return tuple(None if self.unit == "share" else _ratio(figure, first) for figure in self.figures)

    @property
    def points(self) -> tuple[float | None, ...]:
        """Percentage points that each run's share is above the first one's; of other figures none."""
        first = self.figures[0].value
        known = first is not None and self.unit == "share"
        return tuple(
            100 * (one.value - first) if known and one.value is not None else None  # type: ignore[operator]
            for one in self.figures
        )


class Comparison(NamedTuple):
    """All there is to say of several runs; ``remarks``: what cannot be compared, and why."""

    runs: tuple[RunReport, ...]
    lines: tuple[Line, ...]
    settings: tuple[Setting, ...]
    remarks: tuple[str, ...]


def compare(runs: Sequence[RunReport]) -> Comparison:
    """Two runs or more beside each other, all against the first."""
    return Comparison(
        tuple(runs),
        (*_scores(runs), *_costs(runs)),
        tuple(differing([configured(run) for run in runs])),
        tuple(_remarks(runs)),
    )


def label(index: int) -> str:
    """A, B, C …: what a run is called in the tables."""
    return letters(index).upper()


def _ratio(figure: Figure, first: Figure) -> float | None:
    if figure.value is None or not first.value or figure.reason or first.reason:
        return None
    return figure.value / first.value


_Condition = tuple[str, tuple[str, ...], str]  # metric, modalities given, mask


def _scores(runs: Sequence[RunReport]) -> Iterator[Line]:
    """The score of each input that any of the models was last tried with, by the metric that its run leads with."""
    found: list[dict[_Condition, float]] = []
    for run in runs:
        metric = quality.primary_metric(run)
        rows = [row for row in quality.latest(run.evaluations) if row.metric == metric]
        rows.sort(key=lambda row: (-len(row.available), row.available, row.missing))
        found.append({(row.metric, row.available, row.missing): row.value for row in rows})
    for condition in dict.fromkeys(condition for scores in found for condition in scores):
        metric, given, mask = condition
        filled = "" if mask == "none" else f", {mask} mask"
        figures = tuple(
            Figure(scores[condition], "measured", "test set")
            if condition in scores
            else Figure(reason=_why(scores, condition))
            for scores in found
        )
        yield Line(
            "scores", f"{metric}, {' + '.join(given)}{filled}", "share" if units.is_share(metric) else "", figures
        )


def _why(scores: dict[_Condition, float], condition: _Condition) -> str:
    """Why a run has no score under this condition."""
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


def _costs(runs: Sequence[RunReport]) -> Iterator[Line]:
    for name in COMPARED:
        figures = tuple(resources.fleet(name, run) for run in runs)
        if any(figure.value is not None for figure in figures) or not name.startswith("cuda"):
            yield Line("costs", MEANINGS[name], FIGURES[name], figures)
    yield Line("costs", "whole run", "s", tuple(map(_took, runs)))
    done = [Figure(float(_rounds(run)), "counted", "ledger") for run in runs]
    yield Line("costs", "rounds", "rounds", tuple(done))


def _took(run: RunReport) -> Figure:
    if run.finished_at is None:
        return Figure(reason=f"the run is {run.status or 'not over'}")
    return Figure(run.finished_at - run.started_at, "measured", "coordinator's clock")


def _remarks(runs: Sequence[RunReport]) -> Iterator[str]:
    """What stands between the first run and a fair comparison with the others."""
    found: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for text in _hindrances(runs[0], run):
            found.setdefault(text, []).append(label(index))
    for text, letters_ in found.items():
        yield f"{', '.join(letters_)}: {text}"


def _hindrances(first: RunReport, run: RunReport) -> Iterator[str]:
    if run.status != "done":
        yield f"{run.status or 'not over'}; its figures are of the {_rounds(run)} rounds it finished"
    if untrained := _untrained(run):
        yield f"{listed(untrained)} trained no round: its totals are of the other devices"
    metric, own = quality.primary_metric(first), quality.primary_metric(run)
    if first.evaluations and run.evaluations and metric != own:
        yield f"scores cannot be compared with A's: {own} is not {metric}"
    if (one := _modalities(first)) != (other := _modalities(run)):
        yield f"a model of {' + '.join(other)}, A's of {' + '.join(one)}: another task, whose scores are not comparable"
    elif _data(first) != _data(run):
        yield "other data than A's (data, seed): a difference in score is not the method's alone"
    if _machines(first) != _machines(run):
        yield "on another kind of machine than A: seconds and joules are not comparable"


def _untrained(run: RunReport) -> list[str]:
    """Devices that took no part in any round that others trained."""
    trained = {row.device for row in run.assignments if row.status == "done"}
    return [one.device for one in run.devices if trained and one.device not in trained]


def _rounds(run: RunReport) -> int:
    return sum(row.status == "done" for row in run.rounds)


def _modalities(run: RunReport) -> list[str]:
    return sorted({part.partition("/")[0] for part in run.part_bytes if part.endswith("/embed")})


def _data(run: RunReport) -> tuple[object, object]:
    settings = configured(run)
    return settings.get("data"), settings.get("seed")


def _machines(run: RunReport) -> set[str]:
    return {kind_of_machine(device.capabilities) for device in run.devices}


def headline(found: Comparison) -> str:
    """ "B to A: accuracy 98.8 % (−0.4 points), 5.34× the step memory, 8.22× the FLOPs, 0.645× the payload sent.".

    Then of how many rounds the totals are, where these differ, and who trained none.
    """
    told = []
    first = _rounds(found.runs[0])
    for index in range(1, len(found.runs)):
        scores = [line for line in found.lines if line.group == "scores" and line.figures[0].value is not None]
        parts = [text for line in scores[:1] if (text := _scored(line, index))]
        for name in _TOLD:
            times = next((against(line, index) for line in found.lines if line.name == MEANINGS[name]), "")
            parts += [f"{times} the {MEANINGS[name].partition(',')[0]}"] if times else []
        own, untrained = _rounds(found.runs[index]), _untrained(found.runs[index])
        parts += [f"totals of {own} rounds against {first}"] if parts and own != first else []
        parts += [f"{listed(untrained)} trained no round"] if parts and untrained else []
        told += [f"{label(index)} to A: {', '.join(parts)}"] if parts else []
    more = [f"{len(told) - _NAMED} more in the tables"] if len(told) > _NAMED else []
    return f"{'; '.join([*told[:_NAMED], *more])}." if told else "No figure of these runs can be compared."


def _scored(line: Line, index: int) -> str:
    """ "accuracy 98.8 % (−0.4 points)"; empty without a score."""
    value, change = line.figures[index].value, against(line, index)
    if value is None:
        return ""
    metric = line.name.partition(",")[0]
    return f"{metric} {units.score(metric, value)} ({change}{' points' if line.unit == 'share' else ''})"


def grids(found: Comparison) -> list[Grid]:
    """The runs with their letters, the scores, the costs, and the settings that differ."""
    numbered = list(enumerate(found.runs))
    columns: list[Column[tuple[int, RunReport]]] = [
        Column("", lambda row: label(row[0]), key=True, text=True),
        Column("run", lambda row: row[1].run, text=True, whole=True),
        Column("recipe", lambda row: row[1].recipe, text=True),
        Column("status", lambda row: row[1].status, text=True),
        Column("devices", lambda row: len(row[1].devices)),
    ]
    remarks = [f"{text}." for text in found.remarks]
    scores, costs = ([line for line in found.lines if line.group == group] for group in ("scores", "costs"))
    notes = ["Peaks are those of any device, the others sums over devices and rounds. ×: times the first run's."]
    return [
        table("Runs", columns, numbered, remarks),
        _side_by_side("Scores after the last evaluated round", found, scores, "No model has been evaluated yet."),
        _side_by_side("What training took", found, costs, "", notes),
        _differences(found),
    ]


def _side_by_side(title: str, found: Comparison, lines: Sequence[Line], empty: str, notes: Sequence[str] = ()) -> Grid:
    columns: list[Column[Line]] = [
        Column("", lambda line: line.name, key=True, text=True),
        Column(
            "unit", lambda line: "%" if line.unit == "share" else units.printed_unit(line.unit), key=True, text=True
        ),
    ]
    for index in range(len(found.runs)):
        columns += _of_run(index)
    return table(title, columns, lines, notes, empty)


def _of_run(index: int) -> list[Column[Line]]:
    """A run's figure and, but for the first run, what it is against the first."""
    value: Column[Line] = Column(label(index), lambda line: _value(line, index))
    change: Column[Line] = Column(f"{label(index)} to A", lambda line: against(line, index))
    return [value, change] if index else [value]


def _value(line: Line, index: int) -> Cell:
    figure = line.figures[index]
    if line.unit == "share" and figure.value is not None:
        return Cell(f"{100 * figure.value:.1f}", tip=figure.source)
    if line.unit in units.COUNTED and figure.value is not None:
        return Cell(f"{figure.value:,.0f}")
    return measurement_cell(figure, line.unit)


def against(line: Line, index: int) -> str:
    """Points more or less of a share, else times the first run's figure."""
    if (points := line.points[index]) is not None:
        return f"{points:+.1f}".replace("-", "−")
    ratio = line.ratios[index]
    return "" if ratio is None else f"{units.number(ratio)}×"


def _differences(found: Comparison) -> Grid:

    def of_run(index: int) -> Column[Setting]:
        return Column(label(index), lambda row: row.values[index] or units.NOTHING, text=True)

    columns: list[Column[Setting]] = [Column("setting", lambda row: row.path, key=True, text=True, whole=True)]
    columns += map(of_run, range(len(found.runs)))
    return table("Settings that differ", columns, found.settings, empty="All settings are the same.")


def print_all(found: Comparison, console: Console) -> None:
    """The sentence and the tables on a terminal."""
    console.print(Text(headline(found), style="bold"))
    print_grids(grids(found), console)
