"""The rules of one round, pure: who is offered, what each answer changes, when it closes, when it is tried again."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from coordinator.core import quarantine
from coordinator.core.instructions import (
    Aggregate,
    EmitEvent,
    EndTransfers,
    Fail,
    Instruction,
    SaveAssignment,
    SaveRound,
    SendAbort,
    SendOffer,
    Step,
)
from coordinator.core.outliers import outliers
from coordinator.core.planning import arrival_of, no_placement, reason_text
from coordinator.core.state import OPEN, Assignment, Round, State, Status
from coordinator.core.stragglers import is_buffered, is_closing, placed, staleness, updates_of
from edgefl.models.spec import modality_of
from edgefl.plan.job import Placement
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, Figures, Refusal
from edgefl.registry import choose
from edgefl.run_records import AssignmentRow

replace = msgspec.structs.replace


def open_round(state: State, at: float) -> Step:
    """Offer the next attempt to every chosen device; wait, or fail, when there is none."""
    state, begun = quarantine.readmitted(state)
    state, more = _outdated(state)
    begun += more
    able = free(state)
    if not able and not state.buffered and not any(state.devices[name].online for name in state.stragglers):
        state, more = no_placement(state, at)
        return state, begun + more
    number = Attempt(state.run, state.stage, state.number, state.attempt + 1, state.made_ms)
    draw = np.random.default_rng((state.seed, state.stage, state.number))  # the same run draws the same devices again
    full = state.policy.mode == "async" and len(state.buffered) >= state.policy.buffer  # an offer would be old at once
    selection = choose("select", state.recipe)
    choice = selection.bind(selection.method.draw)(able, draw, state.memory) if able and not full else []
    names = able if is_closing(state) else choice
    placements = {name: p for name in names if (p := state.devices[name].placement) is not None}
    deadline_s = state.policy.deadline_s if state.policy.deadline_s > 0 else math.inf
    opened = Round(
        attempt=number,
        tries=state.tries + 1,
        opened_at=at,
        deadline_at=at + deadline_s,
        assignments={name: Assignment(placement) for name, placement in placements.items()},
    )
    out: list[Instruction] = [*begun, SaveRound(number)]
    out += _unrepairable(state)
    out += [_saved(state, number, name, assignment) for name, assignment in opened.assignments.items()]
    out += [_saved(state, number, name, assignment) for name, assignment in quarantine.not_asked(state).items()]
    data = {"participants": names, "attempt": number.attempt}
    if state.stragglers:
        data["behind"] = sorted(state.stragglers)
    out.append(EmitEvent("round_started", state.stage, state.number, data=data))
    out += [send_offer(opened, name, at) for name in names]
    state = replace(state, phase="round", attempt=number.attempt, tries=opened.tries, open=opened)
    state, more = check_close(state, at) if not names else (state, [])
    return state, out + more


def _unrepairable(state: State) -> list[Instruction]:
    """In a stage's first attempt: the warning that by the devices' data no layer can be replaced."""
    repair = choose("repair", state.recipe)
    if repair.method.unlikely is None or (state.number, state.attempt) != (1, 0):
        return []
    able = [device for device in state.devices.values() if device.eligible and device.placement is not None]
    modalities = {
        owner
        for device in able
        if device.placement is not None
        for part in device.placement.stage.present
        if (owner := modality_of(part)) is not None
    }
    samples = {device.hello.device: device.hello.samples for device in able}
    why = repair.bind(repair.method.unlikely)(samples, sorted(modalities))
    text = f"repair: {repair.name} will replace nothing, or little: {why}"
    return [EmitEvent("warning", state.stage, state.number, data={"text": text})] if why else []


def free(state: State) -> list[str]:
    """Devices that can be offered something, in order of name."""
    return sorted(
        name
        for name, device in state.devices.items()
        if device.online and device.eligible and not device.barred and name not in state.stragglers
    )


def offer_free(state: State, at: float) -> Step:
    """Without lockstep: whoever has nothing to do in the open round is offered its model at once."""
    out: list[Instruction] = []
    opened = state.open
    if opened is None or state.phase != "round" or state.policy.mode != "async":
        return state, out
    for name in free(state):
        device = state.devices[name]
        if name not in opened.assignments and not device.ticket and device.placement is not None:
            state, more = put(state, name, Assignment(device.placement))
            opened = state.open or opened
            out += [*more, send_offer(opened, name, at)]
    return state, out


def _outdated(state: State) -> Step:
    """What is made from a model older than the policy admits does not count any more."""
    out: list[Instruction] = []
    most = state.policy.max_staleness
    working = list(state.stragglers.items())
    waiting = [(one.update.device, one) for one in state.buffered.values() if one.update is not None]
    for device, one in working + waiting:
        if one.attempt is not None and (late := staleness(state, one.attempt)) > most:
            late_by = Refusal("late", float(late), float(most), "rounds", "its model is too old")
            state, saved = put(state, device, replace(one, status="late", refusal=late_by))
            out += saved
            if one.status != "done":
                out.append(SendAbort(device, one.attempt, "its model is too old"))
    return state, out


def check_close(state: State, at: float) -> Step:
    """Close when all have answered, or the deadline is over, or only absent devices are missing and grace is over.

    Without lockstep: when the buffer is full. Devices at work on an earlier model are waited for only then, and where
    nobody is asked anew.
    """
    opened = state.open
    if opened is None or state.phase != "round":
        return state, []
    waiting = [name for name, a in opened.assignments.items() if a.status in OPEN]
    have, enough, full = len(done(opened)), len(done(opened)) >= quorum(state), False
    if is_buffered(state):
        waiting, have = [*waiting, *state.stragglers], have + len(state.buffered)
        enough, full = have > 0, state.policy.mode == "async" and have >= state.policy.buffer
    if full or not waiting or at >= opened.deadline_at:
        return _end(state, at, enough=enough)
    if enough and not any(state.devices[name].online for name in waiting):
        if opened.grace_at is None:
            return replace(state, open=replace(opened, grace_at=at + state.grace_s)), []
        return _end(state, at, enough=True) if at >= opened.grace_at else (state, [])
    return replace(state, open=replace(opened, grace_at=None)) if opened.grace_at is not None else state, []


def _end(state: State, at: float, *, enough: bool) -> Step:
    """Close, or try again; but first leave out what is out of line, whereupon more answers may be needed."""
    out: list[Instruction] = []
    for device, assignment, refusal in outliers(state):
        state, saved = put(state, device, replace(assignment, status="rejected", refusal=refusal))
        state, told = quarantine.rejected(state, device, refusal)
        out += [*saved, *told]
    if not out:
        return _close(state, at) if enough else _retry(state, at)
    state, more = check_close(state, at)
    return state, [*out, *more]


def quorum(state: State) -> int:
    """Updates needed: the policy's share of the devices offered, without those the planner has excluded; at least 1."""
    if state.open is None or is_buffered(state):
        return 1
    offered = sum(a.status != "refused" for a in state.open.assignments.values())
    return max(1, math.ceil(state.policy.quorum * offered - 1e-9))


def done(opened: Round) -> list[str]:
    """Devices whose updates are on disk, in order of name: the order in which they are added up."""
    return sorted(name for name, a in opened.assignments.items() if a.status == "done")


def aggregated_updates(state: State) -> list[Update]:
    """The updates of the round that is being closed: its own, and what was made from earlier models."""
    opened = state.open
    own = [opened.assignments[name].update for name in done(opened)] if opened is not None else []
    return [update for update in own if update is not None] + updates_of(state, state.aggregating)


def drop(state: State, reason: str) -> Step:
    """Count a message without effect."""
    return replace(state, dropped={**state.dropped, reason: state.dropped.get(reason, 0) + 1}), []


def put(state: State, device: str, assignment: Assignment, measured: Figures | None = None) -> Step:
    """Set a device's assignment, and have it recorded."""
    opened = state.open
    if assignment.attempt is not None:
        save = _saved(state, assignment.attempt, device, assignment, measured)
        return placed(state, device, assignment), [save]
    if opened is None:
        return state, []
    opened = replace(opened, assignments={**opened.assignments, device: assignment})
    save = _saved(state, opened.attempt, device, assignment, measured)
    return replace(state, open=opened), [save]


def expected(state: State, attempt: Attempt, placement: Placement, device: str) -> Figures:
    """Predicted figures of a device's round: its first, and its first and the last of a stage, cost more."""
    cost, known = placement.cost, state.devices.get(device)
    arrival = arrival_of(known, attempt.stage, state.rounds)
    found = placement.predicted
    if placement.predicted_first and (attempt.round == 1 or arrival != "staying"):
        found = placement.predicted_first
    if "payload_down_bytes" not in found or "payload_up_bytes" not in found:
        return found
    sizes: dict[str, int] = {}
    if arrival != "staying":
        sizes["payload_down_bytes"] = cost.joining_down_bytes if arrival == "joining" else cost.entering_down_bytes
        if attempt.round == 1 and not any(state.rounds[: attempt.stage - 1]):  # there are no prototypes yet
            sizes["payload_down_bytes"] -= cost.prototypes_down_bytes
    ends = attempt.round == state.rounds[attempt.stage - 1]
    up = cost.whole_up_bytes if ends else round(found["payload_up_bytes"].value or 0)
    sizes["payload_up_bytes"] = up + (cost.signature_bytes if known is None or not known.holds else 0)
    return {**found, **{name: replace(found[name], value=float(size)) for name, size in sizes.items()}}


def _saved(
    state: State, attempt: Attempt, device: str, assignment: Assignment, measured: Figures | None = None
) -> SaveAssignment:
    placement, update = assignment.placement, assignment.update
    planned = assignment.status in {"offered", "refused"}
    row = AssignmentRow(
        device=device,
        stage=attempt.stage,
        round=attempt.round,
        attempt=attempt.attempt,
        status=assignment.status,
        refusal=assignment.refusal,
        batch_size=state.batch_sizes[attempt.stage - 1],
        micro_batch=placement.hyper.micro_batch,
        trained=placement.stage.trained,
        samples=update.samples if update is not None else {},
        metrics=update.metrics if update is not None else {},
        predicted=expected(state, attempt, placement, device) if planned else {},
        measured=measured or {},
    )
    return SaveAssignment(row)


def _close(state: State, at: float) -> Step:
    """Nobody's answer counts any more in this round; where the policy keeps updates, it will in the next."""
    last = state.number == state.rounds[state.stage - 1]
    keep = state.policy.keeps and not last
    state = replace(state, aggregating=tuple(sorted(state.buffered)))
    state, out = _cut(state, keep=keep)
    opened = state.open
    if opened is None:
        return state, out
    for name, one in state.stragglers.items() if not keep else ():
        state, more = _given_up(state, name, one)
        out += more
    if not keep:
        out.append(EndTransfers(opened.attempt))
    updates = aggregated_updates(state)
    out.append(Aggregate(opened.attempt, tuple(updates)))
    counted = {update.device for update in updates}
    holders = {
        name: replace(state.devices[name], holds=opened.attempt.stage) for name in counted & state.devices.keys()
    }
    state = quarantine.forgiven(replace(state, devices={**state.devices, **holders}), counted)
    return replace(state, phase="closing", until=at), out


def _retry(state: State, at: float) -> Step:
    state, out = _cut(state)
    opened = state.open
    if opened is None:
        return state, out
    if not state.policy.keeps:
        out.append(EndTransfers(opened.attempt))
    out.append(SaveRound(opened.attempt, "failed", tuple(done(opened))))
    story = "; ".join(_outcome(name, a) for name, a in sorted(opened.assignments.items()))
    counted, needed = len(done(opened)), quorum(state)
    text = f"attempt {opened.attempt} got {counted} of {needed} updates it needs ({story})"
    if opened.tries >= state.policy.max_attempts:
        return replace(state, open=None), [*out, Fail("RunError", f"{text}; it was tried {opened.tries} times")]
    out += [SendAbort(name, opened.attempt, "the attempt failed") for name in done(opened)]
    out.append(EmitEvent("warning", state.stage, state.number, data={"text": f"{text}; it is tried again"}))
    until = at + state.retry_pause_s * opened.tries
    return replace(state, phase="pausing", until=until, open=None), out


def _cut(state: State, *, keep: bool = False) -> Step:
    """Whoever has not answered is late, or lost when it is not there either; or it goes on, one round behind."""
    out: list[Instruction] = []
    opened = state.open
    for name, assignment in opened.assignments.items() if opened is not None else ():
        if opened is None or assignment.status not in OPEN:
            continue
        if keep and assignment.status != "replanning":
            left = {other: one for other, one in (state.open or opened).assignments.items() if other != name}
            state = replace(state, open=replace(state.open or opened, assignments=left))
            state = placed(state, name, replace(assignment, attempt=opened.attempt))
        else:
            state, more = _given_up(state, name, assignment)
            out += more
    return state, out


def _given_up(state: State, device: str, assignment: Assignment) -> Step:
    status: Status = "late" if state.devices[device].online else "lost"
    state, saved = put(state, device, replace(assignment, status=status))
    attempt = assignment.attempt or (state.open.attempt if state.open is not None else Attempt())
    return state, [*saved, SendAbort(device, attempt, "the round is closed")]


def send_offer(opened: Round, device: str, at: float) -> SendOffer:
    """The offer of a device's part, with the time that is left."""
    left = 0.0 if math.isinf(opened.deadline_at) else max(1.0, opened.deadline_at - at)
    return SendOffer(device, opened.attempt, opened.assignments[device].placement, left)


def _outcome(device: str, assignment: Assignment) -> str:
    why = f" ({reason_text(assignment.refusal)})" if assignment.refusal is not None else ""
    return f"{device} {assignment.status}{why}"
