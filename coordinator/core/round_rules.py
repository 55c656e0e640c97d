"""Rules of one round: offers, closing, retries and stragglers. Pure.

A straggler is a device that has not answered when its round closes, where the policy keeps late updates (async, or
round.late: keep). It moves to ``State.stragglers``, with its attempt. Its update lies in ``State.buffered`` until the
next aggregation includes it, by its staleness: the rounds closed since its model was made. A stage's last round drops
both: what other stages trained is other parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from coordinator.core.assignments import offer, placement_in, put, put_earlier, row_of
from coordinator.core.crowd import call_absent, free_in, sort_out
from coordinator.core.known_devices import count_rejected, not_asked, readmit, reason_text, wait_for_able
from coordinator.core.lateness import late
from coordinator.core.moves import Aggregate, CollectGarbage, EndTransfers, Fail, SavedRound, SendAbort, Steps
from coordinator.core.outliers import clipped, outliers
from coordinator.core.periods import continuing, missing, period_rounds
from coordinator.core.state import Assignment, Phase, Round, State
from coordinator.core.step_back import broken, can_step_back, step_back
from coordinator.core.unfinished import end_without_update
from edgefl.models.spec import modality_of
from edgefl.plan.choice_of_k import without_counts
from edgefl.plan.stages import is_closing, stage_in, trained_stages
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, Refusal
from edgefl.registry import choose
from edgefl.run_records import OPEN

replace = msgspec.structs.replace


def staleness(state: State, attempt: Attempt) -> int:
    """Staleness in rounds of the model that ``attempt`` starts from."""
    return state.number - attempt.round


def in_closing_round(state: State) -> bool:
    """True in the closing round, with offers to, and waits for, every eligible device."""
    return state.stage > 0 and is_closing(state.plan.stages[state.stage - 1])


def is_buffered(state: State) -> bool:
    """True if the round closes by the number of updates: async, or with only stragglers at work."""
    if in_closing_round(state):
        return False
    return state.policy.mode == "async" or (state.open is not None and not state.open.assignments)


def still_needed(state: State) -> CollectGarbage:
    """Roots of garbage collection: updates on disk or on their way, and the states their attempts began from."""
    every = [*state.stragglers.values(), *state.buffered.values()]
    updates = tuple(one.update for one in every if one.update is not None)
    began = {one.attempt for one in every if one.attempt is not None}
    memories = [state.memory] if state.undo is None else [state.memory, state.undo.memory]
    states = tuple(memory.stage.state for memory in memories if memory.stage.state)
    attempts = began if state.undo is None else began | {state.undo.attempt}
    return CollectGarbage(updates, frozenset(attempts), states)


def _drop_outdated(steps: Steps) -> None:
    """Abort or drop updates made from a model older than the policy admits."""
    state, most = steps.state, steps.state.policy.max_staleness
    waiting = [(one.update.device, one) for one in state.buffered.values() if one.update is not None]
    for device, one in [*state.stragglers.items(), *waiting]:
        if one.attempt is not None and (late := staleness(state, one.attempt)) > most:
            late_by = Refusal("late", float(late), float(most), "rounds", "its model is too old")
            end_without_update(steps, device, replace(one, status="late", refusal=late_by))
            if one.status != "done":
                steps.do(SendAbort(device, one.attempt, "its model is too old"))


def open_round(steps: Steps) -> None:
    """Offer the next attempt to every chosen device; wait, or fail, when there is none."""
    readmit(steps)
    _drop_outdated(steps)
    sort_out(steps)
    state, at = steps.state, steps.at
    able = _free(state)
    if not len(able) and not state.buffered and not any(state.devices[name].online for name in state.stragglers):
        wait_for_able(steps)
        return
    number = Attempt(state.plan.run, state.stage, state.number, state.attempt + 1, state.made_ms)
    members = continuing(state, able)
    names = list(members or _chosen(state, able))
    if call_absent(steps, names):
        return
    periods = period_rounds(state, names, resumes=bool(members))
    placed = {name: placement for name in names if (placement := state.devices[name].placement) is not None}
    assignments = {
        name: Assignment(placement_in(state, number, name, placement), period=periods.get(name))
        for name, placement in placed.items()
    }
    opened = Round(number, state.tries + 1, at, state.deadline(at), assignments)
    steps.do(SavedRound(number.stage, number.round, number.attempt))
    if (state.number, state.attempt) == (1, 0):
        _warn_unrepairable(steps)
    for name, assignment in (*assignments.items(), *not_asked(state).items()):
        steps.do(row_of(state, number, name, assignment))
    behind = {"behind": sorted(state.stragglers)} if state.stragglers else {}
    later = sorted(set(able) - set(members)) if members else []
    waiting = {"next_period": later} if later else {}
    crowd = {"crowd": len(able)} if state.crowd is not None else {}
    stage = stage_in(state.plan, state.stage, state.number)
    drawn = {"drawn": trained_stages(stage)} if stage.draw else {}
    steps.emit(
        "round_started", data={"participants": names, "attempt": number.attempt, **crowd, **drawn, **behind, **waiting}
    )
    if state.memory.period and not members:
        steps.warn("too few devices of the period can go on with it; another period begins with this round")
    if not members:
        steps.set(period_devices=tuple(periods))
    steps.set(phase=Phase.ROUND, attempt=number.attempt, tries=opened.tries, open=opened)
    for name in names:
        offer(steps, name)
    if not names:
        check_close(steps)


def _free(state: State) -> Sequence[str]:
    """Devices free for an offer, by name; one set aside only if there is no other."""
    if state.crowd is not None:
        crowd, aside = free_in(state), state.set_aside
        return (aside[:2] == (state.stage, state.number) and crowd.without(aside[2])) or crowd
    free = sorted(
        name
        for name, device in state.devices.items()
        if device.online and device.eligible and name not in state.stragglers
        if not device.barred and not device.out
    )
    return [name for name in free if state.set_aside != (state.stage, state.number, name)] or free


def _chosen(state: State, able: Sequence[str]) -> Sequence[str]:
    """Devices for the next attempt's offers: all in the closing round, else by the slot "select"."""
    if in_closing_round(state):
        return able
    draw = np.random.default_rng((state.plan.seed, state.stage, state.number))  # the same run draws the same again
    full = state.policy.mode == "async" and len(state.buffered) >= state.policy.buffer  # an offer would be old at once
    selection = choose("select", state.plan.server)
    return selection.bind(selection.method.draw)(able, draw, state.memory) if able and not full else []


def _warn_unrepairable(steps: Steps) -> None:
    """Warn if the devices' modalities and samples leave no layer for the repair to replace."""
    repair = choose("repair", steps.state.plan.server)
    if repair.method.unlikely is None:
        return
    able = [device for device in steps.state.devices.values() if device.eligible]
    owners = {modality_of(part) for one in able if one.placement for part in one.placement.stage.present}
    samples = {device.hello.device: device.hello.samples for device in able}
    why = repair.bind(repair.method.unlikely)(samples, sorted(owner for owner in owners if owner is not None))
    if why:
        steps.warn(f"repair: {repair.name} will replace nothing, or little: {why}")


def offer_free(steps: Steps) -> None:
    """In async rounds: offer the open round's model to devices without an assignment in it; not before a pause."""
    state = steps.state
    if state.phase is not Phase.ROUND or state.policy.mode != "async" or state.paused:
        return
    for name in _free(state):
        device = state.devices[name]
        if name not in state.assignments and not device.ticket and device.placement is not None:
            put(steps, name, Assignment(device.placement))
            offer(steps, name)


def quorum(state: State) -> int:
    """Number of updates needed to close the open attempt: a share of its offers, at least one; if buffered, one.

    In a period it is a share of the devices that the period began with: shares of those left would compound.
    A device that was left out meanwhile is not counted: the operator has decided that the round does without it.
    """
    if is_buffered(state):
        return 1
    offered = sum(a.status not in {"refused", "left_out"} for a in state.assignments.values())
    return state.policy.share(offered + missing(state, state.assignments))


def done(opened: Round) -> list[str]:
    """Devices with updates on disk, by name: the order of their summation."""
    return sorted(name for name, a in opened.assignments.items() if a.status == "done")


def aggregated_updates(state: State) -> list[Update]:
    """Updates to aggregate in the closing round: its own, and stragglers'."""
    own = [state.assignments[name] for name in done(state.open)] if state.open is not None else []
    parts = [*own, *(state.buffered[key] for key in state.aggregating)]
    return [part.update for part in parts if part.update is not None]


def check_close(steps: Steps) -> None:
    """Close when all have answered, the deadline is over, or only offline devices are missing and grace is over.

    Async: when the buffer is full. Stragglers are waited for only then, and where no device has an assignment.
    """
    state, at, opened = steps.state, steps.at, steps.state.open
    if opened is None or state.phase is not Phase.ROUND:
        return
    full = state.policy.mode == "async" and is_buffered(state) and _delivered(state) >= state.policy.buffer
    there = any(state.devices[name].online for name in _waited_for(state))
    if full or at >= opened.deadline_at or not (there or any(_waited_for(state))):
        _end(steps, enough=_delivered(state) >= quorum(state))
    elif not there and _delivered(state) >= quorum(state):
        if opened.grace_at is None:
            steps.set(open=replace(opened, grace_at=at + state.timeouts.grace_s))
        elif at >= opened.grace_at:
            _end(steps, enough=True)
    elif opened.grace_at is not None:
        steps.set(open=replace(opened, grace_at=None))


def _waited_for(state: State) -> Iterator[str]:
    """Devices that have not answered in the open attempt. Lazily: each answer asks whether there is another."""
    yield from (name for name, assignment in state.assignments.items() if assignment.status in OPEN)
    if is_buffered(state):
        yield from state.stragglers


def _delivered(state: State) -> int:
    """Number of updates on disk that would count if the round closed now."""
    own = sum(assignment.status == "done" for assignment in state.assignments.values())
    return own + (len(state.buffered) if is_buffered(state) else 0)


def _end(steps: Steps, *, enough: bool) -> None:
    """Close (``enough`` updates) or retry; first step back or reject outliers, if there are any."""
    if (names := broken(steps.state)) and can_step_back(steps.state):
        attempt = steps.opened.attempt
        _cut(steps)
        steps.do(EndTransfers(), SavedRound(attempt.stage, attempt.round, attempt.attempt, "failed"))
        steps.do(*(SendAbort(name, attempt, "the attempt failed") for name in done(steps.opened)))
        step_back(steps, f"{', '.join(names)} cannot calculate with the model they were offered", again=False)
        return
    rejected = outliers(steps.state)
    for device, assignment, refusal in rejected:
        put(steps, device, replace(assignment, status="rejected", refusal=refusal))
        # It was acknowledged: the device restores the residuals of the round before, or sends the rest of it later.
        steps.do(SendAbort(device, assignment.attempt or steps.opened.attempt, refusal.detail))
        count_rejected(steps, device, refusal)
    if rejected:
        check_close(steps)
    elif enough:
        _close(steps)
    else:
        _retry(steps)


def _close(steps: Steps) -> None:
    """Close the round and aggregate; late replies count in the next round if the policy keeps them."""
    state, attempt = steps.state, steps.opened.attempt
    keep = state.policy.keeps and state.number < state.rounds[state.stage - 1]
    steps.set(aggregating=tuple(sorted(state.buffered)))
    _cut(steps, keep=keep)
    if not keep:
        for name, one in state.stragglers.items():
            _give_up(steps, name, one)
        steps.do(EndTransfers())
    updates, factors = aggregated_updates(steps.state), clipped(steps.state)
    known = {name: one.hello.signature for name, one in sorted(state.devices.items()) if not one.out}
    signatures = {name: value for name, value in known.items() if value}
    steps.do(Aggregate(attempt, tuple(updates), signatures, factors))
    for update, own in zip(updates, factors, strict=False):
        if own:
            least = min(own, key=lambda entry: own[entry])
            text = f"its change is clipped, of {least} to {own[least]:.2g} of it (round.clip_change)"
            steps.warn_once(update.device, "change", text)
    devices, now = steps.state.devices, (attempt.stage, 0)
    these = {one.device: devices[one.device] for one in updates}
    used = {
        name: replace(one, holds=attempt.stage, bad=0) for name, one in these.items() if (one.holds, one.bad) != now
    }
    steps.set(phase=Phase.AGGREGATING, devices={**devices, **used})


def _retry(steps: Steps) -> None:
    """The attempt failed: pause, then try again; fail after ``max_attempts``."""
    _cut(steps)
    state, opened = steps.state, steps.opened
    attempt, names = opened.attempt, done(opened)
    if not state.policy.keeps:
        steps.do(EndTransfers())
    steps.do(SavedRound(attempt.stage, attempt.round, attempt.attempt, "failed", participants=tuple(names)))
    story = "; ".join(
        f"{name} {a.status}" + (f" ({reason_text(why)})" if (why := a.refusal) and why.reason != a.status else "")
        for name, a in sorted(opened.assignments.items())
    )
    text = f"attempt {attempt} got {len(names)} of {quorum(state)} updates it needs ({story})"
    steps.set(open=None)
    if opened.tries >= state.policy.max_attempts and any(a.status != "left_out" for a in opened.assignments.values()):
        steps.do(Fail("RunError", f"{text}; it was tried {opened.tries} times"))
        return
    steps.do(*(SendAbort(name, attempt, "the attempt failed") for name in names))
    steps.warn(f"{text}; it is tried again")
    steps.set(phase=Phase.RETRYING, until=steps.at + state.timeouts.retry_pause_s * opened.tries)


def _cut(steps: Steps, *, keep: bool = False) -> None:
    """End the open assignments: as late, or lost where the device is offline; ``keep``: they become stragglers."""
    attempt = steps.opened.attempt
    for name, assignment in steps.opened.assignments.items():
        if assignment.status not in OPEN:
            continue
        if keep and assignment.status != "replanning":
            left = {other: one for other, one in steps.opened.assignments.items() if other != name}
            steps.set(open=replace(steps.opened, assignments=left))
            put_earlier(steps, name, attempt, replace(assignment, attempt=attempt))
        else:
            _give_up(steps, name, assignment)


def _give_up(steps: Steps, device: str, assignment: Assignment) -> None:
    """End an assignment as late (online) or lost (offline), and abort it on the device."""
    status = "late" if steps.state.devices[device].online else "lost"
    refusal = late(steps, device, assignment) if status == "late" else None
    end_without_update(steps, device, replace(assignment, status=status, refusal=refusal))
    steps.do(SendAbort(device, assignment.attempt or steps.opened.attempt, "the round is closed"))


def release(steps: Steps, device: str, refusal: Refusal) -> None:
    """End a device's open parts, in the open attempt and in an earlier one; what it has delivered still counts."""
    state = steps.state
    parts = [state.stragglers.get(device), state.assignments.get(device)]
    for part in (one for one in parts if one is not None and one.status in OPEN):
        end_without_update(steps, device, replace(part, status="left_out", refusal=refusal))
        steps.do(SendAbort(device, part.attempt or steps.opened.attempt, refusal.detail))


def metric_means(state: State) -> dict[str, float]:
    """Means of the devices' metrics, weighted by samples."""
    sums: dict[str, tuple[float, float]] = {}
    for update in aggregated_updates(state):
        weight = float(max(update.samples.values(), default=0))
        for metric, value in without_counts(update.metrics).items():
            total, weights = sums.get(metric, (0.0, 0.0))
            sums[metric] = (total + weight * value, weights + weight)
    return {metric: total / weights for metric, (total, weights) in sorted(sums.items()) if weights > 0}


def summary(state: State, at: float) -> dict[str, object]:
    """Data of the event of a closed round."""
    updates, assignments = aggregated_updates(state), state.assignments
    parts = [*assignments.values(), *(state.buffered[key] for key in state.aggregating)]
    names = ("payload_up_bytes", "payload_down_bytes")
    figures = [part.measured[name] for part in parts for name in names if name in part.measured]
    found: dict[str, object] = {
        "participants": sorted({update.device for update in updates}),
        "late": sorted(name for name, a in assignments.items() if a.status == "late"),
        "lost": sorted(name for name, a in assignments.items() if a.status == "lost"),
        "loss": metric_means(state).get("loss"),
        "seconds": at - state.open.opened_at if state.open is not None else None,
        "payload_bytes": sum(figure.value or 0.0 for figure in figures),
    }
    if state.policy.keeps:
        found["updates"] = len(updates)
        found["behind"] = sorted(state.stragglers)
        found["staleness"] = {u.device: late for u in updates if (late := staleness(state, u.attempt))}
    return found
