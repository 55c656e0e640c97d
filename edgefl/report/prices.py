"""What ``edgefl plan`` shows: prices of the schedules, and what each device would train, as rows and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgefl.plan.schedule import trained_stages
from edgefl.plan.values import Hyper, Placement
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid


class StagePrice(msgspec.Struct, frozen=True):
    """One stage of one schedule on one share. Bytes of a usual round; FLOPs forward + backward."""

    schedule: str = ""
    stage: int = 0
    rounds: int = 0
    step_peak_bytes: int = 0
    flops_per_round: float = 0.0
    flops_per_sample: float = 0.0
    payload_down_bytes: int = 0
    payload_up_bytes: int = 0
    filling_flops: float = 0.0  # once: what no earlier stage has stored of the frozen prefix
    whole_bytes: int = 0  # down and up of the stage's first and last transfers, in which parts come whole


class DevicePlan(msgspec.Struct, frozen=True):
    """What one device would train in one stage."""

    device: str = ""
    profile: str = ""
    placement: Placement = Placement()
    card: bool = False  # the step is in the GPU's own memory


class Account(msgspec.Struct, frozen=True):
    """A schedule by a paper's accounting: bytes of one client, FLOPs of one sample."""

    schedule: str = ""
    payload_bytes: float = 0.0
    flops: float = 0.0


class RunPrice(msgspec.Struct, frozen=True):
    """The whole answer. ``samples``: size of the share that the schedules are priced on."""

    name: str = ""
    recipe: str = ""
    model_bytes: int = 0
    samples: int = 0
    batch_size: int = 0
    trainer_base_bytes: int = 0
    schedules: tuple[StagePrice, ...] = ()
    devices: tuple[DevicePlan, ...] = ()
    convention: str = ""
    accounts: tuple[Account, ...] = ()  # by that convention


def price_grids(price: RunPrice) -> tuple[Grid, ...]:
    """Totals of each schedule, its stages, the devices' placements and, where asked for, a paper's accounting."""
    asked = (_accounts(price),) if price.accounts else ()
    return _totals(price), _stages(price), _placements(price), _costs(price), *asked


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
        Column("rounds"),
        Column("step memory, highest", "MiB"),
        Column("FLOPs, all rounds", "GFLOP"),
        Column("bytes down + up, all rounds", "MiB"),
        Column("against end-to-end", text=True),
    )
    totals = {name: _total([s for s in price.schedules if s.schedule == name]) for name in _names(price)}
    reference = totals.get("end_to_end")
    rows = []
    for name, (rounds, memory, flops, payload) in totals.items():
        ratio = ""
        if reference is not None and name != "end_to_end":
            less = [was / now if now else 0.0 for was, now in zip(reference[1:], (memory, flops, payload), strict=True)]
            ratio = "memory ÷ {:.1f}, FLOPs ÷ {:.1f}, bytes ÷ {:.1f}".format(*less)
        cells = (units.number(memory / units.MIB), units.number(flops / units.GIGA), units.number(payload / units.MIB))
        rows.append((Cell(name), Cell(str(rounds)), *map(Cell, cells), Cell(ratio)))
    note = (
        f"Model {units.mib(price.model_bytes)}; a share of {price.samples} samples, batches of {price.batch_size}, "
        "all modalities present. Nothing was run: the training step is traced on shapes alone."
    )
    return Grid(f"Schedules of {price.name}", columns, tuple(rows), (note,))


def _total(stages: list[StagePrice]) -> tuple[int, float, float, float]:
    return (
        sum(s.rounds for s in stages),
        max((s.step_peak_bytes for s in stages if s.rounds), default=0),
        sum(s.rounds * s.flops_per_round + s.filling_flops for s in stages if s.rounds),
        sum(s.whole_bytes + (s.rounds - 1) * (s.payload_down_bytes + s.payload_up_bytes) for s in stages if s.rounds),
    )


def _names(price: RunPrice) -> list[str]:
    return list(dict.fromkeys(s.schedule for s in price.schedules))


def _stages(price: RunPrice) -> Grid:
    columns = (
        Column("schedule", key=True, text=True),
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
    """What a round takes besides step memory and FLOPs, of the placements that fit."""
    columns = (
        Column("device", key=True, text=True),
        Column("stage", key=True),
        Column("process", "MiB"),
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
        step = cost.staging_bytes if device.card else max(cost.step_peak_bytes, cost.filling_peak_bytes)
        peak = price.trainer_base_bytes + step
        sizes = (peak, cost.payload_down_bytes, cost.payload_up_bytes, cost.disk_bytes)
        rows.append(
            (
                Cell(device.device),
                Cell(str(device.placement.stage.index)),
                *(Cell(units.number(size / units.MIB)) for size in sizes),
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
    anew = ", blocks anew" if hyper.checkpoint else ""
    lean = f", {hyper.optimizer}" if hyper.leaned else ""
    return f"{hyper.micro_batch or hyper.batch_size}{anew}{lean}"


def _trains(placement: Placement) -> str:
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
