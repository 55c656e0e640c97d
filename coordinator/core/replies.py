"""What each message of a device changes in the open round, pure. Messages may come late, twice or out of turn."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.core import quarantine
from coordinator.core.instructions import EmitEvent, Fetch, Instruction, SendAbort, SendAck, Step
from coordinator.core.one_time_warnings import warn_once
from coordinator.core.planning import ask, figures_of, how_data
from coordinator.core.plausibility import likely, plausible
from coordinator.core.prediction_correction import learned
from coordinator.core.round import check_close, drop, expected, put, send_offer
from coordinator.core.state import (
    OPEN,
    Accepted,
    Announced,
    Assignment,
    Declined,
    IllegalMoveError,
    Progressed,
    State,
    UpdateInvalid,
    UpdateStored,
)
from coordinator.core.stragglers import assignment_of, staleness
from coordinator.core.update_header import bounded, unfit
from edgefl.budget.fit import decline_of
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, Figures, Refusal

replace = msgspec.structs.replace

#: Reasons to plan a device again: it measured, or ran into, a limit that a smaller job may respect.
REPLAN = frozenset({"step_memory", "memory", "ceiling", "flops", "payload", "disk", "cache", "packed"})


def resync(state: State, device: str, working_on: Attempt | None, at: float) -> Step:
    """A device is back: go on where both sides stand, without asking for anything twice."""
    state, out, over = _resync_straggler(state, device, working_on)
    if over:
        return state, out
    state, more = _resync_open(state, device, working_on, at)
    return state, [*out, *more]


def _resync_open(state: State, device: str, working_on: Attempt | None, at: float) -> Step:
    opened = state.open
    assignment = opened.assignments.get(device) if opened is not None else None
    if working_on is not None and (opened is None or working_on != opened.attempt):
        if is_aggregated(state, device, working_on):
            return state, [SendAck(device, working_on)]
        if (working_on.run, working_on.made_ms) == (state.run, state.made_ms):
            out: list[Instruction] = [SendAbort(device, working_on, "this attempt is closed")]
            state, more = _resync_open(state, device, None, at)
            return state, out + more
    if opened is None or assignment is None or state.phase != "round":
        return state, []
    same = working_on == opened.attempt
    if assignment.status == "done":
        return state, [SendAck(device, opened.attempt)] if same else []
    if assignment.status == "updated" and same and assignment.update is not None:
        return state, [Fetch(assignment.update)]
    if assignment.status == "accepted" and same:
        return state, []
    if assignment.status == "offered" and same:
        return put(state, device, replace(assignment, status="accepted"))
    if assignment.status in {"offered", "accepted", "updated"}:
        again = replace(assignment, status="offered", update=None)
        state, out = put(state, device, again)
        return state, [*out, send_offer(opened, device, at)]
    return state, []


def _resync_straggler(state: State, device: str, working_on: Attempt | None) -> tuple[State, list[Instruction], bool]:
    """The same for a device whose round has closed without it; also whether that is all there is to say."""
    one = assignment_of(state, device, working_on) if working_on is not None else None
    if one is not None and one.attempt is not None:
        if one.status == "done":
            return state, [SendAck(device, one.attempt)], True
        if one.status == "updated" and one.update is not None:
            return state, [Fetch(one.update)], True
        state, out = put(state, device, replace(one, status="accepted")) if one.status == "offered" else (state, [])
        return state, out, True
    if (gone := state.stragglers.get(device)) is None:
        return state, [], False
    state, out = put(state, device, replace(gone, status="lost"))  # it knows nothing of it any more
    return state, out, False


def is_aggregated(state: State, device: str, attempt: Attempt) -> bool:
    """Whether what a device made in this attempt is in the model."""
    return (attempt == state.closed and device in state.last_aggregated) or attempt == state.devices[device].aggregated


def accepted(state: State, event: Accepted) -> Step:
    """The device trains."""
    assignment = assignment_of(state, event.device, event.attempt)
    if assignment is None or assignment.status != "offered":
        return drop(state, "duplicate")
    return put(state, event.device, replace(assignment, status="accepted"))


def progressed(state: State, event: Progressed) -> Step:
    """The device is so far; it also says that it took the offer, should that message have been lost."""
    assignment = assignment_of(state, event.device, event.attempt)
    if assignment is None or assignment.status not in {"offered", "accepted"}:
        return drop(state, "late")
    out: list[Instruction] = []
    if assignment.status == "offered":
        state, out = put(state, event.device, replace(assignment, status="accepted"))
    return state, [*out, EmitEvent("progress", state.stage, state.number, event.device, event.data)]


def declined(state: State, event: Declined) -> Step:
    """Plan the device again when it ran into a limit for the first time with these numbers; else record why."""
    assignment = assignment_of(state, event.device, event.attempt)
    if assignment is None or assignment.status not in {"offered", "accepted"}:
        return drop(state, "duplicate")
    refusal, placement = event.refusal, assignment.placement
    device = state.devices[event.device]
    tell = EmitEvent("declined", state.stage, state.number, event.device, figures_of(refusal))
    seen = refusal.needed is not None and any(refusal == was.refusal for was in device.declined)
    seen = seen or (refusal.reason == "packed" and any(was.refusal.reason == "packed" for was in device.declined))
    if refusal.reason not in REPLAN or seen:
        state, out = put(state, event.device, replace(assignment, status="declined", refusal=refusal), event.figures)
        state, more = check_close(state, event.at)
        return state, [*out, tell, *more]
    device = replace(device, declined=(*device.declined, decline_of(placement, refusal)))
    state = replace(state, devices={**state.devices, event.device: device})
    over = assignment.attempt is not None  # its round is: what it is planned anew for is the next
    changed = replace(assignment, status="declined" if over else "replanning", refusal=refusal)
    state, out = put(state, event.device, changed, event.figures)
    state, plan = ask(state, [event.device])
    return state, [*out, tell, *plan]


def replanned(state: State, device: str, at: float) -> Step:
    """The planner answered for a device that declined in this round."""
    opened = state.open
    assignment = opened.assignments.get(device) if opened is not None else None
    placement = state.devices[device].placement
    if opened is None or assignment is None or assignment.status != "replanning" or placement is None:
        return state, []
    if placement.refusal is not None:
        gone = replace(assignment, status="refused", refusal=placement.refusal)
        state, out = put(state, device, gone)
        state, more = check_close(state, at)
        return state, [*out, *more]
    why = assignment.refusal or Refusal()
    state, out = put(state, device, Assignment(placement))
    out.append(
        EmitEvent(
            "replanned",
            state.stage,
            state.number,
            device,
            {**how_data(placement), "reason": why.reason, "where": why.where},
        )
    )
    now = state.open
    return state, [*out, send_offer(now, device, at)] if now is not None else out


def announced(state: State, event: Announced) -> Step:
    """Fetch an update, unless it can not be one."""
    update = event.update
    assignment = assignment_of(state, update.device, update.attempt)
    if assignment is None or assignment.status not in {*OPEN, "done"}:
        state, out = drop(state, "late")
        return state, [*out, SendAck(update.device, update.attempt, False, Refusal(reason="late"))]
    if assignment.status == "done":
        state, out = drop(state, "duplicate")
        return state, [*out, SendAck(update.device, update.attempt)]
    refusal = unfit(state, assignment, update)
    if refusal is not None:
        return _reject(state, update.device, assignment, refusal, event.at)
    update = bounded(update, state.devices[update.device].claim)
    if assignment.status == "updated":
        state, _ = drop(state, "duplicate")
    state, out = put(state, update.device, replace(assignment, status="updated", update=update))
    return state, [*out, Fetch(update)]


def update_stored(state: State, event: UpdateStored) -> Step:
    """An update is on disk: count it once."""
    assignment = assignment_of(state, event.device, event.attempt)
    if assignment is None:
        raise IllegalMoveError(event, state, f"{event.device} has no update being fetched")
    if assignment.status != "updated" or assignment.update is None:  # it has said something else while this was told
        return drop(state, "duplicate")
    told = assignment.placement.predicted
    own, odd = plausible(assignment.update.figures, expected(state, event.attempt, assignment.placement, event.device))
    update = replace(
        assignment.update,
        manifest=event.manifest or assignment.update.manifest,
        metrics=likely(assignment.update.metrics),
        figures=own,
    )
    measured = {**event.figures, **{name: f for name, f in update.figures.items() if f.value is not None}}
    measured = {**update.figures, **measured}
    if "payload_up_bytes" in event.figures:  # the device can not know it before the last chunk has left
        measured["payload_up_bytes"] = event.figures["payload_up_bytes"]
    done = replace(assignment, status="done", update=update, measured=measured, changes=event.changes)
    device = state.devices[event.device]
    device = replace(device, factors=learned(device.factors, assignment.placement, told, measured))
    state = replace(state, devices={**state.devices, event.device: device})
    state, out = put(state, event.device, done, measured)
    out.append(SendAck(event.device, event.attempt))
    bill = _bill(update, measured)
    if late := staleness(state, event.attempt):
        bill["staleness"] = late
    out.append(EmitEvent("update", state.stage, state.number, event.device, bill))
    if odd:
        text = f"implausible figures are left out: {'; '.join(odd)}"
        state, warned = warn_once(state, event.device, "figures", text)
        out += warned
    state, more = check_close(state, event.at)
    return state, out + more


def update_invalid(state: State, event: UpdateInvalid) -> Step:
    """An update that can not be used."""
    assignment = assignment_of(state, event.device, event.attempt)
    if assignment is None:
        raise IllegalMoveError(event, state, f"{event.device} has no update being fetched")
    if assignment.status != "updated":  # it has had its answer, or has said something else
        return drop(state, "duplicate")
    return _reject(state, event.device, assignment, event.refusal, event.at)


def _reject(state: State, device: str, assignment: Assignment, refusal: Refusal, at: float) -> Step:
    """An update that can not be used: the round goes on with the others, and the device may end in quarantine."""
    attempt = assignment.attempt or (state.open.attempt if state.open is not None else Attempt())
    state, out = put(state, device, replace(assignment, status="rejected", refusal=refusal))
    state, told = quarantine.rejected(state, device, refusal)
    state, more = check_close(state, at)
    return state, [*out, SendAck(device, attempt, False, refusal), *told, *more]


def _bill(update: Update, measured: Figures) -> dict[str, Any]:
    names = ("payload_up_bytes", "payload_down_bytes", "step_peak_bytes", "flops")
    values = {name: measured[name].value if name in measured else None for name in names}
    seconds = measured["wall_s"].value if "wall_s" in measured else None
    samples = max(update.samples.values(), default=0)
    return {"loss": update.metrics.get("loss"), "samples": samples, "seconds": seconds, **values}
