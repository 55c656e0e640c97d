"""Requests to the planner: which devices are planned when, and errors and warnings when none can train. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from coordinator.core.instructions import Fail, Plan
from coordinator.core.state import Device, Phase, State
from coordinator.core.steps import Steps
from edgefl.budget.fit import trained_depth
from edgefl.plan.job import Arrival, Candidate, Placement
from edgefl.plan.training_samples import LABEL_THEM, UNLABELLED
from edgefl.records import Refusal
from edgefl.report.units import quantity

replace = msgspec.structs.replace


def ask(steps: Steps, names: Iterable[str]) -> None:
    """Request placements of these devices in the current stage; answers to earlier requests for them are void."""
    state, names = steps.state, sorted(names)
    if names:
        ticket = state.tickets + 1
        devices = state.devices | {name: replace(state.devices[name], ticket=ticket) for name in names}
        steps.set(tickets=ticket, devices=devices)
        found = tuple(candidate(devices[name], state.stage, state.rounds) for name in names)
        steps.do(Plan(ticket, state.stage, found))


def arrival_of(device: Device | None, stage: int, rounds: Sequence[int]) -> Arrival:
    """State of the model that a device holds at this stage; ``rounds``: of each stage.

    One that took no part in the stage before counts as joining: that stage and earlier ones changed what it holds.
    """
    before = max((s for s in range(1, stage) if rounds[s - 1]), default=0)
    if device is None or not device.holds or device.holds < before:
        return "joining"
    return "staying" if device.holds >= stage else "entering"


def candidate(device: Device, stage: int, rounds: Sequence[int]) -> Candidate:
    """Facts of a device that the planner places it in a stage by; ``rounds``: of each stage."""
    hello = device.hello
    return Candidate(
        device=hello.device,
        capabilities=hello.capabilities,
        budget=hello.budget,
        samples=hello.samples,
        modalities=hello.modalities,
        class_counts=hello.class_counts,
        declined=device.declined,
        arrival=arrival_of(device, stage, rounds),
        factors=device.factors,
    )


def take_placements(steps: Steps, ticket: int, placements: Iterable[Placement]) -> list[str]:
    """Take the planner's answer. Returns the devices that it is still valid for."""
    devices = dict(steps.state.devices)
    valid = [one for one in placements if one.device in devices and devices[one.device].ticket == ticket]
    for one in valid:
        devices[one.device] = replace(devices[one.device], placement=one, ticket=0)
    steps.set(devices=devices)
    if valid:
        steps.emit("stage_planned", data={"placements": [placement_data(one) for one in valid]})
    return [one.device for one in valid]


def how_data(placement: Placement) -> dict[str, Any]:
    """How a device trains, as events say it."""
    hyper = placement.hyper
    return {
        "micro_batch": hyper.micro_batch,
        "cache": hyper.cache,
        "depth": trained_depth(placement.stage),
        "checkpoint": hyper.checkpoint,
        "lean": hyper.optimizer if hyper.low_memory else "",
        "precision": hyper.precision,
    }


def placement_data(placement: Placement) -> dict[str, Any]:
    """A placement as the event ``stage_planned`` says it."""
    return {
        "device": placement.device,
        "ok": placement.refusal is None,
        **how_data(placement),
        "factors": {name: round(factor, 3) for name, factor in placement.factors.items()},
        "step_peak_bytes": placement.cost.step_peak_bytes,
        "flops": placement.cost.flops,
        **figures_of(placement.refusal or Refusal()),
    }


def figures_of(refusal: Refusal) -> dict[str, Any]:
    """A refusal as events say it."""
    return {
        "reason": refusal.reason,
        "needed": refusal.needed,
        "allowed": refusal.allowed,
        "unit": refusal.unit,
        "detail": refusal.detail,
        "where": refusal.where,
    }


def wait_for_able(steps: Steps) -> None:
    """Wait for a device that can train; fail when every known one is refused or in quarantine."""
    state = steps.state
    refused = [d.placement.refusal for d in state.devices.values() if d.placement is not None and d.placement.refusal]
    hopeful = any(device.eligible or device.placement is None for device in state.devices.values())
    if refused and not hopeful:
        if all(refusal.reason == UNLABELLED for refusal in refused):
            steps.do(Fail("DataError", nearest_refusal(state), LABEL_THEM))
        else:
            steps.do(Fail("BudgetError", nearest_refusal(state)))
        return
    barred = sorted(name for name, device in state.devices.items() if device.barred)
    if barred and not any((d.eligible or d.placement is None) and not d.barred for d in state.devices.values()):
        text = f"every device that can train stage {state.stage} is in quarantine: {', '.join(barred)}"
        steps.do(Fail("RunError", text))
    elif state.phase is not Phase.WAITING:
        wait_s = state.policy.join_s
        steps.set(phase=Phase.WAITING, until=steps.at + wait_s)
        steps.warn(f"no device that can train stage {state.stage} is connected; waiting {wait_s:g} s for one")


def nearest_refusal(state: State) -> str:
    """The refusal of the device that came nearest to fitting, with both numbers."""
    refusals = [
        (name, d.placement.refusal)
        for name, d in sorted(state.devices.items())
        if d.placement is not None and d.placement.refusal is not None
    ]
    name, refusal = min(refusals, key=lambda pair: _excess(pair[1]))
    others = f" ({len(refusals)} devices were refused)" if len(refusals) > 1 else ""
    return f"no device can train stage {state.stage}: the nearest, '{name}', {reason_text(refusal)}{others}"


def reason_text(refusal: Refusal) -> str:
    """A refusal as a clause: which limit, what is needed, what is allowed."""
    detail = f": {refusal.detail}" if refusal.detail else ""
    if refusal.needed is None or refusal.allowed is None:
        return f"is refused for {refusal.reason or 'an unknown reason'}{detail}"
    needed, allowed = (quantity(value, refusal.unit) for value in (refusal.needed, refusal.allowed))
    return f"needs {needed} and is allowed {allowed} ({refusal.reason}{detail})"


def _excess(refusal: Refusal) -> float:
    """How far a refusal is from fitting: the ratio of the larger to the smaller number; unknown: far."""
    if not refusal.needed or not refusal.allowed:
        return float("inf")
    return max(refusal.needed / refusal.allowed, refusal.allowed / refusal.needed)
