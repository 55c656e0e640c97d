"""Asking the planner, pure: who is planned when, and what is said when nobody can train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from coordinator.core.instructions import EmitEvent, Fail, Instruction, Plan, Step
from coordinator.core.state import Device, State
from edgefl.budget.fit import trained_depth
from edgefl.plan.job import Arrival, Candidate, Placement
from edgefl.plan.usable_samples import LABEL_THEM, UNLABELLED
from edgefl.records import Refusal
from edgefl.report.units import quantity

replace = msgspec.structs.replace


def ask(state: State, names: Iterable[str]) -> Step:
    """Ask what these devices can do in the current stage; answers to earlier questions about them are void."""
    names = sorted(names)
    if not names:
        return state, []
    ticket = state.tickets + 1
    devices = {**state.devices}
    for name in names:
        devices[name] = replace(devices[name], ticket=ticket)
    plan = Plan(ticket, state.stage, tuple(candidate(devices[name], state.stage, state.rounds) for name in names))
    return replace(state, tickets=ticket, devices=devices), [plan]


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


def answer(state: State, ticket: int, placements: Iterable[Placement]) -> tuple[State, list[str], list[Instruction]]:
    """Note the planner's answer. Also returns the devices it is still valid for."""
    devices, names, told = {**state.devices}, [], []
    for placement in placements:
        device = devices.get(placement.device)
        if device is not None and device.ticket == ticket:
            devices[placement.device] = replace(device, placement=placement, ticket=0)
            names.append(placement.device)
            told.append(placement_data(placement))
    tell: list[Instruction] = [EmitEvent("stage_planned", state.stage, state.number, data={"placements": told})]
    return replace(state, devices=devices), names, tell if told else []


def how_data(placement: Placement) -> dict[str, Any]:
    """How a device trains, as events tell it."""
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
    """A placement as the event ``stage_planned`` tells it."""
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
    """A refusal as events tell it."""
    return {
        "reason": refusal.reason,
        "needed": refusal.needed,
        "allowed": refusal.allowed,
        "unit": refusal.unit,
        "detail": refusal.detail,
        "where": refusal.where,
    }


def no_placement(state: State, at: float) -> Step:
    """Nobody can be offered anything now: wait for an able device, or fail when none is known and some are refused."""
    refused = [d.placement.refusal for d in state.devices.values() if d.placement is not None and d.placement.refusal]
    hopeful = any(device.eligible or device.placement is None for device in state.devices.values())
    if refused and not hopeful:
        if all(refusal.reason == UNLABELLED for refusal in refused):
            return state, [Fail("DataError", nobody_fits(state), LABEL_THEM)]
        return state, [Fail("BudgetError", nobody_fits(state))]
    barred = sorted(name for name, device in state.devices.items() if device.barred)
    if barred and not any((d.eligible or d.placement is None) and not d.barred for d in state.devices.values()):
        text = f"every device that can train stage {state.stage} is in quarantine: {', '.join(barred)}"
        return state, [Fail("RunError", text)]
    if state.phase == "waiting":
        return state, []
    text = f"no device that can train stage {state.stage} is connected; waiting {state.policy.join_s:g} s for one"
    until = at + state.policy.join_s
    return replace(state, phase="waiting", until=until), [
        EmitEvent("warning", state.stage, state.number, data={"text": text})
    ]


def nobody_fits(state: State) -> str:
    """Names the device that came nearest, with both numbers."""
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
