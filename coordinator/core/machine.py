"""The coordinator as a pure machine: ``step(state, event) -> (state, instructions)``. No clock, no I/O, no randomness.

    starting -> joining -> planning -> round -> closing -> evaluating -> (next round) … -> finished
                              |          |
                           waiting    pausing (the attempt failed and is tried again)

Messages of devices never raise: what is stale, double or out of turn is counted in ``state.dropped``. Reports of the
runner that can not be true raise :class:`coordinator.core.state.IllegalMoveError` with the story of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from coordinator.core import replies
from coordinator.core.hello import MOST_CONNECTIONS, introduced, strange
from coordinator.core.instructions import (
    CollectGarbage,
    DrainAll,
    EmitEvent,
    Evaluate,
    Fail,
    Instruction,
    SaveEnd,
    SaveEvaluation,
    SaveRound,
    SendAbort,
    SendAck,
    SendWelcome,
    Step,
)
from coordinator.core.one_time_warnings import warn_once
from coordinator.core.planning import answer, ask, nobody_fits
from coordinator.core.round import aggregated_updates, check_close, done, drop, offer_free, open_round
from coordinator.core.state import (
    Accepted,
    Aggregated,
    Announced,
    Begin,
    Declined,
    DeviceOffline,
    Evaluated,
    Event,
    HeartbeatSeen,
    IllegalMoveError,
    Joined,
    Planned,
    Progressed,
    State,
    Tick,
    UpdateInvalid,
    UpdateStored,
)
from coordinator.core.stragglers import assignment_of, mark_aggregated, staleness, still_needed
from coordinator.core.timeouts import Timeouts
from coordinator.core.update_header import overweights
from edgefl.plan.job import RunPlan
from edgefl.plan.schedule import is_closing
from edgefl.protocol.messages import PROTOCOL_VERSION
from edgefl.records import EvaluationRow, Refusal

replace = msgspec.structs.replace

#: Lines of story kept for an error: enough for one round of a fleet of ten.
STORY_LINES = 40


def initial(plan: RunPlan, timeouts: Timeouts) -> State:
    """The state before anything happened."""
    return State(
        run=plan.run,
        policy=plan.policy,
        rounds=tuple(stage.rounds for stage in plan.stages),
        batch_sizes=tuple(hyper.batch_size for hyper in plan.hypers),
        closing=next((stage.index for stage in plan.stages if is_closing(stage)), 0),
        seed=plan.seed,
        recipe=plan.server,
        every_round=plan.evaluate_every == "round",
        has_test=bool(plan.test),
        grace_s=timeouts.grace_s,
        retry_pause_s=timeouts.retry_pause_s,
    )


def step(state: State, event: Event) -> Step:
    """The one door: what happened goes in, the new state and what is to be done come out."""
    before = state.phase
    state, out = _HANDLERS[type(event)](state, event)
    state, more = offer_free(state, event.at)
    out = [*out, *more]
    for instruction in out:
        if isinstance(instruction, Fail):
            state = replace(state, phase="failed")
            out = [*out, SaveEnd("failed")]
            break
    if not isinstance(event, Tick | Progressed | HeartbeatSeen) or state.phase != before:
        line = f"{event.at:.3f} {_name(event)} [{before} -> {state.phase}]"
        state = replace(state, story=(*state.story[1 - STORY_LINES :], line))
    return state, out


def _name(event: Event) -> str:
    device = getattr(event, "device", "")
    if isinstance(event, Joined):
        device = event.hello.device
    if isinstance(event, Announced):
        device = event.update.device
    attempt = getattr(event, "attempt", "")
    return " ".join(str(word) for word in (type(event).__name__, device, attempt) if word)


def _begin(state: State, event: Begin) -> Step:
    if state.phase != "starting":
        raise IllegalMoveError(event, state, "the run has begun already")
    following = _following(state, event.stage, event.round)
    was = event.resumed
    if was is not None and (was.stage, was.number) in {following, (event.stage, event.round)}:
        planned = {"rounds": state.rounds, "batch_sizes": state.batch_sizes, "closing": state.closing}
        state = replace(was if (was.stage, was.number) == following else replace(was, open=None), **planned)
    until = event.at + state.policy.join_s
    state = replace(state, made_ms=event.made_ms, memory=event.memory, began_at=event.at, until=until)
    if following is not None:
        state = replace(state, stage=following[0], number=following[1], attempt=event.attempt)
    else:
        state = replace(state, stage=event.stage, number=event.round)
    last = event.unevaluated
    if last is not None and _due(state, last.stage, last.round):
        return replace(state, phase="evaluating", evaluating=last), [Evaluate(last)]
    if state.open is not None:
        return check_close(replace(state, phase="round"), event.at)
    return _finish(state, event.at) if following is None else (replace(state, phase="joining"), [])


def _following(state: State, stage: int, number: int) -> tuple[int, int] | None:
    """(stage, round) after this one; stages without rounds are passed over. None: that was the last."""
    if stage and number < state.rounds[stage - 1]:
        return stage, number + 1
    later = (index for index, rounds in enumerate(state.rounds, start=1) if index > stage and rounds > 0)
    first = next(later, None)
    return (first, 1) if first is not None else None


def _due(state: State, stage: int, number: int) -> bool:
    """Whether the model is evaluated after this round."""
    return state.has_test and (state.every_round or number == state.rounds[stage - 1])


def _joined(state: State, event: Joined) -> Step:
    hello = event.hello
    if hello.protocol != PROTOCOL_VERSION:
        return strange(drop(state, "protocol")[0], hello)
    state, out = introduced(state, hello)
    device = state.devices[hello.device]
    state = replace(state, returning=_without(state.returning, hello.device))
    state, more = replies.resync(state, hello.device, hello.working_on, event.at)
    out += more
    if state.phase == "joining":
        state, more = _enough(state, event.at)
        return state, out + more
    if state.stage and state.planned_stage == state.stage and state.phase not in {"finished", "failed"}:
        if device.placement is None and device.ticket == 0:
            state, more = ask(state, [hello.device])
            return state, out + more
        if state.phase == "waiting":
            state, more = _enter(state, event.at)
            return state, out + more
    return state, out


def _heartbeat_seen(state: State, event: HeartbeatSeen) -> Step:
    """A sign of life: brings back a device that was missed, and mends what a lost message left undone."""
    known = state.devices.get(event.device)
    if known is None or (not known.online and not event.reports_work):
        return state, [SendWelcome(event.device)]
    if not known.online:
        return _joined(state, Joined(event.at, replace(known.hello, working_on=event.working_on)))
    return replies.resync(state, event.device, event.working_on, event.at) if event.reports_work else (state, [])


def _device_offline(state: State, event: DeviceOffline) -> Step:
    device = state.devices.get(event.device)
    if device is None or not device.online:
        return drop(state, "duplicate")
    state = replace(state, devices={**state.devices, event.device: replace(device, online=False)})
    if _online(state) < state.policy.devices:  # without it the next round would have fewer than were asked for
        state = replace(state, returning={**state.returning, event.device: event.at + state.grace_s})
    state, out = check_close(state, event.at)
    if device.connections > MOST_CONNECTIONS:
        return state, out
    return state, [EmitEvent("device_left", state.stage, state.number, event.device, {"reason": event.reason}), *out]


def _without(returning: dict[str, float], name: str) -> dict[str, float]:
    return {other: until for other, until in returning.items() if other != name} if name in returning else returning


def _online(state: State) -> int:
    return sum(device.online for device in state.devices.values())


def _awaits(state: State, at: float) -> bool:
    """Whether devices are expected back: who was here before a restart, or has just left and is needed."""
    return any(at < until for until in state.returning.values())


def _enough(state: State, at: float) -> Step:
    if _awaits(state, at):
        return state, []
    online = _online(state)
    if online >= state.policy.devices or not state.until:
        return _enter(state, at)
    if at < state.until:
        return state, []
    wanted, waited = state.policy.devices, state.policy.join_s
    if not online:
        return state, [Fail("RunError", f"no device connected within {waited:g} s")]
    text = f"{online} of {wanted} devices connected within {waited:g} s; the run begins with them"
    state, out = _enter(state, at)
    return state, [EmitEvent("warning", state.stage, state.number, data={"text": text}), *out]


def _enter(state: State, at: float) -> Step:
    """On to the round that comes next: plan its stage first if that has not been done, and wait for answers."""
    if _awaits(state, at):
        return replace(state, phase="joining", until=0.0), []
    state = replace(state, returning={}) if state.returning else state
    if state.planned_stage != state.stage:
        devices = {n: replace(d, placement=None, ticket=0, declined=()) for n, d in state.devices.items()}
        state = replace(state, devices=devices, planned_stage=state.stage, phase="planning")
        state, out = ask(state, [name for name, device in devices.items() if device.online])
        return (state, out) if out else open_round(state, at)
    new = [n for n, device in state.devices.items() if device.online and device.placement is None and not device.ticket]
    state, out = ask(state, new)
    if any(device.online and device.ticket for device in state.devices.values()):
        return replace(state, phase="planning"), out
    return open_round(state, at)


def _planned(state: State, event: Planned) -> Step:
    state, names, out = answer(state, event.ticket, event.placements)
    if not names:
        return drop(state, "stale plan")
    if state.phase in {"planning", "waiting"}:
        state, more = _enter(state, event.at)
        return state, out + more
    if state.phase == "round":
        for name in names:
            state, more = replies.replanned(state, name, event.at)
            out += more
    return state, out


def _message(state: State, event: Accepted | Declined | Progressed | Announced) -> Step:
    """A device speaks of an attempt: drop it, and tell the device, when that is not the open one."""
    announced = isinstance(event, Announced)
    device = event.update.device if isinstance(event, Announced) else event.device
    attempt = event.update.attempt if isinstance(event, Announced) else event.attempt
    if device not in state.devices:
        state, out = drop(state, "unknown device")
        return state, [*out, SendWelcome(device)]
    if assignment_of(state, device, attempt) is None:
        if state.open is not None and attempt == state.open.attempt:
            return drop(state, "out of turn")
        state, _ = drop(state, "stale")
        counted = replies.is_aggregated(state, device, attempt)
        if announced:
            return state, [SendAck(device, attempt, counted, Refusal() if counted else Refusal(reason="stale"))]
        quiet = isinstance(event, Declined) or counted
        return state, [] if quiet else [SendAbort(device, attempt, "this attempt is closed")]
    if isinstance(event, Accepted):
        return replies.accepted(state, event)
    if isinstance(event, Declined):
        return replies.declined(state, event)
    if isinstance(event, Progressed):
        return replies.progressed(state, event)
    return replies.announced(state, event)


def _fetched(state: State, event: UpdateStored | UpdateInvalid) -> Step:
    assignment = assignment_of(state, event.device, event.attempt)
    if assignment is None or (assignment.attempt is None and state.phase != "round"):
        return drop(state, "late")  # its last chunk came while the round was being closed
    if isinstance(event, UpdateStored):
        return replies.update_stored(state, event)
    return replies.update_invalid(state, event)


def _aggregated(state: State, event: Aggregated) -> Step:
    opened = state.open
    if state.phase != "closing" or opened is None or event.attempt != opened.attempt:
        raise IllegalMoveError(event, state, "this attempt is not being aggregated")
    names = tuple(sorted({update.device for update in aggregated_updates(state)}))
    metrics = _metrics(state)
    saved = SaveRound(opened.attempt, "done", names, metrics, event.record, event.manifest)
    out: list[Instruction] = [
        saved,
        EmitEvent("round_closed", state.stage, state.number, data=_summary(state, event.at)),
    ]
    for refused in event.record.get("refused", ()):
        text = f"part {refused['part']} of {refused['device']} was left out: {refused['detail']}"
        out.append(EmitEvent("warning", state.stage, state.number, refused["device"], {"text": text}))
    for device, text in overweights(event.record):
        state, more = warn_once(state, device, "weight", text)
        out += more
    own = frozenset(done(opened))
    state = mark_aggregated(state, state.aggregating)
    state = replace(state, open=None, closed=opened.attempt, last_aggregated=own, tries=0, memory=event.memory)
    if _due(state, state.stage, state.number):
        return replace(state, phase="evaluating", evaluating=opened.attempt), [*out, Evaluate(opened.attempt)]
    state, more = _advance(state, event.at)
    return state, out + more


def _evaluated(state: State, event: Evaluated) -> Step:
    if state.phase != "evaluating" or event.attempt != state.evaluating:
        raise IllegalMoveError(event, state, "this attempt is not being evaluated")
    attempt = event.attempt
    rows = tuple(row for row in event.rows if math.isfinite(row.value))
    values = [msgspec.to_builtins(row) for row in rows]
    out: list[Instruction] = [
        SaveEvaluation(rows),
        EmitEvent("evaluated", attempt.stage, attempt.round, data={"values": values}),
    ]
    if lost := [row for row in event.rows if not math.isfinite(row.value)]:
        out.append(EmitEvent("warning", attempt.stage, attempt.round, data={"text": _no_numbers(lost)}))
    state = replace(state, evaluating=None)
    if (attempt.stage, attempt.round) != (state.stage, state.number):  # an earlier process had left it over
        state, more = _enough(replace(state, phase="joining", until=event.at + state.policy.join_s), event.at)
        return state, out + more
    state, more = _advance(state, event.at)
    return state, out + more


def _no_numbers(rows: list[EvaluationRow]) -> str:
    names = sorted({f"{row.metric} with {'+'.join(row.available)}" for row in rows})
    text = f"the evaluation has no figure for {len(rows)} of its rows: {', '.join(names[:3])}"
    return f"{text}{', …' if len(names) > 3 else ''} is not a finite number; the model has diverged"


def _advance(state: State, at: float) -> Step:
    """The round is over: tidy up, then the next round, the next stage, or the end."""
    out: list[Instruction] = [CollectGarbage(*still_needed(state))]
    following = _following(state, state.stage, state.number)
    if following is None or following[0] != state.stage:
        out.append(EmitEvent("stage_finished", state.stage, state.number))
    if following is None:
        state, more = _finish(state, at)
        return state, out + more
    state, more = _enter(replace(state, stage=following[0], number=following[1], attempt=0, tries=0), at)
    return state, out + more


def _finish(state: State, at: float) -> Step:
    tell = EmitEvent("run_finished", data={"status": "done", "seconds": at - state.began_at})
    return replace(state, phase="finished"), [SaveEnd("done"), DrainAll("the run is finished"), tell]


def _tick(state: State, event: Tick) -> Step:
    if state.phase == "round":
        return check_close(state, event.at)
    if state.phase == "joining":
        return _enough(state, event.at)
    if state.phase == "pausing" and event.at >= state.until:
        return _enter(state, event.at)
    if state.phase == "waiting" and event.at >= state.until:
        where = f"stage {state.stage}, round {state.number}"
        refused = [d for d in state.devices.values() if d.placement is not None and d.placement.refusal is not None]
        more = f"; {nobody_fits(state)}" if refused else ""
        text = f"no device that can train was connected for {state.policy.join_s:g} s ({where}){more}"
        return state, [Fail("RunError", text)]
    return state, []


def _metrics(state: State) -> dict[str, float]:
    """Means of the devices' metrics, weighted by samples."""
    sums: dict[str, tuple[float, float]] = {}
    for update in aggregated_updates(state):
        weight = float(max(update.samples.values(), default=0))
        for metric, value in update.metrics.items():
            total, weights = sums.get(metric, (0.0, 0.0))
            sums[metric] = (total + weight * value, weights + weight)
    return {metric: total / weights for metric, (total, weights) in sorted(sums.items()) if weights > 0}


def _summary(state: State, at: float) -> dict[str, Any]:
    opened = state.open
    assignments = opened.assignments if opened is not None else {}
    older = [state.buffered[key] for key in state.aggregating]
    payload = 0.0
    for assignment in [*assignments.values(), *older]:
        for name in ("payload_up_bytes", "payload_down_bytes"):
            figure = assignment.measured.get(name)
            payload += (figure.value or 0.0) if figure is not None else 0.0
    found: dict[str, Any] = {
        "participants": sorted({update.device for update in aggregated_updates(state)}),
        "late": sorted(name for name, a in assignments.items() if a.status == "late"),
        "lost": sorted(name for name, a in assignments.items() if a.status == "lost"),
        "loss": _metrics(state).get("loss"),
        "seconds": at - opened.opened_at if opened is not None else None,
        "payload_bytes": payload,
    }
    if state.policy.keeps:
        found["updates"] = len(aggregated_updates(state))
        found["behind"] = sorted(state.stragglers)
        found["staleness"] = {
            u.device: late for u in aggregated_updates(state) if (late := staleness(state, u.attempt))
        }
    return found


_HANDLERS: dict[type, Callable[[State, Any], Step]] = {
    Begin: _begin,
    HeartbeatSeen: _heartbeat_seen,
    Joined: _joined,
    DeviceOffline: _device_offline,
    Planned: _planned,
    Accepted: _message,
    Declined: _message,
    Progressed: _message,
    Announced: _message,
    UpdateStored: _fetched,
    UpdateInvalid: _fetched,
    Aggregated: _aggregated,
    Evaluated: _evaluated,
    Tick: _tick,
}
