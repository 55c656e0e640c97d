"""What of the machine's state outlives the process: kept in the ledger, in the transaction of what changed it.

The state is made of frozen values, so that what changed is what is another object: a device, its part in the open
attempt, or the outline, which is the rest. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from coordinator.core.state import Assignment, Device, Phase, Round, State
from edgefl.records import Attempt

Kind = Literal["outline", "device", "assignment", "behind", "taken"]


class Outline(msgspec.Struct, frozen=True):
    """Where the run stands. ``open``: the open attempt. Times are not kept: they are of one process' clock."""

    phase: Phase = "starting"
    stage: int = 0
    number: int = 0
    attempt: int = 0
    tries: int = 0
    planned_stage: int = 0
    open: Attempt | None = None
    evaluating: Attempt | None = None
    closed: Attempt | None = None
    counted: tuple[str, ...] = ()
    returning: tuple[str, ...] = ()


class Kept(msgspec.Struct, frozen=True):
    """A state as it was when the process ended."""

    outline: Outline = Outline()
    devices: dict[str, Device] = {}
    assignments: dict[str, Assignment] = {}
    behind: dict[str, Assignment] = {}
    taken: dict[str, Assignment] = {}


class Changes(NamedTuple):
    """Rows to put, by (kind, name); whether the assignments of an attempt that is over go first; rows that go."""

    rows: dict[tuple[Kind, str], Any]
    anew: bool = False
    gone: tuple[tuple[Kind, str], ...] = ()


#: Nothing has changed.
NOTHING = Changes({})


def changes(before: State, after: State) -> Changes:
    """What has to be kept so that ``kept`` gives ``after``, where it gave ``before``."""
    rows: dict[tuple[Kind, str], Any] = {}
    if (outline := outline_of(after)) != outline_of(before):
        rows["outline", ""] = msgspec.to_builtins(outline)
    for name, device in after.devices.items():
        if before.devices.get(name) is not device:
            rows["device", name] = msgspec.to_builtins(device)
    was = before.open.assignments if before.open is not None else {}
    now = after.open.assignments if after.open is not None else {}
    anew = _attempt(before) != _attempt(after)
    for name, assignment in now.items():
        if anew or was.get(name) is not assignment:
            rows["assignment", name] = msgspec.to_builtins(assignment)
    gone: list[tuple[Kind, str]] = [] if anew else [("assignment", name) for name in was if name not in now]
    for kind, old, new in _of_earlier_rounds(before, after):
        rows |= {(kind, name): msgspec.to_builtins(one) for name, one in new.items() if old.get(name) is not one}
        gone += [(kind, name) for name in old if name not in new]
    return Changes(rows, anew and bool(was), tuple(gone))


def _of_earlier_rounds(before: State, after: State) -> list[tuple[Kind, dict[str, Assignment], dict[str, Assignment]]]:
    return [("behind", before.behind, after.behind), ("taken", before.taken, after.taken)]


def kept(rows: Iterable[tuple[str, str, Any]]) -> Kept | None:
    """The state in rows of (kind, name, value); None when there are none."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in get_args(Kind)}
    for kind, name, value in rows:
        if kind in found:
            found[kind][name] = value
    if not found["outline"]:
        return None
    outline = msgspec.convert(found["outline"][""], Outline)
    return Kept(
        outline,
        {name: msgspec.convert(value, Device) for name, value in sorted(found["device"].items())},
        *(
            {name: msgspec.convert(value, Assignment) for name, value in sorted(found[kind].items())}
            for kind in ("assignment", "behind", "taken")
        ),
    )


def rows_of(state: State, was: Kept) -> State:
    """``state``, which has not begun, with all that the ledger has rows of: ``changes`` from it tells which of them go.

    A run that had failed leaves rows behind that do not go on.
    """
    opened = Round(was.outline.open or Attempt(), 0, 0.0, 0.0, was.assignments) if was.assignments else None
    return msgspec.structs.replace(state, open=opened, behind=was.behind, taken=was.taken)


def outline_of(state: State) -> Outline:
    """The state without its devices and what they do."""
    return Outline(
        phase=state.phase,
        stage=state.stage,
        number=state.number,
        attempt=state.attempt,
        tries=state.tries,
        planned_stage=state.planned_stage,
        open=_attempt(state),
        evaluating=state.evaluating,
        closed=state.closed,
        counted=tuple(sorted(state.counted)),
        returning=tuple(sorted(state.returning)),
    )


def _attempt(state: State) -> Attempt | None:
    return state.open.attempt if state.open is not None else None


def resumed(state: State, was: Kept, at: float) -> State:
    """``state``, which has not begun, as ``was``: nobody is there yet, and nothing is being worked on.

    An open attempt goes on with its whole deadline: time without a coordinator is nobody's delay. Whoever was being
    planned is planned again when it returns. No other round begins until those who were there have returned, or grace
    is over: they take part in it as if nothing had happened.
    """
    outline, replace = was.outline, msgspec.structs.replace
    planning = {name for name, one in was.assignments.items() if one.status == "replanning"}
    devices: Mapping[str, Device] = {
        name: replace(device, online=False, ticket=0, placement=None if name in planning else device.placement)
        for name, device in was.devices.items()
    }
    there = {*outline.returning, *(name for name, device in was.devices.items() if device.online)}
    opened = None
    if outline.open is not None and outline.phase != "failed":
        deadline_s = state.policy.deadline_s if state.policy.deadline_s > 0 else float("inf")
        opened = Round(outline.open, outline.tries, at, at + deadline_s, was.assignments)
    return replace(
        state,
        phase="round" if opened is not None else "joining",
        stage=outline.stage,
        number=outline.number,
        attempt=outline.attempt,
        tries=0 if outline.phase == "failed" else outline.tries,
        planned_stage=outline.planned_stage,
        devices=dict(devices),
        returning=dict.fromkeys(there, at + state.grace_s),
        open=opened,
        behind=was.behind if outline.phase != "failed" else {},  # when a run fails, its devices are told to stop
        taken=was.taken,
        closed=outline.closed,
        counted=frozenset(outline.counted),
    )
