"""The tables of ``edgefl plan``: prices of the schedules, and the placement of each device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from edgefl.budget.fit import Account, DevicePlan, RunPrice, StagePrice
from edgefl.budget.stage_cost import MEMORY
from edgefl.models.spec import is_lora
from edgefl.plan.job import Placement
from edgefl.plan.stages import is_closing, trained_stages
from edgefl.records import Cost
from edgefl.report import units
from edgefl.report.folding import fold
from edgefl.report.grid import Cell, Column, Grid, Row, measure, table
from edgefl.report.month_table import month_table, stage_total
from edgefl.report.schedule_table import batch_column, totals
from edgefl.report.verdict import limit_name, percent, refusal_words, tightest_limit


def price_grids(price: RunPrice, *, details: bool = True) -> list[Grid]:
    """Tables of placements and schedules' totals; with ``details`` their composition, stage by stage.

    Stages, then devices, with equal cells share a row.
    """
    tables = [_placements, totals]
    tables += [_accounts] if price.accounts else []
    tables += [month_table] if price.months else []
    tables += [_memory_of_devices, _costs, _stages, _memory_of_stages] if details else []
    return [fold(made(price), "stage", "device") for made in tables]


def _mib(name: str, get: Callable[[Row], float]) -> Column[Row]:
    return measure(name, get, "B")


def _accounts(price: RunPrice) -> Grid:
    columns: list[Column[Account]] = [
        Column("schedule", lambda row: row.schedule, key=True, text=True),
        Column("bytes down + up, all rounds", lambda row: f"{row.payload_bytes / units.MIB:,.0f}", "MiB"),
        Column("FLOPs of a sample, all epochs", lambda row: f"{row.flops:.2e}"),
    ]
    note = (
        "Not what this run costs: one client, every part in 4 bytes a value; 1 FLOP a multiply-accumulate, 3 times the "
        "forward pass for what is trained; embeddings frozen (arXiv 2407.15426)."
    )
    return table(f"By the convention {price.convention}", columns, price.accounts, [note])


def _stage_key(price: RunPrice) -> list[Column[StagePrice]]:
    return [
        Column("schedule", lambda row: row.schedule, key=True, text=True),
        *batch_column(price, lambda row: row.batch_size),
        Column("stage", lambda row: str(row.stage), key=True),
    ]


def _stages(price: RunPrice) -> Grid:
    columns: list[Column[StagePrice]] = [
        *_stage_key(price),
        Column("rounds", lambda row: str(row.rounds)),
        _mib("tensors of a step", lambda row: row.step_peak_bytes),
        Column("FLOPs a sample", lambda row: units.number(row.flops_per_sample / 1e6), "MFLOP"),
        measure("FLOPs a round", lambda row: row.flops_per_round, "FLOP"),
        _mib("down", lambda row: row.payload_down_bytes),
        _mib("up", lambda row: row.payload_up_bytes),
    ]
    note = (
        "Bytes are those of a usual round; in a stage's first download and last upload parts come whole. A part that "
        "is frozen is sent once more; a newcomer fetches all frozen ones. Totals hold what it takes to store frozen "
        "prefixes."
    )
    return table("Stages", columns, price.schedules, [note])


def _memory_columns(rows: Sequence[Row], get: Callable[[Row], Mapping[str, int]]) -> list[Column[Row]]:
    """A column per memory purpose used by any row."""

    def column(name: str) -> Column[Row]:
        return Column(name, lambda row: units.number(get(row)[name] / units.MIB) if get(row).get(name) else "", "MiB")

    return [column(name) for name in MEMORY if any(get(row).get(name) for row in rows)]


def _memory_of_stages(price: RunPrice) -> Grid:
    """Table of each stage's peak memory by purpose."""
    columns: list[Column[StagePrice]] = [
        *_stage_key(price),
        *_memory_columns(price.schedules, lambda row: row.memory),
        _mib("all tensors", lambda row: row.step_peak_bytes),
    ]
    note = (
        "At the largest moment of a step. Gradients of large parameters are used up as they come, so that they are "
        "never all there. Activations: all else that a step makes. A stored prefix lies on the disk; of it a batch is "
        "read at a time."
    )
    return table("Tensors of a step by stage", columns, price.schedules, [note])


_DEVICE_KEY: tuple[Column[DevicePlan], ...] = (
    Column("device", lambda row: row.device, key=True, text=True),
    Column("stage", lambda row: str(row.placement.stage.index), key=True),
)


def _fitting(price: RunPrice) -> list[DevicePlan]:
    return [device for device in price.devices if device.placement.refusal is None]


def _memory_of_devices(price: RunPrice) -> Grid:
    """Table of peak memory by purpose for each fitting placement, and of the whole process."""

    def process(row: DevicePlan) -> int:
        cost = row.placement.cost
        step = cost.staging_bytes if row.card else max(cost.step_peak_bytes, cost.filling_peak_bytes)
        return price.trainer_base_bytes + step

    rows = _fitting(price)
    columns: list[Column[DevicePlan]] = [
        *_DEVICE_KEY,
        *_memory_columns(rows, lambda row: row.placement.cost.memory),
        _mib("step memory", lambda row: row.placement.cost.step_peak_bytes),
        _mib("base", lambda _: price.trainer_base_bytes),
        _mib("process", process),
    ]
    note = (
        "Base: the idle trainer. Process: its largest moment, in a step or while a "
        "prefix is stored; beside a card, which holds the step in memory of its own, what passes through on the way "
        "there. Transit: parts while they come and go, where that takes more than a step."
    )
    return table("Memory by device", columns, rows, [note])


def _placements(price: RunPrice) -> Grid:
    begins = {plan.device: plan for plan in reversed(price.devices) if plan.placement.refusal is None}

    def cost(name: str, unit: str, get: Callable[[Cost], float], group: str = "") -> Column[DevicePlan]:
        def cell(row: DevicePlan) -> str:
            if row.placement.refusal:
                return ""
            joins = row is begins[row.device]
            spent = row.placement.cost if group == "a step" else stage_total(row.placement, price.period, joins=joins)
            return units.number(units.scaled(get(spent), unit))

        return Column(name, cell, units.printed_unit(unit), group)

    columns: list[Column[DevicePlan]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("stage", lambda row: str(row.placement.stage.index), key=True),
        Column(
            "trains, with heads", lambda row: _trains(row.placement) + _rank(row) + _retreat(row.placement), text=True
        ),
        Column("budget", _verdict, text=True),
        *([Column("less, since all of it", _less, text=True)] if any(map(_less, price.devices)) else []),
        cost("memory", "B", lambda cost: cost.step_peak_bytes, "a step"),
        cost("FLOPs", "FLOP", lambda cost: cost.flops, "a stage"),
        cost("down", "B", lambda cost: cost.payload_down_bytes, "a stage"),
        cost("up", "B", lambda cost: cost.payload_up_bytes, "a stage"),
    ]
    note = (
        f"Recipe {price.recipe}. Budget: the limit of which most is needed. Whole-process limits are checked with an "
        f"idle trainer of {units.mib(price.trainer_base_bytes)}; every agent measures its own (a report's note on "
        "budgets has it), and --trainer-base sets it here. A stage: all its rounds, with the larger first download and "
        "the pass that stores what is frozen, so that the stages add up to the device's bill."
    )
    if 0 < price.fewest_rounds < max((row.placement.stage.rounds for row in price.devices), default=0):
        note += f" That is the most: the recipe's pace may end a stage after {price.fewest_rounds} rounds."
    if any(row.placement.draws for row in price.devices):
        note += (
            " Where a round trains one encoder stage of several, a step is that of the most memory, by which the "
            "budget is checked, and a stage has the mean of all; no prefix is stored: by the next round it has changed."
        )
    if price.omits:
        note += f" Up is the most: with upload: {price.omits} a device chooses what it sends."
    if (private := price.spending) is not None:
        spent = f"epsilon {private.epsilon:.3g} (delta {private.delta:g})"
        if private.server:
            spent += f", and {private.server:.3g} towards the server, which sees each update with its device's noise"
        ratio = private.noise * math.sqrt(price.model_bytes / 4)
        note += (
            f" Privacy: {private.rounds} of {private.planned} rounds take place, which cost {spent}. Over all weights "
            f"a round's noise is about {units.number(ratio)} times as long as the change of all devices can be."
        )
    if price.period > 1:
        largest = max((row.placement.cost.layer_bytes for row in price.devices), default=0)
        note += (
            f" Of {price.period} rounds one brings the model and one takes what was trained; in the others a layer of "
            f"at most {units.mib(largest)} travels each way, as which it is counted here."
        )
    return table("Devices", columns, price.devices, [note])


def _trains(placement: Placement) -> str:
    if placement.refusal:
        return "nothing"
    if is_closing(placement.stage):
        return "matching networks (closing round)"
    numbers = trained_stages(placement.stage)
    names = ["embeddings"] if 0 in numbers else []
    if stages := [n for n in numbers if n]:
        first, last = stages[0], stages[-1]
        one = "its stage" if first == placement.stage.index and not placement.draws else f"stage {first}"
        adapted = "LoRA of " if any(map(is_lora, placement.stage.trained)) else ""
        drawn = "one a round of " if placement.draws else ""
        names.append(drawn + adapted + (one if first == last else f"stages {first}–{last}"))
    return " + ".join(names) or "heads alone"


def _rank(row: DevicePlan) -> str:
    """Rank of the low-rank terms, where devices have ranks of their own."""
    return f", rank {row.placement.rank} of {row.whole_rank}" if row.placement.rank else ""


def _less(row: DevicePlan) -> str:
    """Limit behind a placement of less depth or rank than scheduled."""
    return "" if row.placement.refusal else refusal_words(row.placement.shortened)


def _retreat(placement: Placement) -> str:
    """Fallbacks that make a stage fit: micro-batches, checkpointing, weights on disk, low-memory optimiser."""
    hyper = placement.hyper
    rows = f", {hyper.micro_batch} rows at once" if hyper.micro_batch else ""
    rows += ", blocks anew" * hyper.checkpoint + ", weights on disk" * (hyper.weights == "disk")
    return rows + f", {hyper.optimizer}" * hyper.low_memory


def _verdict(row: DevicePlan) -> Cell:
    """Cell with the share of the tightest limit needed, or the refusal."""
    refusal = row.placement.refusal
    if refusal is not None:
        return Cell(refusal_words(refusal).removeprefix("is "), tone="bad")
    used = tightest_limit(row.limits)
    return (
        Cell("no limit", tone="dim")
        if used is None
        else Cell(f"{percent(used[0])} of {limit_name(used[1])}", tone="good")
    )


def _costs(price: RunPrice) -> Grid:
    """Table of bytes, disk, time and energy of a round for the fitting placements."""

    def known(name: str, unit: str, get: Callable[[DevicePlan], float]) -> Column[DevicePlan]:
        return Column(name, lambda row: units.number(value) if (value := get(row)) else "", unit)

    columns: list[Column[DevicePlan]] = [
        *_DEVICE_KEY,
        _mib("down", lambda row: row.placement.cost.payload_down_bytes),
        _mib("up", lambda row: row.placement.cost.payload_up_bytes),
        _mib("disk", lambda row: row.placement.cost.disk_bytes),
        measure("first round", lambda row: row.placement.cost.flops + row.placement.cost.filling_flops, "FLOP"),
        known("a round", "s", lambda row: row.placement.cost.wall_s),
        known("energy", "J", lambda row: row.placement.cost.energy_j),
    ]
    note = (
        "First round: with what it takes to store the frozen prefix of every sample, where no earlier stage has. "
        "Seconds and joules by the speed and power in the device's profile; empty where it tells none, and without the "
        "link where that is not in it."
    )
    return table("What a round costs each device", columns, _fitting(price), [note])
