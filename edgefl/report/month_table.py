"""Price of a month on each device: bytes of its runs, bytes of waiting between them, joules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from types import MappingProxyType

import msgspec

from edgefl.budget.fit import DeviceMonth, RunPrice
from edgefl.plan.job import Placement
from edgefl.plan.periods import whole_exchanges
from edgefl.records import Cost
from edgefl.report import units
from edgefl.report.folding import listed
from edgefl.report.grid import Cell, Column, Grid, measure, table

#: Waiting: a ping and its answer over TLS a minute (edgefl/transport/link.py), 246 bytes with headers; 43,200 minutes.
IDLE_BYTES_A_MONTH = 43_200 * 246
#: Headers of IP and TCP, of segments and of acknowledgements: 52 bytes of 1,500 that carry 1,448, and 52 back for every
#: second one.
PACKET_SHARE = 0.05


def months(
    price: RunPrice,
    runs: int,
    wire: Mapping[str, float] = MappingProxyType({}),
    idle: Mapping[str, float] = MappingProxyType({}),
) -> tuple[DeviceMonth, ...]:
    """A month of ``runs`` runs for each device, on the link: payload with its packets, and the idle connection.

    ``wire``: device -> bytes of a run at the broker's socket, ``idle``: of a month of waiting, where counted.
    """
    return tuple(_months(price, runs, wire, idle))


def _months(price: RunPrice, runs: int, wire: Mapping[str, float], idle: Mapping[str, float]) -> Iterator[DeviceMonth]:
    for name in dict.fromkeys(plan.device for plan in price.devices):
        fitting = [p.placement for p in price.devices if p.device == name and p.placement.refusal is None]
        held = [placement for placement in fitting if placement.stage.rounds]
        costs = [stage_total(one, price.period, joins=one is held[0]) for one in held]
        payload = wire.get(name, sum(cost.payload_down_bytes + cost.payload_up_bytes for cost in costs))
        joules = [one.stage.rounds * usual(one).energy_j for one in held]
        energy = runs * sum(joules) if held and all(joules) else None
        waiting = round(idle.get(name, IDLE_BYTES_A_MONTH))
        counted = tuple(what for what, known in (("runs", wire), ("waiting", idle)) if name in known)
        yield DeviceMonth(name, round(runs * payload * (1 + PACKET_SHARE)), waiting, energy, counted)


def month_table(price: RunPrice) -> Grid:
    """One row per device: bytes of its runs, idle bytes, both, joules of its runs."""
    unknown = "the device's speed, or its power, is not in its profile"

    def energy(row: DeviceMonth) -> Cell:
        return Cell(units.NOTHING, why=unknown) if row.energy_j is None else Cell(units.number(row.energy_j))

    columns: list[Column[DeviceMonth]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        measure("runs", lambda row: row.runs_bytes, "B", "on the link"),
        measure("waiting", lambda row: row.idle_bytes, "B", "on the link"),
        measure("in all", lambda row: row.runs_bytes + row.idle_bytes, "B", "on the link"),
        Column("energy", energy, "J", "runs"),
    ]
    note = (
        f"Runs: payload up and down of every round, and {100 * PACKET_SHARE:.0f} % for the packets it travels in; no "
        "losses. Waiting: MQTT's keep-alive over TLS. Joules of the rounds, without those of waiting."
    )
    counts = {what: [row.device for row in price.months if what in row.counted] for what in ("runs", "waiting")}
    notes = [
        f"Counted in the run, not predicted: bytes of {what}, "
        f"{'every device' if len(names) == len(price.months) else listed(names)}."
        for what, names in counts.items()
        if names
    ]
    plural = "s" if price.runs_a_month != 1 else ""
    title = f"A month of {price.runs_a_month} run{plural}"
    return table(title, columns, price.months, [note, *notes])


def usual(placement: Placement) -> Cost:
    """Cost of a usual round; of a stage with draws their mean, since each has as many rounds, or one less."""
    names, costs = (
        ("flops", "payload_down_bytes", "payload_up_bytes", "energy_j"),
        [one.cost for one in placement.draws],
    )
    means = {name: fmean(getattr(cost, name) for cost in costs) for name in names} if costs else {}
    return msgspec.structs.replace(placement.cost, **means)


def stage_total(placement: Placement, period: int = 1, *, joins: bool) -> Cost:
    """FLOPs and bytes of all rounds of a stage at a device; ``joins``: its first stage.

    The sum of the rounds' predictions: the first brings whole parts and stores a frozen prefix, the last sends whole
    parts, and the run's first has no prototypes to bring. ``period``: rounds from one whole exchange to the next.
    """
    cost, rounds = usual(placement), placement.stage.rounds
    later, more = rounds - 1, whole_exchanges(rounds, period) - 1
    between = later - more
    first = placement.predicted_first.get("flops")
    brought = cost.joining_down_bytes - cost.prototypes_down_bytes if joins else cost.entering_down_bytes
    return Cost(
        flops=later * cost.flops + (first.value or 0.0 if first is not None else cost.flops),
        payload_down_bytes=brought + more * cost.payload_down_bytes + between * cost.layer_bytes,
        payload_up_bytes=more * cost.payload_up_bytes
        + cost.whole_up_bytes
        + between * cost.layers_up_bytes
        + joins * cost.signature_bytes,
    )
