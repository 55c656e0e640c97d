"""Events of a run as lines of text and as changes of the live display's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from edgefl.plan.choice_of_k import in_words
from edgefl.records import ORACLE, Refusal
from edgefl.report import units
from edgefl.report.grid import Record
from edgefl.report.refusals import REPLACED, REVOKED, reason, refusal_of, refusal_text
from edgefl.run_records import EventRow

#: What a device does that the operator has left out.
LEFT_OUT = "left out"
#: Activity -> its word where that is another: between tasks, a device waits.
WORDS = {**dict.fromkeys(("idle", "done", "late"), "waiting"), "lost": "away"}
#: Who asks -> where that operator was.
_PLACES = {"web": "on the live page", "terminal": "at a terminal"}
_BUDGETS = {
    "step_memory_bytes": ("step memory", "B"),
    "memory_bytes": ("process memory", "B"),
    "gpu_memory_bytes": ("GPU memory", "B"),
    "flops": ("FLOPs", "FLOP"),
    "payload_bytes": ("payload", "B"),
    "energy_j": ("energy", "J"),
    "disk_bytes": ("disk", "B"),
}
#: Activities of a device that is not there.
GONE = ("lost", REVOKED)
#: Changes of activity that are kept of a device; more than a screen has pixels for.
MOST_SPANS = 96
#: Channels that a line names.
MOST_CHANNELS = 6
#: Activities of a device that is at work for the open round.
AT_WORK = ("waiting", "receiving", "training", "sending")


def fitting(data: Record) -> str:
    """Fallbacks in an event's data that fit training to the budget: rank, micro-batch, and so on."""
    words = [f"rank {data['rank']}"] if data.get("rank") else []
    words += [f"micro-batch {data['micro_batch']}"] if data.get("micro_batch") else []
    words += ["blocks computed anew"] if data.get("checkpoint") else []
    words += ["weights on disk"] if data.get("weights") == "disk" else []
    words += [str(data["lean"])] if data.get("lean") else []
    return ", ".join(words)


def how_many(value: Sized | int | None) -> int:
    """A list's length, or the number itself: events may carry either."""
    return len(value) if isinstance(value, Sized) else int(value or 0)


def _names(value: object) -> tuple[object, ...]:
    """The names in an event's list; () if the event has only their number."""
    return tuple(value) if isinstance(value, (list, tuple)) else ()


@dataclass
class LiveDevice:
    """One device as the display shows it.

    ``doing``: waiting, receiving, training, sending, done, refused, declined, rejected, quarantined, left out, revoked,
    lost, late, idle. ``spans``: since when it does what. ``highest``: the most that one round took of each figure.
    ``heard_by``: what showed last that it was there. ``flops``, ``energy_j``: None until an update has them.
    """

    name: str
    doing: str = "idle"
    why: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    flops: float | None = None
    energy_j: float | None = None
    profile: str = ""
    budget: Record = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    heard_at: float | None = None
    heard_by: str = ""
    spans: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_SPANS))

    @property
    def word(self) -> str:
        """The device's activity, in the glossary's words."""
        return WORDS.get(self.doing, self.doing)

    def took(self, figure: str, value: float | None, so_far: float | None = None) -> float | None:
        """Record a round's value of a figure; returns the total with ``so_far``, None if unknown."""
        if value is None:
            return so_far
        self.highest[figure] = max(self.highest.get(figure, 0.0), value)
        return value + (so_far or 0.0)


@dataclass
class LiveState:
    """The run so far. ``scores``: (metric, given, mask) -> value over time, the last after ``scored_after`` rounds.

    ``refusals``: (device, stage, kind of event) -> the last one. ``paused``: "", "pausing" or "paused". ``began_at``:
    of a run that goes on, when it first began; ``took_s``: from there to its end, once it is over.
    """

    name: str = ""
    recipe: str = ""
    stages: int = 0
    rounds_total: int = 0
    rounds_done: int = 0
    stage: int = 0
    round: int = 0
    attempt: int = 1
    began_at: float | None = None
    took_s: float | None = None
    now: float = 0.0
    losses: list[float] = field(default_factory=list)
    scored_after: list[int] = field(default_factory=list)
    refusals: dict[tuple[str, int, str], Refusal] = field(default_factory=dict)
    scores: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    devices: dict[str, LiveDevice] = field(default_factory=dict)
    paused: str = ""
    ended: str = ""
    failure: str = ""

    def apply(self, event: EventRow) -> str | None:
        """Apply one event; returns its line of text, None for some kinds, such as progress.

        Unknown kinds only move the clock, so that a newer coordinator can be watched.
        """
        self.began_at = event.at if self.began_at is None else self.began_at
        self.now = max(self.now, event.at)
        text = KINDS[event.kind].apply(self, event) if event.kind in KINDS else None
        own = self.devices.get(event.device)
        for device in self.devices.values() if own is None else (own,):
            if not device.spans or device.spans[-1][1] != device.doing:
                device.spans.append((event.at, device.doing))
        return text

    def device(self, name: str) -> LiveDevice:
        """The device, added when it was not known."""
        return self.devices.setdefault(name, LiveDevice(name))

    def mark(self, name: str, doing: str, why: str = "") -> LiveDevice:
        """Set a device's activity and the reason for it. One that is left out stays so until it is taken in."""
        device = self.device(name)
        if device.doing != LEFT_OUT:
            device.doing, device.why = doing, why
        return device

    @property
    def elapsed_s(self) -> float:
        """Seconds from the run's begin to the latest event, waiting for a coordinator included."""
        return self.now - (self.began_at or self.now) if self.took_s is None else self.took_s


def _run_started(state: LiveState, event: EventRow) -> str:
    data = event.data
    state.began_at, state.took_s = float(data.get("began_at") or state.began_at or event.at), None
    state.ended = state.failure = ""
    for name in (one.name for one in state.devices.values() if one.doing != REVOKED):  # of before its restart
        state.mark(name, "lost", "not back since the coordinator started again")
    state.name, state.recipe = str(data.get("name", "")), str(data.get("recipe", ""))
    state.stages, state.rounds_total = how_many(data.get("stages")), how_many(data.get("rounds_total"))
    parts = [f"{state.name}: recipe {state.recipe}", f"{state.stages} stages, {state.rounds_total} rounds"]
    if data.get("bytes"):
        parts.append(f"model of {how_many(data.get('parts'))} parts, {units.mib(data['bytes'])}")
    if data.get("broker"):
        parts.append(f"broker {units.public_url(str(data['broker']))}")
    begins = f"run goes on{f' at stage {event.stage} round {event.round}' if event.stage else ''}"
    return f"{begins if data.get('resumed') else 'run started'}: " + " · ".join(parts)


def _device_joined(state: LiveState, event: EventRow) -> str:
    device = state.device(event.device)
    if device.doing in GONE:
        state.mark(event.device, "idle", "came back")
    counts, budget = event.data.get("samples") or {}, event.data.get("budget") or {}
    device.profile, device.budget = str(event.data.get("profile", "")), budget
    device.heard_at, device.heard_by = event.at, "hello"
    samples = units.samples(counts, " samples") if isinstance(counts, dict) else f"{counts} samples"
    limits = [
        f"{label} {units.quantity(budget[key], unit)}"
        for key, (label, unit) in _BUDGETS.items()
        if budget.get(key) is not None
    ]
    profile = event.data.get("profile", "")
    return f"{event.device} joined: {profile} · {samples} · budget: {', '.join(limits) or 'no limit'}"


def _device_left(state: LiveState, event: EventRow) -> str:
    why = str(event.data.get("reason") or "")
    if why == REVOKED:
        state.mark(event.device, REVOKED, "its certificate is not taken any more")
        return f"{event.device} is revoked"
    if why == REPLACED:
        state.mark(event.device, "lost", "another machine takes its place")
        return f"{event.device} is replaced: another machine has its name, the {event.data.get('generation', '')}. one"
    device = state.mark(event.device, "lost", why or "lost contact")
    if why == "offline":
        device.heard_at, device.heard_by = event.at, "last will"
    return f"{event.device} left" + (f": {why}" if why else "")


def _stage_planned(state: LiveState, event: EventRow) -> str:
    state.stage = event.stage
    lines = [f"stage {event.stage} planned"]
    for placement in event.data.get("placements", []):
        name, fits = str(placement.get("device", "")), placement.get("ok", True)
        text, device = _placement(placement), state.device(name)
        if not fits:
            text = f"refused, {refusal_text(placement)}"
            state.mark(name, "refused", refusal_text(placement))
            state.refusals[name, event.stage, event.kind] = refusal_of(placement)
        elif device.doing not in (*GONE, "quarantined"):  # a plan says what it could train, not that it is asked
            state.mark(name, "idle")
        device.predicted_bytes, device.measured_bytes = placement.get("step_peak_bytes") or None, None
        lines.append(f"  {name}: {LEFT_OUT if placement.get('left_out') else text}")
    return "\n".join(lines)


def _placement(data: Record) -> str:
    factors = data.get("factors") or {}
    shown = {"step_peak_bytes": "memory", "flops": "FLOPs"}  # corrections below a percent are left out
    changed = [f"{name} × {factors[key]:.2f}" for key, name in shown.items() if abs(factors.get(key, 1.0) - 1) >= 0.01]
    corrected = f" (corrected by its earlier rounds: {', '.join(changed)})" if changed else ""
    how = f", {fitting(data)}" if fitting(data) else ""
    cost = f"step memory {units.mib(data.get('step_peak_bytes'))}, {units.gflop(data.get('flops'))}"
    return f"trains, predicted {cost}{corrected}{how}"


def _round_started(state: LiveState, event: EventRow) -> str:
    data, chosen = event.data, event.data.get("participants", ())
    state.stage, state.round, state.attempt = event.stage, event.round, int(data.get("attempt") or 1)
    for device in state.devices.values():
        if device.name in _names(chosen):
            state.mark(device.name, "waiting")
            device.step, device.loss = 0, None
        elif device.doing not in (*GONE, "refused", "quarantined") and device.name not in data.get("behind", ()):
            state.mark(device.name, "idle")
    attempt = f", attempt {data['attempt']}" if state.attempt > 1 else ""
    drawn = f", trains {units.stage_words(data['drawn'])}" if data.get("drawn") else ""
    return f"stage {event.stage} round {event.round} started{attempt}{drawn}: {listed(chosen)}"


def listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _progress(state: LiveState, event: EventRow) -> None:
    device = state.device(event.device)
    state.mark(event.device, "training", device.why)
    device.step, device.steps = int(event.data.get("step") or 0), int(event.data.get("steps") or 0)
    device.loss = event.data.get("loss", device.loss)


def _heard(state: LiveState, event: EventRow) -> None:
    """Apply a sign of life; requests and chunks of a device at work mark it receiving or sending."""
    if (device := state.devices.get(event.device)) is None:
        return
    device.heard_at, device.heard_by = event.at, str(event.data.get("by", ""))
    doing = {"need": "receiving", "upload": "sending"}.get(device.heard_by, "")
    if doing and device.doing in AT_WORK and event.at >= device.spans[-1][0]:
        device.doing = doing


def _declined(state: LiveState, event: EventRow) -> str:
    why = state.refusals[event.device, event.stage, event.kind] = refusal_of(event.data)
    device = state.mark(event.device, "declined", refusal_text(event.data))
    if why.reason in ("ceiling", "step_memory"):
        device.measured_bytes = why.needed
        device.took("step_peak_bytes", why.needed)
    return f"{event.device} declined: {device.why}"


def _rejected(state: LiveState, event: EventRow) -> str:
    why = state.refusals[event.device, event.stage, event.kind] = refusal_of(event.data)
    device = state.mark(event.device, "rejected", refusal_text(event.data))
    both = why.needed is not None and why.allowed is not None  # else the detail is in the text already
    detail = f" ({why.detail})" if both and why.detail else ""
    return f"{event.device}'s update was rejected: {device.why}{detail}"


def _quarantined(state: LiveState, event: EventRow) -> str:
    state.refusals[event.device, event.stage, event.kind] = refusal_of(event.data)
    state.mark(event.device, "quarantined", refusal_text(event.data))
    rounds = int(event.data.get("rounds") or 0)
    until = f"for {rounds} round{'' if rounds == 1 else 's'}" if rounds else "for the rest of the run"
    return f"{event.device} is in quarantine {until}: {event.data.get('bad', 0)} updates in a row could not be used"


def _readmitted(state: LiveState, event: EventRow) -> str:
    state.mark(event.device, "idle")
    return f"{event.device} is out of quarantine"


def _paused(state: LiveState, event: EventRow) -> str:
    state.paused = event.kind
    by = event.data.get("by", "")
    if event.kind == "pausing":
        return f"the run pauses ({by}) when the open round is over"
    return f"the run is paused ({by}): no round opens until `edgefl runs resume {event.data.get('run', 'RUN')}`"


def _resumed(state: LiveState, event: EventRow) -> str:
    state.paused = ""
    return f"the run goes on ({event.data.get('by', '')})"


def _left_out(state: LiveState, event: EventRow) -> str:
    by = str(event.data.get("by", ""))
    state.mark(event.device, LEFT_OUT, f"by an operator, {_PLACES[by]}" if by in _PLACES else f"by {by}")
    return f"{event.device} is left out of the run ({by})"


def _taken_in(state: LiveState, event: EventRow) -> str:
    device, there = state.device(event.device), event.data.get("online", True)
    device.doing, device.why = ("idle", "") if there else ("lost", "taken in while it was away")
    return f"{event.device} is taken in again ({event.data.get('by', '')})"


def _replanned(state: LiveState, event: EventRow) -> str:
    how = fitting(event.data)
    state.mark(event.device, "waiting", f"planned again, {how}" if how else "planned again").step = 0
    why = reason(refusal_of(event.data)) if event.data.get("reason") else "as its plan changed"
    return f"{event.device} planned again with {how or 'the whole batch at once'} ({why})"


def _update(state: LiveState, event: EventRow) -> str:
    device, data = state.device(event.device), event.data
    state.mark(event.device, "done", device.why).step = device.steps
    device.loss = data.get("loss", device.loss)
    device.measured_bytes = data.get("step_peak_bytes") or device.measured_bytes
    up, down = data.get("payload_up_bytes") or 0, data.get("payload_down_bytes") or 0
    device.sent_bytes += up
    device.received_bytes += down
    device.took("payload_bytes", up + down)
    device.flops = device.took("flops", data.get("flops"), device.flops)
    device.energy_j = device.took("energy_j", data.get("energy_j"), device.energy_j)
    for figure in ("step_peak_bytes", "process_peak_bytes", "cuda_reserved_peak_bytes"):
        device.took(figure, data.get(figure))
    return (
        f"{event.device} trained: loss {units.number(data.get('loss'))} · step memory "
        f"{units.mib(data.get('step_peak_bytes'))} · {units.gflop(data.get('flops'))} · "
        f"sent {units.mib(data.get('payload_up_bytes'))}, received {units.mib(data.get('payload_down_bytes'))} · "
        f"{units.seconds(data.get('seconds'))}"
    )


def _round_closed(state: LiveState, event: EventRow) -> str:
    data = event.data
    state.rounds_done += 1
    if data.get("loss") is not None:
        state.losses.append(float(data["loss"]))
    for doing, why in (("late", "update came after the deadline"), ("lost", "lost contact")):
        for name in _names(data.get(doing)):
            state.mark(str(name), doing, why)
    stale = ", ".join(f"{name} (by {late})" for name, late in (data.get("staleness") or {}).items())
    parts = [
        f"stage {event.stage} round {event.round} closed: {how_many(data.get('participants'))} devices",
        f"loss {units.number(data.get('loss'))}",
        f"payload {units.mib(data.get('payload_bytes'))}",
        units.seconds(data.get("seconds")),
        *([units.privacy(data["account"])] if data.get("account") else []),
        *([f"made earlier: {stale}"] if stale else []),
        *(f"{name}: {listed(data[name])}" for name in ("late", "lost", "behind") if data.get(name)),
    ]
    return " · ".join(parts)


def _evaluated(state: LiveState, event: EventRow) -> str:
    """ "… accuracy acc + gyro: 91.7 % · accuracy acc alone: 62.5 % zero mask, 80.0 % prototype mask"."""
    texts: dict[tuple[str, str], list[str]] = {}
    state.scored_after.append(state.rounds_done)
    for row in event.data.get("values", []):
        if row.get("missing") == ORACLE:  # a bound that takes the labels, beside masks that a served model has
            continue
        metric, given = str(row.get("metric", "accuracy")), " + ".join(row.get("available", ()))
        mask, value = str(row.get("missing", "none")), float(row.get("value", 0.0))
        state.scores.setdefault((metric, given, mask), []).append(value)
        if units.is_leading(metric):
            text = units.score(metric, value)
            key = (metric, given if mask == "none" else f"{given} alone")
            texts.setdefault(key, []).append(text if mask == "none" else f"{text} {mask} mask")
    scores = " · ".join(f"{metric} {given}: {', '.join(each)}" for (metric, given), each in texts.items())
    return f"stage {event.stage} round {event.round} test {scores}"


def _stage_finished(state: LiveState, event: EventRow) -> str:
    """ "stage 1 finished after 12 of 40 rounds, with the model of round 8: …"."""
    planned, best = int(event.data.get("planned") or event.round), int(event.data.get("best", event.round))
    state.rounds_total -= planned - event.round + int(event.data.get("unspent") or 0)
    if "unspent" in event.data:
        why = "another costs more than is left of epsilon"
        return f"stage {event.stage} finished after {event.round} of {planned} rounds: {why}"
    if planned == event.round == best:
        return f"stage {event.stage} finished"
    kept = f"the model of round {best}" if best else "the model that it began with"
    return f"stage {event.stage} finished after {event.round} of {planned} rounds, with {kept}"


def _standardized(_: LiveState, event: EventRow) -> str:
    """ "sensors are standardised: acc by left, right (mean 9.8, 0.1; std 1.2, 0.4)"."""
    found = [
        f"{m} by {', '.join(one['devices'])} (mean {_figures(one['mean'])}; std {_figures(one['std'])})"
        for m, one in event.data.get("modalities", {}).items()
    ]
    return f"sensors are standardised: {', '.join(found)}"


def _k_chosen(_: LiveState, event: EventRow) -> str:
    """ "stage 2 round 1 k = 5 of 1, 2, 3, 5, 6: right on 412 of 520 held-out samples"."""
    return f"stage {event.stage} round {event.round} {in_words(event.data)}"


def _figures(values: Sequence[float]) -> str:
    more = ", …" if len(values) > MOST_CHANNELS else ""
    return ", ".join(f"{value:.3g}" for value in values[:MOST_CHANNELS]) + more


def _ended(state: LiveState, event: EventRow) -> str:
    failed = event.kind == "run_failed"
    state.took_s = event.data.get("seconds")
    state.ended = {"run_failed": "failed", "run_stopped": "stopped"}.get(
        event.kind, str(event.data.get("status", "done"))
    )
    state.failure = f"{event.data.get('text', '')} {event.data.get('remedy', '')}".strip() if failed else ""
    for device in state.devices.values():
        if device.doing in AT_WORK:
            device.doing = "idle"
    if failed:
        return "run failed"  # the program that shows this ends with the error itself
    where = f" · {event.data['state']}" if event.data.get("state") else ""
    status = (
        f"stopped ({event.data.get('by', '')})" if event.kind == "run_stopped" else event.data.get("status", "finished")
    )
    return f"run {status} after {units.whole_seconds(event.data.get('seconds'))}{where}"


class EventKind(NamedTuple):
    """Display of one kind of event: change of the state and line, persistence, style.

    ``kept``: the line stays on a terminal above the display; the rest is visible in it.
    """

    apply: Callable[[LiveState, EventRow], str | None]
    kept: bool = False
    style: str = ""


KINDS: dict[str, EventKind] = {
    "run_started": EventKind(_run_started, kept=True),
    "enrolled": EventKind(lambda _, event: f"{event.device} has enrolled", kept=True),
    "device_joined": EventKind(_device_joined),
    "device_left": EventKind(_device_left, kept=True, style="red"),
    "stage_planned": EventKind(_stage_planned),
    "round_started": EventKind(_round_started),
    "heard": EventKind(_heard),
    "page": EventKind(lambda _, event: f"live page: {event.data.get('url', '')}", kept=True),
    "progress": EventKind(_progress),
    "declined": EventKind(_declined, kept=True, style="yellow"),
    "rejected": EventKind(_rejected, kept=True),
    "quarantined": EventKind(_quarantined, kept=True),
    "readmitted": EventKind(_readmitted, kept=True),
    "replanned": EventKind(_replanned, kept=True),
    "pausing": EventKind(_paused, kept=True, style="yellow"),
    "paused": EventKind(_paused, kept=True, style="yellow"),
    "resumed": EventKind(_resumed, kept=True),
    "left_out": EventKind(_left_out, kept=True, style="yellow"),
    "taken_in": EventKind(_taken_in, kept=True),
    "standardized": EventKind(_standardized, kept=True),
    "update": EventKind(_update),
    "round_closed": EventKind(_round_closed, kept=True),
    "evaluated": EventKind(_evaluated, kept=True),
    "k_chosen": EventKind(_k_chosen, kept=True),
    "stage_finished": EventKind(_stage_finished),
    "warning": EventKind(lambda _, event: f"warning: {event.data.get('text', '')}", kept=True, style="yellow"),
    "joint_steps": EventKind(lambda _, event: str(event.data.get("text", "")), kept=True),
    "run_finished": EventKind(_ended),
    "run_stopped": EventKind(_ended, kept=True, style="yellow"),
    "run_failed": EventKind(_ended, kept=True, style="red"),
}
