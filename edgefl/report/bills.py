"""Tables of devices' costs, predicted beside measured: by device, by stage, and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from edgefl.records import FIGURES, Figure, kind_of_machine
from edgefl.report import units
from edgefl.report.crowds import rows_of
from edgefl.report.decisions import absences
from edgefl.report.folding import listed
from edgefl.report.grid import EMPTY, Cell, Column, Grid, Row, limit_column, measurement_cell, ratio_cell, table
from edgefl.report.resources import (
    LIMITED,
    Use,
    by_device,
    by_device_and_stage,
    by_group,
    device_row,
    fleet,
    measured,
    predicted,
    process_limit,
    step_limit,
    uses,
)
from edgefl.report.totals import Total, totals
from edgefl.run_records import AssignmentRow, DeviceRow, RunReport

_Line = tuple[str, str, str]  # a figure of the ledger, heading of its group, its own heading


class _Spent(NamedTuple):
    """Cost table row: one device's assignments in a stage.

    ``stage`` 0: the whole run; ``held``: number of rounds of that stage or run, with or without this device.
    """

    device: DeviceRow
    stage: int
    assignments: Sequence[AssignmentRow]
    held: int


#: Predicted and measured side by side.
_COMPARED: tuple[_Line, ...] = (
    ("step_peak_bytes", "step memory", "measured"),
    ("flops", "FLOPs", "counted"),
    ("payload_up_bytes", "payload sent", "counted"),
    ("payload_down_bytes", "payload received", "counted"),
)
#: Measured alone. Neighbours of one group stay neighbours when some of _ESTIMATED go to the end of what is compared.
_MEASURED: tuple[_Line, ...] = (
    ("wall_s", "time", "from offer to update"),
    ("compute_s", "time in training steps", "measured"),
    ("energy_j", "energy", "used"),
    ("process_peak_bytes", "process", "peak"),
    ("prototypes_up_bytes", "of the payload", "prototypes sent"),
    ("prototypes_down_bytes", "of the payload", "prototypes received"),
    ("signature_up_bytes", "of the payload", "signature sent"),
    ("layer_up_bytes", "of the payload", "layers sent"),
    ("layer_down_bytes", "of the payload", "layers received"),
    ("wire_up_bytes", "on the wire", "sent"),
    ("wire_down_bytes", "on the wire", "received"),
    ("resent_up_bytes", "payload once more", "sent"),
    ("resent_down_bytes", "payload once more", "received"),
    ("temperature_c", "heat", "highest"),
)
#: Compared too where some device's profile gives its speed and power; the ratio where it gives those of its machine.
_ESTIMATED = ("energy_j", "compute_s")
#: The brief bill, for terminals: cost of a stage, without what hardly changes from stage to stage.
_BRIEF: tuple[_Line, ...] = (
    ("flops", "FLOPs", "counted"),
    ("payload_up_bytes", "payload", "sent"),
    ("payload_down_bytes", "payload", "received"),
    ("wall_s", "time", "from offer to update"),
)
#: More devices than a small terminal holds rows for, of whom these many are named: the whole report ends in 40 lines.
_MOST_ROWS, _LARGEST = 16, 8
_STEP_NOTE = (
    "Step memory is what training adds to the idle trainer process (runtime and data loaded, no model): the peak of "
    "all rounds. Process memory is the whole trainer process, which is what the out-of-memory killer looks at."
)
_SUM_NOTE = (
    "FLOPs count forward and backward as run, 2 per multiply-accumulate, and add up over rounds. Payload is tensors "
    "only, each counted once; on the wire is everything that passed the broker's socket from offer to update, with the "
    "update's own chunks and those sent once more. Bytes add up over rounds, also those that came late or "
    "were lost: of these the coordinator counts the payload, and the device tells the rest."
)
_RATIO_NOTE = (
    "× is measured or counted over predicted, of the same rounds: below 1 the device needed less than was planned for, "
    "above 1.25 it is coloured. Seconds and joules have one only where the profile was measured on this kind of "
    "machine (`edgefl-agent profile`)."
)
#: Totals of the fleet -> their words.
_TOTALS = {
    "step_peak_bytes": "step memory, largest",
    "flops": "FLOPs",
    "payload_bytes": "payload, both ways",
    "wire_bytes": "on the wire, both ways",
    "compute_s": "time in training steps",
    "energy_j": "energy",
}
_WHOLE_NOTE = "End to end: the planner's price of the same device rounds with all parts trained at once."
NOTES = (_STEP_NOTE, _SUM_NOTE, _RATIO_NOTE)


def device_bill(report: RunReport) -> Grid:
    """One row per device over the whole run."""
    side_by_side, alone = _lines(report)
    columns: list[Column[_Spent]] = [
        Column("device", lambda row: Cell(row.device.device, tip=row.device.profile), key=True, text=True),
        _trained("run"),
        limit_column("budget", lambda row: step_limit(row.device), "B", _COMPARED[0][1]),
        *(column for line in side_by_side for column in _comparison(line)),
        *map(_measurement, alone),
    ]
    rows = [
        _Spent(device_row(report, name), 0, assignments, len(report.rounds))
        for name, assignments in by_device(report).items()
    ]
    notes = [*_time_note(report), *_budget_note(report), *NOTES]
    return table("What each device spent", columns, rows, notes, "No device has joined yet.")


def brief_bill(report: RunReport) -> Grid:
    """One row per device over the whole run, with the columns that fit a terminal.

    Of many devices those that spent most have a row; the others share one, those without a round one for each reason.
    """
    columns: list[Column[_Spent]] = [
        Column("device", lambda row: row.device.device, key=True, text=True),
        _trained("run"),
        limit_column("budget", lambda row: step_limit(row.device), "B", _COMPARED[0][1]),
        *_comparison(_COMPARED[0])[:2],
        *map(_measurement, _BRIEF[:3]),
    ]
    rows, devices = by_device(report), {device.device: device for device in report.devices}
    spent = [_Spent(devices.get(name, DeviceRow(name)), 0, mine, len(report.rounds)) for name, mine in rows.items()]
    if len(spent) <= _MOST_ROWS:
        return table("What each device spent", columns, spent, (), "No device has joined yet.")
    asked = sorted((one for one in spent if one.assignments), key=_weight, reverse=True)
    named = asked if len(asked) <= _MOST_ROWS else asked[:_LARGEST]
    grid = table("What each device spent", columns, named)
    shared = {"": asked[len(named) :], **_unasked(report, spent)}
    return replace(grid, rows=(*grid.rows, *(_crowd(why, of, len(columns)) for why, of in shared.items() if of)))


def _weight(row: _Spent) -> tuple[float, float]:
    """Sort key of a device: step memory, then FLOPs."""
    memory, flops = (measured(name, row.assignments).value or 0.0 for name in ("step_peak_bytes", "flops"))
    return memory, flops


def _unasked(report: RunReport, spent: Sequence[_Spent]) -> dict[str, list[_Spent]]:
    """Reason -> devices that were offered nothing, in the order of the report."""
    whys = absences(report)
    found: dict[str, list[_Spent]] = {}
    for row in spent:
        if not row.assignments:
            found.setdefault(listed(list(whys.get(row.device.device, ()))), []).append(row)
    return found


def _crowd(why: str, rows: Sequence[_Spent], width: int) -> tuple[Cell, ...]:
    """Cells in place of these devices' rows: how many, why, and how many rounds they finished."""
    many = "1 device" if len(rows) == 1 else f"{len(rows):,} devices"
    counts = sorted({_finished(row) for row in rows})
    done = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    cells = Cell(f"{many}: {why}" if why else f"{many} more"), Cell(f"{done} / {rows[0].held}")
    return *cells, *(Cell() for _ in range(width - len(cells)))


def _budget_note(report: RunReport) -> list[str]:
    """Footnote on step memory budgets derived from process memory, with the idle trainer's size; [] for none."""
    bases = {
        row.device: units.quantity(row.capabilities.trainer_base_bytes, "B")
        for row in report.devices
        if process_limit(row) is not None
    }
    told = [f"{base} on {name}" for name, base in bases.items()]
    return [f"Budget: the budget of process memory minus the idle trainer ({listed(told)})."] if told else []


def _time_note(report: RunReport) -> list[str]:
    """Footnote on predicted seconds: coverage, machine, correction; [] without any."""
    timed = {row.device for row in report.assignments if "compute_s" in row.predicted}
    if not timed:
        return []
    elsewhere = [
        f"{row.device} on a real {row.profile}"
        for row in report.devices
        if row.device in timed and row.capabilities.speed.machine != kind_of_machine(row.capabilities)
    ]
    there = f" ({listed(elsewhere)}, which is another machine)" if elsewhere else ""
    return [
        (
            f"Predicted seconds are of training steps, by the profile{there}, and corrected by the device's earlier "
            "rounds, at most fourfold: on a slower machine they rise from stage to stage."
        )
    ]


def stage_bill(report: RunReport) -> Grid:
    """One row per device and stage, with the columns that fit a terminal."""
    columns: list[Column[_Spent]] = [
        Column("device", lambda row: row.device.device, key=True, text=True),
        Column("stage", lambda row: row.stage, key=True),
        _trained("stage"),
        _BATCH,
        *(column for line in _COMPARED[:1] for column in _comparison(line)),
        *map(_measurement, _BRIEF),
    ]
    held = Counter(row.stage for row in report.rounds)
    rows = [
        _Spent(device_row(report, name), stage, assignments, held[stage])
        for (name, stage), assignments in by_device_and_stage(report).items()
    ]
    return table("What each device spent, stage by stage", columns, rows, NOTES, "No round yet.")


class DeviceBill(NamedTuple):
    """A device's costs: profile, rounds and budgets in a line (``facts``); a row per figure, a column per stage."""

    device: str
    facts: str
    grid: Grid


def billed(report: RunReport) -> list[str]:
    """Devices with a bill of their own: all, or of many those with the largest share of step memory used."""

    def used(name: str) -> float:
        spent, limit = measured("step_peak_bytes", spending[name]).value, step_limit(device_row(report, name))
        return (spent or 0.0) / limit if limit else 0.0

    spending = by_device(report)
    return rows_of(list(spending), used)[1]


def bills(report: RunReport) -> Iterator[DeviceBill]:
    """The bill of each ``billed`` device, without unknown figures."""
    held = Counter(row.stage for row in report.rounds)
    side_by_side, alone = _lines(report)
    lines = [_trained("stage"), _BATCH, *(one for line in side_by_side for one in _comparison(line))]
    lines += map(_measurement, alone)
    of_stage: dict[str, dict[int, list[AssignmentRow]]] = {}
    for (name, stage), rows in by_device_and_stage(report).items():
        of_stage.setdefault(name, {})[stage] = rows
    spending = by_device(report)
    for name in billed(report):
        device, rows = device_row(report, name), spending[name]
        spent = [_Spent(device, stage, mine, held[stage]) for stage, mine in of_stage.get(name, {}).items()]
        spent += [_Spent(device, 0, rows, len(report.rounds))] if rows else []
        every = [(line, [line.cell(one) for one in spent]) for line in lines]
        shown = [(line, cells) for line, cells in every if any(cell.text not in EMPTY for cell in cells)]
        columns = [
            Column[None]("figure", lambda _: None, key=True, text=True),
            Column[None]("unit", lambda _: None, text=True),
        ]
        columns += [Column(f"stage {one.stage}" if one.stage else "run", lambda _: None) for one in spent]
        body = tuple((Cell(line.label), Cell(line.unit), *cells) for line, cells in shown)
        yield DeviceBill(
            name, _facts(device, spent), Grid(name, tuple(columns), body, empty="It took part in no round.")
        )


def _facts(device: DeviceRow, spent: Sequence[_Spent]) -> str:
    """ "single-stage · trained 12 of 12 rounds · step memory 13.4 of 24.0 MiB · payload of a round 5.33 of 8 MiB"."""
    whole = spent[-1] if spent else _Spent(device, 0, (), 0)
    done = _finished(whole)
    largest = measured("step_peak_bytes", whole.assignments).value
    limit = step_limit(device) if process_limit(device) is None else None  # else it is among what follows
    told = [device.profile, f"trained {done} of {whole.held} rounds"]
    told += [f"step memory {units.mib(largest)}{f' of {units.mib(limit)}' if limit else ''}"] if largest else []
    most: dict[str, Use] = {}  # of each budget of a round, where most of it was used
    for use in (use for row in whole.assignments for use in uses(device, row) if use.what != "memory"):
        most[use.what] = max(use, most.get(use.what, use))
    told += [
        f"{LIMITED[what]} {units.quantity(use.spent, use.unit)} of {units.quantity(use.allowed, use.unit)}"
        for what, use in most.items()
    ]
    return " · ".join(filter(None, told))


def fleet_totals(report: RunReport) -> Grid:
    """One row per figure over all devices: measured, predicted, predicted end to end, and the share of that."""

    def cell(get: Callable[[Total], Figure]) -> Callable[[Total], Cell]:
        return lambda row: measurement_cell(get(row), row.unit)

    def share(row: Total) -> Cell:
        whole = row.name not in _ESTIMATED and not row.end_to_end.reason
        return ratio_cell(row.measured, row.end_to_end) if whole else Cell()

    columns: list[Column[Total]] = [
        Column("figure", lambda row: _TOTALS[row.name], key=True, text=True),
        Column("unit", lambda row: units.printed_unit(row.unit), text=True),
        Column("spent", cell(lambda row: row.measured)),
        Column("predicted", cell(lambda row: row.predicted)),
        Column("predicted", cell(lambda row: row.end_to_end), "", "end to end"),
        Column("ratio", share, "×", "end to end", tip="spent over predicted end to end"),
    ]
    rows = [row for row in totals(report) if row.name in _TOTALS]
    held = any(row.measured.value is not None for row in rows)
    return table("All devices together", columns, rows if held else [], [_WHOLE_NOTE], "No round yet.")


def stage_totals(report: RunReport) -> Grid:
    """One row per stage over all devices: bytes, FLOPs and time."""

    def all_devices(line: _Line) -> Column[int]:
        return _figure(line, lambda stage: fleet(line[0], report, stage))

    def trained(stage: int) -> int:
        return len({row.device for row in report.assignments if row.stage == stage and row.status == "done"})

    columns: list[Column[int]] = [
        Column("stage", lambda stage: stage, key=True),
        Column("rounds", lambda stage: len([row for row in report.rounds if row.stage == stage])),
        Column("devices", trained, tip="Devices that trained at least one round of the stage."),
        all_devices(("step_peak_bytes", "step memory", "highest")),
        *map(all_devices, _BRIEF[:3]),
        all_devices(("compute_s", "time", "in training steps")),
    ]
    stages = sorted({row.stage for row in report.rounds} | {row.stage for row in report.assignments})
    return table("What each stage cost, all devices together", columns, stages, empty="No round yet.")


def group_totals(report: RunReport) -> Grid:
    """One row per group of devices; a device may be in several."""
    parts = by_group(report)

    def column(line: _Line) -> Column[str]:
        return _figure(line, lambda group: fleet(line[0], parts[group]))

    def trained(group: str) -> int:
        return len({row.device for row in parts[group].assignments if row.status == "done"})

    columns: list[Column[str]] = [
        Column("group", lambda group: Cell(group, tip=", ".join(report.groups[group])), key=True, text=True),
        Column("devices", lambda group: len(parts[group].devices)),
        Column("trained", trained, tip="Devices that trained at least one round."),
        column(("step_peak_bytes", "step memory", "highest")),
        *map(column, _BRIEF[:3]),
        column(("compute_s", "time", "in training steps")),
    ]
    note = "Groups as they were when the run was made. A device in several counts in each."
    return table("What each group spent", columns, [*parts], [note], "No device of the run is in a group.")


def _lines(report: RunReport) -> tuple[Sequence[_Line], Sequence[_Line]]:
    """(figures with a prediction beside the measurement, figures with the measurement alone)."""
    known = {name for row in report.assignments for name in row.predicted}
    measured = {name for row in report.assignments for name in row.measured}
    estimated = [line for name in _ESTIMATED for line in _MEASURED if line[0] == name and name in known]
    seldom = {name for name, group, _ in _MEASURED if group == "payload once more" and not fleet(name, report).value}
    there = [
        line for line in _MEASURED if line[0] not in seldom and (line[1] != "of the payload" or line[0] in measured)
    ]
    return [*_COMPARED, *estimated], [line for line in there if line not in estimated]


def _finished(row: _Spent) -> int:
    """Rounds that the device finished."""
    return len({(one.stage, one.round) for one in row.assignments if one.status == "done"})


def _trained(of: str) -> Column[_Spent]:
    def cell(row: _Spent) -> Cell:
        done = _finished(row)
        return Cell(f"{done} / {row.held}", tone="warn" if done < row.held else "")

    return Column("trained", cell, "of all", "rounds", tip=f"Rounds this device finished, of all rounds of the {of}.")


def _figure(line: _Line, get: Callable[[Row], Figure]) -> Column[Row]:
    name, group, heading = line
    unit = FIGURES[name]
    return Column(heading, lambda row: measurement_cell(get(row), unit), units.printed_unit(unit), group)


def _measurement(line: _Line) -> Column[_Spent]:
    return _figure(line, lambda row: measured(line[0], row.assignments))


def _comparison(line: _Line) -> list[Column[_Spent]]:
    """Columns predicted, measured, ratio; no ratio for seconds and joules by another machine's profile."""
    name, group, _ = line

    def ratio(row: _Spent) -> Cell:
        has = row.device.capabilities
        if name in _ESTIMATED and has.speed.machine != kind_of_machine(has):
            return Cell()
        return ratio_cell(measured(name, row.assignments), predicted(name, row.assignments))

    return [
        _figure((name, group, "predicted"), lambda row: predicted(name, row.assignments)),
        _measurement(line),
        Column("ratio", ratio, "×", group, tip="measured or counted over predicted, of the same rounds"),
    ]


def _batch(row: _Spent) -> str:
    """Batch size of the last attempt, with the micro-batch in brackets when it is smaller."""
    last = row.assignments[-1]
    micro = f" ({last.micro_batch})" if 0 < last.micro_batch < last.batch_size else ""
    return f"{last.batch_size}{micro}" if last.batch_size else ""


_BATCH: Column[_Spent] = Column(
    "batch", _batch, tip="Samples per optimiser step; in brackets: computed at once (micro-batch)."
)
