"""Introductions of devices (hellos): the state kept of a device, warnings, and refused protocol versions. Pure."""

from __future__ import annotations

import msgspec

from coordinator.core.instructions import EmitEvent, Instruction, SaveDevice, SendDrain, SendWelcome, Step
from coordinator.core.one_time_warnings import warn_once
from coordinator.core.state import Device, State
from coordinator.core.update_header import exceeds
from edgefl.protocol.messages import PROTOCOL_VERSION, Hello

replace = msgspec.structs.replace

#: Connections of a device whose joins and leaves a run's ledger records: one that goes on so would fill it.
MOST_CONNECTIONS = 100


def introduced(state: State, hello: Hello) -> Step:
    """The state with the device as it now says it is. It keeps what it has done wrong, and its first claim."""
    name, known = hello.device, state.devices.get(hello.device)
    was = known or Device(hello)
    back = known is None or not known.online
    device = replace(was, hello=hello, online=True, first_claim=was.claim, connections=was.connections + back)
    if known is None or _facts(known.hello) != _facts(hello):
        device = replace(device, placement=None, ticket=0, declined=(), factors={})
    if hello.session != was.hello.session:
        device = replace(device, previous_session=was.hello.session)
    state = replace(state, devices={**state.devices, name: device})
    out: list[Instruction] = [SaveDevice(hello), SendWelcome(name)]
    if back and device.connections <= MOST_CONNECTIONS:
        budget = msgspec.to_builtins(hello.budget)
        data = {"profile": hello.profile, "samples": hello.samples, "budget": budget}
        out.append(EmitEvent("device_joined", state.stage, state.number, name, data))
    for about, text in _odd(was, device):
        state, more = warn_once(state, name, about, text)
        out += more
    return state, out


def _odd(was: Device, now: Device) -> list[tuple[str, str]]:
    """(about, text) of what operators have to know."""
    hello, found = now.hello, []
    if exceeds(hello, now.claim):
        counts = now.claim.samples.get("", 0)
        text = f"it now says it has {hello.samples.get('', 0)} samples; in this run the first {counts} count"
        found.append(("claim", text))
    if hello.session != was.hello.session and hello.session == was.previous_session:
        text = "two agents use this identity and take turns at the broker; stop one, or enrol it under its own name"
        found.append(("twin", text))
    if now.connections > MOST_CONNECTIONS:
        found.append(("comings", f"it came {now.connections} times; its coming and going are not told any more"))
    return found


def strange(state: State, hello: Hello) -> Step:
    """Refuse a device of another protocol version: it is sent the reason each time; operators get one warning."""
    text = f"it speaks protocol {hello.protocol}, this coordinator {PROTOCOL_VERSION}: install the same release on both"
    out: list[Instruction] = [SendDrain(hello.device, text)]
    if hello.device not in state.strange:
        state = replace(state, strange=state.strange | {hello.device})
        data = {"text": f"{hello.device} is refused: {text}", "about": "protocol"}
        out.append(EmitEvent("warning", state.stage, state.number, hello.device, data))
    return state, out


def _facts(hello: Hello) -> tuple[object, ...]:
    """Facts of a device that its placement depends on; a change requires a new plan."""
    measured = hello.capabilities.trainer_base_bytes > 0
    return hello.profile, hello.budget, hello.samples, hello.modalities, hello.class_counts, measured
