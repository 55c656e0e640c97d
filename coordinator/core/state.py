"""The coordinator's values: the state of a run, and what can happen to it (events).

All frozen; times are seconds of one monotonic clock that the runner passes in.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgefl.aggregation.history import Memory
from edgefl.errors import EdgeFLError
from edgefl.plan.job import Decline, Placement, RoundPolicy
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, EvaluationRow, Figures, Manifest, Refusal

Phase = Literal[
    "starting", "joining", "planning", "waiting", "pausing", "round", "closing", "evaluating", "finished", "failed"
]
#: "declined" by the device, "refused" by the planner, "rejected": its update could not be used.
Status = (
    Literal["offered", "accepted", "replanning", "updated", "done", "lost", "late"]
    | Literal["declined", "refused", "rejected", "quarantined"]
)

#: Statuses that still can become "done".
OPEN: frozenset[Status] = frozenset({"offered", "accepted", "replanning", "updated"})


class Change(msgspec.Struct, frozen=True, array_like=True):
    """How far a device's training has moved a part: L2 norms of its change, and of what it started from."""

    norm: float = 0.0
    base: float = 0.0


#: By part; a part's buffers have an entry of their own, ``coordinator.core.outliers.buffers_of``.
Changes = dict[str, Change]


class Claim(msgspec.Struct, frozen=True):
    """Data that a device claimed when it first introduced itself in this run: no more of it counts."""

    samples: dict[str, int] = {}  # modality -> samples that have it; "" -> all samples
    class_counts: tuple[int, ...] = ()


#: Names of fields in snapshots, which are those of an earlier version.
_DEVICE_KEYS = {
    "aggregated": "taken",
    "first_claim": "first",
    "connections": "comings",
    "previous_session": "former",
    "warned": "told",
}


class Device(msgspec.Struct, frozen=True, rename=_DEVICE_KEYS):
    """One device the coordinator has met. ``placement`` and ``declined`` belong to the current stage."""

    hello: Hello
    online: bool = True
    placement: Placement | None = None
    ticket: int = 0  # of the plan that was asked for and has not come yet; 0: none
    declined: tuple[Decline, ...] = ()
    factors: dict[str, float] = {}  # measured / predicted, by figure, over all its rounds
    bad: int = 0  # updates in a row that could not be used
    rejected: dict[str, int] = {}  # all of them, by reason
    barred: int = 0  # in quarantine through this round, counted over all stages; -1: for good; 0: it is not
    aggregated: Attempt | None = None  # the newest of its attempts that is in the model
    holds: int = 0  # the stage of the newest model it has trained from; 0: it has had none yet
    first_claim: Claim | None = None  # None: kept by a version that had no such field; ``claim`` tells
    connections: int = 0  # how often it was there again
    previous_session: str = ""  # the session before the present one
    warned: tuple[str, ...] = ()  # what operators have been told of it, once in a run

    @property
    def claim(self) -> Claim:
        """The data that counts."""
        return self.first_claim or Claim(self.hello.samples, self.hello.class_counts)

    @property
    def eligible(self) -> bool:
        """Planned, and not refused."""
        return self.placement is not None and self.placement.refusal is None


class Assignment(msgspec.Struct, frozen=True):
    """One device's part in one attempt."""

    placement: Placement
    status: Status = "offered"
    update: Update | None = None
    refusal: Refusal | None = None
    measured: Figures = {}
    attempt: Attempt | None = None  # where it is not the open one but an earlier, whose update still counts
    changes: Changes = {}  # of the update


class Round(msgspec.Struct, frozen=True):
    """The open attempt. ``tries`` counts attempts since this coordinator started; attempt numbers go on counting."""

    attempt: Attempt
    tries: int
    opened_at: float
    deadline_at: float
    assignments: dict[str, Assignment] = {}
    grace_at: float | None = None


_STATE_KEYS = {"stragglers": "behind", "buffered": "taken", "last_aggregated": "counted"}


class State(msgspec.Struct, frozen=True, rename=_STATE_KEYS):
    """A run. ``stage`` and ``number`` name the round that is open or comes next; ``attempt`` is its last attempt begun.

    A run that is finished stays at its last round. Stages and rounds count from 1; ``stage`` 0: not begun.
    """

    run: str
    policy: RoundPolicy
    rounds: tuple[int, ...]  # per stage
    batch_sizes: tuple[int, ...]  # per stage
    closing: int = 0  # the stage that is the closing round; 0: there is none
    seed: int = 0
    recipe: dict[str, Any] = {}  # role -> {choice: options}; the machine needs "select" and "weight"
    memory: Memory = Memory()  # what the slots remember of the rounds before
    every_round: bool = True  # evaluate after each round, else after each stage
    has_test: bool = True
    grace_s: float = 20.0
    retry_pause_s: float = 2.0
    phase: Phase = "starting"
    stage: int = 0
    number: int = 0
    attempt: int = 0
    tries: int = 0
    made_ms: int = 0  # when the run was made, in milliseconds since the epoch; ``began_at``: this process, on its clock
    began_at: float = 0.0
    until: float = 0.0  # when joining, waiting or pausing ends; 0 in joining: when nobody is expected back
    planned_stage: int = 0  # the stage the devices' placements belong to
    devices: dict[str, Device] = {}
    returning: dict[str, float] = {}  # devices that are expected back, and until when the next round waits for each
    open: Round | None = None
    stragglers: dict[str, Assignment] = {}  # devices at work on an earlier round's model, whose updates will count
    buffered: dict[str, Assignment] = {}  # such updates, on disk and not in the model yet, by ``key_of``
    aggregating: tuple[str, ...] = ()  # those of them that are being aggregated
    evaluating: Attempt | None = None
    closed: Attempt | None = None  # the last attempt that was aggregated
    last_aggregated: frozenset[str] = frozenset()  # the devices whose updates it holds
    tickets: int = 0
    strange: frozenset[str] = frozenset()  # devices of another protocol version, which operators know of
    dropped: dict[str, int] = {}  # messages without effect, by reason
    story: tuple[str, ...] = ()  # what happened last, for error messages


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
    """A device told how far it is."""

    at: float
    device: str
    attempt: Attempt
    data: dict[str, Any] = {}


class Announced(msgspec.Struct, frozen=True):
    """A device has an update to fetch."""

    at: float
    update: Update


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
    """An update arrived but can not be used."""

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
    """The runner reported something that can not have happened. A defect, so it tells the whole story."""

    remedy = "This is a defect of the coordinator: report it with the story above. Start again with --resume RUN."

    def __init__(self, event: Event, state: State, why: str) -> None:
        self.event = event
        self.state = state
        story = "\n".join(f"  {line}" for line in state.story)
        where = state.open.attempt if state.open else f"{state.run}/s{state.stage}/r{state.number}/a{state.attempt}"
        kind = type(event).__name__
        super().__init__(f"illegal {kind} in phase '{state.phase}' of {where}: {why}\nwhat happened before:\n{story}")
