"""Grace periods for disconnected devices: single ones, all after an outage or a restart. Pure."""

from __future__ import annotations

from coordinator.core.moves import Steps
from coordinator.core.state import ENDED, Device, Phase, State


def online(state: State) -> int:
    """Number of connected devices that take part, and of a crowd's, which can be called."""
    if state.crowd is not None:
        return len(state.crowd.names) - len({*state.gone, *(n for n, device in state.devices.items() if device.out)})
    return sum(device.online and not device.out for device in state.devices.values())


def wanted(state: State) -> int:
    """Number of devices needed to begin a round, less those out of the run."""
    return max(0, state.policy.devices - sum(device.out for device in state.devices.values()))


def expects_back(steps: Steps) -> bool:
    """True while the grace period of a disconnected device is running."""
    return any(steps.at < until for until in steps.state.returning.values())


def expect(steps: Steps, name: str) -> None:
    """Begin a device's grace period if the next round would lack it; not while it waits for others already.

    Else a fleet whose devices come and go would wait for ever.
    """
    state = steps.state
    waits = state.phase is Phase.JOINING and not state.until
    if not waits and online(state) < wanted(state) and not state.devices[name].out:
        steps.set(returning={**state.returning, name: steps.at + state.timeouts.grace_s})


def forget(steps: Steps, name: str) -> None:
    """End a device's grace period."""
    steps.set(returning={other: until for other, until in steps.state.returning.items() if other != name})


def is_first_back(state: State, name: str) -> bool:
    """True for the first device to reconnect after all were offline, between rounds.

    True once for each round, so that flapping devices cannot delay it for ever.
    """
    joining = state.phase is Phase.JOINING and state.until  # ``round.join_s`` is waited for
    if joining or state.regained or state.phase in {Phase.STARTING, Phase.ROUND, *ENDED}:
        return False
    device = state.devices.get(name)
    if device is not None and (device.online or not _can_train(device)):
        return False
    return not any(one.online and _can_train(one) for one in state.devices.values())


def expect_others(steps: Steps, name: str) -> None:
    """Begin the others' grace with the first one after an outage."""
    grace_s, others = steps.state.timeouts.grace_s, sorted(steps.state.returning)
    if others:
        steps.set(returning=dict.fromkeys(others, steps.at + grace_s), regained=True)
        text = f"{name} is the first device online after all were offline; no round waits longer than {grace_s:g} s for"
        steps.warn(f"{text} {', '.join(others)}")


def _can_train(device: Device) -> bool:
    return not (device.refusal or device.barred or device.out)
