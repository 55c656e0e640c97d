"""Brokers that take no large messages and do not say so: what a client, a run and `doctor` make of them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from coordinator_fixture import a_plan
from faulty_broker import FaultyBroker
from fleet_fixture import Fleet, finish, share
from transport_fixtures import Recorder, fails, mosquitto_wanted, run, until

from coordinator.runtime.chunk_size import LEAST_BYTES, Chunking, ChunkSizer
from coordinator.runtime.environment import Environment
from coordinator.runtime.publisher import Publisher
from device_agent.device_checks import reach
from edgefl.errors import BrokerError, MessageSizeError
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, HEADER_BYTES
from edgefl.protocol.messages import Drain
from edgefl.storage.objects import ObjectStore
from edgefl.transport.broker import Broker, start_broker
from edgefl.transport.interface import Probe, check_payload
from edgefl.transport.memory_broker import MemoryTransport
from edgefl.transport.mosquitto import write_configuration
from edgefl.transport.mqtt import LOSSES, MqttTransport, Sizes

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed here")
LIMIT = 50_000
#: Of parts that fill chunks of the usual size.
WIDE = {
    "model.encoders.acc.width": 64,
    "transfer.chunk_bytes": DEFAULT_CHUNK_BYTES,
    "training.rounds": "[1, 0]",
    "round.devices": 1,
    "round.deadline_s": 30,
}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mosquitto has a limit that it announces to nobody."""

    def write(directory: Path, *details: Any) -> Path:
        path = write_configuration(directory, *details)
        path.write_text(f"{path.read_text()}message_size_limit {LIMIT}\n")
        return path

    monkeypatch.setattr("edgefl.transport.broker.write_configuration", write)


@pytest.fixture
def narrow(tmp_path: Path, limited: None) -> Iterator[Broker]:
    broker = start_broker(tmp_path / "broker", "mosquitto")
    asyncio.run(broker.start())
    yield broker
    asyncio.run(broker.stop())


def url_of(broker: Broker, version: str) -> str:
    return broker.url + ("?version=3" if version == "3" else "")


@asynccontextmanager
async def probing(url: str) -> AsyncIterator[tuple[MqttTransport, Probe]]:
    transport = MqttTransport(url, "one", clean_session=True)
    probe = Probe(transport, "edgefl/1/default/d/one/probe")
    transport.on_message = lambda topic, payload: probe.heard(payload)
    await transport.connect()
    try:
        yield transport, probe
    finally:
        await transport.close()


# The client


@needs_mosquitto
def test_a_refusal_for_its_size_names_the_size_and_keeps_the_connection(narrow: Broker) -> None:
    """paho knows no PUBACK with reason 0x95 and ends the connection on it: 108 times in a minute at 8515bcb."""

    async def scene() -> None:
        transport = MqttTransport(narrow.url, "one", clean_session=True)
        seen = Recorder(transport)
        await transport.connect()
        await transport.subscribe(["x"])
        error = await fails(asyncio.wait_for(transport.publish("x", bytes(98_356)), 5))
        assert isinstance(error, MessageSizeError)
        assert error.size == 98_356
        assert "98,356 bytes" in error.message
        assert "transfer.chunk_bytes=16384" in error.remedy
        assert transport.max_payload == 98_355  # such a message is not even sent again
        await transport.publish("x", b"small")
        await seen.arrived(1)
        assert seen.connections == [True]
        await transport.close()

    run(scene())


async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A broker (as rumqttd) that acknowledges, and closes the connection on what is larger than its limit."""
    while header := await reader.read(1):
        length = shift = 0
        while True:
            (byte,) = await reader.readexactly(1)
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if length > LIMIT:
            break
        body = await reader.readexactly(length)
        if header[0] == 0x10:  # CONNECT
            writer.write(b"\x20\x02\x00\x00")
        elif header[0] & 0xF0 == 0x30:  # PUBLISH
            topic = 2 + int.from_bytes(body[:2], "big")
            writer.write(b"\x40\x02" + body[topic : topic + 2])
    writer.close()


def test_a_message_at_which_each_connection_ends_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        server = await asyncio.start_server(closing, "127.0.0.1", 0)
        transport = MqttTransport(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}?version=3", "one")
        seen = Recorder(transport)
        await transport.connect()
        await transport.publish("x", bytes(20_000))
        sent = [asyncio.ensure_future(transport.publish("x", bytes(size))) for size in (98_356, 40_000)]
        error = await fails(asyncio.wait_for(sent[0], 10))
        assert isinstance(error, MessageSizeError)
        assert (error.size, error.reason) == (98_356, "it closes the connection")
        await asyncio.wait_for(sent[1], 10)  # what came after it is not lost
        assert seen.connections.count(False) == LOSSES
        assert isinstance(await fails(transport.publish("x", bytes(98_356))), MessageSizeError)
        await transport.close()
        server.close()
        await server.wait_closed()

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert "same id" not in caplog.text


def test_only_a_message_larger_than_any_that_passed_is_suspected() -> None:
    sizes = Sizes()
    sizes.sent(1, 50_000)
    assert [sizes.lost() for _ in range(LOSSES)] == [None] * (LOSSES - 1) + [1]
    sizes.taken(1)
    sizes.sent(2, 50_000)  # as large as one that passed: the network's fault
    assert [sizes.lost() for _ in range(3)] == [None] * 3
    sizes.taken(2)
    sizes.sent(3, 60_000)
    assert sizes.lost() is None
    sizes.sent(4, 70_000)
    sizes.taken(3)  # it was slow, not too large
    assert sizes.lost() is None
    sizes = Sizes()
    sizes.sent(1, 100)  # no broker refuses that
    assert [sizes.lost() for _ in range(3)] == [None] * 3


@needs_mosquitto
def test_what_this_side_gave_a_connection_up_for_is_told(narrow: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """paho's own reason: here a packet that no client can read."""

    async def scene() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(b"\x20\x02\x00\x00")
            await reader.read(100)
            writer.write(b"\x90\x00")  # an answer to a subscription without any content
            await reader.read(100)
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        transport = MqttTransport(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}?version=3", "one")
        await transport.connect()
        waiting = asyncio.ensure_future(transport.subscribe(["x"]))
        await until(lambda: "lost the broker" in caplog.text)
        waiting.cancel()
        await transport.close()
        server.close()
        await server.wait_closed()

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert "Protocol error" in caplog.text


# The probe


@needs_mosquitto
def test_what_others_are_known_to_send_is_tried_where_the_broker_tells_no_limit(tmp_path: Path) -> None:
    """Two of 2,000 agents fell back to MQTT 3.1.1, and never sent the chunks of 384 KiB that they were asked for."""

    async def scene() -> None:
        async with start_broker(tmp_path / "broker", "mosquitto") as broker:
            transport = MqttTransport(url_of(broker, "3"), "one", clean_session=True)
            await transport.connect()
            assert isinstance(
                await fails(asyncio.wait_for(transport.publish("x", bytes(400_000)), 5)), MessageSizeError
            )
            transport.admit(400_000)
            await asyncio.wait_for(transport.publish("x", bytes(400_000)), 5)
            await transport.close()
            told = MqttTransport(broker.url, "two", clean_session=True)
            await told.connect()
            before = told.max_payload
            told.admit(2**28)
            assert told.max_payload == before, "the broker has told its own"
            await told.close()

    run(scene())


@needs_mosquitto
@pytest.mark.parametrize("version", ["5", "3"])
def test_the_probe_finds_the_size_that_passes(narrow: Broker, version: str) -> None:
    async def scene() -> None:
        async with probing(url_of(narrow, version)) as (transport, probe):
            assert transport.limits.version == ("5" if version == "5" else "3.1.1")
            assert await probe.passes(40_000) is True
            assert await probe.passes(60_000) is False
            why = {"5": "Packet too large", "3": "it acknowledges and drops it"}
            assert probe.reason == why[version]
            assert await probe.largest(DEFAULT_CHUNK_BYTES, LEAST_BYTES, HEADER_BYTES) == DEFAULT_CHUNK_BYTES // 2

    run(scene())


@needs_mosquitto
@pytest.mark.parametrize("version", ["5", "3"])
def test_doctor_names_the_size_and_the_way_out(narrow: Broker, version: str) -> None:
    check = reach(url_of(narrow, version))
    assert check.status == "warn"
    assert f"MQTT {'5' if version == '5' else '3.1.1'}" in check.detail
    assert "98,304 bytes do not pass, 49,152 do" in check.detail
    assert "transfer.chunk_bytes=49152" in check.remedy


@needs_mosquitto
def test_doctor_tells_what_holds_at_a_broker(tmp_path: Path) -> None:
    async def started() -> Broker:
        broker = start_broker(tmp_path, "mosquitto")
        await broker.start()
        return broker

    broker = asyncio.run(started())
    check = reach(broker.url)
    asyncio.run(broker.stop())
    assert check.status == "ok"
    assert "MQTT 5, packets of 2,097,152 bytes, 20 in flight; chunks of 98,304 bytes pass" in check.detail


# The coordinator


@needs_mosquitto
def test_chunks_grow_only_to_what_passes(narrow: Broker) -> None:
    async def scene() -> None:
        told: list[str] = []
        transport = MqttTransport(narrow.url, "coordinator", clean_session=True)
        sizer = ChunkSizer(0, a_plan().credit)
        chunking = Chunking(transport, "default", sizer, told.append)
        transport.on_message = lambda topic, payload: chunking.heard(payload)
        await transport.connect()
        await chunking.begin()
        assert sizer.of(["a"])[0] == 49_152
        assert "takes no messages of 98,356 bytes" in told[0]
        assert "transfer.chunk_bytes=49152" in told[0]
        sizer.note("a", 10_000_000, 0.1)  # a link for far more
        assert sizer.of(["a"])[0] == 49_152
        await chunking.close()
        await transport.close()

    run(scene())


def test_larger_chunks_are_tried_before_they_are_sent() -> None:
    sizer = ChunkSizer(0, 16)
    sizer.connected(1_000_000)
    sizer.proved(DEFAULT_CHUNK_BYTES)
    sizer.note("a", 10_000_000, 0.1)
    assert (sizer.of(["a"])[0], sizer.wanted) == (DEFAULT_CHUNK_BYTES, 2 * DEFAULT_CHUNK_BYTES)
    sizer.proved(2 * DEFAULT_CHUNK_BYTES)
    assert (sizer.of(["a"])[0], sizer.wanted) == (2 * DEFAULT_CHUNK_BYTES, 4 * DEFAULT_CHUNK_BYTES)
    sizer.capped(2 * DEFAULT_CHUNK_BYTES)
    assert (sizer.of(["a"])[0], sizer.wanted) == (2 * DEFAULT_CHUNK_BYTES, 0)


def test_a_broker_that_takes_next_to_nothing_ends_the_run_by_name() -> None:
    async def scene() -> None:
        class Deaf:
            """Refuses every size."""

            max_payload, limits = 255 * 1024, MqttTransport("mqtt://h", "one").limits

            async def subscribe(self, patterns: list[str]) -> None:
                pass

            async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
                error = MessageSizeError("too large")
                error.reason = "Packet too large"
                raise error

        chunking = Chunking(Deaf(), "default", ChunkSizer(0, 16), lambda text: None)  # type: ignore[arg-type]
        error = await fails(chunking.begin())
        assert isinstance(error, BrokerError)
        assert "8,244 bytes: Packet too large" in error.message
        assert "message_size_limit" in error.remedy

    run(scene())


class Shallow(MemoryTransport):
    """Takes 10 KiB."""

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        check_payload(topic, payload, 10 * 1024)
        await super().publish(topic, payload, retain=retain)


@pytest.mark.parametrize("size", [9_000, 12_000, 20_000])
def test_a_message_that_no_chunk_size_makes_smaller_is_reported(tmp_path: Path, size: int) -> None:
    """Such as an offer of a model of many classes: the devices would wait for it in vain."""

    async def scene() -> list[object]:
        told: list[object] = []
        transport, store = Shallow(FaultyBroker(), "c"), ObjectStore(tmp_path)
        await transport.connect()
        publisher = Publisher(
            a_plan(), Environment(tmp_path, transport, "default", told.append), store, told.append, lambda: 0.0
        )
        await publisher.chunking.begin()
        publisher.post("a", Drain("r1", "x" * size))
        await publisher.flush(1.0)
        await asyncio.sleep(0)
        await publisher.close()
        return told

    told = run(scene())
    if size < 10 * 1024:
        assert told == []
    else:
        assert [(type(error), error.size > size) for error in told] == [(MessageSizeError, True)]


# A run


@needs_mosquitto
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("version", ["5", "3"])
def test_a_run_ends_on_a_broker_that_takes_no_usual_chunk(version: str, tmp_path: Path) -> None:
    """At 8515bcb nothing moved: "late", after three deadlines."""
    with Fleet(tmp_path, "mosquitto") as fleet:
        fleet.broker.address = dataclasses.replace(fleet.broker.address, legacy=version == "3")
        fleet.agent("one", share(40, "acc", seed=1))
        finish(fleet.coordinator("r1", WIDE))
        report = fleet.report("r1")
    assert report.status == "done"
    started = next(event for event in report.events if event.kind == "run_started")
    assert started.data["mqtt"] == ("5" if version == "5" else "3.1.1")
    assert started.data["chunk_bytes"] == DEFAULT_CHUNK_BYTES // 2
    assert any("takes no messages of 98,356 bytes" in str(event.data.get("text")) for event in report.events)


@needs_mosquitto
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_chunks_shrink_where_the_coordinator_may_not_try_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An access list without the topic for probes: the first refusal of a chunk tells."""

    def write(directory: Path, *details: Any) -> Path:
        path = write_configuration(directory, *details)
        (directory / "acl").write_text("user edgefl\ntopic deny edgefl/1/+/d/+/probe\ntopic readwrite #\n")
        (directory / "acl").chmod(0o600)
        path.write_text(f"{path.read_text()}message_size_limit {LIMIT}\nacl_file {directory / 'acl'}\n")
        return path

    monkeypatch.setattr("edgefl.transport.broker.write_configuration", write)
    with Fleet(tmp_path, "mosquitto") as fleet:
        for name in ("one", "two"):
            fleet.agent(name, share(40, "acc", seed=1))
        finish(fleet.coordinator("r1", {**WIDE, "round.devices": 2}))
        report = fleet.report("r1")
    assert report.status == "done"
    assert report.rounds[0].attempt == 1
    assert report.rounds[0].participants == ("one", "two")
    assert any("chunks are of 49,1" in str(event.data.get("text")) for event in report.events)
