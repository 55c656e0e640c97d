"""Runs side by side: scores, memory, FLOPs, bytes, time and energy against the first run, and settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from edgefl.records import kind_of_machine
from edgefl.report import quality, shortfall, story, units
from edgefl.report.attendance import Attendance, attendance
from edgefl.report.compare_lines import (
    OF_RECENT,
    RECENT,
    Line,
    against,
    costs,
    missed_unequally,
    recent_name,
    references,
    rounds_done,
    scores,
)
from edgefl.report.folding import listed
from edgefl.report.grid import Cell, Column, Grid, letters, measurement_cell, print_grids, table, with_rows
from edgefl.report.settings import NOT_SET, Setting, configured, differing, schedule
from edgefl.report.writers import MEANINGS
from edgefl.run_records import RunReport

#: Costs that the sentence on top tells, and runs that it tells them of.
_TOLD, _NAMED = ("step_peak_bytes", "flops", "payload_up_bytes"), 3
#: A score that varies by more than this over its last rounds says little by the last alone: of shares in points (of
#: 240 test samples, two standard errors of an accuracy of 95 % are 2.8), of other metrics a share of their median.
_UNSTEADY_POINTS, _UNSTEADY_SHARE = 3.0, 0.05


class Comparison(NamedTuple):
    """Comparison of several runs; ``remarks``: reasons against comparing some figures."""

    runs: tuple[RunReport, ...]
    lines: tuple[Line, ...]
    settings: tuple[Setting, ...]
    remarks: tuple[str, ...]


def compare(runs: Sequence[RunReport]) -> Comparison:
    """Compare two or more runs with the first."""
    scored = tuple(scores(runs))
    return Comparison(
        tuple(runs),
        (*scored, *references(runs), *costs(runs)),
        tuple(differing([configured(run) for run in runs])),
        tuple(_remarks(runs, scored)),
    )


def label(index: int) -> str:
    """A run's letter in the tables: A, B, C …."""
    return letters(index).upper()


def _remarks(runs: Sequence[RunReport], scored: Sequence[Line]) -> Iterator[str]:
    """Reasons against a fair comparison of the first run with others, with the runs concerned."""
    found: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for text in (*_hindrances(runs[0], run), *_unsteady(scored, index)):
            found.setdefault(text, []).append(label(index))
    for text, letters_ in found.items():
        yield f"{', '.join(letters_)}: {text}"


def _hindrances(first: RunReport, run: RunReport) -> Iterator[str]:
    if run.status != "done":
        yield f"{run.status or 'not over'}; its figures are of the {rounds_done(run)} rounds it finished"
    if (work := attendance(run)).missed:
        yield f"{_who_missed(work)}; its totals are of {work.trained} of {work.of} device rounds"
    yield from (text.removesuffix(".") for text in (story.below_reference(run), *shortfall.sentences(run)) if text)
    metric, own = quality.primary_metric(first), quality.primary_metric(run)
    if first.evaluations and run.evaluations and metric != own:
        yield f"scores cannot be compared with A's: {own} is not {metric}"
    if (one := _modalities(first)) != (other := _modalities(run)):
        yield f"a model of {' + '.join(other)}, A's of {' + '.join(one)}: another task, whose scores are not comparable"
    elif _data(first) != _data(run):
        yield "other data than A's (data, seed): a difference in score is not the method's alone"
    if _machines(first) != _machines(run):
        yield "on another kind of machine than A: seconds and joules are not comparable"


def _who_missed(work: Attendance) -> str:
    """ "wrist trained 6 of 12 rounds (bytes over budget)"; of many devices the first."""
    return listed([one.text for one in work.missed])


def _unsteady(scored: Sequence[Line], index: int) -> Iterator[str]:
    """Remark on a score with all modalities that varies much over the last rounds; none for a steady one."""
    line = next((one for one in scored if one.figures[index].value is not None), None)
    if line is None:
        return
    middle, low, high = (_recent(scored, line, of, index) for of in OF_RECENT)
    allowed = _UNSTEADY_POINTS / 100 if line.unit == "share" else _UNSTEADY_SHARE * abs(middle or 0.0)
    if None not in (low, high) and high - low > allowed:  # type: ignore[operator]
        metric, last = line.name.partition(",")[0], line.figures[index].value
        told = [units.score(metric, value) for value in (low, high, last) if value is not None]
        reach = f"{told[0]} to {told[1]} over its last {RECENT} rounds"
        yield f"{line.name} was {reach}; the last, {told[2]}, says little alone"


def _recent(scored: Sequence[Line], line: Line, of: str, index: int) -> float | None:
    """Median, lowest or highest of the last rounds; None of runs that were evaluated once."""
    return next((one.figures[index].value for one in scored if one.name == recent_name(line.name, of)), None)


def _modalities(run: RunReport) -> list[str]:
    return sorted({part.partition("/")[0] for part in run.part_bytes if part.endswith("/embed")})


def _data(run: RunReport) -> tuple[object, object]:
    settings = configured(run)
    return settings.get("data"), settings.get("seed")


def _machines(run: RunReport) -> set[str]:
    return {kind_of_machine(device.capabilities) for device in run.devices}


def headline(found: Comparison) -> str:
    """ "B to A: accuracy 98.8 % (−0.4 points), 5.34× the step memory, ≥ 8.22× the FLOPs, ≥ 0.645× the payload sent.".

    Then differences in the work: rounds, and devices with missed ones.
    """
    told: list[str] = []
    first, unequal = found.runs[0], missed_unequally(found.runs)
    for index, run in enumerate(found.runs[1:], start=1):
        scored = [line for line in found.lines if line.group == "scores" and line.figures[0].value is not None]
        parts = [text for line in scored[:1] if (text := _scored(found, line, index))]
        for name in _TOLD:
            times = next((against(line, index) for line in found.lines if line.name == MEANINGS[name]), "")
            parts += [f"{times} the {MEANINGS[name].partition(',')[0]}"] if times else []
        own, due = rounds_done(run), rounds_done(first)
        parts += [f"totals of {own} rounds against {due}"] if parts and own != due else []
        parts += [_work(run)] if parts and unequal and attendance(run).missed else []
        to = label(0) if told else _named(found, 0)
        told += [f"{_named(found, index)} to {to}: {', '.join(parts)}"] if parts else []
    more = [f"{len(told) - _NAMED} more in the tables"] if len(told) > _NAMED else []
    of_first = [f"A itself: {_work(first)}"] if told and unequal and attendance(first).missed else []
    return f"{'; '.join([*told[:_NAMED], *more, *of_first])}." if told else "No figure of these runs can be compared."


def _named(found: Comparison, index: int) -> str:
    """A run's letter, with its schedule if the runs' differ: "B (progressive)"."""
    schedules = [schedule(run) for run in found.runs]
    return label(index) + f" ({schedules[index]})" * (len(set(schedules)) > 1 and bool(schedules[index]))


def _work(run: RunReport) -> str:
    work = attendance(run)
    who = listed([f"{one.device} {one.trained} of {one.of}" for one in work.missed])
    return f"totals of {work.trained} of {work.of} device rounds ({who})"


def _scored(found: Comparison, line: Line, index: int) -> str:
    """ "accuracy 98.8 % (−0.4 points)", and the median of the last rounds where either run's varied; "" without."""
    value, change = line.figures[index].value, _points(line, index)
    if value is None:
        return ""
    metric = line.name.partition(",")[0]
    told = f"{metric} {units.score(metric, value)}"
    middle = next((one for one in found.lines if one.name == recent_name(line.name, "median")), None)
    if middle is None or not [one for at in (0, index) for one in _unsteady(found.lines, at)]:
        return f"{told} ({change})"
    recent = units.score(metric, middle.figures[index].value or 0.0)
    return f"{told} ({change}; median of the last {RECENT} rounds {recent}, {_points(middle, index)})"


def _points(line: Line, index: int) -> str:
    return against(line, index) + " points" * (line.unit == "share")


def grids(found: Comparison) -> list[Grid]:
    """The runs with their letters, the scores, the costs, and the settings that differ."""
    numbered = list(enumerate(found.runs))
    columns: list[Column[tuple[int, RunReport]]] = [
        Column("", lambda row: label(row[0]), key=True, text=True),
        Column("run", lambda row: row[1].run, text=True, whole=True),
        Column("recipe", lambda row: row[1].recipe, text=True),
        Column("schedule", lambda row: schedule(row[1]), text=True),
        Column("status", lambda row: row[1].status, text=True),
        Column("devices", lambda row: len(row[1].devices)),
        Column("device rounds", lambda row: _attended(row[1]), tip="Trained, of devices × rounds."),
    ]
    remarks = [f"{text}." for text in found.remarks]
    of_group = {
        group: [line for line in found.lines if line.group == group] for group in ("scores", "reference", "costs")
    }
    notes = [
        "Peaks are those of any device that trained, the others sums over devices and rounds.",
        "×: times the first run's; ≥ and ≤ where a run missed rounds.",
        "Seconds depend on the machine and on what else it had to do; those between rounds are the coordinator's.",
    ]
    return [
        table("Runs", columns, numbered, remarks),
        _side_by_side(
            "Scores after the last evaluated round", found, of_group["scores"], "No model has been evaluated yet."
        ),
        *_lately(found, of_group["scores"]),
        *with_rows(
            _side_by_side("Simple models on the same samples, all in one place", found, of_group["reference"], "")
        ),
        _side_by_side("What training took", found, of_group["costs"], "", notes),
        _differences(found),
    ]


def _attended(run: RunReport) -> Cell:
    work = attendance(run)
    return Cell(f"{work.trained} / {work.of}", tone="warn" if work.missed else "")


def _lately(found: Comparison, scored: Sequence[Line]) -> list[Grid]:
    """Table of median, lowest and highest score of the last rounds; [] if each run was evaluated once."""
    if not any(line.group == "recent" for line in found.lines):
        return []

    def of_run(index: int) -> list[Column[Line]]:
        def middle(line: Line) -> Cell:
            return _value(_line(found, line, "median"), index)

        def reach(line: Line) -> str:
            low, high = (_value(_line(found, line, of), index).text for of in ("lowest", "highest"))
            return low if low == high else f"{low}–{high}"

        columns: list[Column[Line]] = [
            Column("median", middle, "", label(index)),
            Column("range", reach, "", label(index)),
        ]
        change: Column[Line] = Column(
            "to A", lambda line: against(_line(found, line, "median"), index), "", label(index)
        )
        return [*columns, change] if index else columns

    columns = [*_NAMES, *(column for index in range(len(found.runs)) for column in of_run(index))]
    return [table(f"Scores over the last {RECENT} evaluated rounds", columns, scored)]


def _line(found: Comparison, line: Line, of: str) -> Line:
    return next(one for one in found.lines if one.name == recent_name(line.name, of))


#: What a figure is called, and its unit.
_NAMES: tuple[Column[Line], ...] = (
    Column("", lambda line: line.name, key=True, text=True),
    Column("unit", lambda line: "%" if line.unit == "share" else units.printed_unit(line.unit), key=True, text=True),
)


def _side_by_side(title: str, found: Comparison, lines: Sequence[Line], empty: str, notes: Sequence[str] = ()) -> Grid:
    columns = list(_NAMES)
    for index in range(len(found.runs)):
        columns += _of_run(index)
    return table(title, columns, lines, notes, empty)


def _of_run(index: int) -> list[Column[Line]]:
    """Columns of a run: its figure and, except for the first run, the comparison with the first."""
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


def _differences(found: Comparison) -> Grid:

    def of_run(index: int) -> Column[Setting]:
        return Column(label(index), lambda row: row.values[index] or NOT_SET, text=True)

    columns: list[Column[Setting]] = [Column("setting", lambda row: row.path, key=True, text=True, whole=True)]
    columns += map(of_run, range(len(found.runs)))
    return table("Settings that differ", columns, found.settings, empty="All settings are the same.")


def print_all(found: Comparison, console: Console) -> None:
    """The sentence and the tables on a terminal."""
    console.print(Text(headline(found), style="bold"))
    print_grids(grids(found), console)
