"""Table of schedules in ``edgefl plan``: fitting devices, and cost of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgefl.budget.fit import RunPrice, StagePrice
from edgefl.plan.periods import whole_exchanges
from edgefl.registry import default, method
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Row, measure, table


class _Total(NamedTuple):
    """A schedule with one batch size, all rounds: the most step memory on a device; sums of FLOPs and bytes."""

    schedule: str
    batch_size: int
    rounds: int
    step: int
    flops: float
    payload: float


def _payload(stage: StagePrice, period: int) -> int:
    """Bytes of all rounds of a stage, down and up."""
    wholes = whole_exchanges(stage.rounds, period)
    usual = stage.payload_down_bytes + stage.payload_up_bytes
    return stage.whole_bytes + (wholes - 1) * usual + (stage.rounds - wholes) * stage.layer_bytes


def batch_column(price: RunPrice, get: Callable[[Row], int]) -> list[Column[Row]]:
    """The column of batch sizes, if there are several; else []."""
    several = len({stage.batch_size for stage in price.schedules}) > 1
    return [Column("batch", lambda row: str(get(row)), key=True)] if several else []


def totals(price: RunPrice) -> Grid:
    """One row per schedule and batch size, with its saving against the default schedule."""
    on_cpu = not price.devices or not all(device.card for device in price.devices)
    libraries = max((stage.libraries_bytes for stage in price.schedules), default=0) if on_cpu else 0
    keys = dict.fromkeys((stage.schedule, stage.batch_size) for stage in price.schedules)
    rows = []
    for schedule, batch in keys:
        stages = [s for s in price.schedules if (s.schedule, s.batch_size) == (schedule, batch) and s.rounds]
        row = _Total(
            schedule,
            batch,
            rounds=sum(s.rounds for s in stages),
            step=max((s.step_peak_bytes + libraries for s in stages), default=0),
            flops=sum(s.rounds * s.flops_per_round + s.filling_flops for s in stages),
            payload=sum(_payload(s, price.period) for s in stages),
        )
        rows.append(row)
    references = {row.batch_size: row for row in rows if row.schedule == default("schedule")}

    def against(get: Callable[[_Total], float], group: str) -> Column[_Total]:
        def cell(row: _Total) -> str:
            reference = references.get(row.batch_size)
            if reference is None or row is reference or not get(row):
                return ""
            return f"{get(reference) / get(row):.1f}"

        return Column("less", cell, "÷", group, tip=f"times as much is needed by {default('schedule')}")

    columns: list[Column[_Total]] = [
        Column(
            "schedule",
            lambda row: Cell(row.schedule, tone="good" if row.schedule == price.schedule else ""),
            key=True,
            text=True,
        ),
        *batch_column(price, lambda row: row.batch_size),
        Column("rounds", lambda row: str(row.rounds)),
        *([Column("fit whole", lambda row: _fits(price, row), "devices")] if price.devices else []),
        measure("most", lambda row: row.step, "B", "step memory"),
        against(lambda row: row.step, "step memory"),
        measure("all rounds", lambda row: row.flops, "FLOP", "FLOPs"),
        against(lambda row: row.flops, "FLOPs"),
        measure("all rounds", lambda row: row.payload, "B", "bytes down + up"),
        against(lambda row: row.payload, "bytes down + up"),
    ]
    sizes = " and ".join(dict.fromkeys(str(stage.batch_size) for stage in price.schedules))
    note = (
        f"Model {units.mib(price.model_bytes)}; a share of {price.samples} samples, batches of {sizes}, "
        f"all modalities present. ÷: how many times as much {default('schedule')} needs. Nothing was run: the training "
        "step is traced on shapes alone."
    )
    if libraries:
        note += f" Step memory: the step's tensors and, on a CPU, {units.mib(libraries)} of libraries besides."
    note += " Fit whole: every stage, in whole batches; the plan of devices also tries smaller pieces and fewer stages."
    if method("schedule", price.schedule).by_budget:
        name = price.schedule.capitalize()
        note += f" {name}, as this run is: a device trains the whole model, or at most what progressive has it train."
    return table(f"Schedules; {price.name} trains {price.schedule}", columns, rows, [note, _cheapest(price, rows)])


def _fits(price: RunPrice, row: _Total) -> Cell:
    """ "3 of 4": devices whose budgets hold every stage of the schedule whole."""
    every = dict.fromkeys(device.device for device in price.devices)
    stages = [one for one in price.schedules if (one.schedule, one.batch_size) == (row.schedule, row.batch_size)]
    short = {name for stage in stages for name in stage.exceeds}
    return Cell(
        f"{len(every) - len(short)} of {len(every)}", tone="warn" if short else "", tip=", ".join(sorted(short))
    )


def _cheapest(price: RunPrice, rows: Sequence[_Total]) -> str:
    """Note on the schedule with the fewest FLOPs, and on measuring its accuracy; "" without prices."""
    priced = [row for row in rows if row.batch_size == price.batch_size and row.flops]
    own = next((row for row in priced if row.schedule == price.schedule), None)
    least = min(priced, key=lambda row: row.flops, default=None)
    if least is None:
        return ""
    if least is own:
        return f"Of these {own.schedule}, as this run is, takes the fewest FLOPs."
    name = least.schedule
    than = f", {own.flops / least.flops:.1f} times fewer than {own.schedule}" if own is not None else ""
    return (
        f"The fewest FLOPs are those of {name}{than} ({method('schedule', name).summary}). What that costs in accuracy "
        f"a run tells: the same with --set slots.schedule={name}, then `edgefl compare`."
    )
