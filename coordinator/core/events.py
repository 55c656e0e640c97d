"""Events: what can happen to a run. Frozen; times are seconds of the runner's monotonic clock."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.core.state import Changes, State
from edgefl.aggregation.history import Memory
from edgefl.errors import EdgeFLError
from edgefl.plan.job import Placement
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, EvaluationRow, Figures, Manifest, Refusal


class Begin(msgspec.Struct, frozen=True):
    """The initial parts lie in the store: devices may join.

    ``stage`` and ``round`` are those of the last finished round, 0 and 0 when there is none; ``attempt`` is the last
    one begun for the round that comes next; ``unevaluated`` is the last finished round if it was not evaluated;
    ``made_ms`` is when the run was made; ``memory`` is what the slots remember; ``resumed`` is the state as an earlier
    process left it.
    """

    at: float
    stage: int = 0
    round: int = 0
    attempt: int = 0
    unevaluated: Attempt | None = None
    made_ms: int = 0
    memory: Memory = Memory()
    resumed: State | None = None


class Joined(msgspec.Struct, frozen=True):
    """A device said hello, or showed life after it had been missed."""

    at: float
    hello: Hello

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


class Planned(msgspec.Struct, frozen=True):
    """The planner's answer to the ``Plan`` with this ticket."""

    at: float
    ticket: int
    placements: tuple[Placement, ...] = ()


class Accepted(msgspec.Struct, frozen=True):
    """A device took an offer."""

    at: float
    device: str
    attempt: Attempt


class Declined(msgspec.Struct, frozen=True):
    """A device did not take an offer, or gave it up."""

    at: float
    device: str
    attempt: Attempt
    refusal: Refusal = Refusal()
    figures: Figures = {}


class Progressed(msgspec.Struct, frozen=True):
    """Progress of a device's training."""

    at: float
    device: str
    attempt: Attempt
    data: dict[str, Any] = {}


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


class UpdateStored(msgspec.Struct, frozen=True):
    """An update lies complete and checked in the store. ``figures`` are the coordinator's own, counted.

    ``changes``: how far it is from what the device was offered.
    """

    at: float
    device: str
    attempt: Attempt
    figures: Figures = {}
    manifest: Manifest = {}  # of the update, with what came packed unpacked
    changes: Changes = {}


class UpdateInvalid(msgspec.Struct, frozen=True):
    """An update arrived and is unusable."""

    at: float
    device: str
    attempt: Attempt
    refusal: Refusal


class Aggregated(msgspec.Struct, frozen=True):
    """The new model state lies in the store. ``record`` says what each slot did, ``memory`` what it remembers."""

    at: float
    attempt: Attempt
    manifest: Manifest = {}
    record: dict[str, Any] = {}
    memory: Memory = Memory()


class Evaluated(msgspec.Struct, frozen=True):
    """The global model was tried on the test set."""

    at: float
    attempt: Attempt
    rows: tuple[EvaluationRow, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""

    at: float


FromDevice = Joined | HeartbeatSeen | DeviceOffline | Accepted | Declined | Progressed | Announced
FromWork = Planned | UpdateStored | UpdateInvalid | Aggregated | Evaluated
Event = Begin | FromDevice | FromWork | Tick


class IllegalMoveError(EdgeFLError):
    """The runner reported something impossible. A defect, so the message holds the whole story."""

    remedy = "This is a defect of the coordinator: report it with the story above. Start again with --resume RUN."

    def __init__(self, event: Event, state: State, why: str) -> None:
        self.event = event
        self.state = state
        story = "\n".join(f"  {line}" for line in state.story)
        where = state.open.attempt if state.open else f"{state.run}/s{state.stage}/r{state.number}/a{state.attempt}"
        kind, phase = type(event).__name__, state.phase.value
        super().__init__(f"illegal {kind} in phase '{phase}' of {where}: {why}\nwhat happened before:\n{story}")
