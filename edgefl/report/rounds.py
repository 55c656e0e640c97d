"""Tables of a run's rounds, late updates, devices, stages and bundles; status of an unfinished run."""

from __future__ import annotations

import statistics
from collections import Counter

from edgefl.models.spec import is_matcher
from edgefl.records import Traffic
from edgefl.report import quality, resources, units
from edgefl.report.grid import Cell, Column, Grid, Record, Tone, amount, limit_column, measure, table
from edgefl.report.waits import Wait, waits
from edgefl.run_records import BundleRow, DeviceRow, RoundRow, RunReport

_TONES: dict[str, Tone] = {"failed": "bad", "running": "dim"}
#: Events that name a device and are no sign of its life: what the operator does, what the coordinator concludes.
_NO_SIGN = ("left_out", "taken_in", "readmitted", "device_left")
#: After the parts of the closing round.
CLOSING = " (closing round: every eligible device, the model does not change)"
#: Seconds of 30 days; a shorter wait, with the connection's handshake in it, says little of a month.
MONTH_S, LEAST_WAIT_S = 30 * 86400, 600.0
_NO_LINK = "not told: no TCP connection, or a kernel without its count"
_SHORT_WAIT = "waited for less than ten minutes without a run"
_LINK_NOTE = (
    "Bytes on the link, both ways. In this run: at the broker's socket, from offer to update. The others by the "
    "kernel, with TLS, IP and TCP, since the agent's start, up to its last hello; waiting: while it had no run."
)
_WAITED = "The device that answered last, and what took it longest in the round."
_LATE_NOTE = (
    "An update made from the model of s rounds ago moves the model by the change it makes, times (1 + s) to the power "
    "of −alpha. Too old: made from a model older than round.max_staleness, and dropped."
)


def standing(report: RunReport) -> str:
    """Sentence on an unfinished run: its end, and the way to resume it; "" if done or running."""
    if report.status == "failed":
        reason = next((event.data.get("text") for event in reversed(report.events) if event.kind == "run_failed"), "")
        return f"The run failed: {reason or 'no reason on record'}"
    if report.status not in {"interrupted", "stopped"}:
        return ""
    done = [row for row in report.rounds if row.status == "done"]
    after = f"after stage {done[-1].stage}, round {done[-1].round}" if done else "before its first round was finished"
    if report.status == "stopped":
        by = next((event.data.get("by") for event in reversed(report.events) if event.kind == "run_stopped"), "")
        when = units.moment(report.finished_at)
        return f"The run was stopped ({by}) {after}, on {when}. --resume {report.run} goes on."
    last = f"; the last event is of {units.moment(report.events[-1].at)}" if report.events else ""
    return f"The run was interrupted {after}{last}. No coordinator holds it; --resume {report.run} goes on."


def warnings(report: RunReport) -> list[str]:
    """Each lasting warning of the run once; those of a moment are in the events alone."""
    lasting = [event.data for event in report.events if event.kind == "warning" and event.data.get("lasting")]
    return list(dict.fromkeys(str(data.get("text", "")) for data in lasting))


def rounds(report: RunReport) -> Grid:
    """Table of rounds: participants, outcome, cost."""
    metric = quality.primary_metric(report)
    scores = {(r.stage, r.round): r for r in report.evaluations if r.missing == "none" and r.metric == metric}
    ended = {"running": report.status} if report.status in {"stopped", "interrupted"} else {}  # the open round
    assigned, waited = resources.by_round(report), waits(report)

    def score(row: RoundRow) -> str:
        return quality.score(scores.get((row.stage, row.round)))

    def took_part(row: RoundRow) -> Cell:
        here = assigned.get((row.stage, row.round), [])
        asked = {one.device for one in here if one.status not in {"refused", "quarantined"}}
        offered = asked | set(row.participants)
        return Cell(f"{len(row.participants)} / {len(offered)}", tip=", ".join(row.participants) or "nobody")

    def payload(row: RoundRow) -> Cell:
        here = assigned.get((row.stage, row.round), [])
        both = [resources.measured(name, here) for name in ("payload_up_bytes", "payload_down_bytes") if here]
        return amount((moved := resources.total("payload", both)).value, "B", why=moved.reason)

    def of(row: RoundRow) -> Wait:
        return waited.get((row.stage, row.round), Wait())

    def seconds(row: RoundRow) -> float | None:
        return None if row.ended_at is None else row.ended_at - row.started_at

    columns: list[Column[RoundRow]] = [
        Column("stage", lambda row: row.stage, key=True),
        Column("round", lambda row: row.round, key=True),
        Column("attempt", lambda row: row.attempt),
        Column(
            "status", lambda row: Cell(ended.get(row.status, row.status), tone=_TONES.get(row.status, "")), text=True
        ),
        Column("took part", took_part, "of offered"),
        measure("loss", lambda row: row.metrics.get("loss"), "", why="no loss on record"),
        Column(metric, score, "%" if units.is_share(metric) else "", tip="All modalities given."),
        Column("payload", payload, "MiB", tip="Tensors sent and received by all devices."),
        measure("time", seconds, "s", why="the round has not ended"),
        Column("waited for", lambda row: of(row).text, text=True, tip=_WAITED),
        measure("evaluation", lambda row: of(row).evaluation_s, "s", why="not evaluated"),
    ]
    if any(map(stale, report.rounds)):
        columns.append(Column("late updates", _late, tip="Made from earlier models, and by how many rounds."))
    accounts = [row.record["account"] for row in report.rounds if "account" in row.record]
    if accounts:
        columns.append(Column("epsilon", _epsilon, tip="So far."))
    choices = dict.fromkeys(_slots(row).text for row in report.rounds)
    if len(choices) > 1:
        columns.append(Column("what each slot did", _slots, text=True))
    notes = [f"In every round: {choice}." for choice in choices if choice and len(choices) == 1]
    if accounts:
        notes.append(f"Privacy of each device, by all rounds: {units.privacy(accounts[-1])}.")
    return table("Rounds", columns, report.rounds, notes, "No round has started yet.")


def _slots(row: RoundRow) -> Cell:
    """ "select all · weight samples · combine mean": a round's effective slots; details in the tooltip."""
    short, details = [], []
    for role, did in row.record.items():
        if role in {"stale", "account"}:  # have a column of their own
            continue
        record = did if isinstance(did, dict) else {"choice": did}
        if (choice := record.get("choice")) and choice != "none":
            short.append(f"{role} {choice}")
        details += [f"{role}.{name} = {value}" for name, value in record.items() if name != "choice" and value]
    return Cell(" · ".join(short), tip="; ".join(details))


def _epsilon(row: RoundRow) -> str:
    account = row.record.get("account")
    return units.number(account["epsilon"]) if account else ""


def stale(row: RoundRow) -> list[Record]:
    """The late updates of a round: device, staleness, factor."""
    found = row.record.get("stale", {})
    return list(found.values()) if isinstance(found, dict) else []


def _late(row: RoundRow) -> Cell:
    """Cell with the number of late updates in a round, and their staleness."""
    late = stale(row)
    if not late:
        return Cell()
    each = [f"{one['device']}: {one['staleness']} rounds, × {one['factor']:.2f}" for one in late]
    return Cell(f"{len(late)}, up to {max(one['staleness'] for one in late)}", tip="; ".join(each))


def late_updates(report: RunReport) -> Grid:
    """Table of devices' aggregated updates: number, staleness, mean factor. No rows without late ones."""
    late: dict[str, list[Record]] = {}
    in_time: Counter[str] = Counter()
    for row in report.rounds:
        for update in stale(row):
            late.setdefault(str(update["device"]), []).append(update)
        parts = [part.get("devices", {}) for part in row.record.get("parts", {}).values() if isinstance(part, dict)]
        in_time.update({device for devices in parts for device in devices})
    dropped = [row for row in report.assignments if row.status == "late" and row.refusal]
    old = Counter(row.device for row in dropped if row.refusal and row.refusal.unit == "rounds")

    def of(device: str, name: str) -> list[float]:
        return [update[name] for update in late.get(device, [])]

    def mean(device: str, name: str) -> str:
        return units.number(statistics.fmean(values)) if (values := of(device, name)) else ""

    age = "Rounds between the model it was made from and the one it joined, late ones."
    factor = "What the change of a late update was multiplied by."
    columns: list[Column[str]] = [
        Column("device", lambda device: device, key=True, text=True),
        Column("updates", lambda device: len(late.get(device, [])) + in_time[device]),
        Column("of them late", lambda device: len(late.get(device, []))),
        Column("staleness", lambda device: mean(device, "staleness"), "mean", tip=age),
        Column("", lambda device: str(max(of(device, "staleness"), default="")), "most", tip="Rounds."),
        Column("damped", lambda device: mean(device, "factor"), "mean ×", tip=factor),
        Column("too old", lambda device: old[device], tip="Updates, or work on them, that were dropped."),
    ]
    return table("Late updates", columns, sorted({*late, *old}), [_LATE_NOTE], "No update was late.")


def devices(report: RunReport) -> Grid:
    """Table of devices: hardware, budget of a round, data."""
    may, link = "may spend per round", "bytes on the link"

    def gpu(row: DeviceRow) -> Cell:
        name, size = row.capabilities.gpu, row.capabilities.gpu_memory_bytes
        return Cell(name or "none", tone="" if name else "dim", tip=f"{units.mib(size)} of its own" if size else "")

    def traffic(row: DeviceRow) -> Traffic:
        return row.capabilities.traffic

    def month(row: DeviceRow) -> Cell:
        return amount(idle_month(traffic(row)), "B", why=no_idle_month(traffic(row)))

    wire = wire_bytes(report)
    moded = any(row.capabilities.power_mode for row in report.devices)
    columns: list[Column[DeviceRow]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("profile", lambda row: row.profile, text=True),
        Column("machine", lambda row: Cell(row.capabilities.machine, tip=row.capabilities.runtime), text=True),
        Column("cores", lambda row: row.capabilities.cores or None),
        measure("memory", lambda row: row.capabilities.memory_total_bytes or None, "B", "has"),
        measure("disk free", lambda row: row.capabilities.disk_free_bytes or None, "B", "has"),
        Column("GPU", gpu, "", "has", text=True),
        *([Column("power mode", lambda row: row.capabilities.power_mode, "", "has", text=True)] * moded),
        limit_column("step memory", lambda row: row.budget.step_memory_bytes, "B", may),
        limit_column("process", lambda row: row.budget.memory_bytes, "B", may),
        limit_column("FLOPs", lambda row: row.budget.flops, "FLOP", may),
        limit_column("payload", lambda row: row.budget.payload_bytes, "B", may),
        limit_column("disk", lambda row: row.budget.disk_bytes, "B", may),
        Column("samples", lambda row: units.samples(row.samples), "", "data", text=True),
        measure("in this run", lambda row: wire.get(row.device), "B", link, why="not measured"),
        measure("since its start", lambda row: traffic(row).bytes or None, "B", link, why=_NO_LINK),
        measure(
            "waiting", lambda row: traffic(row).idle_bytes if traffic(row).seconds else None, "B", link, why=_NO_LINK
        ),
        Column("waiting, a month", month, units.printed_unit("B"), link),
        Column("last seen", lambda row: units.moment(last_seen(report, row.device)), text=True),
    ]
    notes = [_LINK_NOTE] if any(traffic(row).seconds for row in report.devices) else []
    return table("Devices", columns, report.devices, notes, "No device has joined yet.")


def wire_bytes(report: RunReport) -> dict[str, float]:
    """Device -> bytes on the wire in this run's rounds, both ways; devices without a measurement are left out."""
    found: dict[str, float] = {}
    for device, rows in resources.by_device(report).items():
        both = [resources.measured(name, rows).value for name in ("wire_up_bytes", "wire_down_bytes")]
        if None not in both:
            found[device] = sum(filter(None, both))
    return found


def idle_month(traffic: Traffic) -> float | None:
    """Bytes of a month of waiting, at the measured rate; None of a wait under ten minutes."""
    return traffic.idle_bytes / traffic.idle_s * MONTH_S if traffic.idle_s >= LEAST_WAIT_S else None


def no_idle_month(traffic: Traffic) -> str:
    """Reason why a month of waiting is not known; "" where it is."""
    return (_SHORT_WAIT if traffic.seconds else _NO_LINK) if idle_month(traffic) is None else ""


def last_seen(report: RunReport, device: str) -> float | None:
    """Time of a device's latest sign of life, else its last round's end; seconds since the epoch."""
    times = [event.at for event in report.events if event.device == device and event.kind not in _NO_SIGN]
    if not times:
        times = [row.ended_at or row.started_at for row in report.rounds if device in row.participants]
    return max(times, default=None)


def stages(report: RunReport) -> Grid:
    """Table of stages: trained parts, and size of the parts on a device."""

    def size(kind: str) -> Column[Record]:
        def total(row: Record) -> int | None:
            return sum(report.part_bytes.get(part, 0) for part in row.get(kind, ())) if report.part_bytes else None

        return measure(kind, total, "B", "size of the parts", why="sizes of the parts not on record")

    def parts(row: Record) -> str:
        trained = list(row.get("trained", ()))
        drawn = "each round one encoder stage of: " if row.get("draw") else ""
        return drawn + ", ".join(trained) + (CLOSING if trained and all(map(is_matcher, trained)) else "")

    columns: list[Column[Record]] = [
        Column("stage", lambda row: row.get("index"), key=True),
        Column("encoder depth", lambda row: row.get("depth"), "stages"),
        Column("rounds", lambda row: row.get("rounds"), "planned"),
        size("trained"),
        size("present"),
        Column("parts trained", parts, text=True),
    ]
    return table("Stages", columns, report.stages, empty="No stage on record.")


def bundles(report: RunReport) -> Grid:
    """Table of exported ONNX files and their difference from torch: in outputs, or in accuracy below float32."""

    def cell(row: BundleRow, exact: float, points: float) -> Cell:
        good = row.max_difference <= row.tolerance and row.lost_points <= row.max_loss
        return Cell(
            f"{exact:.1e}" if row.precision == "f32" else f"{points:.1f} points", tone="good" if good else "bad"
        )

    columns: list[Column[BundleRow]] = [
        Column("bundle", lambda row: row.name, key=True, text=True),
        Column("modalities", lambda row: " + ".join(row.modalities), text=True),
        Column("precision", lambda row: row.precision, text=True),
        measure("size", lambda row: row.size_bytes, "B"),
        Column("largest", lambda row: cell(row, row.max_difference, row.lost_points), "", "difference from torch"),
        Column("allowed", lambda row: cell(row, row.tolerance, row.max_loss).text, "", "difference from torch"),
        Column("file", lambda row: row.path, text=True, whole=True),
    ]
    empty = "Nothing exported; `edgefl export RUN` writes ONNX bundles."
    return table("Exported bundles", columns, report.bundles, empty=empty)
