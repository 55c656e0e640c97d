"""Moves of the machine: its events, its instructions, and the step between them. Pure.

Times are seconds of the runner's monotonic clock. What is to be saved is committed, in one transaction, before the rest
is done; only a request for an update's chunks may precede.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from coordinator.core.state import Changes, Link, Round, State
from edgefl.aggregation.history import Memory
from edgefl.errors import EdgeFLError
from edgefl.plan.job import Candidate, PeriodRound, Placement, RunPlan
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, EvaluationRow, Figures, Manifest, Refusal
from edgefl.run_records import AssignmentRow, DeviceRow, EventRow, RoundRow, SightingRow

replace = msgspec.structs.replace


class Position(NamedTuple):
    """Position of a run: its last finished round (0, 0: none), and attempts begun for the next.

    ``unevaluated``: that round, if it was not evaluated. ``made_ms``: when the run was made, in milliseconds since the
    epoch: a restored run counts as made when it was restored, and has the times before that in ``earlier_ms``.
    """

    stage: int
    round: int
    attempt: int
    manifest: Manifest
    unevaluated: Attempt | None
    made_ms: int
    earlier_ms: tuple[int, ...] = ()


class Begin(msgspec.Struct, frozen=True):
    """The initial parts lie in the store: devices may join.

    ``memory``: what the slots remember. ``resumed``: the state as an earlier process left it. ``age_s``: seconds since
    the run was made.
    """

    at: float
    position: Position
    memory: Memory = Memory()
    resumed: State | None = None
    age_s: float = 0.0


class Joined(msgspec.Struct, frozen=True):
    """A device said hello, or showed life after it had been missed."""

    at: float
    hello: Hello
    generation: int = 1  # of the machine that has the name now

    @property
    def device(self) -> str:
        """The device that joined."""
        return self.hello.device


class HeartbeatSeen(msgspec.Struct, frozen=True):
    """A device shows life. ``reports_work``: it also says what it works on."""

    at: float
    device: str
    working_on: Attempt | None = None
    reports_work: bool = True


class DeviceOffline(msgspec.Struct, frozen=True):
    """A device is offline: its last will, or too many silent heartbeats."""

    at: float
    device: str
    reason: str = ""


class Revoked(msgspec.Struct, frozen=True):
    """The fleet revoked a device's certificate, for good."""

    at: float
    device: str


class Replaced(msgspec.Struct, frozen=True):
    """Another machine has taken over a device's name: the ``generation``-th, from 1."""

    at: float
    device: str
    generation: int


class Planned(msgspec.Struct, frozen=True):
    """The planner's answer to the ``Plan`` with this ticket."""

    at: float
    ticket: int
    placements: tuple[Placement, ...] = ()


class _OfAttempt(msgspec.Struct, frozen=True):
    at: float
    device: str
    attempt: Attempt


class Accepted(_OfAttempt, frozen=True):
    """A device took an offer."""


class Declined(_OfAttempt, frozen=True):
    """A device did not take an offer, or gave it up."""

    refusal: Refusal = Refusal()
    figures: Figures = {}


class Progressed(_OfAttempt, frozen=True):
    """Progress of a device's training."""

    data: Mapping[str, object] = {}


class Spent(_OfAttempt, frozen=True):
    """A device's cost of an attempt that it has dropped."""

    figures: Figures = {}


class Announced(msgspec.Struct, frozen=True):
    """A device has an update to fetch."""

    at: float
    update: Update

    @property
    def device(self) -> str:
        """The device that trained it."""
        return self.update.device

    @property
    def attempt(self) -> Attempt:
        """The attempt it was trained in."""
        return self.update.attempt


class UpdateStored(_OfAttempt, frozen=True):
    """An update lies complete and checked in the store. ``figures`` are the coordinator's own, counted.

    ``changes``: how far it is from what the device was offered.
    """

    figures: Figures = {}
    manifest: Manifest = {}  # of the update, with what came packed unpacked
    changes: Changes = {}


class UpdateInvalid(_OfAttempt, frozen=True):
    """An update arrived and is unusable."""

    refusal: Refusal


class Aggregated(msgspec.Struct, frozen=True):
    """The new model state lies in the store. ``record`` says what each slot did, ``memory`` what it remembers."""

    at: float
    attempt: Attempt
    manifest: Manifest = {}
    record: dict[str, Any] = {}
    memory: Memory = Memory()


class Evaluated(msgspec.Struct, frozen=True):
    """The global model was tried on the test set; without rows where that could not be done."""

    at: float
    attempt: Attempt
    rows: tuple[EvaluationRow, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time passed. ``links``: of devices at work, shortly before the open attempt's deadline and after it."""

    at: float
    links: dict[str, Link] = {}


class Present(msgspec.Struct, frozen=True):
    """Devices of a crowd came and left by their traces."""

    at: float
    came: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()


class _Request(msgspec.Struct, frozen=True):
    at: float
    by: str  # who asks: "terminal", "web"


class PauseAsked(_Request, frozen=True):
    """The operator pauses the run: no further round opens."""


class ResumeAsked(_Request, frozen=True):
    """The operator ends the pause."""


class StopAsked(_Request, frozen=True):
    """The operator ends the run where it stands."""


class LeaveOutAsked(_Request, frozen=True):
    """The operator leaves a device out of the run."""

    device: str


class TakeInAsked(_Request, frozen=True):
    """The operator takes a device in again."""

    device: str


FromDevice = Joined | HeartbeatSeen | DeviceOffline | Accepted | Declined | Progressed | Announced | Spent
Request = PauseAsked | ResumeAsked | StopAsked | LeaveOutAsked | TakeInAsked
Decided = Revoked | Replaced
Passing = Tick | Present
Event = (
    Begin | FromDevice | Decided | Planned | UpdateStored | UpdateInvalid | Aggregated | Evaluated | Passing | Request
)


class IllegalMoveError(EdgeFLError):
    """The runner reported something impossible. A defect, so the message holds the whole story."""

    remedy = "This is a defect of the coordinator: report it with the story above. Start again with --resume RUN."

    def __init__(self, event: Event, state: State, why: str) -> None:
        self.event = event
        self.state = state
        story = "\n".join(f"  {line}" for line in state.story)
        where = Attempt(state.plan.run, state.stage, state.number, state.attempt)
        kind, phase = type(event).__name__, state.phase.value
        super().__init__(f"illegal {kind} in phase '{phase}' of {where}: {why}\nwhat happened before:\n{story}")


class SavedRound(RoundRow, frozen=True):
    """Ledger: a round began, or ended as done (with the state it made) or failed. The ledger dates it."""

    manifest: Manifest | None = None


class TakenBack(msgspec.Struct, frozen=True):
    """Ledger: a finished round is withdrawn, with its evaluation.

    ``again``: it failed, and is done again; else it counts as having changed nothing.
    """

    attempt: Attempt
    again: bool


class Spending(msgspec.Struct, frozen=True):
    """Ledger: newest figures of an attempt without a counted update; empty once its update counts."""

    device: str
    attempt: Attempt
    figures: Figures


class SavePlan(msgspec.Struct, frozen=True):
    """The plan has changed: its model's constants are fixed."""

    plan: RunPlan


class SaveEnd(msgspec.Struct, frozen=True):
    """Ledger: the run is over."""

    status: Literal["done", "failed", "stopped"]


class SendWelcome(msgspec.Struct, frozen=True):
    """Send a welcome."""

    device: str


class Plan(msgspec.Struct, frozen=True):
    """Ask the planner for placements of these devices in this stage."""

    ticket: int
    stage: int
    candidates: tuple[Candidate, ...]


class SendOffer(msgspec.Struct, frozen=True):
    """Offer a device its part."""

    device: str
    attempt: Attempt
    placement: Placement
    deadline_s: float
    period: PeriodRound | None = None


class SendAbort(msgspec.Struct, frozen=True):
    """Abort an attempt on a device."""

    device: str
    attempt: Attempt
    reason: str


class SendAck(msgspec.Struct, frozen=True):
    """Acknowledge a device's update, or refuse it."""

    device: str
    attempt: Attempt
    accepted: bool = True
    refusal: Refusal = Refusal()


class SendDrain(msgspec.Struct, frozen=True):
    """Drain one device: there is nothing for it here, and why."""

    device: str
    reason: str


class Fetch(msgspec.Struct, frozen=True):
    """Get the objects of an update; asked again, it goes on where it stopped.

    ``again``: the device may have forgotten what it was asked for. Else an upload in progress is left alone.
    """

    update: Update
    again: bool = True


class EndTransfers(msgspec.Struct, frozen=True):
    """Every attempt is closed: end their transfers."""


class Aggregate(msgspec.Struct, frozen=True):
    """Make the new model state of these updates. ``signatures``: device -> what its hello carries for clusters.

    ``clips``: of each update, factors of its change by part and buffers, where it is clipped (``outliers.clips``).
    """

    attempt: Attempt
    updates: tuple[Update, ...]
    signatures: dict[str, bytes] = {}
    clips: tuple[dict[str, float], ...] = ()


class Evaluate(msgspec.Struct, frozen=True):
    """Try the global model on the test set."""

    attempt: Attempt


class CollectGarbage(msgspec.Struct, frozen=True):
    """Delete objects nothing points to.

    Still needed: ``updates``, the states that ``attempts`` started from, and ``states``.
    """

    updates: tuple[Update, ...] = ()
    attempts: frozenset[Attempt] = frozenset()
    states: tuple[Manifest, ...] = ()


class DrainAll(msgspec.Struct, frozen=True):
    """Drain all devices: the run is over."""

    reason: str = ""


class Fail(msgspec.Struct, frozen=True):
    """End the run with this error; what was finished is kept. ``kind`` names a class of :mod:`edgefl.errors`.

    ``remedy``: what to do, where the class's own remedy does not fit.
    """

    kind: Literal["RunError", "BudgetError", "DataError"]
    message: str
    remedy: str = ""


#: Rows of the ledger are instructions to save them; an EventRow, which the runner dates, is also announced.
#: An assignment's figures on record stay where the row has none.
_Rows = DeviceRow | SightingRow | SavedRound | AssignmentRow | EvaluationRow
Save = _Rows | TakenBack | SaveEnd | SavePlan | Spending
Send = SendWelcome | SendOffer | SendAbort | SendAck | SendDrain | DrainAll
#: The same, to look a type up in: ``isinstance`` of a union tries each.
SAVES, SENDS = frozenset(get_args(Save)), frozenset(get_args(Send))
Instruction = Save | Send | Plan | Fetch | EndTransfers | Aggregate | Evaluate | CollectGarbage | EventRow | Fail


class Steps:
    """Outcome of one event so far: ``state``, and the instructions ``out``, in order. ``at``: the event's time."""

    __slots__ = ("at", "out", "state")

    def __init__(self, state: State, at: float) -> None:
        self.state = state
        self.at = at
        self.out: list[Instruction] = []

    @property
    def opened(self) -> Round:
        """The open attempt; for rules that run where there is one."""
        if self.state.open is None:
            raise ValueError("no attempt is open")
        return self.state.open

    def set(self, **fields: object) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **fields)

    def set_device(self, device: str, **fields: object) -> None:
        """Replace fields of a known device."""
        devices = self.state.devices
        self.set(devices={**devices, device: replace(devices[device], **fields)})

    def do(self, *instructions: Instruction) -> None:
        """Add instructions."""
        self.out += instructions

    def emit(self, kind: str, device: str = "", data: Mapping[str, object] | None = None) -> None:
        """Emit an event of the current round."""
        self.do(EventRow(0.0, kind, self.state.stage, self.state.number, device, dict(data or {})))

    def warn(self, text: str, device: str = "") -> None:
        """Warn operators."""
        self.emit("warning", device, {"text": text})

    def warn_once(self, device: str, about: str, text: str) -> None:
        """Warn operators about a known device, once in a run for each subject ``about``."""
        warned = self.state.devices[device].warned
        if about not in warned:
            self.set_device(device, warned=(*warned, about))
            self.emit("warning", device, {"text": f"{device}: {text}", "about": about})

    def drop(self, reason: str) -> None:
        """Count a message without effect."""
        dropped = self.state.dropped
        self.set(dropped={**dropped, reason: dropped.get(reason, 0) + 1})
