"""Introductions of devices (hellos): the state kept of a device, warnings, and refused protocol versions. Pure."""

from __future__ import annotations

import msgspec

from coordinator.core.instructions import SaveDevice, SendDrain, SendWelcome
from coordinator.core.state import Device
from coordinator.core.steps import Steps
from coordinator.core.update_header import exceeds
from edgefl.protocol.messages import PROTOCOL_VERSION, Hello

replace = msgspec.structs.replace

#: Connections of a device whose joins and leaves a run's ledger records: one that goes on so would fill it.
MOST_CONNECTIONS = 100


def introduce(steps: Steps, hello: Hello) -> None:
    """Take a device as it now says it is. Its rejected updates and its first claim stay."""
    name, known = hello.device, steps.state.devices.get(hello.device)
    was = known or Device(hello)
    back = known is None or not known.online
    device = replace(was, hello=hello, online=True, first_claim=was.claim, connections=was.connections + back)
    if known is None or _facts(known.hello) != _facts(hello):
        device = replace(device, placement=None, ticket=0, declined=(), factors={})
    if hello.session != was.hello.session:
        device = replace(device, previous_session=was.hello.session)
    steps.set(devices={**steps.state.devices, name: device})
    steps.do(SaveDevice(hello), SendWelcome(name))
    if back and device.connections <= MOST_CONNECTIONS:
        budget = msgspec.to_builtins(hello.budget)
        steps.emit("device_joined", name, {"profile": hello.profile, "samples": hello.samples, "budget": budget})
    for about, text in _suspicious(was, device):
        steps.warn_once(name, about, text)


def _suspicious(was: Device, now: Device) -> list[tuple[str, str]]:
    """(about, text) of warnings for operators."""
    hello, found = now.hello, []
    if exceeds(hello, now.claim):
        counts = now.claim.samples.get("", 0)
        text = f"it now says it has {hello.samples.get('', 0)} samples; in this run the first {counts} count"
        found.append(("claim", text))
    if hello.session != was.hello.session and hello.session == was.previous_session:
        text = "two agents use this identity and take turns at the broker; stop one, or enrol it under its own name"
        found.append(("twin", text))
    if now.connections > MOST_CONNECTIONS:
        text = f"it connected {now.connections} times; its joins and leaves are not recorded any more"
        found.append(("comings", text))
    return found


def refuse_protocol(steps: Steps, hello: Hello) -> None:
    """Refuse a device of another protocol version: it is sent the reason each time; operators get one warning."""
    text = f"it speaks protocol {hello.protocol}, this coordinator {PROTOCOL_VERSION}: install the same release on both"
    steps.drop("protocol")
    steps.do(SendDrain(hello.device, text))
    if hello.device not in steps.state.incompatible:
        steps.set(incompatible=steps.state.incompatible | {hello.device})
        steps.emit("warning", hello.device, {"text": f"{hello.device} is refused: {text}", "about": "protocol"})


def _facts(hello: Hello) -> tuple[object, ...]:
    """Facts of a device that its placement depends on; a change requires a new plan."""
    measured = hello.capabilities.trainer_base_bytes > 0
    return hello.profile, hello.budget, hello.samples, hello.modalities, hello.class_counts, measured
