"""Devices whose updates can not be used: counted by reason, and after some in a row not asked for a while. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coordinator.core.instructions import EmitEvent, Instruction, Step
from coordinator.core.planning import figures_of
from coordinator.core.state import Assignment, State
from edgefl.records import Refusal

replace = msgspec.structs.replace
#: In quarantine for the rest of the run.
FOR_GOOD = -1


def ordinal(state: State) -> int:
    """The round that is open or comes next, counted from 1 over all stages."""
    return sum(state.rounds[: state.stage - 1]) + state.number


def rejected(state: State, device: str, refusal: Refusal) -> Step:
    """One more update of this device that can not be used; now and then that is one too many."""
    known, policy = state.devices[device], state.policy
    counts = {**known.rejected, refusal.reason: known.rejected.get(refusal.reason, 0) + 1}
    known = replace(known, bad=known.bad + 1, rejected=counts)
    out: list[Instruction] = [EmitEvent("rejected", state.stage, state.number, device, figures_of(refusal))]
    if policy.quarantine_after and known.bad >= policy.quarantine_after and not known.barred:
        last = ordinal(state) + policy.quarantine_rounds if policy.quarantine_rounds else FOR_GOOD
        known = replace(known, barred=last)
        data = {"bad": known.bad, "rounds": policy.quarantine_rounds, "rejected": counts, **figures_of(refusal)}
        out.append(EmitEvent("quarantined", state.stage, state.number, device, data))
    return replace(state, devices={**state.devices, device: known}), out


def forgiven(state: State, names: Iterable[str]) -> State:
    """Updates of these devices are used: no longer are their last ones bad."""
    good = {name: replace(state.devices[name], bad=0) for name in names if state.devices[name].bad}
    return replace(state, devices={**state.devices, **good}) if good else state


def readmitted(state: State) -> Step:
    """Devices whose quarantine was over with the round before are asked again, as if nothing had happened."""
    now, devices, out = ordinal(state), dict(state.devices), list[Instruction]()
    for name, device in state.devices.items():
        if 0 < device.barred < now:
            devices[name] = replace(device, barred=0, bad=0)
            out.append(EmitEvent("readmitted", state.stage, state.number, name))
    return (replace(state, devices=devices), out) if out else (state, out)


def why(state: State, device: str) -> Refusal:
    """Why a device is not asked."""
    known = state.devices[device]
    told = ", ".join(f"{reason} × {count}" for reason, count in sorted(known.rejected.items()))
    until = "the end of the run" if known.barred == FOR_GOOD else f"round {known.barred} of the run"
    text = f"{known.bad} updates in a row could not be used (in all: {told}); not asked until {until}"
    return Refusal("quarantine", float(known.bad), float(state.policy.quarantine_after - 1), "updates", text)


def not_asked(state: State) -> dict[str, Assignment]:
    """Devices that the planner has excluded, or that are in quarantine, and why."""
    found: dict[str, Assignment] = {}
    for name, device in state.devices.items():
        if device.placement is None:
            continue
        if device.placement.refusal is not None:
            found[name] = Assignment(device.placement, "refused", refusal=device.placement.refusal)
        elif device.barred:
            found[name] = Assignment(device.placement, "quarantined", refusal=why(state, name))
    return found
