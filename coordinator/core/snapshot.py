"""Snapshots: the part of the machine's state that outlives the process, in the ledger with what changed it.

The state is made of frozen values, so that what changed is what is another object: a device, its part in the open
attempt, or the position, which is the rest. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from coordinator.core.state import Assignment, Device, Phase, Round, State
from edgefl.records import Attempt

Kind = Literal["outline", "device", "assignment", "behind", "taken"]


class RunPosition(msgspec.Struct, frozen=True, rename={"last_aggregated": "counted"}):
    """Where the run stands. ``open``: the open attempt. Times are not kept: they are of one process' clock."""

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


class Snapshot(
    msgspec.Struct, frozen=True, rename={"position": "outline", "stragglers": "behind", "buffered": "taken"}
):
    """A state as it was when the process ended."""

    position: RunPosition = RunPosition()
    devices: dict[str, Device] = {}
    assignments: dict[str, Assignment] = {}
    stragglers: dict[str, Assignment] = {}
    buffered: dict[str, Assignment] = {}


class Changes(NamedTuple):
    """Rows to put, by (kind, name); whether the assignments of an attempt that is over go first; rows that go."""

    rows: dict[tuple[Kind, str], Any]
    new_attempt: bool = False
    deleted: tuple[tuple[Kind, str], ...] = ()


#: Nothing has changed.
NOTHING = Changes({})


def changes(before: State, after: State) -> Changes:
    """The rows to write so that ``decode`` gives ``after``, where it gave ``before``."""
    rows: dict[tuple[Kind, str], Any] = {}
    if (position := position_of(after)) != position_of(before):
        rows["outline", ""] = msgspec.to_builtins(position)
    for name, device in after.devices.items():
        if before.devices.get(name) is not device:
            rows["device", name] = msgspec.to_builtins(device)
    was = before.open.assignments if before.open is not None else {}
    now = after.open.assignments if after.open is not None else {}
    new_attempt = _attempt(before) != _attempt(after)
    for name, assignment in now.items():
        if new_attempt or was.get(name) is not assignment:
            rows["assignment", name] = msgspec.to_builtins(assignment)
    deleted: list[tuple[Kind, str]] = [] if new_attempt else [("assignment", name) for name in was if name not in now]
    for kind, old, new in _of_earlier_rounds(before, after):
        rows |= {(kind, name): msgspec.to_builtins(one) for name, one in new.items() if old.get(name) is not one}
        deleted += [(kind, name) for name in old if name not in new]
    return Changes(rows, new_attempt and bool(was), tuple(deleted))


def _of_earlier_rounds(before: State, after: State) -> list[tuple[Kind, dict[str, Assignment], dict[str, Assignment]]]:
    return [("behind", before.stragglers, after.stragglers), ("taken", before.buffered, after.buffered)]


def decode(rows: Iterable[tuple[str, str, Any]]) -> Snapshot | None:
    """The state in rows of (kind, name, value); None when there are none."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in get_args(Kind)}
    for kind, name, value in rows:
        if kind in found:
            found[kind][name] = value
    if not found["outline"]:
        return None
    position = msgspec.convert(found["outline"][""], RunPosition)
    return Snapshot(
        position,
        {name: msgspec.convert(value, Device) for name, value in sorted(found["device"].items())},
        *(
            {name: msgspec.convert(value, Assignment) for name, value in sorted(found[kind].items())}
            for kind in ("assignment", "behind", "taken")
        ),
    )


def as_saved(state: State, was: Snapshot) -> State:
    """``state``, which has not begun, with all that the ledger has rows of: ``changes`` from it deletes those that end.

    A run that had failed leaves rows of assignments that do not go on.
    """
    opened = Round(was.position.open or Attempt(), 0, 0.0, 0.0, was.assignments) if was.assignments else None
    return msgspec.structs.replace(state, open=opened, stragglers=was.stragglers, buffered=was.buffered)


def position_of(state: State) -> RunPosition:
    """The state without its devices and what they do."""
    return RunPosition(
        phase=state.phase,
        stage=state.stage,
        number=state.number,
        attempt=state.attempt,
        tries=state.tries,
        planned_stage=state.planned_stage,
        open=_attempt(state),
        evaluating=state.evaluating,
        closed=state.closed,
        last_aggregated=tuple(sorted(state.last_aggregated)),
        returning=tuple(sorted(state.returning)),
    )


def _attempt(state: State) -> Attempt | None:
    return state.open.attempt if state.open is not None else None


def resumed(state: State, was: Snapshot, at: float) -> State:
    """``state``, which has not begun, as ``was``, with every device offline and no task in progress.

    An open attempt goes on with its whole deadline: time without a coordinator is no device's delay. A device that was
    being planned is planned again when it returns. No other round begins until the devices that were online have
    returned, or grace is over.
    """
    position, replace = was.position, msgspec.structs.replace
    planning = {name for name, one in was.assignments.items() if one.status == "replanning"}
    devices: Mapping[str, Device] = {
        name: replace(device, online=False, ticket=0, placement=None if name in planning else device.placement)
        for name, device in was.devices.items()
    }
    there = {*position.returning, *(name for name, device in was.devices.items() if device.online)}
    opened = None
    if position.open is not None and position.phase is not Phase.FAILED:
        deadline_s = state.policy.deadline_s if state.policy.deadline_s > 0 else float("inf")
        opened = Round(position.open, position.tries, at, at + deadline_s, was.assignments)
    return replace(
        state,
        phase=Phase.ROUND if opened is not None else Phase.JOINING,
        stage=position.stage,
        number=position.number,
        attempt=position.attempt,
        tries=0 if position.phase is Phase.FAILED else position.tries,
        planned_stage=position.planned_stage,
        devices=dict(devices),
        returning=dict.fromkeys(there, at + state.grace_s),
        open=opened,
        stragglers=was.stragglers if position.phase is not Phase.FAILED else {},  # a failed run's devices were aborted
        buffered=was.buffered,
        closed=position.closed,
        last_aggregated=frozenset(position.last_aggregated),
    )
