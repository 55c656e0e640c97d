"""Each event as one line of words, for logs, pipes and the lines above the live display. None: not worth a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgefl.report import inventory, units
from edgefl.report.decisions import how_words, reason, refusal_of
from edgefl.report.totals import is_leading, is_share
from edgefl.run_records import EventRow

Data = Mapping[str, Any]


def line(event: EventRow) -> str | None:
    """What the event says; None when only the display's numbers move (progress) or the kind is unknown."""
    teller = _TELLERS.get(event.kind)
    return teller(event, event.data) if teller is not None else None


def refusal_words(data: Data) -> str:
    """ "step memory over budget: needs 26.4 MiB, allowed 24.0 MiB"."""
    refusal = refusal_of(data)
    text = reason(refusal)
    if refusal.needed is not None and refusal.allowed is not None:
        needed, allowed = (units.quantity(value, refusal.unit) for value in (refusal.needed, refusal.allowed))
        return f"{text}: needs {needed}, allowed {allowed}"
    return f"{text}: {refusal.detail}" if refusal.detail else text


def how_many(value: Any) -> int:
    """A list's length, or the number itself: events may carry either."""
    return len(value) if isinstance(value, (list, tuple, dict)) else int(value or 0)


def names(value: Any) -> str:
    """A list of names in one string, a number as it is."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def scores(values: list[Data]) -> str:
    """ "accuracy 91.7 % with acc + gyro · acc alone 62.5 % zero, 80.0 % prototype"."""
    told: dict[tuple[str, str], list[str]] = {}
    for value in values:
        metric, mask = str(value.get("metric", "accuracy")), str(value.get("missing", "none"))
        if not is_leading(metric):
            continue
        score = float(value.get("value", 0.0))
        text = units.percent(score) if is_share(metric) else units.number(score)
        given = " + ".join(value.get("available", ()))
        key = (metric, given if mask == "none" else f"{given} alone")
        told.setdefault(key, []).append(text if mask == "none" else f"{text} {mask} mask")
    return " · ".join(f"{metric} {given}: {', '.join(texts)}" for (metric, given), texts in told.items())


def _run_started(_: EventRow, data: Data) -> str:
    parts = [f"{data.get('name', '')}: recipe {data.get('recipe', '')}"]
    parts.append(f"{how_many(data.get('stages'))} stages, {how_many(data.get('rounds_total'))} rounds")
    if data.get("bytes"):
        parts.append(f"model of {how_many(data.get('parts'))} parts, {units.mib(data['bytes'])}")
    if data.get("broker"):
        parts.append(f"broker {units.public_url(str(data['broker']))}")
    return "run started: " + " · ".join(parts)


def _device_joined(event: EventRow, data: Data) -> str:
    counts = data.get("samples") or {}
    told = inventory.samples(counts, " samples") if isinstance(counts, dict) else f"{counts} samples"
    budget = data.get("budget") or {}
    limits = [f"{label} {units.mib(budget[key])}" for key, label in _LIMITS.items() if budget.get(key) is not None]
    return f"{event.device} joined: {data.get('profile', '')} · {told} · budget: {', '.join(limits) or 'no limit'}"


_LIMITS = {
    "step_memory_bytes": "step memory",
    "memory_bytes": "process memory",
    "gpu_memory_bytes": "GPU memory",
    "payload_bytes": "payload",
    "disk_bytes": "disk",
}


def _device_left(event: EventRow, data: Data) -> str:
    return f"{event.device} left" + (f": {data['reason']}" if data.get("reason") else "")


def _stage_planned(event: EventRow, data: Data) -> str:
    lines = [f"stage {event.stage} planned"]
    for placement in data.get("placements", []):
        if placement.get("ok", True):
            micro = f", {how}" if (how := how_words(placement)) else ""
            cost = f"step memory {units.mib(placement.get('step_peak_bytes'))}, {units.gflop(placement.get('flops'))}"
            learned = _learned(placement.get("factors") or {})
            lines.append(f"  {placement.get('device', '')}: trains, predicted {cost}{learned}{micro}")
        else:
            lines.append(f"  {placement.get('device', '')}: refused, {refusal_words(placement)}")
    return "\n".join(lines)


def _learned(factors: Mapping[str, float]) -> str:
    """By how much earlier rounds of the device have changed these predictions; "" below a percent."""
    told = (("step_peak_bytes", "memory"), ("flops", "FLOPs"))
    words = [f"{name} × {factors[key]:.2f}" for key, name in told if abs(factors.get(key, 1.0) - 1) >= 0.01]
    return f" (corrected by its earlier rounds: {', '.join(words)})" if words else ""


def _round_started(event: EventRow, data: Data) -> str:
    attempt = f", attempt {data['attempt']}" if int(data.get("attempt") or 1) > 1 else ""
    return f"stage {event.stage} round {event.round} started{attempt}: {names(data.get('participants', ()))}"


def _declined(event: EventRow, data: Data) -> str:
    return f"{event.device} declined: {refusal_words(data)}"


def _rejected(event: EventRow, data: Data) -> str:
    return f"{event.device}'s update was rejected: {refusal_words(data)}" + _detail(data)


def _detail(data: Data) -> str:
    told = data.get("detail") if data.get("needed") is not None and data.get("allowed") is not None else ""
    return f" ({told})" if told else ""


def _quarantined(event: EventRow, data: Data) -> str:
    rounds = int(data.get("rounds") or 0)
    until = f"for {rounds} round{'' if rounds == 1 else 's'}" if rounds else "for the rest of the run"
    return f"{event.device} is in quarantine {until}: {data.get('bad', 0)} updates in a row could not be used"


def _replanned(event: EventRow, data: Data) -> str:
    micro = how_words(data) or "the whole batch at once"
    why = reason(refusal_of(data)) if data.get("reason") else "as its plan changed"
    return f"{event.device} planned again with {micro} ({why})"


def _update(event: EventRow, data: Data) -> str:
    return (
        f"{event.device} trained: loss {_loss(data)} · step memory {units.mib(data.get('step_peak_bytes'))} · "
        f"{units.gflop(data.get('flops'))} · sent {units.mib(data.get('payload_up_bytes'))}, "
        f"received {units.mib(data.get('payload_down_bytes'))} · {units.seconds(data.get('seconds'))}"
    )


def _round_closed(event: EventRow, data: Data) -> str:
    missing = "".join(f" · {name}: {names(data[name])}" for name in ("late", "lost", "behind") if data.get(name))
    if stale := data.get("staleness"):
        missing = " · made earlier: " + ", ".join(f"{name} (by {late})" for name, late in stale.items()) + missing
    took = units.seconds(data.get("seconds"))
    return (
        f"stage {event.stage} round {event.round} closed: {how_many(data.get('participants'))} devices · "
        f"loss {_loss(data)} · payload {units.mib(data.get('payload_bytes'))} · {took}{missing}"
    )


def _loss(data: Data) -> str:
    return units.NOTHING if data.get("loss") is None else units.number(float(data["loss"]))


def _run_finished(_: EventRow, data: Data) -> str:
    where = f" · {data['state']}" if data.get("state") else ""
    return f"run {data.get('status', 'finished')} after {units.seconds(data.get('seconds'))}{where}"


_TELLERS: dict[str, Callable[[EventRow, Data], str]] = {
    "run_started": _run_started,
    "device_joined": _device_joined,
    "device_left": _device_left,
    "stage_planned": _stage_planned,
    "round_started": _round_started,
    "declined": _declined,
    "rejected": _rejected,
    "quarantined": _quarantined,
    "readmitted": lambda event, _: f"{event.device} is out of quarantine",
    "replanned": _replanned,
    "update": _update,
    "round_closed": _round_closed,
    "evaluated": lambda event, data: f"stage {event.stage} round {event.round} test {scores(data.get('values', []))}",
    "stage_finished": lambda event, _: f"stage {event.stage} finished",
    "warning": lambda _, data: f"warning: {data.get('text', '')}",
    "run_finished": _run_finished,
    "run_failed": lambda *_: "run failed",  # the program that shows this ends with the error itself
}
