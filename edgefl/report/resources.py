"""The resource tables: predicted and measured cost of each device, over the run and stage by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from edgefl.budget.eligibility import gpu_limit
from edgefl.records import has_card, kind_of_machine
from edgefl.report import totals, units
from edgefl.report.grid import Cell, Column, Grid, limit_column, measurement_cell, ratio_cell, table
from edgefl.run_records import AssignmentRow, DeviceRow, RunReport


class _Line(NamedTuple):
    """One figure of a bill: heading of its group, unit in the ledger, name in the ledger, its own heading."""

    group: str
    unit: str
    figure: str
    heading: str


class _Spent(NamedTuple):
    """A row of a bill: a device's assignments, of the run or of one stage, in which ``held`` rounds took place."""

    device: DeviceRow
    stage: int
    assignments: Sequence[AssignmentRow]
    held: int


#: Predicted and measured side by side.
_COMPARED = (
    _Line("step memory", "B", "step_peak_bytes", "measured"),
    _Line("FLOPs", "FLOP", "flops", "counted"),
    _Line("payload sent", "B", "payload_up_bytes", "counted"),
    _Line("payload received", "B", "payload_down_bytes", "counted"),
)
#: Measured alone. Neighbours of one group stay neighbours when some of _ESTIMATED go to the end of what is compared.
_MEASURED = (
    _Line("time", "s", "wall_s", "wall"),
    _Line("time", "s", "compute_s", "compute"),
    _Line("energy", "J", "energy_j", "used"),
    _Line("process", "B", "process_peak_bytes", "peak"),
    _Line("of the payload", "B", "prototypes_up_bytes", "prototypes sent"),
    _Line("of the payload", "B", "prototypes_down_bytes", "prototypes received"),
    _Line("of the payload", "B", "signature_up_bytes", "signature sent"),
    _Line("of the payload", "B", "layer_down_bytes", "layer received"),
    _Line("on the wire", "B", "wire_up_bytes", "sent"),
    _Line("on the wire", "B", "wire_down_bytes", "received"),
    _Line("heat", "°C", "temperature_c", "highest"),
)
#: Compared too where some device's profile gives its speed and power; the ratio where it gives those of its machine.
_ESTIMATED = ("energy_j", "compute_s")
#: The brief bill, for terminals: cost of a stage, without what hardly changes from stage to stage.
_BRIEF = (
    _Line("FLOPs", "FLOP", "flops", "counted"),
    _Line("payload", "B", "payload_up_bytes", "sent"),
    _Line("payload", "B", "payload_down_bytes", "received"),
    _Line("time", "s", "wall_s", "wall"),
)
STEP_NOTE = (
    "Step memory is what training adds to the idle trainer process (runtime and data loaded, no model): the peak of "
    "all rounds. Process memory is the whole trainer process, which is what the out-of-memory killer looks at."
)
SUM_NOTE = (
    "FLOPs count forward and backward as run, 2 per multiply-accumulate, and add up over rounds. Payload is tensors "
    "only; on the wire is everything that passed the broker's socket. Bytes add up over rounds."
)
RATIO_NOTE = (
    "× is measured over predicted, of the same rounds: below 1 the device needed less than was planned for, "
    "above 1.25 it is coloured. Seconds and joules "
    "have one only where the profile was measured on this kind of machine (`edgefl-agent profile`)."
)
NOTES: tuple[str, ...] = (STEP_NOTE, SUM_NOTE, RATIO_NOTE)


def device_bill(report: RunReport) -> Grid:
    """One row per device over the whole run."""
    side_by_side, alone = _lines(report)
    columns: list[Column[_Spent]] = [
        Column("device", lambda row: Cell(row.device.device, tip=row.device.profile), key=True, text=True),
        _trained("run"),
        limit_column("budget", lambda row: step_limit(row.device), "B", _COMPARED[0].group),
        *(column for line in side_by_side for column in _comparison(line)),
        *map(_measurement, alone),
    ]
    rows = [
        _Spent(totals.device_row(report, name), 0, assignments, len(report.rounds))
        for name, assignments in totals.by_device(report).items()
    ]
    return table("What each device spent", columns, rows, NOTES, "No device has joined yet.")


def stage_bill(report: RunReport, *, brief: bool = False) -> Grid:
    """One row per device and stage; ``brief`` leaves out what a terminal has no room for."""
    side_by_side, alone = (list(_COMPARED[:1]), list(_BRIEF)) if brief else _lines(report)
    columns: list[Column[_Spent]] = [
        Column("device", lambda row: row.device.device, key=True, text=True),
        Column("stage", lambda row: row.stage, key=True),
        _trained("stage"),
        Column("batch", _batch, tip="Samples per optimiser step; in brackets: computed at once (micro-batch)."),
        *(column for line in side_by_side for column in _comparison(line)),
        *map(_measurement, alone),
    ]
    held = Counter(row.stage for row in report.rounds)
    rows = [
        _Spent(totals.device_row(report, name), stage, assignments, held[stage])
        for (name, stage), assignments in totals.by_device_and_stage(report).items()
    ]
    return table("What each device spent, stage by stage", columns, rows, NOTES, "No round yet.")


def stage_totals(report: RunReport) -> Grid:
    """One row per stage over all devices: bytes, FLOPs and time."""

    def fleet(line: _Line) -> Column[int]:
        group, unit, name, heading = line
        return Column(
            heading,
            lambda stage: measurement_cell(totals.fleet(name, report, stage), unit),
            units.printed_unit(unit),
            group,
        )

    def trained(stage: int) -> int:
        return len({row.device for row in report.assignments if row.stage == stage and row.status == "done"})

    columns: list[Column[int]] = [
        Column("stage", lambda stage: stage, key=True),
        Column("rounds", lambda stage: len([row for row in report.rounds if row.stage == stage])),
        Column("devices", trained, tip="Devices that trained at least one round of the stage."),
        fleet(_Line("step memory", "B", "step_peak_bytes", "highest")),
        *map(fleet, _BRIEF[:3]),
        fleet(_Line("time", "s", "compute_s", "compute")),
    ]
    stages = sorted({row.stage for row in report.rounds} | {row.stage for row in report.assignments})
    return table("What each stage cost, all devices together", columns, stages, empty="No round yet.")


def _lines(report: RunReport) -> tuple[list[_Line], list[_Line]]:
    """Figures shown predicted beside measured, and those shown measured alone."""
    known = {name for row in report.assignments for name in row.predicted}
    measured = {name for row in report.assignments for name in row.measured}
    estimated = [line for name in _ESTIMATED for line in _MEASURED if line.figure == name and name in known]
    there = [line for line in _MEASURED if line.group != "of the payload" or line.figure in measured]
    return [*_COMPARED, *estimated], [line for line in there if line not in estimated]


def _trained(of: str) -> Column[_Spent]:
    def cell(row: _Spent) -> Cell:
        done = {(one.stage, one.round) for one in row.assignments if one.status == "done"}
        return Cell(f"{len(done)} / {row.held}", tone="warn" if len(done) < row.held else "")

    return Column("trained", cell, "of all", "rounds", tip=f"Rounds this device finished, of all rounds of the {of}.")


def _measurement(line: _Line) -> Column[_Spent]:
    group, unit, name, heading = line
    return Column(
        heading,
        lambda row: measurement_cell(totals.measured(name, row.assignments), unit),
        units.printed_unit(unit),
        group,
    )


def _comparison(line: _Line) -> list[Column[_Spent]]:
    """Predicted, measured, ratio. Seconds and joules of another kind of machine's profile get no ratio."""
    group, unit, name, _ = line

    def ratio(row: _Spent) -> Cell:
        has = row.device.capabilities
        if name in _ESTIMATED and has.speed.machine != kind_of_machine(has):
            return Cell()
        return ratio_cell(totals.measured(name, row.assignments), totals.predicted(name, row.assignments))

    return [
        Column(
            "predicted",
            lambda row: measurement_cell(totals.predicted(name, row.assignments), unit),
            units.printed_unit(unit),
            group,
        ),
        _measurement(line),
        Column("ratio", ratio, "×", group, tip="measured over predicted, of the same rounds"),
    ]


def _batch(row: _Spent) -> str:
    """Batch size of the last attempt, with the micro-batch in brackets when it is smaller."""
    last = row.assignments[-1]
    micro = f" ({last.micro_batch})" if 0 < last.micro_batch < last.batch_size else ""
    return f"{last.batch_size}{micro}" if last.batch_size else ""


def step_limit(device: DeviceRow) -> float | None:
    """The device's limit on step memory in bytes, from whichever of its memory budgets is tightest."""
    budget, has = device.budget, device.capabilities
    base = has.trainer_base_bytes
    limits = [float(budget.step_memory_bytes)] if budget.step_memory_bytes is not None else []
    if budget.memory_bytes is not None and base and not has_card(has):
        limits.append(max(0.0, float(budget.memory_bytes - base)))
    if budget.gpu_memory_bytes is not None and (allowed := gpu_limit(budget, has)) is not None:
        limits.append(float(allowed))
    return min(limits, default=None)
