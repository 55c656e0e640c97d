"""Snapshot of a run for live page and metrics, made once a second from its events."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from edgefl.records import Refusal
from edgefl.report import units
from edgefl.report.events import KINDS, LEFT_OUT, LiveDevice, LiveState
from edgefl.report.refusals import REMEDIES, REVOKED, reason
from edgefl.report.story import below
from edgefl.run_records import EventRow, Reference

#: Events that are kept for the page; the whole log is in the run's directory.
MOST_LINES = 200
#: Points of the fleet's history; when there are so many, every second one goes.
MOST_POINTS = 400
#: Group of the page -> the activities in it.
GROUPS: dict[str, tuple[str, ...]] = {
    "training": ("training",),
    "receiving": ("receiving",),
    "sending": ("sending",),
    "waiting": ("waiting", "done", "idle", "late"),
    "away": ("lost", REVOKED),
    "refused": ("refused", "declined", "rejected", "quarantined", LEFT_OUT),
}
GROUP_OF = {doing: group for group, every in GROUPS.items() for doing in every}
#: Budget -> the figure it limits, its name, its unit.
LIMITS: dict[str, tuple[str, str, str]] = {
    "step_memory_bytes": ("step_peak_bytes", "step memory", "B"),
    "memory_bytes": ("process_peak_bytes", "process memory", "B"),
    "gpu_memory_bytes": ("cuda_reserved_peak_bytes", "GPU memory", "B"),
    "flops": ("flops", "FLOPs", "FLOP"),
    "payload_bytes": ("payload_bytes", "payload", "B"),
    "energy_j": ("energy_j", "energy", "J"),
}
_OTHER = "See the device's log; `edgefl report RUN` lists its rounds"


class Bar(msgspec.Struct, frozen=True):
    """One figure of the costliest round so far, and the device's budget for a round; None: unknown, no limit."""

    figure: str
    label: str
    unit: str
    used: float | None
    allowed: float | None

    @property
    def share(self) -> float | None:
        """Used / allowed; None if either is unknown."""
        return None if self.used is None or not self.allowed else self.used / self.allowed


class DeviceView(msgspec.Struct, frozen=True):
    """A device: activity (``word`` names it), spans of activities, last sign of life and its source, costs so far.

    ``flops``, ``energy_j``: None where no update has them.
    """

    name: str
    profile: str
    doing: str
    word: str
    group: str
    why: str
    step: int
    steps: int
    loss: float | None
    heard_at: float | None
    heard_by: str
    bars: tuple[Bar, ...]
    sent_bytes: float
    received_bytes: float
    flops: float | None
    energy_j: float | None
    spans: tuple[tuple[float, str], ...]
    step_peak_bytes: float | None  # also where no budget limits it, and it has no bar


class Curve(msgspec.Struct, frozen=True):
    """A metric over rounds, for the modalities ``given`` and the ``mask`` in place of the rest."""

    metric: str
    given: str
    mask: str
    points: tuple[tuple[int, float], ...]


class Refused(msgspec.Struct, frozen=True):
    """A refusal as text: reason, both numbers if any, remedy."""

    device: str
    stage: int
    by: str
    why: str
    needed: str
    allowed: str
    detail: str
    remedy: str


class Line(msgspec.Struct, frozen=True):
    """An event in words."""

    at: float
    kind: str
    text: str
    style: str


class Snapshot(msgspec.Struct, frozen=True):
    """A run at one moment. Times are seconds since the epoch; ``history``: how many devices each group had.

    ``waiting``: runs behind this one in its queue.
    """

    number: int = 0
    at: float = 0.0
    run: str = ""
    name: str = ""
    recipe: str = ""
    standing: str = "Waiting for the run to begin."
    began_at: float | None = None
    elapsed_s: float = 0.0
    stage: int = 0
    stages: int = 0
    round: int = 0
    attempt: int = 1
    rounds_done: int = 0
    rounds_total: int = 0
    ended: str = ""
    paused: str = ""
    counts: dict[str, int] = {}
    devices: tuple[DeviceView, ...] = ()
    curves: tuple[Curve, ...] = ()
    refusals: tuple[Refused, ...] = ()
    lines: tuple[Line, ...] = ()
    history: tuple[tuple[float, tuple[int, ...]], ...] = ()
    reference: Reference = Reference()  # of simple models, once they are fitted
    waiting: tuple[str, ...] = ()

    @property
    def below(self) -> str:
        """Warning of a score, with all modalities, below a simple model's; "" for none."""
        scored = [one for one in self.curves if one.metric == self.reference.metric and not one.mask]
        last = max(scored, key=lambda one: one.given.count("+"), default=None)
        return "" if last is None else below(self.reference, last.points[-1][1])


#: Of these, the snapshot has what the state has.
_AS_THEY_ARE = (
    *("name", "recipe", "began_at", "stage", "stages", "round", "attempt"),
    *("rounds_done", "rounds_total", "ended", "paused"),
)


class Feed:
    """Takes events from the run's thread and makes snapshots in the page's.

    ``signs``: device -> when it was heard of last, by the clock that only goes forward, how, and whether it is online;
    emptied here. ``phase``: the machine's. ``reference``: scores of simple models, asked for until there are any.
    ``waiting``: runs behind this one in its queue. ``followers``: browsers that follow the page.
    """

    def __init__(
        self,
        run: str,
        signs: dict[str, tuple[float, str, bool]],
        phase: Callable[[], str] = str,
        reference: Callable[[], Reference] = Reference,
        waiting: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.latest = Snapshot(run=run)
        self.followers = 0
        self._run, self._signs, self._phase, self._reference = run, signs, phase, reference
        self._waiting = waiting
        self._new: deque[EventRow] = deque()
        self._state = LiveState()
        self._lines: deque[Line] = deque(maxlen=MOST_LINES)
        self._history: list[tuple[float, tuple[int, ...]]] = []

    def put(self, event: EventRow) -> None:
        """Take an event, from any thread; costs the run's thread nothing more."""
        self._new.append(event)

    def replay(self, log: Path, length: int) -> None:
        """Apply earlier events: the first ``length`` bytes of the run's event log."""
        with log.open("rb") as file:
            while file.tell() < length and (text := file.readline(2**20)):
                try:
                    self._apply(msgspec.json.decode(text, type=EventRow))
                except (msgspec.MsgspecError, UnicodeDecodeError):  # a line that a crash has torn
                    continue
        for device in self._state.devices.values():
            device.heard_by = "ledger"

    def take(self) -> Snapshot:
        """Apply the queued events and make the next snapshot."""
        ahead = time.time() - time.monotonic()
        while self._new:
            self._apply(self._new.popleft())
        while self._signs:
            device, (at, by, online) = self._signs.popitem()
            if online:  # the end of a connection is an event of its own
                self._state.apply(EventRow(at + ahead, "heard", device=device, data={"by": by}))
        self.latest = self._frozen(time.time())
        return self.latest

    def _apply(self, event: EventRow) -> None:
        text = self._state.apply(event)
        if text is not None:
            self._lines.append(Line(event.at, event.kind, text, KINDS[event.kind].style))

    def _frozen(self, now: float) -> Snapshot:
        state = self._state
        devices = tuple(_view(device) for _, device in sorted(state.devices.items()))
        counts = Counter(device.group for device in devices)
        self._remember(now, tuple(counts[group] for group in GROUPS))
        return Snapshot(
            number=self.latest.number + 1,
            at=now,
            run=self._run,
            standing=standing(state, counts, self._phase()),
            elapsed_s=state.elapsed_s if state.ended else now - (state.began_at or now),
            counts=dict(counts),
            devices=devices,
            curves=tuple(_curves(state)),
            refusals=tuple(_refused(*key, refusal) for key, refusal in state.refusals.items()),
            lines=tuple(self._lines),
            history=tuple(self._history),
            reference=self.latest.reference if self.latest.reference.scores else self._reference(),
            waiting=self._waiting(),
            **{name: getattr(state, name) for name in _AS_THEY_ARE},
        )

    def _remember(self, now: float, counts: tuple[int, ...]) -> None:
        """Record the numbers of devices by activity, if changed."""
        if not self._history or self._history[-1][1] != counts:
            self._history.append((now, counts))
        if len(self._history) > MOST_POINTS:
            del self._history[1:-1:2]


def _view(device: LiveDevice) -> DeviceView:
    own = {name: getattr(device, name) for name in DeviceView.__struct_fields__ if hasattr(device, name)}
    group, bars, spans = GROUP_OF.get(device.doing, "waiting"), tuple(_bars(device)), tuple(device.spans)
    peak = device.highest.get("step_peak_bytes")
    own["why"] = f"{LEFT_OUT} {device.why}" if device.doing == LEFT_OUT else device.why
    return DeviceView(**{**own, "group": group, "bars": bars, "spans": spans, "step_peak_bytes": peak})


def _bars(device: LiveDevice) -> Iterable[Bar]:
    """Bars of memory (the limited kind, else of a step), compute, payload and energy."""
    memory = [name for name in ("step_memory_bytes", "memory_bytes", "gpu_memory_bytes") if device.budget.get(name)]
    for name in (*(memory or ["step_memory_bytes"]), "flops", "payload_bytes", "energy_j"):
        figure, label, unit = LIMITS[name]
        yield Bar(figure, label, unit, device.highest.get(figure), device.budget.get(name))


def _curves(state: LiveState) -> Iterable[Curve]:
    if state.losses:
        yield Curve("loss", "training", "", tuple(enumerate(state.losses, 1)))
    for (metric, given, mask), values in state.scores.items():
        if units.is_leading(metric):
            after = state.scored_after[-len(values) :]
            yield Curve(metric, given, "" if mask == "none" else mask, tuple(zip(after, values, strict=False)))


def _refused(device: str, stage: int, kind: str, why: Refusal) -> Refused:
    by = {"stage_planned": "plan", "declined": "device"}.get(kind, "coordinator")
    needed, allowed = ("" if n is None else units.quantity(n, why.unit) for n in (why.needed, why.allowed))
    return Refused(device, stage, by, reason(why), needed, allowed, why.detail, f"{REMEDIES.get(why.reason, _OTHER)}.")


def standing(state: LiveState, counts: Counter[str], phase: str = "") -> str:
    """State of the run in one sentence. ``phase``: the machine's, if known."""
    total = len(state.devices)
    if state.failure:
        return f"The run failed: {state.failure}"
    if state.ended:
        spent = units.whole_seconds(state.elapsed_s)
        return f"The run is {state.ended}: {_many(state.rounds_done, 'round')} in {spent}, {_many(total, 'device')}."
    before = {"paused": "Paused. ", "pausing": "Pausing after this round. "}.get(state.paused, "")
    if phase == "planning":
        asked = sum(device.doing not in (LEFT_OUT, REVOKED) for device in state.devices.values())
        return f"{before}Planning which of {_many(asked, 'device')} can train the next stage within their budgets."
    if not state.round:
        return f"{before}Waiting for devices; {total or 'none'} {'is' if total == 1 else 'are'} here."
    stage, done = f"stage {state.stage} of {state.stages}", state.rounds_done
    if phase == "evaluating":
        return f"{before}Evaluating round {done} of {state.rounds_total} ({stage})."
    if state.paused == "paused":  # no round is open
        return f"Paused after round {done} of {state.rounds_total} ({stage}): {_who(total, counts)}."
    where = f"Round {min(done + 1, state.rounds_total)} of {state.rounds_total}"
    again = f", attempt {state.attempt}" if state.attempt > 1 else ""
    return f"{before}{where}, in {stage}{again}: {_who(total, counts)}."


def _who(total: int, counts: Counter[str]) -> str:
    """Device counts by activity: "3 of 4 devices train, 1 waits"."""
    said: dict[str, Callable[[int], str]] = {
        "training": lambda n: f"{n} of {_many(total, 'device')} {'trains' if n == 1 else 'train'}",
        "receiving": lambda n: f"{n} {'receives' if n == 1 else 'receive'}",
        "sending": lambda n: f"{n} {'sends' if n == 1 else 'send'}",
        "waiting": lambda n: f"{n} {'waits' if n == 1 else 'wait'}",
        "away": lambda n: f"{n} {'is' if n == 1 else 'are'} away",
        "refused": lambda n: f"{n} {'is' if n == 1 else 'are'} refused",
    }
    return ", ".join(say(counts[group]) for group, say in said.items() if counts[group] or group == "training")


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
