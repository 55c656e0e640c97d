"""The rules of one round: who is offered, when it closes, when it is tried again, what becomes of stragglers. Pure.

A straggler is a device that has not answered when its round closes, where the policy keeps late updates (async, or
round.late: keep). It moves to ``State.stragglers``, with its attempt. Its update lies in ``State.buffered`` until the
next aggregation includes it, by its staleness: the rounds closed since its model was made. A stage's last round drops
both: what other stages trained is other parts.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from coordinator.core.assignments import offer, put, put_earlier, saved
from coordinator.core.known_devices import count_rejected, forgive, not_asked, readmit, reason_text, wait_for_able
from coordinator.core.moves import Aggregate, EndTransfers, Fail, SavedRound, SendAbort, Steps
from coordinator.core.plausibility import outliers
from coordinator.core.state import OPEN, Assignment, Phase, Round, State
from edgefl.models.spec import modality_of
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, EvaluationRow, Refusal
from edgefl.registry import choose

replace = msgspec.structs.replace


def staleness(state: State, attempt: Attempt) -> int:
    """How many rounds ago the model that ``attempt`` starts from was the newest."""
    return state.number - attempt.round


def mark_aggregated(steps: Steps) -> None:
    """Note that the buffered updates being aggregated are in the model."""
    state = steps.state
    devices = dict(state.devices)
    for update in updates_of(state, state.aggregating):
        devices[update.device] = replace(devices[update.device], aggregated=update.attempt)
    buffered = {key: one for key, one in state.buffered.items() if key not in state.aggregating}
    steps.set(devices=devices, buffered=buffered, aggregating=())


def updates_of(state: State, keys: tuple[str, ...]) -> list[Update]:
    """Buffered updates, by key."""
    return [update for key in keys if (update := state.buffered[key].update) is not None]


def is_closing(state: State) -> bool:
    """Whether this is the closing round, in which every eligible device is asked and waited for."""
    return 0 < state.closing == state.stage


def is_buffered(state: State) -> bool:
    """Whether the round closes by the number of updates: async, or only stragglers are at work in it."""
    if is_closing(state):
        return False
    return state.policy.mode == "async" or (state.open is not None and not state.open.assignments)


def still_needed(state: State) -> tuple[tuple[Update, ...], frozenset[Attempt]]:
    """The updates that are on disk or on their way, and the attempts whose first state must stay readable."""
    every = [*state.stragglers.values(), *state.buffered.values()]
    updates = tuple(one.update for one in every if one.update is not None)
    return updates, frozenset(one.attempt for one in every if one.attempt is not None)


def open_round(steps: Steps) -> None:
    """Offer the next attempt to every chosen device; wait, or fail, when there is none."""
    readmit(steps)
    _drop_outdated(steps)
    state, at = steps.state, steps.at
    able = free(state)
    if not able and not state.buffered and not any(state.devices[name].online for name in state.stragglers):
        wait_for_able(steps)
        return
    number = Attempt(state.run, state.stage, state.number, state.attempt + 1, state.made_ms)
    names = _chosen(state, able)
    deadline_s = state.policy.deadline_s if state.policy.deadline_s > 0 else math.inf
    opened = Round(
        attempt=number,
        tries=state.tries + 1,
        opened_at=at,
        deadline_at=at + deadline_s,
        assignments={name: Assignment(p) for name in names if (p := state.devices[name].placement) is not None},
    )
    steps.do(SavedRound(number.stage, number.round, number.attempt))
    _warn_unrepairable(steps)
    for name, assignment in (*opened.assignments.items(), *not_asked(state).items()):
        steps.do(saved(state, number, name, assignment))
    behind = {"behind": sorted(state.stragglers)} if state.stragglers else {}
    steps.emit("round_started", data={"participants": names, "attempt": number.attempt, **behind})
    for name in names:
        offer(steps, opened, name)
    steps.set(phase=Phase.ROUND, attempt=number.attempt, tries=opened.tries, open=opened)
    if not names:
        check_close(steps)


def _chosen(state: State, able: list[str]) -> list[str]:
    """The devices that the next attempt is offered to: all in the closing round, else by the slot "select"."""
    if is_closing(state):
        return able
    draw = np.random.default_rng((state.seed, state.stage, state.number))  # the same run draws the same devices again
    full = state.policy.mode == "async" and len(state.buffered) >= state.policy.buffer  # an offer would be old at once
    selection = choose("select", state.recipe)
    return selection.bind(selection.method.draw)(able, draw, state.memory) if able and not full else []


def _warn_unrepairable(steps: Steps) -> None:
    """In a stage's first attempt: warn when by the devices' data no layer can be replaced."""
    state = steps.state
    repair = choose("repair", state.recipe)
    if repair.method.unlikely is None or (state.number, state.attempt) != (1, 0):
        return
    able = [(device, p) for device in state.devices.values() if device.eligible and (p := device.placement) is not None]
    owners = {modality_of(part) for _, placement in able for part in placement.stage.present}
    samples = {device.hello.device: device.hello.samples for device, _ in able}
    why = repair.bind(repair.method.unlikely)(samples, sorted(owner for owner in owners if owner is not None))
    if why:
        steps.warn(f"repair: {repair.name} will replace nothing, or little: {why}")


def free(state: State) -> list[str]:
    """Devices that can be offered something, in order of name."""
    return sorted(
        name
        for name, device in state.devices.items()
        if device.online and device.eligible and not device.barred and name not in state.stragglers
    )


def offer_free(steps: Steps) -> None:
    """In async rounds: offer the open round's model to devices without an assignment in it."""
    state = steps.state
    if state.open is None or state.phase is not Phase.ROUND or state.policy.mode != "async":
        return
    for name in free(state):
        device = state.devices[name]
        if name not in state.open.assignments and not device.ticket and device.placement is not None:
            put(steps, name, Assignment(device.placement))
            if (opened := steps.state.open) is not None:
                offer(steps, opened, name)


def _drop_outdated(steps: Steps) -> None:
    """Abort or drop updates made from a model older than the policy admits."""
    state = steps.state
    most = state.policy.max_staleness
    working = list(state.stragglers.items())
    waiting = [(one.update.device, one) for one in state.buffered.values() if one.update is not None]
    for device, one in working + waiting:
        if one.attempt is not None and (late := staleness(state, one.attempt)) > most:
            late_by = Refusal("late", float(late), float(most), "rounds", "its model is too old")
            put(steps, device, replace(one, status="late", refusal=late_by))
            if one.status != "done":
                steps.do(SendAbort(device, one.attempt, "its model is too old"))


def check_close(steps: Steps) -> None:
    """Close when all have answered, the deadline is over, or only offline devices are missing and grace is over.

    Async: when the buffer is full. Stragglers are waited for only then, and where no device has an assignment.
    """
    state, at, opened = steps.state, steps.at, steps.state.open
    if opened is None or state.phase is not Phase.ROUND:
        return
    waiting = [name for name, a in opened.assignments.items() if a.status in OPEN]
    have, enough, full = len(done(opened)), len(done(opened)) >= quorum(state), False
    if is_buffered(state):
        waiting, have = [*waiting, *state.stragglers], have + len(state.buffered)
        enough, full = have > 0, state.policy.mode == "async" and have >= state.policy.buffer
    if full or not waiting or at >= opened.deadline_at:
        _end(steps, enough=enough)
    elif enough and not any(state.devices[name].online for name in waiting):
        if opened.grace_at is None:
            steps.set(open=replace(opened, grace_at=at + state.grace_s))
        elif at >= opened.grace_at:
            _end(steps, enough=True)
    elif opened.grace_at is not None:
        steps.set(open=replace(opened, grace_at=None))


def _end(steps: Steps, *, enough: bool) -> None:
    """Close, or try again; but first reject outliers, whereupon more updates may be needed."""
    rejected = outliers(steps.state)
    for device, assignment, refusal in rejected:
        put(steps, device, replace(assignment, status="rejected", refusal=refusal))
        count_rejected(steps, device, refusal)
    if rejected:
        check_close(steps)
    elif enough:
        _close(steps)
    else:
        _retry(steps)


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
    """The updates of the round that is being closed: its own, and stragglers'."""
    opened = state.open
    own = [opened.assignments[name].update for name in done(opened)] if opened is not None else []
    return [update for update in own if update is not None] + updates_of(state, state.aggregating)


def _close(steps: Steps) -> None:
    """Aggregate. No reply counts any more in this round; where the policy keeps updates, it does in the next."""
    state = steps.state
    keep = state.policy.keeps and state.number < state.rounds[state.stage - 1]
    steps.set(aggregating=tuple(sorted(state.buffered)))
    _cut(steps, keep=keep)
    state, opened = steps.state, steps.state.open
    if opened is None:
        return
    if not keep:
        for name, one in state.stragglers.items():
            _give_up(steps, name, one)
        steps.do(EndTransfers(opened.attempt))
    updates = aggregated_updates(steps.state)
    steps.do(Aggregate(opened.attempt, tuple(updates)))
    names = {update.device for update in updates}
    devices = steps.state.devices
    holders = {name: replace(devices[name], holds=opened.attempt.stage) for name in names & devices.keys()}
    steps.set(phase=Phase.CLOSING, until=steps.at, devices={**devices, **holders})
    forgive(steps, names)


def _retry(steps: Steps) -> None:
    """The attempt failed: pause, then try again; fail after ``max_attempts``."""
    _cut(steps)
    state, opened = steps.state, steps.state.open
    if opened is None:
        return
    if not state.policy.keeps:
        steps.do(EndTransfers(opened.attempt))
    names = done(opened)
    failed = opened.attempt
    steps.do(SavedRound(failed.stage, failed.round, failed.attempt, "failed", participants=tuple(names)))
    story = "; ".join(_outcome(name, a) for name, a in sorted(opened.assignments.items()))
    text = f"attempt {opened.attempt} got {len(names)} of {quorum(state)} updates it needs ({story})"
    steps.set(open=None)
    if opened.tries >= state.policy.max_attempts:
        steps.do(Fail("RunError", f"{text}; it was tried {opened.tries} times"))
        return
    steps.do(*(SendAbort(name, opened.attempt, "the attempt failed") for name in names))
    steps.warn(f"{text}; it is tried again")
    steps.set(phase=Phase.PAUSING, until=steps.at + state.retry_pause_s * opened.tries)


def _cut(steps: Steps, *, keep: bool = False) -> None:
    """End the open assignments: as late, or lost where the device is offline; ``keep``: they become stragglers."""
    opened = steps.state.open
    for name, assignment in opened.assignments.items() if opened is not None else ():
        if opened is None or assignment.status not in OPEN:
            continue
        if keep and assignment.status != "replanning":
            now = steps.state.open or opened
            left = {other: one for other, one in now.assignments.items() if other != name}
            steps.set(open=replace(now, assignments=left))
            put_earlier(steps, name, replace(assignment, attempt=opened.attempt))
        else:
            _give_up(steps, name, assignment)


def _give_up(steps: Steps, device: str, assignment: Assignment) -> None:
    state = steps.state
    put(steps, device, replace(assignment, status="late" if state.devices[device].online else "lost"))
    attempt = assignment.attempt or (state.open.attempt if state.open is not None else Attempt())
    steps.do(SendAbort(device, attempt, "the round is closed"))


def _outcome(device: str, assignment: Assignment) -> str:
    why = f" ({reason_text(assignment.refusal)})" if assignment.refusal is not None else ""
    return f"{device} {assignment.status}{why}"


def metric_means(state: State) -> dict[str, float]:
    """Means of the devices' metrics, weighted by samples."""
    sums: dict[str, tuple[float, float]] = {}
    for update in aggregated_updates(state):
        weight = float(max(update.samples.values(), default=0))
        for metric, value in update.metrics.items():
            total, weights = sums.get(metric, (0.0, 0.0))
            sums[metric] = (total + weight * value, weights + weight)
    return {metric: total / weights for metric, (total, weights) in sorted(sums.items()) if weights > 0}


def summary(state: State, at: float) -> dict[str, object]:
    """Data of the event of a closed round."""
    opened, updates = state.open, aggregated_updates(state)
    assignments = opened.assignments if opened is not None else {}
    parts = [*assignments.values(), *(state.buffered[key] for key in state.aggregating)]
    names = ("payload_up_bytes", "payload_down_bytes")
    figures = [part.measured[name] for part in parts for name in names if name in part.measured]
    found: dict[str, object] = {
        "participants": sorted({update.device for update in updates}),
        "late": sorted(name for name, a in assignments.items() if a.status == "late"),
        "lost": sorted(name for name, a in assignments.items() if a.status == "lost"),
        "loss": metric_means(state).get("loss"),
        "seconds": at - opened.opened_at if opened is not None else None,
        "payload_bytes": sum((figure.value or 0.0 for figure in figures), 0.0),
    }
    if state.policy.keeps:
        found["updates"] = len(updates)
        found["behind"] = sorted(state.stragglers)
        found["staleness"] = {u.device: late for u in updates if (late := staleness(state, u.attempt))}
    return found


def not_finite(rows: list[EvaluationRow]) -> str:
    """The warning about figures of an evaluation that are not finite numbers."""
    names = sorted({f"{row.metric} with {'+'.join(row.available)}" for row in rows})
    text = f"the evaluation has no figure for {len(rows)} of its rows: {', '.join(names[:3])}"
    return f"{text}{', …' if len(names) > 3 else ''} is not a finite number; the model has diverged"
