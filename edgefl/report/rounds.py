"""Tables of the rounds: participants, cost, late updates, repaired layers; and the status of an unfinished run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from edgefl.report import totals, units
from edgefl.report.grid import Cell, Column, Grid, Record, Tone, amount, measure, table
from edgefl.run_records import AssignmentRow, RoundRow, RunReport

_TONES: dict[str, Tone] = {"failed": "bad", "running": "dim"}
_LATE_NOTE = (
    "An update made from the model of s rounds ago moves the model by the change it makes, times (1 + s) to the power "
    "of −alpha. Too old: made from a model older than round.max_staleness, and dropped."
)
_REPAIR_NOTE = (
    "A device whose batches lacked modalities after complete ones has a poverty layer, the one that changed most. It "
    "is replaced by the mean of its cluster's donors in the round."
)


def standing(report: RunReport) -> str:
    """How a run that is not done ended, and how to resume it; "" for one that is done or still running."""
    if report.status == "failed":
        reason = next((event.data.get("text") for event in reversed(report.events) if event.kind == "run_failed"), "")
        return f"The run failed: {reason or 'no reason on record'}"
    if report.status != "interrupted":
        return ""
    done = [row for row in report.rounds if row.status == "done"]
    after = f"after stage {done[-1].stage}, round {done[-1].round}" if done else "before its first round was finished"
    last = f"; the last event is of {units.moment(report.events[-1].at)}" if report.events else ""
    return f"The run was interrupted {after}{last}. No coordinator holds it; --resume {report.run} goes on."


def warnings(report: RunReport) -> list[str]:
    """Each lasting warning of the run once; those of a moment are in the events alone."""
    lasting = [event.data for event in report.events if event.kind == "warning" and event.data.get("lasting")]
    return list(dict.fromkeys(str(data.get("text", "")) for data in lasting))


def rounds(report: RunReport) -> Grid:
    """Every round: participants, outcome, cost."""
    metric = totals.primary_metric(report)
    scores = {(r.stage, r.round): r for r in report.evaluations if r.missing == "none" and r.metric == metric}

    def score(row: RoundRow) -> str:
        return totals.score(scores.get((row.stage, row.round)))

    def took_part(row: RoundRow) -> Cell:
        asked = {one.device for one in _of(report, row) if one.status not in {"refused", "quarantined"}}
        offered = asked | set(row.participants)
        return Cell(f"{len(row.participants)} / {len(offered)}", tip=", ".join(row.participants) or "nobody")

    def payload(row: RoundRow) -> Cell:
        here = _of(report, row)
        both = [totals.measured(name, here) for name in ("payload_up_bytes", "payload_down_bytes") if here]
        return amount((moved := totals.total("payload", both)).value, "B", why=moved.reason)

    def seconds(row: RoundRow) -> float | None:
        return None if row.ended_at is None else row.ended_at - row.started_at

    columns: list[Column[RoundRow]] = [
        Column("stage", lambda row: row.stage, key=True),
        Column("round", lambda row: row.round, key=True),
        Column("attempt", lambda row: row.attempt),
        Column("status", lambda row: Cell(row.status, tone=_TONES.get(row.status, "")), text=True),
        Column("took part", took_part, "of offered"),
        measure("loss", lambda row: row.metrics.get("loss"), "", why="no loss on record"),
        Column(metric, score, "%" if units.is_share(metric) else "", tip="All modalities given."),
        Column("payload", payload, "MiB", tip="Tensors sent and received by all devices."),
        measure("time", seconds, "s", why="the round has not ended"),
    ]
    if any(map(stale, report.rounds)):
        columns.append(Column("late updates", _late, tip="Made from earlier models, and by how many rounds."))
    choices = dict.fromkeys(_slots(row).text for row in report.rounds)
    if len(choices) > 1:
        columns.append(Column("what each slot did", _slots, text=True))
    notes = [f"In every round: {choice}." for choice in choices if choice and len(choices) == 1]
    return table("Rounds", columns, report.rounds, notes, "No round has started yet.")


def _of(report: RunReport, row: RoundRow) -> list[AssignmentRow]:
    return [one for one in report.assignments if (one.stage, one.round) == (row.stage, row.round)]


def _slots(row: RoundRow) -> Cell:
    """ "select all · weight samples · combine mean"; each slot's details are the tip."""
    short, details = [], []
    for role, did in row.record.items():
        if role == "stale":  # has a column of its own
            continue
        record = did if isinstance(did, dict) else {"choice": did}
        short.append(f"{role} {record.get('choice', '')}".strip())
        details += [f"{role}.{name} = {value}" for name, value in record.items() if name != "choice"]
    return Cell(" · ".join(short), tip="; ".join(details))


# Late updates


def stale(row: RoundRow) -> list[Record]:
    """The late updates of a round: device, staleness, factor."""
    found = row.record.get("stale", {})
    return list(found.values()) if isinstance(found, dict) else []


def _late(row: RoundRow) -> Cell:
    """How many of a round's updates were late, and by how much."""
    late = stale(row)
    if not late:
        return Cell()
    each = [f"{one['device']}: {one['staleness']} rounds, × {one['factor']:.2f}" for one in late]
    return Cell(f"{len(late)}, up to {max(one['staleness'] for one in late)}", tip="; ".join(each))


def late_updates(report: RunReport) -> Grid:
    """Each device's updates in the model: how many, how stale, their mean factor. No rows: none was late."""
    late: dict[str, list[Record]] = {}
    for update in (update for row in report.rounds for update in stale(row)):
        late.setdefault(str(update["device"]), []).append(update)
    old = Counter(
        row.device
        for row in report.assignments
        if row.status == "late" and row.refusal and row.refusal.unit == "rounds"
    )

    def mean(name: str) -> Callable[[str], str]:
        def of(device: str) -> str:
            values = [update[name] for update in late.get(device, [])]
            return units.number(sum(values) / len(values)) if values else ""

        return of

    def most(device: str) -> str:
        return str(max((update["staleness"] for update in late.get(device, [])), default=""))

    def late_of(device: str) -> int:
        return len(late.get(device, []))

    columns: list[Column[str]] = [
        Column("device", lambda device: device, key=True, text=True),
        Column("updates", lambda device: late_of(device) + sum(_in_time(row, device) for row in report.rounds)),
        Column("of them late", late_of),
        Column(
            "staleness",
            mean("staleness"),
            "mean",
            tip="Rounds between the model it was made from and the one it joined, late ones.",
        ),
        Column("", most, "most", tip="Rounds."),
        Column("damped", mean("factor"), "mean ×", tip="What the change of a late update was multiplied by."),
        Column("too old", lambda device: old[device], tip="Updates, or work on them, that were dropped."),
    ]
    return table("Late updates", columns, sorted({*late, *old}), [_LATE_NOTE], "No update was late.")


def _in_time(row: RoundRow, device: str) -> bool:
    """Whether the round counted an update of this device that was not late."""
    parts = [part.get("devices", {}) for part in row.record.get("parts", {}).values() if isinstance(part, dict)]
    return any(device in devices for devices in parts)


# Repairs


def repaired(row: RoundRow) -> dict[str, Record]:
    """device -> the replacement of its layer (part, tensor, donors), or why it was kept."""
    found = row.record.get("repaired", {})
    return (
        {name: record for name, record in found.items() if isinstance(record, dict)} if isinstance(found, dict) else {}
    )


def repairs(report: RunReport) -> Grid:
    """How many updates had their layer replaced and how many not, by reason. No rows: the recipe repairs nothing."""
    met: dict[str, list[tuple[str, int]]] = {}  # reason ("": replaced) -> (device, round counted through the run)
    for number, row in enumerate((row for row in report.rounds if row.status == "done"), start=1):
        for device, record in repaired(row).items():
            met.setdefault(str(record.get("kept", "")), []).append((device, number))
    if met:
        met.setdefault("", [])
    columns: list[Column[str]] = [
        Column("poverty layer", lambda kept: f"kept: {kept}" if kept else "replaced", key=True, text=True),
        Column("updates", lambda kept: len(met[kept])),
        Column("devices", lambda kept: len({device for device, _ in met[kept]})),
        Column("rounds", lambda kept: units.spans([number for _, number in met[kept]])),
    ]
    rows = sorted(met, key=lambda kept: (bool(kept), -len(met[kept]), kept))
    return table("Substitutions", columns, rows, [_REPAIR_NOTE], "No layer was to be replaced.")
