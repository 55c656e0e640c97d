"""The coordinator as a pure machine: ``step(state, event) -> (state, instructions)``. No clock, no I/O, no randomness.

    starting -> joining -> planning -> round -> aggregating -> evaluating -> (next round) … -> finished
                              |          |
                           waiting    retrying (the attempt failed and is tried again)

An operator's pause leads to paused in place of the next round; an operator's stop, from anywhere, to stopped.
``TRANSITIONS``, at the end, says what each event does in each phase. Messages of devices never raise: what is stale,
double or out of turn is counted in ``state.dropped``. Impossible reports of the runner raise
:class:`coordinator.core.moves.IllegalMoveError` with the story of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from coordinator.core import moves as m
from coordinator.core import replies
from coordinator.core.between_rounds import (
    begin_round_if_enough,
    end_waiting,
    next_round,
    pause,
    pause_after_round,
    resume,
    try_again,
    wait_for_devices,
)
from coordinator.core.crowd import call_at_work, came, end, note_present
from coordinator.core.known_devices import (
    MOST_CONNECTIONS,
    ask,
    introduce,
    is_prepared,
    refuse_protocol,
    replaced,
    take_placements,
)
from coordinator.core.moves import Event, Instruction, Steps
from coordinator.core.periods import makes_model
from coordinator.core.plausibility import overweights
from coordinator.core.returning import expect, expect_others, forget, is_first_back
from coordinator.core.round_rules import (
    aggregated_updates,
    check_close,
    done,
    metric_means,
    offer_free,
    release,
    still_needed,
    summary,
)
from coordinator.core.state import ENDED, Phase, State
from coordinator.core.step_back import can_step_back, step_back, undo_of
from edgefl.plan.periods import period_length
from edgefl.protocol.releases import works_with
from edgefl.records import Refusal
from edgefl.report.refusals import REPLACED, REVOKED
from edgefl.run_records import EventRow

replace = msgspec.structs.replace

Rule = Callable[[Steps, Any], object]
#: Lines of story kept for an error: enough for one round of a fleet of ten.
STORY_LINES = 40


def perform(steps: Steps, event: Event) -> None:
    """Apply the rule of TRANSITIONS for this event and phase."""
    usual, special = TRANSITIONS[type(event)]
    special.get(steps.state.phase, usual)(steps, event)


def step(state: State, event: Event) -> tuple[State, list[Instruction]]:
    """The new state after an event, and what is to be done, in order."""
    before, steps = state.phase, Steps(state, event.at)
    perform(steps, event)
    offer_free(steps)
    if any(isinstance(instruction, m.Fail) for instruction in steps.out):
        steps.set(phase=Phase.FAILED)
        steps.do(m.SaveEnd("failed"))
    after = steps.state.phase
    if not isinstance(event, m.Tick | m.Progressed | m.HeartbeatSeen) or after is not before:
        words = (type(event).__name__, getattr(event, "device", ""), getattr(event, "attempt", ""))
        said = " ".join(str(word) for word in words if word)
        line = f"{event.at:.3f} {said} [{before.value} -> {after.value}]"
        steps.set(story=(*steps.state.story[1 - STORY_LINES :], line))
    return steps.state, steps.out


def _begin(steps: Steps, event: m.Begin) -> None:
    plan, stands, was = steps.state.plan, event.position, event.resumed
    steps.set(memory=event.memory)
    following = round_after(steps.state, stands.stage, stands.round)
    if was is not None and (was.stage, was.number) in {following, (stands.stage, stands.round)}:
        steps.state = replace(was, plan=plan)
    stage, number = following or (stands.stage, stands.round)
    steps.set(stage=stage, number=number, made_ms=stands.made_ms, earlier_ms=stands.earlier_ms, memory=event.memory)
    steps.set(began_at=event.at - event.age_s)
    if following is not None:
        steps.set(attempt=stands.attempt)
    last = stands.unevaluated
    if last is not None and _is_evaluated(steps.state, last.stage, last.round):
        steps.set(phase=Phase.EVALUATING, evaluating=last)
        steps.do(m.Evaluate(last))
    elif steps.state.open is not None:
        steps.set(phase=Phase.ROUND)
        call_at_work(steps)
        check_close(steps)
    elif following is None:
        _finish(steps)
    else:
        wait_for_devices(steps)


def round_after(state: State, stage: int, number: int) -> tuple[int, int] | None:
    """(stage, round) after this one; stages without rounds are passed over. None: no other may follow."""
    if state.memory.over:
        return None
    if stage and number < state.rounds[stage - 1] and not state.memory.ended(stage):
        return stage, number + 1
    later = (index for index, rounds in enumerate(state.rounds, start=1) if index > stage and rounds > 0)
    first = next(later, None)
    return (first, 1) if first is not None else None


def _joined(steps: Steps, event: m.Joined) -> None:
    """Record a device's hello and resume its exchange; begin the round, or plan the device."""
    hello, phase = event.hello, steps.state.phase
    if not works_with(hello.protocol):
        refuse_protocol(steps, hello)
        return
    if not steps.state.plan.takes(hello.device):
        steps.drop("not eligible")
        steps.do(m.SendDrain(hello.device, NOT_ELIGIBLE))
        return
    if not is_prepared(steps, hello):
        return
    known = steps.state.devices.get(hello.device)
    if known is not None and known.awaited and hello.session and hello.session == known.previous_session:
        steps.drop("replaced")  # the old machine's, through a broker that has not read its files yet
        return
    first = is_first_back(steps.state, hello.device)
    introduce(steps, hello, event.generation)
    forget(steps, hello.device)
    if first:
        expect_others(steps, hello.device)
    called = _came(steps, hello.device)
    if steps.state.devices[hello.device].out:
        steps.do(m.SendDrain(hello.device, LEFT_OUT))
        return
    if called:
        return
    replies.resync(steps, hello.device, hello.working_on)
    if phase is Phase.JOINING:
        begin_round_if_enough(steps)
    elif phase not in {Phase.STARTING, *ENDED} and steps.state.planned_stage == steps.state.stage:
        device = steps.state.devices[hello.device]
        if device.placement is None and not device.ticket:
            ask(steps, [hello.device])
        elif phase is Phase.WAITING:
            next_round(steps)


def _came(steps: Steps, name: str) -> bool:
    """True for a device that was called; the last one begins the round."""
    called = name in steps.state.called
    if called and came(steps, name):
        next_round(steps)
    return called


def _heartbeat_seen(steps: Steps, event: m.HeartbeatSeen) -> None:
    """Handle a heartbeat: reconnect an offline device, repeat messages that may have been lost."""
    known = steps.state.devices.get(event.device)
    if known is None and not steps.state.plan.takes(event.device):
        steps.drop("not eligible")
    elif known is None or known.awaited or (not known.online and not event.reports_work):
        steps.do(m.SendWelcome(event.device))
    elif not known.online:
        perform(steps, m.Joined(event.at, replace(known.hello, working_on=event.working_on), known.generation))
    elif event.reports_work:
        replies.resync(steps, event.device, event.working_on, beat=True)


def _device_offline(steps: Steps, event: m.DeviceOffline) -> None:
    device = steps.state.devices.get(event.device)
    end(steps, event.device)
    if device is None or not device.online:
        steps.drop("duplicate")
        _came(steps, event.device)
        return
    steps.set_device(event.device, online=False)
    expect(steps, event.device)
    if device.connections <= MOST_CONNECTIONS:
        steps.emit("device_left", event.device, {"reason": event.reason})
    check_close(steps)


def _found_present(steps: Steps, event: m.Present) -> None:
    """Devices of a crowd are there again that a round waits for."""
    note_present(steps, event)
    next_round(steps)


def _revoked(steps: Steps, event: m.Revoked) -> None:
    """Expect nothing more of this device: neither the open round nor the next one waits for it."""
    name, device = event.device, steps.state.devices.get(event.device)
    if device is None or device.revoked:
        steps.drop("unknown device" if device is None else "duplicate")
        return
    steps.emit("device_left", name, {"reason": REVOKED})
    steps.set_device(name, online=False, revoked=True)
    _do_without(steps, name, Refusal(REVOKED))


def _replaced(steps: Steps, event: m.Replaced) -> None:
    """Forget the machine that had the name; the open round does without it, later ones wait for its successor."""
    name, device = event.device, steps.state.devices.get(event.device)
    if device is None or device.generation == event.generation:
        steps.drop("unknown device" if device is None else "duplicate")
        return
    steps.emit("device_left", name, {"reason": REPLACED, "generation": event.generation})
    steps.set_device(name, online=False)
    _do_without(steps, name, Refusal(REPLACED))
    steps.set(devices={**steps.state.devices, name: replaced(steps.state.devices[name], event.generation)})


def _do_without(steps: Steps, name: str, refusal: Refusal) -> None:
    """Stop offers to a device and waits for it; the open round goes on without it."""
    forget(steps, name)
    release(steps, name, refusal)
    check_close(steps)
    if steps.state.phase is Phase.JOINING:
        begin_round_if_enough(steps)


def _planned(steps: Steps, event: m.Planned) -> None:
    in_round, names = steps.state.phase is Phase.ROUND, take_placements(steps, event)
    for name in names if in_round else ():
        replies.replanned(steps, name)
    if names and not in_round:
        next_round(steps)


def _aggregated(steps: Steps, event: m.Aggregated) -> None:
    state, opened = steps.state, steps.state.open
    if opened is None or event.attempt != opened.attempt:
        raise m.IllegalMoveError(event, state, NOT_AGGREGATING)
    names = tuple(sorted({update.device for update in aggregated_updates(state)}))
    closed = m.SavedRound(
        stage=event.attempt.stage,
        round=event.attempt.round,
        attempt=event.attempt.attempt,
        status="done",
        participants=names,
        metrics=metric_means(state),
        record=event.record,
        manifest=event.manifest,
    )
    steps.do(closed)
    account = {"account": event.record["account"]} if "account" in event.record else {}
    steps.emit("round_closed", data=summary(state, event.at) | account)
    for refused in event.record.get("refused", ()):
        text = f"part {refused['part']} of {refused['device']} was left out: {refused['detail']}"
        steps.warn(text, refused["device"])
    if choice := event.record.get("choice_of_k"):
        steps.emit("k_chosen", data=choice)
    for device, text in overweights(event.record.get("parts", {})):
        steps.warn_once(device, "weight", text)
    devices, aggregating = dict(steps.state.devices), [state.buffered[key] for key in state.aggregating]
    for update in [one.update for one in aggregating if one.update is not None]:
        devices[update.device] = replace(devices[update.device], aggregated=update.attempt)
    steps.set(
        open=None,
        closed=opened.attempt,
        last_aggregated=tuple(done(opened)),
        devices=devices,
        buffered={key: one for key, one in state.buffered.items() if key not in state.aggregating},
        aggregating=(),
        tries=0,
        undo=None if event.memory.ended(state.stage) else undo_of(state),
        memory=event.memory,
    )
    if _is_evaluated(steps.state, state.stage, state.number):
        steps.set(phase=Phase.EVALUATING, evaluating=opened.attempt)
        steps.do(m.Evaluate(opened.attempt))
    else:
        _advance(steps)


def _is_evaluated(state: State, stage: int, number: int) -> bool:
    """True if the model is evaluated after this round: only after whole exchanges.

    In periods those are due that are the first at or after a multiple of ``evaluate_every``.
    """
    every, length = state.plan.evaluate_every, period_length(state.plan, state.plan.stages[stage - 1])
    due = number // every > (number - 1) // length * length // every if isinstance(every, int) else every == "round"
    due = due or number == state.rounds[stage - 1] or state.memory.ended(stage)
    return bool(state.plan.test) and due and makes_model(state.plan, stage, number)


def _evaluated(steps: Steps, event: m.Evaluated) -> None:
    state, attempt = steps.state, event.attempt
    if attempt != state.evaluating:
        raise m.IllegalMoveError(event, state, NOT_EVALUATING)
    rows = tuple(row for row in event.rows if math.isfinite(row.value))
    where, values = (attempt.stage, attempt.round), [msgspec.to_builtins(row) for row in rows]
    if event.rows:
        steps.do(*rows, EventRow(0.0, "evaluated", *where, data={"values": values}))
    if lost := [row for row in event.rows if not math.isfinite(row.value)]:
        names = sorted({f"{row.metric} with {'+'.join(row.available)}" for row in lost})
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        text = f"the evaluation has no figure for {len(lost)} of its rows: {listed} is not a finite number"
        steps.do(EventRow(0.0, "warning", *where, data={"text": f"{text}; the model has diverged"}))
    steps.set(evaluating=None, evaluable=not lost if event.rows else state.evaluable)
    if lost and state.evaluable and can_step_back(state):
        step_back(steps, "the evaluation cannot calculate with the model", again=True)
    elif where == (state.stage, state.number):
        _advance(steps)
    else:  # an earlier process had left it over
        wait_for_devices(steps)


def _advance(steps: Steps) -> None:
    """After a round: collect garbage, then begin the next round or stage, or end the run."""
    state = steps.state
    following = round_after(state, state.stage, state.number)
    if following is None:
        steps.set(undo=None)
    steps.do(still_needed(steps.state))
    if following is None or following[0] != state.stage:
        steps.emit("stage_finished", data=_ended_early(state))
    if following is None:
        _finish(steps)
    else:
        steps.set(stage=following[0], number=following[1], attempt=0, tries=0)
        next_round(steps)


def _ended_early(state: State) -> dict[str, object]:
    """Event data of a stage ended early: rounds ``planned``, and the ``best``, whose model is kept; else {}.

    ``unspent``: rounds of later stages beyond the privacy budget.
    """
    if not state.memory.ended(state.stage):
        return {}
    if state.memory.over:
        return {"planned": state.rounds[state.stage - 1], "unspent": sum(state.rounds[state.stage :])}
    return {"planned": state.rounds[state.stage - 1], "best": state.memory.stage.best}


def _finish(steps: Steps) -> None:
    steps.set(phase=Phase.FINISHED)
    data = {"status": "done", "seconds": steps.at - steps.state.began_at}
    steps.do(m.SaveEnd("done"), m.DrainAll("the run is finished"), EventRow(kind="run_finished", data=data))


def _look_at_round(steps: Steps, event: m.Tick) -> None:
    if event.links != steps.state.links:
        steps.set(links=event.links)
    check_close(steps)


def _stop(steps: Steps, event: m.StopAsked) -> None:
    """End the run. The open attempt stays on record as it is: the process that resumes the run goes on with it."""
    steps.emit("run_stopped", data={"by": event.by, "seconds": steps.at - steps.state.began_at})
    steps.set(phase=Phase.STOPPED, paused="")
    steps.do(m.SaveEnd("stopped"), m.DrainAll(f"the run was stopped ({event.by})"))


def _leave_out(steps: Steps, event: m.LeaveOutAsked) -> None:
    """Leave a device out for the operator, through restarts as well; the open round goes on without it."""
    name, state = event.device, steps.state
    if name not in state.devices or state.devices[name].out:
        steps.drop("not in the run")
        return
    steps.emit("left_out", name, {"by": event.by})
    steps.set_device(name, left_out=event.by)
    _do_without(steps, name, Refusal("left_out", detail=f"{LEFT_OUT} ({event.by})"))
    steps.do(m.SendDrain(name, LEFT_OUT))  # last: of an attempt that is aborted before, the device tells the cost


def _take_in(steps: Steps, event: m.TakeInAsked) -> None:
    """Take a device in again: welcome it, for a hello and a plan for the next round."""
    device = steps.state.devices.get(event.device)
    if device is None or device.revoked or not device.left_out:
        steps.drop("not left out")
        return
    steps.set_device(event.device, left_out="")
    steps.emit("taken_in", event.device, {"by": event.by, "online": device.online})
    if device.online:
        steps.do(m.SendWelcome(event.device))


def ignore(steps: Steps, event: Event) -> None:
    """The event does nothing in this phase, on purpose."""


def illegal(why: str) -> Rule:
    """The event is impossible in this phase: a defect of the runner."""

    def rule(steps: Steps, event: Event) -> None:
        raise m.IllegalMoveError(event, steps.state, why)

    return rule


NOT_ELIGIBLE = "this run is for other devices (round.eligible, round.excluded)"
LEFT_OUT = "this device is left out of the run"
NOT_AGGREGATING, NOT_EVALUATING = "this attempt is not being aggregated", "this attempt is not being evaluated"
_NOT_RUNNING = (Phase.STARTING, *ENDED)
_BETWEEN_ROUNDS: dict[Phase, Rule] = dict.fromkeys(
    (Phase.JOINING, Phase.PLANNING, Phase.WAITING, Phase.RETRYING), pause
)
#: What each event does, and what it does instead in these phases. After every event, ``offer_free`` sees to devices
#: without an assignment.
TRANSITIONS: dict[type[Event], tuple[Rule, dict[Phase, Rule]]] = {
    m.Begin: (illegal("the run has begun already"), {Phase.STARTING: _begin}),
    m.Joined: (_joined, {}),
    m.HeartbeatSeen: (_heartbeat_seen, {}),
    m.DeviceOffline: (_device_offline, {}),
    m.Revoked: (_revoked, dict.fromkeys(_NOT_RUNNING, ignore)),
    m.Replaced: (_replaced, dict.fromkeys(_NOT_RUNNING, ignore)),
    m.Planned: (take_placements, dict.fromkeys((Phase.PLANNING, Phase.WAITING, Phase.ROUND), _planned)),
    m.Accepted: (replies.of_attempt(replies.accepted), {}),
    m.Declined: (replies.of_attempt(replies.declined), {}),
    m.Progressed: (replies.of_attempt(replies.progressed), {}),
    m.Spent: (replies.spent, {}),
    m.Announced: (replies.of_attempt(replies.announced), {}),
    m.UpdateStored: (replies.of_fetched(replies.update_stored), {}),
    m.UpdateInvalid: (replies.of_fetched(replies.reject), {}),
    m.Aggregated: (illegal(NOT_AGGREGATING), {Phase.AGGREGATING: _aggregated}),
    m.Evaluated: (illegal(NOT_EVALUATING), {Phase.EVALUATING: _evaluated}),
    m.Tick: (
        ignore,
        {
            Phase.JOINING: lambda steps, _: begin_round_if_enough(steps),
            Phase.ROUND: _look_at_round,
            Phase.RETRYING: try_again,
            Phase.WAITING: end_waiting,
        },
    ),
    m.Present: (note_present, {Phase.WAITING: _found_present}),
    m.PauseAsked: (pause_after_round, _BETWEEN_ROUNDS | dict.fromkeys((Phase.PAUSED, *_NOT_RUNNING), ignore)),
    m.ResumeAsked: (resume, dict.fromkeys(_NOT_RUNNING, ignore)),
    m.StopAsked: (_stop, dict.fromkeys(_NOT_RUNNING, ignore)),
    m.LeaveOutAsked: (_leave_out, dict.fromkeys(_NOT_RUNNING, ignore)),
    m.TakeInAsked: (_take_in, dict.fromkeys(_NOT_RUNNING, ignore)),
}
