"""State of a run in the coordinator's machine, and its snapshot over restarts. Pure.

Times are seconds of the runner's monotonic clock. The state is made of frozen values: what changed is another object, a
device, its part in an attempt, or the position, which is the rest.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple, TypeVar

import msgspec

from coordinator.core.timeouts import Timeouts
from edgefl.aggregation.history import Memory
from edgefl.plan.job import Decline, PeriodRound, Placement, RoundPolicy, RunPlan
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, Figures, Refusal

replace = msgspec.structs.replace

V = TypeVar("V")


class Phase(Enum):
    """Phase of a run: the event it waits for. The values are in snapshots."""

    STARTING = "starting"  # the initial parts
    JOINING = "joining"  # devices
    PLANNING = "planning"  # the planner
    WAITING = "waiting"  # a device that can train
    RETRYING = "pausing"  # time, before a failed attempt is tried again
    PAUSED = "paused"  # its operator, who has paused it
    ROUND = "round"  # updates of the open attempt
    AGGREGATING = "closing"  # the round's updates; not PmcmFL's closing round, which is a stage
    EVALUATING = "evaluating"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"  # by its operator; it can go on, as one that was killed


#: Phases that a run does not leave in this process.
ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.STOPPED})
#: Of a device in an attempt. "offered", "accepted", then "updated": announced, is fetched and checked; "done": counts.
#: "declined" by the device, and "replanning" when a smaller job may suit it; "refused" by the planner; "rejected": its
#: update could not be used; "quarantined": not asked after several of these; "left_out" by the operator. When the round
#: closed without its update, "late": it was online, or its model is too old; "lost": it was offline.
Status = (
    Literal["offered", "accepted", "replanning", "updated", "done", "lost", "late"]
    | Literal["declined", "refused", "rejected", "quarantined", "left_out"]
)
#: Statuses of a device that was asked, and whose update does not count.
WITHOUT_UPDATE: frozenset[Status] = frozenset({"lost", "late", "declined", "rejected", "left_out"})


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Size of a device's change of a part: L2 norms of the change, and of the part offered."""

    norm: float = 0.0
    base: float = 0.0


#: Before the name of a part, in the entry of its buffers, which have another scale.
BUFFERS_OF = "buffers of "
#: By part, and by part of its buffers.
Changes = dict[str, Change]


class Claim(msgspec.Struct, frozen=True):
    """Data claimed in a device's first hello of this run, else its first update: an upper bound for later claims."""

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


class Unfinished(msgspec.Struct, frozen=True):
    """An attempt without the device's update, whose cost it may still report."""

    attempt: Attempt
    predicted: Figures = {}
    first_offered_at: float | None = None


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
    first_claim: Claim | None = None  # None: of a version without this field; see ``claim``
    connections: int = 0  # how often it was there again
    previous_session: str = ""  # the session before the present one
    warned: tuple[str, ...] = ()  # subjects of its warnings, each given once in a run
    late_in: int = 0  # the newest round that it was late in, counted over all stages; 0: none
    left_out: str = ""  # the operator who left it out of the run; "": it is not
    revoked: bool = False  # by its fleet
    generation: int = 1  # of the machine that has the name, in its fleet's count
    awaited: bool = False  # that machine has not introduced itself yet: ``hello`` is blank
    unfinished: tuple[Unfinished, ...] = ()  # the newest whose cost it has not reported

    @property
    def out(self) -> bool:
        """True for a device left out of the run or revoked."""
        return bool(self.left_out) or self.revoked

    @property
    def claim(self) -> Claim:
        """The first claim, else the data in the hello."""
        return self.first_claim or Claim(self.hello.samples, self.hello.class_counts)

    @property
    def refusal(self) -> Refusal | None:
        """The planner's refusal of the device in this stage, if any."""
        return self.placement.refusal if self.placement is not None else None

    @property
    def eligible(self) -> bool:
        """True for a device with a plan and no refusal."""
        return self.placement is not None and self.refusal is None


class Assignment(msgspec.Struct, frozen=True):
    """One device's part in one attempt."""

    placement: Placement
    status: Status = "offered"
    update: Update | None = None
    refusal: Refusal | None = None
    measured: Figures = {}
    attempt: Attempt | None = None  # where it is not the open one but an earlier, whose update still counts
    changes: Changes = {}  # of the update
    offered_at: float | None = None  # when this process sent its last offer
    period: PeriodRound | None = None  # of a recipe with periods
    first_offered_at: float | None = None  # when this process sent its first offer


class Round(msgspec.Struct, frozen=True):
    """The open attempt. ``tries`` counts this round's attempts, over restarts too; attempt numbers go on counting."""

    attempt: Attempt
    tries: int
    opened_at: float
    deadline_at: float
    assignments: dict[str, Assignment] = {}
    grace_at: float | None = None


class Link(msgspec.Struct, frozen=True):
    """Link of a device in the open attempt, measured by the coordinator: bytes a second while chunks moved.

    ``lacks``: bytes that it is still to be sent, of those it ``asked`` for; ``received``: bytes of its update so far.
    """

    rate: float
    lacks: int = 0
    asked: int = 0
    received: int = 0


class Undo(msgspec.Struct, frozen=True):
    """Data to withdraw the last closed round. ``memory``: before it; ``device``: with its longest change."""

    attempt: Attempt
    memory: Memory
    device: str


class Crowd(NamedTuple):
    """A simulated fleet, most of whose devices have not introduced themselves (``coordinator.core.crowd``).

    ``names``: sorted; ``kinds`` [N]: the kind of each; ``firsts``: the first device of each kind, by kind.
    """

    names: Sequence[str]
    kinds: Sequence[int]
    firsts: tuple[str, ...]


class State(msgspec.Struct, frozen=True):
    """A run. ``stage`` and ``number`` name the round that is open or comes next; ``attempt`` is its last attempt begun.

    A run that is finished stays at its last round. Stages and rounds count from 1; ``stage`` 0: not begun.
    """

    plan: RunPlan
    timeouts: Timeouts = Timeouts()
    memory: Memory = Memory()  # what the slots remember of the rounds before
    phase: Phase = Phase.STARTING
    stage: int = 0
    number: int = 0
    attempt: int = 0
    tries: int = 0
    made_ms: int = 0  # when the run was made, in milliseconds since the epoch; ``began_at``: the same, on the clock
    earlier_ms: tuple[int, ...] = ()  # of a restored run: the same before it was restored
    began_at: float = 0.0
    until: float = 0.0  # when joining, waiting or retrying ends; 0 in joining: when no device is expected back
    paused: str = ""  # who paused the run; "": it is not. An open round is finished first
    planned_stage: int = 0  # the stage the devices' placements belong to
    devices: dict[str, Device] = {}
    crowd: Crowd | None = None  # of a simulated fleet
    able: Sequence[str] = ()  # those of the crowd that can train the stage ``sorted_stage``
    sorted_stage: int = 0
    called: frozenset[str] = frozenset()  # those that the next round needs and that are to introduce themselves
    gone: frozenset[str] = frozenset()  # those that have ended, or are away by their traces
    returning: dict[str, float] = {}  # devices that are expected back, and until when the next round waits for each
    regained: bool = False  # whether the first device back after an outage of all has given the others their grace
    links: dict[str, Link] = {}  # of devices at work, shortly before the open attempt's deadline and after it
    period_devices: tuple[str, ...] = ()  # those that the period under way began with; quorums are shares of them
    open: Round | None = None
    stragglers: dict[str, Assignment] = {}  # devices at work on an earlier round's model, whose updates will count
    buffered: dict[str, Assignment] = {}  # such updates, on disk and not in the model yet, by ``key_of``
    aggregating: tuple[str, ...] = ()  # those of them that are being aggregated
    evaluating: Attempt | None = None
    closed: Attempt | None = None  # the last attempt that was aggregated
    last_aggregated: tuple[str, ...] = ()  # the devices whose updates it holds, in order
    undo: Undo | None = None  # of the last round, where this process closed it
    evaluable: bool = True  # whether the last evaluation had all its figures
    stepped_back: tuple[int, int] = (0, 0)  # the newest round (stage, number) in which the one before was taken back
    set_aside: tuple[int, int, str] = (0, 0, "")  # stage, number, and the device that this round is done without
    tickets: int = 0
    incompatible: frozenset[str] = frozenset()  # devices of another protocol version, which operators know of
    dropped: dict[str, int] = {}  # messages without effect, by reason
    story: tuple[str, ...] = ()  # what happened last, for error messages

    @property
    def fleet_size(self) -> int:
        """Devices that are known, or that the first round waits for."""
        return max(len(self.devices), self.policy.devices)

    @property
    def policy(self) -> RoundPolicy:
        """When rounds start, close and are tried again."""
        return self.plan.policy

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of each stage."""
        return tuple(stage.rounds for stage in self.plan.stages)

    @property
    def assignments(self) -> Mapping[str, Assignment]:
        """Assignments of the open attempt, by device."""
        return self.open.assignments if self.open is not None else {}

    def deadline(self, opened_at: float) -> float:
        """Closing deadline of a round opened at ``opened_at``, by the runner's clock."""
        return opened_at + (self.policy.deadline_s if self.policy.deadline_s > 0 else math.inf)


Kind = Literal["outline", "placement", "device", "assignment", "behind", "taken"]
#: Fields that a position has as the state has them.
_POSITION = (
    *("phase", "stage", "number", "attempt", "tries", "planned_stage", "evaluating", "closed", "last_aggregated"),
    *("stepped_back", "set_aside"),
    *("paused", "period_devices"),
)


class RunPosition(msgspec.Struct, frozen=True, rename={"last_aggregated": "counted"}):
    """Position of the run. ``open``: the open attempt. Times are not kept: they are of one process' clock."""

    phase: Phase = Phase.STARTING
    stage: int = 0
    number: int = 0
    attempt: int = 0
    tries: int = 0
    planned_stage: int = 0
    open: Attempt | None = None
    evaluating: Attempt | None = None
    closed: Attempt | None = None
    last_aggregated: tuple[str, ...] = ()
    returning: tuple[str, ...] = ()
    stepped_back: tuple[int, int] = (0, 0)
    set_aside: tuple[int, int, str] = (0, 0, "")
    paused: str = ""
    period_devices: tuple[str, ...] = ()


class SnapshotChanges(NamedTuple):
    """Snapshot rows to write, and to delete, by (kind, name).

    A device's placement, most of its bytes, is a row of its own, written where it changes: ``None`` in the rows of the
    device and of its assignments stands for it.
    """

    rows: dict[tuple[Kind, str], object]
    deleted: tuple[tuple[Kind, str], ...] = ()


#: Nothing has changed.
NOTHING = SnapshotChanges({})


def position_of(state: State) -> RunPosition:
    """The run's position in a state: all but its devices and assignments."""
    opened = state.open.attempt if state.open is not None else None
    same = {name: getattr(state, name) for name in _POSITION}
    return RunPosition(open=opened, returning=tuple(sorted(state.returning)), **same)


def changes(before: State, after: State) -> SnapshotChanges:
    """The rows to write so that ``decode`` gives ``after``, where it gave ``before``."""
    rows: dict[tuple[Kind, str], object] = {}
    deleted: list[tuple[Kind, str]] = []
    if (position := position_of(after)) != position_of(before):
        rows["outline", ""] = position
    placed = set[str]()  # devices whose placement has changed
    if before.devices is not after.devices:
        for name, device in _others(before.devices, after.devices):
            old = before.devices.get(name)
            rows["device", name] = replace(device, placement=None)
            if (old.placement if old is not None else None) is not device.placement:
                placed.add(name)
                if device.placement is None:
                    deleted.append(("placement", name))
                else:
                    rows["placement", name] = device.placement
    pairs: list[tuple[Kind, Mapping[str, Assignment], Mapping[str, Assignment]]] = [
        ("assignment", before.assignments, after.assignments),
        ("behind", before.stragglers, after.stragglers),
        ("taken", before.buffered, after.buffered),
    ]
    for kind, old_ones, new_ones in pairs:
        if old_ones is new_ones and not placed:
            continue
        others = dict(_others(old_ones, new_ones))
        more = sum(name not in old_ones for name in others)
        for name, one in (others | {name: new_ones[name] for name in placed & new_ones.keys()}).items():
            known = after.devices.get(name)
            same = known is not None and known.placement is one.placement
            rows[kind, name] = replace(one, placement=None) if same else one
        if len(old_ones) + more != len(new_ones):
            deleted += [(kind, name) for name in old_ones if name not in new_ones]
    return SnapshotChanges(rows, tuple(deleted))


def _others(before: Mapping[str, V], after: Mapping[str, V]) -> list[tuple[str, V]]:
    """Entries of ``after`` that are other objects than before, in order.

    Nearly all are the same, in the same order: so thousands are looked at without a step of Python for each.
    """
    moved = map(operator.is_not, after.values(), itertools.chain(before.values(), itertools.repeat(None)))
    return [(name, one) for name, one in itertools.compress(after.items(), moved) if before.get(name) is not one]


def decode(state: State, rows: Iterable[tuple[str, str, object]]) -> State | None:
    """The initial ``state`` with the snapshot rows (kind, name, value) applied; None without rows.

    A run that had failed leaves rows of assignments that do not go on: they are in an open attempt without a name.
    """
    found: dict[str, dict[str, object]] = defaultdict(dict)
    for kind, name, value in sorted(rows, key=lambda row: row[:2]):
        found[kind][name] = value
    if not found["outline"]:
        return None
    position = msgspec.convert(found["outline"][""], RunPosition)
    placements = msgspec.convert(found["placement"], dict[str, Placement])
    devices = {
        name: replace(one, placement=one.placement or placements.get(name))
        for name, one in msgspec.convert(found["device"], dict[str, Device]).items()
    }
    for kind in ("assignment", "behind"):
        for name, row in found[kind].items():
            if isinstance(row, dict) and row.get("placement") is None:
                row["placement"] = placements.get(name)
    assignments, stragglers, buffered = (
        msgspec.convert(found[kind], dict[str, Assignment]) for kind in ("assignment", "behind", "taken")
    )
    opened = None
    if position.open is not None or assignments:
        opened = Round(position.open or Attempt(), position.tries, 0.0, 0.0, assignments)
    return replace(
        state,
        **{name: getattr(position, name) for name in _POSITION},
        returning=dict.fromkeys(position.returning, 0.0),
        devices=devices,
        open=opened,
        stragglers=stragglers,
        buffered=buffered,
    )


def resumed(was: State, at: float) -> State:
    """A decoded state, with every device offline and no task in progress.

    An open attempt goes on with its whole deadline: time without a coordinator is no device's delay. A device that was
    being planned is planned again when it returns. No other round begins until the devices that were online have
    returned, or grace is over; nor while the run is paused.
    """
    failed = was.phase is Phase.FAILED
    planning = {name for name, one in was.assignments.items() if one.status == "replanning"}
    opened = None
    if was.open is not None and was.open.attempt.stage and not failed:
        parts = _without_times(was.open.assignments)
        opened = replace(was.open, opened_at=at, deadline_at=was.deadline(at), assignments=parts)
    there = {*was.returning, *(name for name, device in was.devices.items() if device.online)}
    if was.crowd is not None:  # the others are called when they are asked
        there &= set(was.crowd.firsts)
    return replace(
        was,
        phase=Phase.ROUND if opened is not None else Phase.JOINING,
        tries=0 if failed else was.tries,
        evaluating=None,
        devices={
            name: replace(
                device,
                online=False,
                ticket=0,
                # A copy counts as another one, and is written: earlier versions kept it in the device's row alone.
                placement=replace(device.placement) if device.placement and name not in planning else None,
                unfinished=tuple(replace(one, first_offered_at=None) for one in device.unfinished),
            )
            for name, device in was.devices.items()
        },
        returning=dict.fromkeys(there, at + was.timeouts.grace_s),
        open=opened,
        stragglers={} if failed else _without_times(was.stragglers),  # a failed run's devices were aborted
    )


def _without_times(parts: Mapping[str, Assignment]) -> dict[str, Assignment]:
    return {name: replace(one, offered_at=None, first_offered_at=None) for name, one in parts.items()}
