"""Assignments of devices to attempts: look-up, changes, ledger rows, predicted figures, offers. Pure."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import msgspec

from coordinator.core.known_devices import arrival_of
from coordinator.core.moves import SendOffer, Steps
from coordinator.core.state import Assignment, Phase, State
from edgefl.aggregation.history import Memory
from edgefl.aggregation.server_state import PACKED, SERVER, packed_parts, view
from edgefl.aggregation.weights import signed, wanted
from edgefl.models.spec import LAYERS, PROTOTYPES
from edgefl.plan.falling_rates import fallen
from edgefl.plan.job import WHOLE_ROUND, Job, PeriodRound, Placement, RunPlan, Transfer
from edgefl.plan.stages import drawn, is_closing
from edgefl.protocol.messages import Offer
from edgefl.records import Attempt, Figures, Manifest
from edgefl.registry import choose
from edgefl.run_records import OPEN, AssignmentRow

replace = msgspec.structs.replace


def key_of(device: str, attempt: Attempt) -> str:
    """Key of an update in ``State.buffered``: 64 characters at most, for any device name."""
    return f"{attempt.stage}.{attempt.round}.{attempt.attempt}/{hashlib.sha256(device.encode()).hexdigest()[:24]}"


def assignment_of(state: State, device: str, attempt: Attempt) -> Assignment | None:
    """A device's assignment in the open attempt, or in an earlier one with a live update."""
    if state.open is not None and state.open.attempt == attempt and device in state.assignments:
        return state.assignments[device]
    straggler = state.stragglers.get(device)
    if straggler is not None and straggler.attempt == attempt:
        return straggler
    return state.buffered.get(key_of(device, attempt))


def put(steps: Steps, device: str, assignment: Assignment, measured: Figures | None = None) -> None:
    """Set a device's part, in the open attempt or in ``assignment.attempt``, and have it recorded."""
    if assignment.attempt is not None:
        put_earlier(steps, device, assignment.attempt, assignment)
    else:
        assignments = {**steps.opened.assignments, device: assignment}
        steps.set(open=replace(steps.opened, assignments=assignments))
    steps.do(row_of(steps.state, assignment.attempt or steps.opened.attempt, device, assignment, measured))


def put_earlier(steps: Steps, device: str, attempt: Attempt, assignment: Assignment) -> None:
    """Set a device's part in an earlier attempt: a straggler's, a buffered update's, or neither when it is over."""
    stragglers, buffered, key = dict(steps.state.stragglers), dict(steps.state.buffered), key_of(device, attempt)
    if device in stragglers and stragglers[device].attempt == attempt:
        del stragglers[device]
    if assignment.status in OPEN:
        stragglers[device] = assignment
    elif assignment.status == "done":
        buffered[key] = assignment
    else:
        buffered.pop(key, None)
    steps.set(stragglers=stragglers, buffered=buffered)


def placement_in(state: State, attempt: Attempt, device: str, placement: Placement) -> Placement:
    """A device's placement in the round of ``attempt``: that of the round's draw, in a stage with draws.

    A device downloads what the round before trained; one that missed that round, at most the parts of all draws.
    """
    if not placement.draws:
        return placement
    stage, seed = state.plan.stages[attempt.stage - 1], state.plan.seed
    one = placement.draws[drawn(stage, seed, attempt.round)]
    followed = attempt.round > 1 and device in state.last_aggregated
    before = placement.draws[drawn(stage, seed, attempt.round - 1)] if followed else placement
    name = "payload_down_bytes"
    cost = replace(one.cost, payload_down_bytes=before.cost.payload_down_bytes)
    predicted = {**one.predicted, name: before.predicted[name]}
    return replace(placement, stage=one.stage, cost=cost, predicted=predicted, draws=())


def row_of(
    state: State, attempt: Attempt, device: str, assignment: Assignment, measured: Figures | None = None
) -> AssignmentRow:
    """The ledger's row of a part."""
    placement, update = assignment.placement, assignment.update
    planned = assignment.status in {"offered", "refused"}
    return AssignmentRow(
        device=device,
        stage=attempt.stage,
        round=attempt.round,
        attempt=attempt.attempt,
        status=assignment.status,
        refusal=assignment.refusal,
        batch_size=state.plan.hypers[attempt.stage - 1].batch_size,
        micro_batch=placement.hyper.micro_batch,
        trained=placement.stage.trained,
        samples=update.samples if update is not None else {},
        metrics=update.metrics if update is not None else {},
        predicted=expected(state, attempt, placement, device, assignment.period) if planned else {},
        measured=measured or {},
    )


def expected(
    state: State, attempt: Attempt, placement: Placement, device: str, period: PeriodRound | None = None
) -> Figures:
    """Predicted figures of a device's round; more for its first round, and a stage's first and last.

    Rounds between two whole exchanges are predicted with the bytes of the largest layer, an upper bound.
    """
    period = period or WHOLE_ROUND
    cost, known, rounds = placement.cost, state.devices.get(device), state.rounds
    arrival = arrival_of(known, attempt.stage, rounds)
    found = placement.predicted
    if placement.predicted_first and (attempt.round == 1 or arrival != "staying"):
        found = placement.predicted_first
    if "payload_down_bytes" not in found or "payload_up_bytes" not in found:
        return found
    sizes: dict[str, float] = {}
    if arrival == "joining" and cost.personal_flops and (flops := found["flops"].value) is not None:
        sizes["flops"] = flops - cost.personal_flops * placement.factors.get("flops", 1.0)
    if arrival != "staying":
        sizes["payload_down_bytes"] = cost.joining_down_bytes if arrival == "joining" else cost.entering_down_bytes
        if attempt.round == 1 and not any(rounds[: attempt.stage - 1]):  # there are no prototypes yet
            sizes["payload_down_bytes"] -= cost.prototypes_down_bytes
    ends = attempt.round == rounds[attempt.stage - 1]
    up = cost.whole_up_bytes if ends else round(found["payload_up_bytes"].value or 0)
    if not period.whole:
        up = cost.layers_up_bytes if period.layers else 0
    sizes["payload_up_bytes"] = up + (cost.signature_bytes if known is None or not known.holds else 0)
    if period.resumes:
        member = state.memory.period.get(device)
        sizes["payload_down_bytes"] = cost.layer_bytes if member is not None and member.lent else 0
    return {**found, **{name: replace(found[name], value=float(size)) for name, size in sizes.items()}}


def offer(steps: Steps, device: str) -> None:
    """Offer a device its part in the open attempt, with the time left."""
    opened = steps.opened
    part = opened.assignments[device]
    first = steps.at if part.first_offered_at is None else part.first_offered_at
    sent_now = replace(part, offered_at=steps.at, first_offered_at=first)
    steps.set(open=replace(opened, assignments={**opened.assignments, device: sent_now}))
    left_s = 0.0 if math.isinf(opened.deadline_at) else max(1.0, opened.deadline_at - steps.at)  # 0: no deadline
    steps.do(SendOffer(device, opened.attempt, sent_now.placement, left_s, sent_now.period))


def offer_for(one: SendOffer, manifest: Manifest, state: State) -> Offer:
    """The offer of a placement from the state ``manifest``, still without chunk sizes."""
    plan, stage, attempt = state.plan, one.placement.stage, one.attempt
    names = {*stage.present, *(() if is_closing(stage) else separate_figures(plan))} - {LAYERS}
    resumes = (one.period or WHOLE_ROUND).resumes
    if resumes:
        names = names - {*stage.trained, *separate_figures(plan)} | {LAYERS, PROTOTYPES}
    offered = {part: ref for part, ref in visible_parts(manifest, one.device, state.memory).items() if part in names}
    unsigned = one.device not in signed(manifest) and not is_closing(stage)
    return Offer(
        attempt=attempt,
        deadline_s=one.deadline_s,
        job=Job(
            model=plan.model,
            stage=stage,
            hyper=fallen(plan, one.placement.hyper, attempt),
            slots=plan.slots,
            signature=wanted(plan.server) if unsigned else "",
            transfer=transfer_of(plan, attempt),
            period=one.period and replace(one.period, largest=one.placement.layer),
            k=state.memory.k,
        ),
        manifest=offered,
        transfer=transfer_name("d", attempt),
        packed=packed_parts(manifest, offered),
        base=state.memory.period[one.device].base if resumes else "",
    )


def separate_figures(plan: RunPlan) -> dict[str, str]:
    """Parts beside the stage's (prototypes, single layers) -> the figure of their download bytes."""
    one_layer = dict.fromkeys((choose("repair", plan.server).name, LAYERS), "layer_down_bytes")
    return {**one_layer, PROTOTYPES: "prototypes_down_bytes"}


def visible_parts(manifest: Manifest, device: str, memory: Memory) -> Manifest:
    """The parts of a state in a device's scope: global, its cluster's, its own."""
    history = memory.devices.get(device)
    return view(manifest, device, history.cluster if history is not None else -1)


def served_parts(manifest: Manifest) -> Manifest:
    """The parts of a state open to download by devices."""
    return {key: ref for key, ref in manifest.items() if not key.startswith(SERVER) or key.startswith(PACKED)}


def in_progress(state: State) -> dict[Attempt, list[str]]:
    """Attempt -> devices at work on it, stragglers included."""
    found: dict[Attempt, list[str]] = {}
    if state.open is not None and state.phase is Phase.ROUND:
        found[state.open.attempt] = list(state.open.assignments)
    for name, straggler in state.stragglers.items():
        if straggler.attempt is not None:
            found.setdefault(straggler.attempt, []).append(name)
    return found


def transfer_of(plan: RunPlan, attempt: Attempt) -> Transfer:
    """Transfer settings of a round: a stage's last one is whole unless the run file packs it.

    Matcher networks always travel whole (``is_scheduled``); a whole closing round would change the finished model.
    """
    last = attempt.round >= plan.stages[attempt.stage - 1].rounds
    return replace(plan.transfer, whole=last and plan.transfer.closing == "whole")


@lru_cache(maxsize=4096)  # asked for with every message of a transfer
def transfer_name(direction: str, attempt: Attempt, device: str = "") -> str:
    """Name of a transfer for a topic level: readable, and unique by its hash of run and device."""
    tail = hashlib.sha256(f"{attempt}/{attempt.made_ms}/{device}".encode()).hexdigest()[:12]
    return f"{direction}-s{attempt.stage}r{attempt.round}a{attempt.attempt}-{tail}"
