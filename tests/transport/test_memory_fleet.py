"""What the in-memory broker and a simulated device do not do, so that a fleet may have thousands of devices."""

from __future__ import annotations

import asyncio

import pytest
from faulty_broker import FaultyBroker
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from coordinator.runtime.inbound import Inbound
from device_agent.core.machine import step
from device_agent.core.state import Received, Send, State, Tick
from edgefl.api.in_process import SIMULATED
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.transport import memory_broker
from edgefl.transport.memory_broker import MemoryTransport, Subscriptions

LEVELS = st.sampled_from(["a", "b", "$s", ""])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    levels = draw(st.lists(LEVELS | st.just("+"), min_size=1, max_size=4))
    return "/".join([*levels, *(["#"] if draw(st.booleans()) else [])])


@given(st.lists(patterns(), max_size=8), st.lists(LEVELS, min_size=1, max_size=4))
def test_subscriptions_are_found_as_mqtt_matches_them(wanted: list[str], levels: list[str]) -> None:
    topic, index = "/".join(levels), Subscriptions[int]()
    for who, pattern in enumerate(wanted):
        index.add(pattern, who)
    assert index.of(topic) == {who for who, one in enumerate(wanted) if topic_matches_sub(one, topic)}


def test_a_publish_looks_at_no_pattern_of_the_devices_that_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand devices join, and each is sent one message."""
    looked: list[str] = []
    monkeypatch.setattr(memory_broker, "topic_matches_sub", lambda pattern, topic: looked.append(topic))
    got: dict[str, list[bytes]] = {}

    async def scene() -> None:
        broker = FaultyBroker()
        names = [f"device-{n}" for n in range(1000)]
        for name in names:
            link = MemoryTransport(broker, name)
            link.on_message = lambda _, payload, name=name: got.setdefault(name, []).append(payload)
            await link.connect()
            await link.subscribe(topics.device_subscriptions("fleet", name))
        sender = MemoryTransport(broker, "coordinator")
        await sender.connect()
        for name in names:
            await sender.publish(topics.build("down", "fleet", name), name.encode())
        await asyncio.sleep(0.01)

    asyncio.run(scene())
    assert got == {f"device-{n}": [f"device-{n}".encode()] for n in range(1000)}
    assert looked == []


def test_a_simulated_device_is_not_lost_however_long_it_is_silent() -> None:
    inbound = Inbound(SIMULATED.silence_s, SIMULATED.introduce_s)
    beat = m.encode(m.Heartbeat("d", "s", 1))
    inbound.read(topics.parse(topics.build("up", "fleet", "d")), beat, 0.0)
    assert inbound.silent(1e9) == []


def test_a_simulated_device_sends_no_heartbeat() -> None:
    """Its welcome's interval passes the wire, and no time is beyond it."""
    welcome = m.decode_down(m.encode(m.Welcome("c", run="r", heartbeat_s=SIMULATED.heartbeat_s)))
    state, _ = step(State(device="d", connected=True, heartbeat_s=1.0), Received(welcome), 0.0)
    assert not [one for one in step(state, Tick(), 1e9)[1] if isinstance(one, Send)]
