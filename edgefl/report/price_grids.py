"""What ``edgefl plan`` shows: prices of the schedules, and what each device would train, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgefl.budget.prices import DevicePlan, RunPrice, StagePrice
from edgefl.budget.stage_cost import MEMORY
from edgefl.plan.job import Hyper, Placement
from edgefl.plan.schedule import is_closing, trained_stages
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid


def price_grids(price: RunPrice) -> tuple[Grid, ...]:
    """Totals of each schedule, its stages, the devices' placements and, where asked for, a paper's accounting."""
    asked = (_accounts(price),) if price.accounts else ()
    return (
        _totals(price),
        _stages(price),
        _memory_of_stages(price),
        _placements(price),
        _memory_of_devices(price),
        _costs(price),
        *asked,
    )


def _accounts(price: RunPrice) -> Grid:
    columns = (
        Column("schedule", key=True, text=True),
        Column("bytes down + up, all rounds", "MiB"),
        Column("FLOPs of a sample, all epochs"),
    )
    rows = tuple(
        (Cell(one.schedule), Cell(f"{one.payload_bytes / units.MIB:,.0f}"), Cell(f"{one.flops:.2e}"))
        for one in price.accounts
    )
    note = (
        "Not what this run costs: one client, every part in 4 bytes a value; 1 FLOP a multiply-accumulate, 3 times the "
        "forward pass for what is trained; embeddings frozen (arXiv 2407.15426)."
    )
    return Grid(f"By the convention {price.convention}", columns, rows, (note,))


def _totals(price: RunPrice) -> Grid:
    columns = (
        Column("schedule", key=True, text=True),
        *_batch_column(price),
        Column("rounds"),
        Column("step memory, highest", "MiB"),
        Column("FLOPs, all rounds", "GFLOP"),
        Column("bytes down + up, all rounds", "MiB"),
        Column("against end-to-end", text=True),
    )
    totals = {key: _total([s for s in price.schedules if (s.schedule, s.batch_size) == key]) for key in _names(price)}
    rows = []
    for (name, batch), (rounds, memory, flops, payload) in totals.items():
        ratio, reference = "", totals.get(("end_to_end", batch))
        if reference is not None and name != "end_to_end":
            less = [was / now if now else 0.0 for was, now in zip(reference[1:], (memory, flops, payload), strict=True)]
            ratio = "memory ÷ {:.1f}, FLOPs ÷ {:.1f}, bytes ÷ {:.1f}".format(*less)
        cells = (units.number(memory / units.MIB), units.number(flops / units.GIGA), units.number(payload / units.MIB))
        own = _batch_cell(price, batch)
        rows.append((Cell(name), *own, Cell(str(rounds)), *map(Cell, cells), Cell(ratio)))
    sizes = " and ".join(str(size) for size in _batches(price))
    note = (
        f"Model {units.mib(price.model_bytes)}; a share of {price.samples} samples, batches of {sizes}, "
        "all modalities present. Nothing was run: the training step is traced on shapes alone."
    )
    if price.schedule == "mixed":
        note += " Mixed, as this run is: a device trains the whole model, or at most what progressive has it train."
    return Grid(f"Schedules of {price.name}", columns, tuple(rows), (note,))


def _total(stages: list[StagePrice]) -> tuple[int, float, float, float]:
    return (
        sum(s.rounds for s in stages),
        max((s.step_peak_bytes for s in stages if s.rounds), default=0),
        sum(s.rounds * s.flops_per_round + s.filling_flops for s in stages if s.rounds),
        sum(s.whole_bytes + (s.rounds - 1) * (s.payload_down_bytes + s.payload_up_bytes) for s in stages if s.rounds),
    )


def _names(price: RunPrice) -> list[tuple[str, int]]:
    return list(dict.fromkeys((s.schedule, s.batch_size) for s in price.schedules))


def _batches(price: RunPrice) -> list[int]:
    return list(dict.fromkeys(s.batch_size for s in price.schedules))


def _batch_column(price: RunPrice) -> tuple[Column, ...]:
    """Only where there are several."""
    return (Column("batch", key=True),) if len(_batches(price)) > 1 else ()


def _batch_cell(price: RunPrice, size: int) -> tuple[Cell, ...]:
    return (Cell(str(size)),) if len(_batches(price)) > 1 else ()


def _stages(price: RunPrice) -> Grid:
    columns = (
        Column("schedule", key=True, text=True),
        *_batch_column(price),
        Column("stage", key=True),
        Column("rounds"),
        Column("step memory", "MiB"),
        Column("FLOPs a sample", "MFLOP"),
        Column("FLOPs a round", "GFLOP"),
        Column("down", "MiB"),
        Column("up", "MiB"),
    )
    rows = tuple(
        (
            Cell(s.schedule),
            *_batch_cell(price, s.batch_size),
            Cell(str(s.stage)),
            Cell(str(s.rounds)),
            Cell(units.number(s.step_peak_bytes / units.MIB)),
            Cell(units.number(s.flops_per_sample / 1e6)),
            Cell(units.number(s.flops_per_round / units.GIGA)),
            Cell(units.number(s.payload_down_bytes / units.MIB)),
            Cell(units.number(s.payload_up_bytes / units.MIB)),
        )
        for s in price.schedules
    )
    note = (
        "Bytes are those of a usual round; in a stage's first download and last upload parts come whole. A part that "
        "is frozen is sent once more; a newcomer fetches all frozen ones. Totals hold what it takes to store frozen "
        "prefixes."
    )
    return Grid("Stages", columns, rows, (note,))


def _memory_of_stages(price: RunPrice) -> Grid:
    """What each stage's largest moment consists of."""
    lead = (Column("schedule", key=True, text=True), *_batch_column(price), Column("stage", key=True))
    names = _used([s.memory for s in price.schedules])
    rows = tuple(
        (
            Cell(s.schedule),
            *_batch_cell(price, s.batch_size),
            Cell(str(s.stage)),
            *_memory_cells(names, s.memory),
            *_mib(s.step_peak_bytes),
        )
        for s in price.schedules
    )
    note = (
        "At the largest moment of a step. Gradients of large parameters are used up as they come, so that they are "
        "never all there. Activations: all else that a step makes. A stored prefix lies on the disk; of it a batch is "
        "read at a time."
    )
    return Grid(
        "Memory of a step by stage", (*lead, *_memory_columns(names), Column("step memory", "MiB")), rows, (note,)
    )


def _memory_of_devices(price: RunPrice) -> Grid:
    """The same of the placements that fit, and the process with it."""
    lead = (Column("device", key=True, text=True), Column("stage", key=True))
    rows, base = [], price.trainer_base_bytes
    placed = [device for device in price.devices if device.placement.refusal is None]
    names = _used([device.placement.cost.memory for device in placed])
    for device in placed:
        cost = device.placement.cost
        step = cost.staging_bytes if device.card else max(cost.step_peak_bytes, cost.filling_peak_bytes)
        head = (Cell(device.device), Cell(str(device.placement.stage.index)))
        rows.append((*head, *_memory_cells(names, cost.memory), *_mib(cost.step_peak_bytes, base, base + step)))
    sums = tuple(Column(name, "MiB") for name in ("step memory", "base", "process"))
    columns = (*lead, *_memory_columns(names), *sums)
    note = (
        "Base: the idle trainer. Process: its largest moment, in a step or while a "
        "prefix is stored; beside a card, which holds the step in memory of its own, what passes through on the way "
        "there. Transit: parts while they come and go, where that takes more than a step."
    )
    return Grid("Memory by device", columns, tuple(rows), (note,))


def _used(memories: Sequence[Mapping[str, int]]) -> list[str]:
    """What any of these goes to."""
    return [name for name in MEMORY if any(memory.get(name) for memory in memories)]


def _memory_columns(names: Sequence[str]) -> tuple[Column, ...]:
    return tuple(Column(name, "MiB") for name in names)


def _memory_cells(names: Sequence[str], memory: Mapping[str, int]) -> tuple[Cell, ...]:
    return tuple(Cell(units.number(memory[name] / units.MIB) if memory.get(name) else "") for name in names)


def _mib(*sizes: int) -> tuple[Cell, ...]:
    return tuple(Cell(units.number(size / units.MIB)) for size in sizes)


def size_grid(sizes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Grid:
    """Encoder sizes by kind: kind -> size -> fields."""
    fields = ("width", "depth", "heads", "patch", "vocabulary")
    columns = (Column("kind", key=True, text=True), Column("size", key=True, text=True), *map(Column, fields))
    rows = tuple(
        (Cell(kind), Cell(name), *(Cell(str(size[field]) if field in size else "") for field in fields))
        for kind, named in sizes.items()
        for name, size in named.items()
    )
    note = "Fields of model.encoders.<modality>; one that is given in the run file wins over the size's."
    return Grid("Encoder sizes", columns, rows, (note,))


def _placements(price: RunPrice) -> Grid:
    columns = (
        Column("device", key=True, text=True),
        Column("profile", text=True),
        Column("stage", key=True),
        Column("trains", text=True),
        Column("micro-batch"),
        Column("step memory", "MiB"),
        Column("FLOPs a round", "GFLOP"),
        Column("verdict", text=True),
    )
    rows = tuple(_placement_row(price, device) for device in price.devices)
    base = units.mib(price.trainer_base_bytes)
    note = (
        f"Recipe {price.recipe}. Whole-process limits are checked with an idle trainer of {base}; every agent measures "
        "its own, and --trainer-base sets it here."
    )
    return Grid("Devices", columns, rows, (note,))


def _costs(price: RunPrice) -> Grid:
    """What a round takes besides memory and FLOPs, of the placements that fit."""
    columns = (
        Column("device", key=True, text=True),
        Column("stage", key=True),
        Column("down", "MiB"),
        Column("up", "MiB"),
        Column("disk", "MiB"),
        Column("first round", "GFLOP"),
        Column("a round", "s"),
        Column("energy", "J"),
    )
    rows = []
    for device in price.devices:
        cost = device.placement.cost
        if device.placement.refusal is not None:
            continue
        sizes = (cost.payload_down_bytes, cost.payload_up_bytes, cost.disk_bytes)
        rows.append(
            (
                Cell(device.device),
                Cell(str(device.placement.stage.index)),
                *_mib(*sizes),
                Cell(units.number((cost.flops + cost.filling_flops) / units.GIGA)),
                *(Cell(units.number(value) if value else "") for value in (cost.wall_s, cost.energy_j)),
            )
        )
    note = (
        "First round: with what it takes to store the frozen prefix of every sample, where no earlier stage has. "
        "Seconds and joules by the speed and power in the device's profile; empty where it tells none, and without the "
        "link where that is not in it."
    )
    return Grid("What a round costs each device", columns, tuple(rows), (note,))


def _batch(hyper: Hyper) -> str:
    """Rows of a micro-batch, and what else was done to fit."""
    checkpointed = ", blocks anew" if hyper.checkpoint else ""
    optimizer = f", {hyper.optimizer}" if hyper.low_memory else ""
    return f"{hyper.micro_batch or hyper.batch_size}{checkpointed}{optimizer}"


def _trains(placement: Placement) -> str:
    if is_closing(placement.stage):
        return "matching networks (closing round)"
    numbers = trained_stages(placement.stage)
    names = ["embeddings"] if 0 in numbers else []
    stages = [n for n in numbers if n]
    if stages:
        first, last = stages[0], stages[-1]
        names.append(f"stage {first}" if first == last else f"stages {first}-{last}")
    return " + ".join([*names, "heads"])


def _placement_row(price: RunPrice, device: DevicePlan) -> tuple[Cell, ...]:
    placement = device.placement
    head = (Cell(device.device), Cell(device.profile), Cell(str(placement.stage.index)))
    refusal = placement.refusal
    if refusal is not None:
        needed, allowed = (units.quantity(v, refusal.unit) for v in (refusal.needed, refusal.allowed))
        numbers = f": needs {needed}, may use {allowed}" if refusal.needed is not None else ""
        text = f"refused by {refusal.reason}{numbers} ({refusal.detail})"
        return (*head, Cell("nothing"), Cell(), Cell(), Cell(), Cell(text, tone="bad"))
    return (
        *head,
        Cell(_trains(placement)),
        Cell(_batch(placement.hyper)),
        Cell(units.number(placement.cost.step_peak_bytes / units.MIB)),
        Cell(units.number(placement.cost.flops / units.GIGA)),
        Cell("fits", tone="good"),
    )
