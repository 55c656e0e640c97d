"""Rules for devices' replies about an attempt. Pure. Messages may come late, twice or out of turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from coordinator.core import moves as m
from coordinator.core.assignments import assignment_of, expected, offer, placement_in, put
from coordinator.core.known_devices import ask, count_rejected, figures_of, how_data
from coordinator.core.moves import Steps
from coordinator.core.plausibility import bounded, learned, likely, makes_claim, miscounted, plausible, unfit
from coordinator.core.round_rules import check_close, staleness
from coordinator.core.state import Assignment, Claim, Phase, State
from coordinator.core.unfinished import end_without_update, own_figures, record_spent
from edgefl.budget.fit import OF_NO_SIZE, decline_of
from edgefl.plan.choice_of_k import without_counts
from edgefl.plan.job import WHOLE_ROUND
from edgefl.records import METHOD, OUT_OF_STEP, Attempt, Figure, Figures, Refusal
from edgefl.run_records import OPEN

replace = msgspec.structs.replace

M = TypeVar("M", bound=m.Accepted | m.Declined | m.Progressed | m.Announced)
F = TypeVar("F", bound=m.UpdateStored | m.UpdateInvalid)

#: Reasons to plan a device again: it measured, or ran into, a limit that a smaller job may respect; the same job may
#: succeed; or it lacks a method of the run, whereupon the planner refuses it for the stage.
REPLAN = frozenset({"step_memory", "memory", "ceiling", "flops", "payload", "disk", "cache", *OF_NO_SIZE, METHOD})


def resync(steps: Steps, device: str, working_on: Attempt | None, *, beat: bool = False) -> None:
    """Resume the exchange with a device after a hello or heartbeat, without repeated requests.

    ``beat``: it was a heartbeat, not a hello. The device still knows what it was asked for, and a recent offer may
    have crossed the heartbeat: repeating either would have everything sent twice.
    """
    state = steps.state
    if working_on is not None and (one := assignment_of(state, device, working_on)) is not None:
        if one.attempt is not None or state.phase is Phase.ROUND:
            _go_on(steps, device, working_on, one, beat)
        return
    if (straggler := state.stragglers.get(device)) is not None:
        end_without_update(steps, device, replace(straggler, status="lost"))  # it knows nothing of it any more
    if working_on is not None and (state.open is None or working_on != state.open.attempt):
        if is_aggregated(state, device, working_on):
            steps.do(m.SendAck(device, working_on))
            return
        if (working_on.run, working_on.made_ms) == (state.plan.run, state.made_ms):
            steps.do(m.SendAbort(device, working_on, "this attempt is closed"))
    part = state.assignments.get(device)
    if part is None or (beat and _recently_offered(steps, part)):
        return
    if state.phase is Phase.ROUND and part.status in {"offered", "accepted", "updated"}:
        put(steps, device, replace(part, status="offered", update=None))
        offer(steps, device)


def _recently_offered(steps: Steps, part: Assignment) -> bool:
    """True if the offer is younger than ``offer_s``, so that a heartbeat may have crossed it."""
    return part.offered_at is not None and 0 <= steps.at - part.offered_at < steps.state.timeouts.offer_s


def _go_on(steps: Steps, device: str, attempt: Attempt, one: Assignment, beat: bool) -> None:
    """Resume an assignment the device works on: repeat the acknowledgement or request, note its acceptance."""
    if one.status == "done":
        steps.do(m.SendAck(device, attempt))
    elif one.status == "updated" and one.update is not None:
        steps.do(m.Fetch(one.update, again=not beat))
    elif one.status == "offered":
        put(steps, device, replace(one, status="accepted"))


def is_aggregated(state: State, device: str, attempt: Attempt) -> bool:
    """True if the device's update of this attempt is in the model."""
    return (attempt == state.closed and device in state.last_aggregated) or attempt == state.devices[device].aggregated


def of_attempt(rule: Callable[[Steps, M, Assignment], object]) -> Callable[[Steps, M], object]:
    """``rule`` limited to messages about a live attempt; others are dropped, their device is sent an abort."""

    def checked(steps: Steps, event: M) -> None:
        state, device, attempt = steps.state, event.device, event.attempt
        if device not in state.devices:
            steps.drop("unknown device")
            steps.do(m.SendWelcome(device))
        elif (assignment := assignment_of(state, device, attempt)) is not None:
            rule(steps, event, assignment)
        elif state.open is not None and attempt == state.open.attempt:
            steps.drop("out of turn")
        else:
            steps.drop("stale")
            included = is_aggregated(state, device, attempt)
            if isinstance(event, m.Announced):
                record_spent(steps, device, attempt, event.update.figures)
                steps.do(m.SendAck(device, attempt, included, Refusal() if included else Refusal(reason="stale")))
            elif isinstance(event, m.Declined):
                record_spent(steps, device, attempt, event.figures)
            elif not included:
                steps.do(m.SendAbort(device, attempt, "this attempt is closed"))

    return checked


def of_fetched(rule: Callable[[Steps, F, Assignment], object]) -> Callable[[Steps, F], object]:
    """``rule`` limited to fetched updates still waited for; late or duplicate ones are dropped."""

    def checked(steps: Steps, event: F) -> None:
        assignment = assignment_of(steps.state, event.device, event.attempt)
        if assignment is None or (assignment.attempt is None and steps.state.phase is not Phase.ROUND):
            steps.drop("late")
        elif assignment.status != "updated":  # it has had its answer, or the device has said something else meanwhile
            steps.drop("duplicate")
        else:
            rule(steps, event, assignment)

    return checked


def spent(steps: Steps, event: m.Spent) -> None:
    """Record a device's reported cost of an attempt that it dropped."""
    if event.device in steps.state.devices:
        record_spent(steps, event.device, event.attempt, event.figures)


def accepted(steps: Steps, event: m.Accepted, assignment: Assignment) -> None:
    """Note that the device has accepted its offer."""
    if assignment.status == "offered":
        put(steps, event.device, replace(assignment, status="accepted"))
    else:
        steps.drop("duplicate")


def progressed(steps: Steps, event: m.Progressed, assignment: Assignment) -> None:
    """Report progress; also note the acceptance, in case that message was lost."""
    if assignment.status not in {"offered", "accepted"}:
        steps.drop("late")
        return
    if assignment.status == "offered":
        put(steps, event.device, replace(assignment, status="accepted"))
    steps.emit("progress", event.device, event.data)


def declined(steps: Steps, event: m.Declined, assignment: Assignment) -> None:
    """Plan the device again when it ran into a limit for the first time with these numbers; else record why."""
    if assignment.status not in {"offered", "accepted"}:
        steps.drop("duplicate")
        record_spent(steps, event.device, event.attempt, event.figures)
        return
    refusal, before = event.refusal, steps.state.devices[event.device].declined
    seen = refusal.needed is not None and any(refusal == was.refusal for was in before)
    alike = sum(was.refusal.reason == refusal.reason for was in before)
    seen = seen or alike >= OF_NO_SIZE.get(refusal.reason, math.inf)
    again = refusal.reason in REPLAN and not seen
    if again:
        steps.set_device(event.device, declined=(*before, decline_of(assignment.placement, refusal)))
    # The round of an earlier attempt is over, and a period goes on as it began: planned for the next.
    resumes = (assignment.period or WHOLE_ROUND).resumes
    open_again = again and assignment.attempt is None and not resumes
    if resumes and refusal.reason == OUT_OF_STEP:  # no other attempt finds it in step: without members a period begins
        period = {name: one for name, one in steps.state.memory.period.items() if name != event.device}
        steps.set(memory=replace(steps.state.memory, period=period))
    changed = replace(assignment, status="replanning" if open_again else "declined", refusal=refusal)
    put(steps, event.device, changed, own_figures(steps, event.device, assignment, event.figures))
    steps.emit("declined", event.device, figures_of(refusal))
    if again:
        ask(steps, [event.device])
    if not again or resumes:
        check_close(steps)


def replanned(steps: Steps, device: str) -> None:
    """Offer the new plan of a device that declined, or record its refusal."""
    assignment, placement = steps.state.assignments.get(device), steps.state.devices[device].placement
    if assignment is None or assignment.status != "replanning" or placement is None:
        return
    if placement.refusal is not None:
        put(steps, device, replace(assignment, status="refused", refusal=placement.refusal))
        check_close(steps)
        return
    why = assignment.refusal or Refusal()
    placement = placement_in(steps.state, steps.opened.attempt, device, placement)
    put(steps, device, Assignment(placement, period=assignment.period))
    steps.emit("replanned", device, {**how_data(placement), "reason": why.reason, "where": why.where})
    offer(steps, device)


def announced(steps: Steps, event: m.Announced, assignment: Assignment) -> None:
    """Fetch an announced update, unless its message already makes it unusable."""
    state, update = steps.state, event.update
    if assignment.status == "done":
        steps.drop("duplicate")
        steps.do(m.SendAck(update.device, update.attempt))
    elif assignment.status not in OPEN:
        steps.drop("late")
        record_spent(steps, update.device, update.attempt, update.figures)
        steps.do(m.SendAck(update.device, update.attempt, False, Refusal(reason="late")))
    elif (refusal := unfit(state, assignment, update)) is not None:
        reject(steps, m.UpdateInvalid(event.at, update.device, update.attempt, refusal), assignment)
        record_spent(steps, update.device, update.attempt, update.figures)
    else:
        if makes_claim(state, update.device):
            steps.set_device(update.device, first_claim=Claim({"": max(update.samples.values(), default=0)}))
        update = bounded(update, steps.state.devices[update.device].claim)
        if assignment.status == "updated":
            steps.drop("duplicate")
        put(steps, update.device, replace(assignment, status="updated", update=update))
        steps.do(m.Fetch(update))


def _of_upload(own: Figures, counted: Figures) -> Figures:
    """Figures of an upload, announced before its last chunk, corrected by the coordinator's counts."""
    found = {name: counted[name] for name in ("payload_up_bytes",) if name in counted}
    wire, again = own.get("wire_up_bytes", Figure()).value, counted.get("resent_up_bytes", Figure()).value
    if wire is not None and again:
        source = f"{own['wire_up_bytes'].source} + the chunks that the coordinator received more than once"
        found["wire_up_bytes"] = replace(own["wire_up_bytes"], value=wire + again, source=source)
    return found


def update_stored(steps: Steps, event: m.UpdateStored, assignment: Assignment) -> None:
    """An update is on disk: count it once."""
    name, state, update = event.device, steps.state, assignment.update
    if update is None:
        raise ValueError(f"nothing was fetched from {name}")
    predicted = expected(state, event.attempt, assignment.placement, name, assignment.period)
    since = assignment.first_offered_at
    own, implausible = plausible(update.figures, predicted, None if since is None else steps.at - since)
    manifest, metrics = event.manifest or update.manifest, likely(update.metrics)
    miscount = miscounted(state, assignment.placement, name, metrics)
    metrics = without_counts(metrics) if miscount else metrics
    update = replace(update, manifest=manifest, metrics=metrics, figures=own)
    measured = own | event.figures | {figure: f for figure, f in own.items() if f.value is not None}
    measured |= _of_upload(own, event.figures)
    factors = learned(state.devices[name].factors, assignment.placement, measured)
    if factors != state.devices[name].factors:
        steps.set_device(name, factors=factors)
    stored = replace(assignment, status="done", update=update, measured=measured, changes=event.changes)
    put(steps, name, stored, measured)
    steps.do(m.SendAck(name, event.attempt))
    late = staleness(state, event.attempt)
    names = ("payload_up_bytes", "payload_down_bytes", "step_peak_bytes", "flops", "wall_s")
    others = ("process_peak_bytes", "cuda_reserved_peak_bytes", "energy_j")
    costs = {figure: measured[figure].value if figure in measured else None for figure in names}
    costs |= {figure: measured[figure].value for figure in others if figure in measured}
    data = {
        "loss": update.metrics.get("loss"),
        "samples": max(update.samples.values(), default=0),
        "seconds": costs.pop("wall_s"),
        **costs,
    }
    steps.emit("update", name, data | ({"staleness": late} if late else {}))
    if implausible:
        steps.warn_once(name, "figures", f"implausible figures are left out: {'; '.join(implausible)}")
    if miscount:
        steps.warn_once(name, "k", f"its counts for the choice of k are ignored: {miscount}")
    check_close(steps)


def reject(steps: Steps, event: m.UpdateInvalid, assignment: Assignment) -> None:
    """An update is unusable: the round goes on with the others, and the device may end in quarantine."""
    end_without_update(steps, event.device, replace(assignment, status="rejected", refusal=event.refusal))
    steps.do(m.SendAck(event.device, event.attempt, False, event.refusal))
    count_rejected(steps, event.device, event.refusal)
    check_close(steps)
