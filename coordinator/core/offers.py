"""Offers: what a device is to train in an attempt, and the parts it is sent for it. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from coordinator.core.instructions import SendOffer
from coordinator.core.state import Phase, State
from edgefl.aggregation.clusters import signed, wanted
from edgefl.aggregation.server_state import PACKED, SERVER, packed_parts, view
from edgefl.models.spec import PROTOTYPES
from edgefl.plan.job import Job, RunPlan, Transfer
from edgefl.plan.stages import is_closing
from edgefl.protocol.messages import Offer
from edgefl.records import Attempt, Manifest
from edgefl.registry import choose


def offer_for(plan: RunPlan, one: SendOffer, manifest: Manifest, state: State) -> Offer:
    """The offer of a placement that starts from the state ``manifest``; without the sizes of its chunks."""
    stage, attempt = one.placement.stage, one.attempt
    seen = visible_parts(manifest, one.device, state)
    names = {*stage.present, *(() if is_closing(stage) else separate_figures(plan))}
    offered = {part: ref for part, ref in seen.items() if part in names}
    unsigned = one.device not in signed(manifest) and not is_closing(stage)
    return Offer(
        attempt=attempt,
        deadline_s=one.deadline_s,
        job=Job(
            model=plan.model,
            stage=stage,
            hyper=one.placement.hyper,
            slots=plan.slots,
            signature=wanted(plan.server) if unsigned else "",
            transfer=transfer_of(plan, attempt),
        ),
        manifest=offered,
        transfer=transfer_name("d", attempt),
        packed=packed_parts(manifest, offered),
    )


def separate_figures(plan: RunPlan) -> dict[str, str]:
    """Parts beside a stage's own -> the figure that counts their download by itself."""
    return {choose("repair", plan.server).method.part: "layer_down_bytes", PROTOTYPES: "prototypes_down_bytes"}


def visible_parts(manifest: Manifest, device: str, state: State) -> Manifest:
    """The parts of a state in a device's scope: global, its cluster's, its own."""
    history = state.memory.devices.get(device)
    return view(manifest, device, history.cluster if history is not None else -1)


def served_parts(manifest: Manifest) -> Manifest:
    """The parts of a state that devices may download."""
    return {key: ref for key, ref in manifest.items() if not key.startswith(SERVER) or key.startswith(PACKED)}


def in_progress(state: State) -> dict[Attempt, list[str]]:
    """The attempts that devices are at work on, and which devices."""
    found: dict[Attempt, list[str]] = {}
    if state.open is not None and state.phase is Phase.ROUND:
        found[state.open.attempt] = list(state.open.assignments)
    for name, straggler in state.stragglers.items():
        if straggler.attempt is not None:
            found.setdefault(straggler.attempt, []).append(name)
    return found


def transfer_of(plan: RunPlan, attempt: Attempt) -> Transfer:
    """How parts travel in this round: a stage's last one, which others build on, is sent uncompressed."""
    return msgspec.structs.replace(plan.transfer, whole=attempt.round >= plan.stages[attempt.stage - 1].rounds)


def transfer_name(direction: str, attempt: Attempt, device: str = "") -> str:
    """A name that fits a topic level: readable, and unique by its hash of run and device."""
    tail = hashlib.sha256(f"{attempt}/{attempt.made_ms}/{device}".encode()).hexdigest()[:12]
    return f"{direction}-s{attempt.stage}r{attempt.round}a{attempt.attempt}-{tail}"
