"""The resource tables: what each device was predicted to spend and what it spent, in all and stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.budget.eligibility import gpu_limit
from edgefl.records import Capabilities, Figure, has_card, kind_of_machine
from edgefl.report import totals, units
from edgefl.report.grid import NOT_APPLICABLE, Cell, Column, Grid, amount, compared, count, figure, words
from edgefl.run_records import AssignmentRow, DeviceRow, RunReport

#: Predicted and measured side by side: (group, unit, ledger figure, name of the measured column).
_COMPARED: tuple[tuple[str, str, str, str], ...] = (
    ("step memory", "B", "step_peak_bytes", "measured"),
    ("FLOPs", "FLOP", "flops", "counted"),
    ("payload sent", "B", "payload_up_bytes", "counted"),
    ("payload received", "B", "payload_down_bytes", "counted"),
)
#: Spent. Neighbours of one group stay neighbours when some of _ESTIMATED go to the end of what is compared.
_SPENT: tuple[tuple[str, str, str, str], ...] = (
    ("time", "s", "wall_s", "wall"),
    ("time", "s", "compute_s", "compute"),
    ("energy", "J", "energy_j", "used"),
    ("process", "B", "process_peak_bytes", "peak"),
    ("of the payload", "B", "prototypes_up_bytes", "prototypes sent"),
    ("of the payload", "B", "prototypes_down_bytes", "prototypes received"),
    ("of the payload", "B", "signature_up_bytes", "signature sent"),
    ("of the payload", "B", "layer_down_bytes", "layer received"),
    ("on the wire", "B", "wire_up_bytes", "sent"),
    ("on the wire", "B", "wire_down_bytes", "received"),
    ("heat", "°C", "temperature_c", "highest"),
)
#: Compared too where some device's profile gives its speed and power; the ratio where it gives those of its machine.
_ESTIMATED = ("energy_j", "compute_s")
#: The brief bill, for terminals: what a stage costs, without what hardly changes from stage to stage.
_BRIEF_SPENT: tuple[tuple[str, str, str, str], ...] = (
    ("FLOPs", "FLOP", "flops", "counted"),
    ("payload", "B", "payload_up_bytes", "sent"),
    ("payload", "B", "payload_down_bytes", "received"),
    ("time", "s", "wall_s", "wall"),
)
_Lines = tuple[tuple[str, str, str, str], ...]
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
    compared_, spent = _lines(report)
    columns = (
        Column("device", key=True, text=True),
        Column("trained", "of all", "rounds", tip="Rounds this device finished, of all rounds of the run."),
        *_columns(compared_, spent, budget=True),
    )
    rows = []
    for name, assignments in totals.by_device(report).items():
        device = totals.device_row(report, name)
        head = (words(name, tip=device.profile), _rounds(assignments, len(report.rounds)))
        cells = _cells(assignments, compared_, spent, limit(step_limit(device), "B"), device.capabilities)
        rows.append(head + cells)
    return Grid("What each device spent", columns, tuple(rows), NOTES, "No device has joined yet.")


def stage_bill(report: RunReport, *, brief: bool = False) -> Grid:
    """One row per device and stage; ``brief`` leaves out what a terminal has no room for."""
    compared_, spent = (_COMPARED[:1], _BRIEF_SPENT) if brief else _lines(report)
    columns = (
        Column("device", key=True, text=True),
        Column("stage", key=True),
        Column("trained", "of all", "rounds", tip="Rounds this device finished, of all rounds of the stage."),
        Column("batch", tip="Samples per optimiser step; in brackets: computed at once (micro-batch)."),
        *_columns(compared_, spent, budget=False),
    )
    rows = []
    for (name, stage), assignments in totals.by_device_and_stage(report).items():
        held = len([row for row in report.rounds if row.stage == stage])
        head = (words(name), count(stage), _rounds(assignments, held), _batch(assignments))
        has = totals.device_row(report, name).capabilities
        rows.append(head + _cells(assignments, compared_, spent, has=has))
    return Grid("What each device spent, stage by stage", columns, tuple(rows), NOTES, "No round yet.")


def stage_totals(report: RunReport) -> Grid:
    """One row per stage over all devices: bytes, FLOPs and time."""
    columns = (
        Column("stage", key=True),
        Column("rounds"),
        Column("devices", tip="Devices that trained at least one round of the stage."),
        Column("highest", "MiB", "step memory"),
        Column("counted", "GFLOP", "FLOPs"),
        Column("sent", "MiB", "payload"),
        Column("received", "MiB", "payload"),
        Column("compute", "s", "time"),
    )
    rows = []
    for stage in sorted({row.stage for row in report.rounds} | {row.stage for row in report.assignments}):
        trained = {row.device for row in report.assignments if row.stage == stage and row.status == "done"}
        names = ("step_peak_bytes", "flops", "payload_up_bytes", "payload_down_bytes", "compute_s")
        unit_of = ("B", "FLOP", "B", "B", "s")
        figures = tuple(
            figure(totals.fleet(name, report, stage), unit) for name, unit in zip(names, unit_of, strict=True)
        )
        rounds = len([row for row in report.rounds if row.stage == stage])
        rows.append((count(stage), count(rounds), count(len(trained)), *figures))
    return Grid("What each stage cost, all devices together", columns, tuple(rows), empty="No round yet.")


def _lines(report: RunReport) -> tuple[_Lines, _Lines]:
    """What is shown side by side, and what is shown as spent alone."""
    known = {name for row in report.assignments for name in row.predicted}
    estimated = [line for name in _ESTIMATED for line in _SPENT if line[2] == name and name in known]
    spent = {name for row in report.assignments for name in row.measured}
    there = [line for line in _SPENT if line[0] != "of the payload" or line[2] in spent]
    return (*_COMPARED, *estimated), tuple(line for line in there if line not in estimated)


def _columns(side_by_side: _Lines, spent: _Lines, *, budget: bool) -> tuple[Column, ...]:
    columns: list[Column] = []
    for group, unit, name, heading in side_by_side:
        printed = units.printed_unit(unit)
        if name == "step_peak_bytes" and budget:
            columns.append(Column("budget", printed, group))
        columns += [Column("predicted", printed, group), Column(heading, printed, group)]
        columns.append(Column("ratio", "×", group, tip="measured over predicted, of the same rounds"))
    columns += [Column(heading, units.printed_unit(unit), group) for group, unit, _, heading in spent]
    return tuple(columns)


def _cells(
    assignments: Sequence[AssignmentRow],
    side_by_side: _Lines,
    spent: _Lines,
    budget: Cell | None = None,
    has: Capabilities | None = None,
) -> tuple[Cell, ...]:
    """``has``: the device that ran; seconds and joules of another kind of machine's profile are not held against it."""
    cells: list[Cell] = []
    own = has is None or has.speed.machine == kind_of_machine(has)
    for _, unit, name, _ in side_by_side:
        predicted, measured = totals.predicted(name, assignments), totals.measured(name, assignments)
        if name == "step_peak_bytes" and budget is not None:
            cells.append(budget)
        ratio = compared(measured, predicted) if own or name not in _ESTIMATED else NOT_APPLICABLE
        cells += [figure(predicted, unit), figure(measured, unit), ratio]
    cells += [figure(totals.measured(name, assignments), unit) for _, unit, name, _ in spent]
    return tuple(cells)


def limit(value: float | None, unit: str) -> Cell:
    """A budget: its number, or "no limit"."""
    return Cell("no limit", tone="dim") if value is None else amount(value, unit)


def _rounds(assignments: Sequence[AssignmentRow], held: int) -> Cell:
    done = {(row.stage, row.round) for row in assignments if row.status == "done"}
    return Cell(f"{len(done)} / {held}", tone="warn" if len(done) < held else "")


def _batch(assignments: Sequence[AssignmentRow]) -> Cell:
    """Batch size of the last attempt, with the micro-batch in brackets when it is smaller."""
    last = assignments[-1]
    if not last.batch_size:
        return words("")
    micro = f" ({last.micro_batch})" if 0 < last.micro_batch < last.batch_size else ""
    return Cell(f"{last.batch_size}{micro}")


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


def figure_of(value: Figure, unit: str) -> str:
    """A figure as text with its unit, for running sentences: ``≥`` when rounds are missing."""
    prefix = "≥ " if value.value is not None and value.reason else ""
    return prefix + units.quantity(value.value, unit)
