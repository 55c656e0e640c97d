"""State of the live display, and the kinds of events: the line that each prints, and its change of the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.report import event_text as text
from edgefl.report.decisions import fitting, refusal_of
from edgefl.run_records import EventRow


@dataclass
class LiveDevice:
    """One device as the display shows it.

    ``doing``: waiting, training, done, refused, declined, rejected, quarantined, lost, late, idle.
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
    flops: float = 0.0


@dataclass
class LiveState:
    """The run so far. ``scores``: (metric, given, mask) -> value over time."""

    name: str = ""
    recipe: str = ""
    stages: int = 0
    rounds_total: int = 0
    rounds_done: int = 0
    stage: int = 0
    round: int = 0
    attempt: int = 1
    began_at: float | None = None
    now: float = 0.0
    losses: list[float] = field(default_factory=list)
    scores: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    devices: dict[str, LiveDevice] = field(default_factory=dict)
    ended: str = ""

    def apply(self, event: EventRow) -> None:
        """Change by one event. Unknown kinds only move the clock."""
        self.began_at = event.at if self.began_at is None else self.began_at
        self.now = max(self.now, event.at)
        kind_of(event).change(self, event)

    def device(self, name: str) -> LiveDevice:
        """The device, added when it was not known."""
        return self.devices.setdefault(name, LiveDevice(name))

    def mark(self, name: str, doing: str, why: str = "") -> LiveDevice:
        """Set a device's activity and the reason for it."""
        device = self.device(name)
        device.doing, device.why = doing, why
        return device

    @property
    def elapsed_s(self) -> float:
        """Seconds between the first event and the latest."""
        return self.now - (self.began_at or self.now)


@dataclass(frozen=True)
class EventKind:
    """How events of one kind are shown: line (None for some, such as progress), change of the state, style of the line.

    ``kept``: whether the line stays on a terminal above the display; the rest is visible in it.
    """

    line: Callable[[EventRow], str | None] = lambda _: None
    change: Callable[[LiveState, EventRow], object] = lambda state, event: None
    kept: bool = False
    style: str = ""


def kind_of(event: EventRow) -> EventKind:
    """The event's kind; unknown kinds show nothing, so that a newer coordinator can be watched."""
    return KINDS.get(event.kind, EventKind())


def _start_run(state: LiveState, event: EventRow) -> None:
    data = event.data
    state.name, state.recipe = str(data.get("name", "")), str(data.get("recipe", ""))
    state.stages, state.rounds_total = text.how_many(data.get("stages")), text.how_many(data.get("rounds_total"))


def _join(state: LiveState, event: EventRow) -> None:
    if state.device(event.device).doing == "lost":
        state.mark(event.device, "idle", "came back")


def _plan_stage(state: LiveState, event: EventRow) -> None:
    state.stage = event.stage
    for placement in event.data.get("placements", []):
        fits = placement.get("ok", True)
        why = "" if fits else text.refusal(placement)
        device = state.mark(str(placement.get("device", "")), "idle" if fits else "refused", why)
        device.predicted_bytes, device.measured_bytes = placement.get("step_peak_bytes") or None, None


def _start_round(state: LiveState, event: EventRow) -> None:
    data = event.data
    state.stage, state.round, state.attempt = event.stage, event.round, int(data.get("attempt") or 1)
    chosen = data.get("participants")
    for device in state.devices.values():
        if isinstance(chosen, (list, tuple)) and device.name in chosen:
            state.mark(device.name, "waiting")
            device.step, device.loss = 0, None
        elif device.doing not in ("refused", "lost", "quarantined") and device.name not in data.get("behind", ()):
            state.mark(device.name, "idle")


def _progress(state: LiveState, event: EventRow) -> None:
    device = state.device(event.device)
    device.doing = "training"
    device.step, device.steps = int(event.data.get("step") or 0), int(event.data.get("steps") or 0)
    device.loss = event.data.get("loss", device.loss)


def _decline(state: LiveState, event: EventRow) -> None:
    device, refusal = state.mark(event.device, "declined", text.refusal(event.data)), refusal_of(event.data)
    if refusal.reason in ("ceiling", "step_memory"):
        device.measured_bytes = refusal.needed


def _replan(state: LiveState, event: EventRow) -> None:
    how = fitting(event.data)
    state.mark(event.device, "waiting", f"planned again, {how}" if how else "planned again").step = 0


def _update(state: LiveState, event: EventRow) -> None:
    device, data = state.device(event.device), event.data
    device.doing, device.step = "done", device.steps
    device.loss = data.get("loss", device.loss)
    device.measured_bytes = data.get("step_peak_bytes") or device.measured_bytes
    device.sent_bytes += data.get("payload_up_bytes") or 0
    device.received_bytes += data.get("payload_down_bytes") or 0
    device.flops += data.get("flops") or 0


def _close_round(state: LiveState, event: EventRow) -> None:
    state.rounds_done += 1
    if event.data.get("loss") is not None:
        state.losses.append(float(event.data["loss"]))
    for doing, why in (("late", "update came after the deadline"), ("lost", "lost contact")):
        names = event.data.get(doing)
        for name in names if isinstance(names, (list, tuple)) else ():
            state.mark(name, doing, why)


def _evaluate(state: LiveState, event: EventRow) -> None:
    for metric, given, mask, value in map(text.condition, event.data.get("values", [])):
        state.scores.setdefault((metric, given, mask), []).append(value)


def _end(state: LiveState, event: EventRow) -> None:
    state.ended = "failed" if event.kind == "run_failed" else str(event.data.get("status", "done"))
    for device in state.devices.values():
        if device.doing in ("waiting", "training"):
            device.doing = "idle"


KINDS: dict[str, EventKind] = {
    "run_started": EventKind(text.run_started, _start_run, kept=True),
    "device_joined": EventKind(text.device_joined, _join),
    "device_left": EventKind(
        lambda e: f"{e.device} left" + (f": {e.data['reason']}" if e.data.get("reason") else ""),
        lambda state, e: state.mark(e.device, "lost", str(e.data.get("reason") or "lost contact")),
        kept=True,
        style="red",
    ),
    "stage_planned": EventKind(text.stage_planned, _plan_stage),
    "round_started": EventKind(text.round_started, _start_round),
    "progress": EventKind(change=_progress),
    "declined": EventKind(text.declined, _decline, kept=True, style="yellow"),
    "rejected": EventKind(
        text.rejected, lambda state, e: state.mark(e.device, "rejected", text.refusal(e.data)), kept=True
    ),
    "quarantined": EventKind(
        text.quarantined, lambda state, e: state.mark(e.device, "quarantined", text.refusal(e.data)), kept=True
    ),
    "readmitted": EventKind(
        lambda e: f"{e.device} is out of quarantine", lambda state, e: state.mark(e.device, "idle"), kept=True
    ),
    "replanned": EventKind(text.replanned, _replan, kept=True),
    "update": EventKind(text.update, _update),
    "round_closed": EventKind(text.round_closed, _close_round, kept=True),
    "evaluated": EventKind(text.evaluated, _evaluate, kept=True),
    "stage_finished": EventKind(lambda e: f"stage {e.stage} finished"),
    "warning": EventKind(lambda e: f"warning: {e.data.get('text', '')}", kept=True, style="yellow"),
    "run_finished": EventKind(text.run_finished, _end),
    # The program that shows this ends with the error itself.
    "run_failed": EventKind(lambda _: "run failed", _end, kept=True, style="red"),
}
