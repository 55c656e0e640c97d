"""Each event of a run as one line of words, for logs, pipes and the lines above the live display."""

from __future__ import annotations

from collections.abc import Sized

from edgefl.report import inventory, totals, units
from edgefl.report.decisions import fitting, reason, refusal_of
from edgefl.report.grid import Record
from edgefl.run_records import EventRow

_BUDGETS = {
    "step_memory_bytes": "step memory",
    "memory_bytes": "process memory",
    "gpu_memory_bytes": "GPU memory",
    "payload_bytes": "payload",
    "disk_bytes": "disk",
}


def refusal(data: Record) -> str:
    """ "step memory over budget: needs 26.4 MiB, allowed 24.0 MiB"."""
    why = refusal_of(data)
    if why.needed is not None and why.allowed is not None:
        needed, allowed = (units.quantity(value, why.unit) for value in (why.needed, why.allowed))
        return f"{reason(why)}: needs {needed}, allowed {allowed}"
    return f"{reason(why)}: {why.detail}" if why.detail else reason(why)


def how_many(value: Sized | int | None) -> int:
    """A list's length, or the number itself: events may carry either."""
    return len(value) if isinstance(value, Sized) else int(value or 0)


def _names(value: object) -> str:
    """A list of names in one string, a number as it is."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _number(value: float | None) -> str:
    return units.NOTHING if value is None else units.number(float(value))


def condition(value: Record) -> tuple[str, str, str, float]:
    """Metric, modalities given, mask and value of one evaluation."""
    given = " + ".join(value.get("available", ()))
    return (
        str(value.get("metric", "accuracy")),
        given,
        str(value.get("missing", "none")),
        float(value.get("value", 0.0)),
    )


def run_started(event: EventRow) -> str:
    data = event.data
    parts = [f"{data.get('name', '')}: recipe {data.get('recipe', '')}"]
    parts.append(f"{how_many(data.get('stages'))} stages, {how_many(data.get('rounds_total'))} rounds")
    if data.get("bytes"):
        parts.append(f"model of {how_many(data.get('parts'))} parts, {units.mib(data['bytes'])}")
    if data.get("broker"):
        parts.append(f"broker {units.public_url(str(data['broker']))}")
    return "run started: " + " · ".join(parts)


def device_joined(event: EventRow) -> str:
    counts, budget = event.data.get("samples") or {}, event.data.get("budget") or {}
    samples = inventory.samples(counts, " samples") if isinstance(counts, dict) else f"{counts} samples"
    limits = [f"{label} {units.mib(budget[key])}" for key, label in _BUDGETS.items() if budget.get(key) is not None]
    profile = event.data.get("profile", "")
    return f"{event.device} joined: {profile} · {samples} · budget: {', '.join(limits) or 'no limit'}"


def stage_planned(event: EventRow) -> str:
    return "\n".join([f"stage {event.stage} planned", *map(_placement, event.data.get("placements", []))])


def _placement(data: Record) -> str:
    device = data.get("device", "")
    if not data.get("ok", True):
        return f"  {device}: refused, {refusal(data)}"
    factors = data.get("factors") or {}
    shown = {"step_peak_bytes": "memory", "flops": "FLOPs"}  # corrections below a percent are left out
    changed = [f"{name} × {factors[key]:.2f}" for key, name in shown.items() if abs(factors.get(key, 1.0) - 1) >= 0.01]
    corrected = f" (corrected by its earlier rounds: {', '.join(changed)})" if changed else ""
    how = f", {fitting(data)}" if fitting(data) else ""
    cost = f"step memory {units.mib(data.get('step_peak_bytes'))}, {units.gflop(data.get('flops'))}"
    return f"  {device}: trains, predicted {cost}{corrected}{how}"


def round_started(event: EventRow) -> str:
    data = event.data
    attempt = f", attempt {data['attempt']}" if int(data.get("attempt") or 1) > 1 else ""
    return f"stage {event.stage} round {event.round} started{attempt}: {_names(data.get('participants', ()))}"


def declined(event: EventRow) -> str:
    return f"{event.device} declined: {refusal(event.data)}"


def rejected(event: EventRow) -> str:
    why = refusal_of(event.data)
    both = why.needed is not None and why.allowed is not None  # else the detail is in the text already
    detail = f" ({why.detail})" if both and why.detail else ""
    return f"{event.device}'s update was rejected: {refusal(event.data)}{detail}"


def quarantined(event: EventRow) -> str:
    rounds = int(event.data.get("rounds") or 0)
    until = f"for {rounds} round{'' if rounds == 1 else 's'}" if rounds else "for the rest of the run"
    bad = event.data.get("bad", 0)
    return f"{event.device} is in quarantine {until}: {bad} updates in a row could not be used"


def replanned(event: EventRow) -> str:
    how = fitting(event.data) or "the whole batch at once"
    why = reason(refusal_of(event.data)) if event.data.get("reason") else "as its plan changed"
    return f"{event.device} planned again with {how} ({why})"


def update(event: EventRow) -> str:
    data = event.data
    return (
        f"{event.device} trained: loss {_number(data.get('loss'))} · step memory "
        f"{units.mib(data.get('step_peak_bytes'))} · {units.gflop(data.get('flops'))} · "
        f"sent {units.mib(data.get('payload_up_bytes'))}, received {units.mib(data.get('payload_down_bytes'))} · "
        f"{units.seconds(data.get('seconds'))}"
    )


def round_closed(event: EventRow) -> str:
    data = event.data
    stale = ", ".join(f"{name} (by {late})" for name, late in (data.get("staleness") or {}).items())
    parts = [
        f"stage {event.stage} round {event.round} closed: {how_many(data.get('participants'))} devices",
        f"loss {_number(data.get('loss'))}",
        f"payload {units.mib(data.get('payload_bytes'))}",
        units.seconds(data.get("seconds")),
        *([f"made earlier: {stale}"] if stale else []),
        *(f"{name}: {_names(data[name])}" for name in ("late", "lost", "behind") if data.get(name)),
    ]
    return " · ".join(parts)


def evaluated(event: EventRow) -> str:
    """ "… accuracy acc + gyro: 91.7 % · accuracy acc alone: 62.5 % zero mask, 80.0 % prototype mask"."""
    texts: dict[tuple[str, str], list[str]] = {}
    for metric, given, mask, value in map(condition, event.data.get("values", [])):
        if totals.is_leading(metric):
            text = totals.score_text(metric, value)
            key = (metric, given if mask == "none" else f"{given} alone")
            texts.setdefault(key, []).append(text if mask == "none" else f"{text} {mask} mask")
    scores = " · ".join(f"{metric} {given}: {', '.join(each)}" for (metric, given), each in texts.items())
    return f"stage {event.stage} round {event.round} test {scores}"


def run_finished(event: EventRow) -> str:
    where = f" · {event.data['state']}" if event.data.get("state") else ""
    return f"run {event.data.get('status', 'finished')} after {units.seconds(event.data.get('seconds'))}{where}"
