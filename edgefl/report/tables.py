"""Tables of a run for programs: figures, budgets, rounds, scores, totals, refusals, devices, groups. Base units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from edgefl.groups import groups_of
from edgefl.records import FIGURES, Figure, Traffic
from edgefl.report import decisions, resources
from edgefl.report.resources import step_limit
from edgefl.report.rounds import idle_month, no_idle_month, wire_bytes
from edgefl.report.totals import totals
from edgefl.report.waits import Wait, waits
from edgefl.run_records import AssignmentRow, DeviceRow, EndToEnd, RunReport

Row = Sequence[str | float | None]


class Table(NamedTuple):
    """A table: column -> type (string, int64, float64), and rows in the order of the columns; None is missing."""

    types: Mapping[str, str]
    rows: list[Row]


def _types(columns: str) -> dict[str, str]:
    """Types by column of "name name:i name:f"."""
    kinds = {"": "string", "i": "int64", "f": "float64"}
    pairs = (column.partition(":") for column in columns.split())
    return {name: kinds[kind] for name, _, kind in pairs}


_WHERE = "run device stage:i round:i attempt:i status"
#: Table -> its columns. New columns come last: programs may know them by their place.
COLUMNS = {
    "figures": _types(f"{_WHERE} figure unit predicted:f measured:f kind source reason refusal needed:f allowed:f"),
    "budgets": _types(f"{_WHERE} budget unit predicted:f measured:f allowed:f share:f reason"),
    "rounds": _types(
        "run stage:i round:i attempt:i status started_at:f seconds:f participants offered:i loss:f payload_bytes:f "
        "waited_for waited_on waited_s:f evaluation_s:f"
    ),
    "scores": _types("run given mask metric stage:i round:i value:f samples:i matcher"),
    "totals": _types("run figure unit measured:f predicted:f end_to_end:f reason end_to_end_reason"),
    "refusals": _types("run device stage:i rounds decided_by reason needed:f allowed:f unit detail"),
    "devices": _types(
        "run device profile samples:i step_memory_limit:f payload_limit:f flops_limit:f energy_limit:f disk_limit:f "
        "agent_version machine rounds_trained:i end_to_end_step_peak_bytes:f end_to_end_flops:f "
        "end_to_end_payload_bytes:f end_to_end_refusal wire_bytes:f link_bytes:f idle_bytes:f idle_s:f "
        "idle_month_bytes:f groups idle_month_reason"
    ),
    "groups": _types(
        "run group devices:i rounds_trained:i figure unit measured:f predicted:f end_to_end:f reason end_to_end_reason"
    ),
}


def tables(report: RunReport) -> dict[str, Table]:
    """Every table of the run, by name."""
    return {name: table(report, name) for name in COLUMNS}


def table(report: RunReport, name: str) -> Table:
    """The table ``name`` of the run."""
    return Table(COLUMNS[name], [(report.run, *row) for row in _ROWS[name](report)])


def _figures(report: RunReport) -> Iterator[Row]:
    for row in report.assignments:
        refusal = row.refusal
        why = ("", None, None) if refusal is None else (refusal.reason, refusal.needed, refusal.allowed)
        for name in [name for name in FIGURES if name in row.predicted or name in row.measured]:
            plan, told = row.predicted.get(name, Figure()), row.measured.get(name) or resources.unknown(row)
            origin = (told.kind if told.value is not None else "missing", told.source)
            yield (*_where(row), name, FIGURES[name], plan.value, told.value, *origin, told.reason, *why)
        if refusal is not None and not row.predicted and not row.measured:
            yield (*_where(row), "", "", None, None, "", "", "", *why)


def _where(row: AssignmentRow) -> tuple[str, int, int, int, str]:
    return row.device, row.stage, row.round, row.attempt, row.status


def _budgets(report: RunReport) -> Iterator[Row]:
    devices = {device.device: device for device in report.devices}
    for row in report.assignments:
        device = devices.get(row.device, DeviceRow(row.device))
        for limit in resources.limits(device):
            spent = [row.measured.get(name) or resources.unknown(row) for name in limit.figures]
            plan = [row.predicted.get(name, Figure()).value for name in limit.figures]
            if limit.what == "process memory":  # planned as the step above the idle trainer
                plan = [row.predicted.get("step_peak_bytes", Figure()).value, device.capabilities.trainer_base_bytes]
            measured = _sum([figure.value for figure in spent])
            share = None if measured is None or not limit.allowed else measured / limit.allowed
            missing = dict.fromkeys(figure.reason for figure in spent if figure.value is None)
            reason = "; ".join(missing) if limit.figures else "checked before the round, not measured"
            yield (*_where(row), limit.name, limit.unit, _sum(plan), measured, limit.allowed, share, reason)


def _sum(values: Sequence[float | None]) -> float | None:
    """Sum of the values; None where one is missing, or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _rounds(report: RunReport) -> Iterator[Row]:
    assigned = resources.by_round(report)
    waited = waits(report)
    for row in report.rounds:
        here = assigned.get((row.stage, row.round), [])
        offered = {one.device for one in here if one.status not in {"refused", "quarantined"}} | {*row.participants}
        moved = [resources.measured(name, here).value for name in ("payload_up_bytes", "payload_down_bytes")]
        seconds = None if row.ended_at is None else row.ended_at - row.started_at
        names = "; ".join(row.participants)
        yield (
            *(row.stage, row.round, row.attempt, row.status, row.started_at, seconds, names, len(offered)),
            *(row.metrics.get("loss"), _sum(moved), *waited.get((row.stage, row.round), Wait())),
        )


def _scores(report: RunReport) -> Iterator[Row]:
    for row in report.evaluations:
        given = " + ".join(row.available)
        yield given, row.missing, row.metric, row.stage, row.round, row.value, row.samples, row.matcher


def _totals(report: RunReport) -> Iterator[Row]:
    for one in totals(report):
        values = one.measured.value, one.predicted.value, one.end_to_end.value
        yield one.name, one.unit, *values, one.measured.reason, one.end_to_end.reason


def _refusals(report: RunReport) -> Iterator[Row]:
    for row, rounds in decisions.collected(report).items():
        why, listed = row.refusal, "; ".join(map(str, sorted(rounds)))
        numbers = why.needed, why.allowed, why.unit
        yield row.device, row.stage, listed, row.decided_by, why.reason, *numbers, why.detail


def _devices(report: RunReport) -> Iterator[Row]:
    done, wire = resources.by_device(report), wire_bytes(report)
    for row in report.devices:
        budget, price = row.budget, report.end_to_end.get(row.device)
        limits = (step_limit(row), budget.payload_bytes, budget.flops, budget.energy_j, budget.disk_bytes)
        trained = sum(one.status == "done" for one in done[row.device])
        yield (
            *(row.device, row.profile, row.samples.get("", 0), *limits, row.agent_version, row.capabilities.machine),
            *(trained, *_price(price, trained), wire.get(row.device), *_link(row.capabilities.traffic)),
            *("; ".join(groups_of(row.device, report.groups)), no_idle_month(row.capabilities.traffic)),
        )


def _groups(report: RunReport) -> Iterator[Row]:
    """Totals of each group that the run has a device of."""
    for group, part in resources.by_group(report).items():
        trained = sum(one.status == "done" for one in part.assignments)
        for row in _totals(part):
            yield (group, len(part.devices), trained, *row)


def _link(traffic: Traffic) -> Row:
    """Bytes on the link since the agent's start, and while it had no run; seconds of that, and a month at that rate."""
    if not traffic.seconds:
        return None, None, None, None
    return traffic.bytes, traffic.idle_bytes, traffic.idle_s, idle_month(traffic)


def _price(price: EndToEnd | None, rounds: int) -> Row:
    """A device's price end to end in as many rounds: largest step, FLOPs, bytes; the limit it would exceed."""
    if price is None:
        return None, None, None, ""
    refused = price.refusal.reason if price.refusal else ""
    return price.step_peak_bytes, rounds * price.flops, rounds * price.payload_bytes, refused


_ROWS = {
    "figures": _figures,
    "budgets": _budgets,
    "rounds": _rounds,
    "scores": _scores,
    "totals": _totals,
    "refusals": _refusals,
    "devices": _devices,
    "groups": _groups,
}
