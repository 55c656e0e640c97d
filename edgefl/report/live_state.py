"""What the live display knows: a value that grows with each event. No drawing here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edgefl.report import units
from edgefl.report.decisions import how_words, refusal_of
from edgefl.report.event_text import how_many, refusal_words
from edgefl.run_records import EventRow


@dataclass
class Watched:
    """One device as the display shows it.

    ``doing``: waiting, training, done, refused, declined, rejected, quarantined, lost, late, idle.
    """

    name: str
    profile: str = ""
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
class Watch:
    """The run so far. ``scores``: (metric, given, mask) -> value over time."""

    name: str = ""
    recipe: str = ""
    broker: str = ""
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
    devices: dict[str, Watched] = field(default_factory=dict)
    ended: str = ""

    def feed(self, event: EventRow) -> None:
        """Take note of one event. Unknown kinds only move the clock."""
        self.began_at = event.at if self.began_at is None else self.began_at
        self.now = max(self.now, event.at)
        taker = _TAKERS.get(event.kind)
        if taker is not None:
            taker(self, event, event.data)

    def device(self, name: str) -> Watched:
        """The device, added when it was not known."""
        return self.devices.setdefault(name, Watched(name))

    @property
    def elapsed_s(self) -> float:
        """Seconds between the first event and the latest."""
        return self.now - (self.began_at or self.now)


def _run_started(watch: Watch, _: EventRow, data: dict[str, Any]) -> None:
    watch.name, watch.recipe = str(data.get("name", "")), str(data.get("recipe", ""))
    watch.broker = units.public_url(str(data.get("broker", "")))
    watch.stages, watch.rounds_total = how_many(data.get("stages")), how_many(data.get("rounds_total"))


def _device_joined(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.profile = str(data.get("profile", ""))
    if device.doing == "lost":
        device.doing, device.why = "idle", "came back"


def _device_left(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing, device.why = "lost", str(data.get("reason") or "lost contact")


def _stage_planned(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    watch.stage = event.stage
    for placement in data.get("placements", []):
        device = watch.device(str(placement.get("device", "")))
        device.predicted_bytes, device.measured_bytes = placement.get("step_peak_bytes") or None, None
        device.doing, device.why = ("idle", "") if placement.get("ok", True) else ("refused", refusal_words(placement))


def _round_started(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    watch.stage, watch.round, watch.attempt = event.stage, event.round, int(data.get("attempt") or 1)
    chosen = data.get("participants")
    for device in watch.devices.values():
        if isinstance(chosen, (list, tuple)) and device.name in chosen:
            device.doing, device.why, device.step, device.loss = "waiting", "", 0, None
        elif device.doing not in ("refused", "lost", "quarantined") and device.name not in data.get("behind", ()):
            device.doing, device.why = "idle", ""


def _progress(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing = "training"
    device.step, device.steps = int(data.get("step") or 0), int(data.get("steps") or 0)
    device.loss = data.get("loss", device.loss)


def _declined(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing, device.why = "declined", refusal_words(data)
    refusal = refusal_of(data)
    device.measured_bytes = refusal.needed if refusal.reason in ("ceiling", "step_memory") else device.measured_bytes


def _rejected(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing, device.why = "rejected", refusal_words(data)


def _quarantined(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing, device.why = "quarantined", refusal_words(data)


def _readmitted(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing, device.why = "idle", ""


def _replanned(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    how = how_words(data)
    device.doing, device.why = "waiting", f"planned again, {how}" if how else "planned again"
    device.step = 0


def _update(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    device = watch.device(event.device)
    device.doing, device.step = "done", device.steps
    device.loss = data.get("loss", device.loss)
    device.measured_bytes = data.get("step_peak_bytes") or device.measured_bytes
    device.sent_bytes += data.get("payload_up_bytes") or 0
    device.received_bytes += data.get("payload_down_bytes") or 0
    device.flops += data.get("flops") or 0


def _round_closed(watch: Watch, _: EventRow, data: dict[str, Any]) -> None:
    watch.rounds_done += 1
    if data.get("loss") is not None:
        watch.losses.append(float(data["loss"]))
    for kind, why in (("late", "update came after the deadline"), ("lost", "lost contact")):
        told = data.get(kind)
        for name in told if isinstance(told, (list, tuple)) else ():
            watch.device(name).doing, watch.device(name).why = kind, why


def _evaluated(watch: Watch, _: EventRow, data: dict[str, Any]) -> None:
    for value in data.get("values", []):
        given = " + ".join(value.get("available", ()))
        key = (str(value.get("metric", "accuracy")), given, str(value.get("missing", "none")))
        watch.scores.setdefault(key, []).append(float(value.get("value", 0.0)))


def _ended(watch: Watch, event: EventRow, data: dict[str, Any]) -> None:
    watch.ended = "failed" if event.kind == "run_failed" else str(data.get("status", "done"))
    for device in watch.devices.values():
        if device.doing in ("waiting", "training"):
            device.doing = "idle"


_TAKERS: dict[str, Callable[[Watch, EventRow, dict[str, Any]], None]] = {
    "run_started": _run_started,
    "device_joined": _device_joined,
    "device_left": _device_left,
    "stage_planned": _stage_planned,
    "round_started": _round_started,
    "progress": _progress,
    "declined": _declined,
    "rejected": _rejected,
    "quarantined": _quarantined,
    "readmitted": _readmitted,
    "replanned": _replanned,
    "update": _update,
    "round_closed": _round_closed,
    "evaluated": _evaluated,
    "run_finished": _ended,
    "run_failed": _ended,
}
