"""Quarantine: devices whose updates could not be used several times in a row are not asked for some rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coordinator.core.planning import figures_of
from coordinator.core.state import Assignment, State
from coordinator.core.steps import Steps
from edgefl.records import Refusal

replace = msgspec.structs.replace
#: ``Device.barred`` of a device in quarantine for the rest of the run.
FOR_GOOD = -1


def ordinal(state: State) -> int:
    """The round that is open or comes next, counted from 1 over all stages."""
    return sum(state.rounds[: state.stage - 1]) + state.number


def count_rejected(steps: Steps, device: str, refusal: Refusal) -> None:
    """Count an unusable update; after ``quarantine_after`` in a row the device is in quarantine."""
    known, policy = steps.state.devices[device], steps.state.policy
    counts = {**known.rejected, refusal.reason: known.rejected.get(refusal.reason, 0) + 1}
    bad = known.bad + 1
    steps.set_device(device, bad=bad, rejected=counts)
    steps.emit("rejected", device, figures_of(refusal))
    if policy.quarantine_after and bad >= policy.quarantine_after and not known.barred:
        rounds = policy.quarantine_rounds
        steps.set_device(device, barred=ordinal(steps.state) + rounds if rounds else FOR_GOOD)
        data = {"bad": bad, "rounds": rounds, "rejected": counts, **figures_of(refusal)}
        steps.emit("quarantined", device, data)


def forgive(steps: Steps, names: Iterable[str]) -> None:
    """Reset the count of unusable updates in a row: updates of these devices are used."""
    for name in names:
        if steps.state.devices[name].bad:
            steps.set_device(name, bad=0)


def readmit(steps: Steps) -> None:
    """End the quarantines that lasted through the round before: these devices are asked again."""
    now = ordinal(steps.state)
    for name, device in steps.state.devices.items():
        if 0 < device.barred < now:
            steps.set_device(name, barred=0, bad=0)
            steps.emit("readmitted", name)


def why(state: State, device: str) -> Refusal:
    """Why a device in quarantine is not asked."""
    known = state.devices[device]
    counts = ", ".join(f"{reason} × {count}" for reason, count in sorted(known.rejected.items()))
    until = "the end of the run" if known.barred == FOR_GOOD else f"round {known.barred} of the run"
    text = f"{known.bad} updates in a row could not be used (in all: {counts}); not asked until {until}"
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
