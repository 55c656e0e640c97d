"""Strangers at a fleet's door: what they may fill, and that it is none of the fleet's. Real mosquittos."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from identity_fixture import FLEET, HOST, Attackers, a_fleet, enrolled
from transport_fixtures import Recorder, fails, mosquitto_wanted, run, until

from edgefl.errors import BrokerError
from edgefl.identity.fleet import Fleet, fleet_broker
from edgefl.identity.token import MAX_MESSAGE_BYTES
from edgefl.protocol import topics
from edgefl.transport.mosquitto import NEWCOMER_BYTES

pytestmark = pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed")

MIB = 2**20


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path / "fleet")


def resident_bytes(directory: Path) -> int:
    """Of all brokers whose files lie there."""
    return sum(psutil.Process(int(file.read_text())).memory_info().rss for file in directory.glob("*.pid"))


async def send(at: Attackers, number: int, size: int, **options: Any) -> None:
    """One stranger's message, whatever the broker makes of it."""
    name = f"enroll-{number}"
    stranger, heard = await at.newcomer(name)
    stranger.max_payload = 2**28  # it does not heed what the broker has told it
    sending = asyncio.ensure_future(stranger.publish(topics.build("enroll-up", FLEET, name), bytes(size), **options))
    await until(lambda: sending.done() or False in heard.connections)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await stranger.close()


def test_strangers_fill_neither_memory_nor_disk(fleet: Fleet) -> None:
    """150 of them with a message of 1 MiB each, retained; at 8515bcb the broker grew by 145 MiB."""

    async def scene() -> None:
        async with fleet_broker(fleet), Attackers(fleet) as at:
            place = fleet.directory / "broker"
            before = resident_bytes(place)
            for number in range(150):
                await send(at, number, MIB - 2000, retain=True)
            assert resident_bytes(place) - before < 24 * MIB
            for number in range(3):  # nor what is small, but retained
                await send(at, number, 1000, retain=True)
            _, heard = await at.coordinator(topics.build("enroll-up", FLEET, "+"))
            _, greeted = await at.greeter(topics.build("enroll-up", FLEET, "+"))
            await send(at, 7, 1000)
            await greeted.arrived(1)
            assert [topic for topic, _ in greeted.messages] == [topics.build("enroll-up", FLEET, "enroll-7")]
            assert heard.messages == []
        sizes = [file.stat().st_size for file in place.glob("*.db")]
        assert sum(sizes) < MIB, sizes

    run(scene(), 60)


def test_strangers_do_not_displace_what_a_device_has_said(fleet: Fleet) -> None:
    """While the coordinator is away, its queue holds 20 MiB here (512 in use); strangers send 30 MB into theirs."""
    place = fleet.directory / "broker"

    async def scene() -> None:
        broker = fleet_broker(fleet)
        for file in place.glob("*.conf"):
            text = file.read_text(encoding="utf-8").replace(
                f"max_queued_bytes {512 * MIB}", f"max_queued_bytes {20 * MIB}"
            )
            file.write_text(text, encoding="utf-8")
        cam = enrolled(fleet, "cam", fleet.directory / "cam")
        async with broker, Attackers(fleet) as at:
            patterns = [
                *topics.coordinator_subscriptions(FLEET),
                topics.build("enroll-up", FLEET, "+"),
            ]  # as at 8515bcb
            away = fleet.transport()
            await away.connect()
            await away.subscribe(patterns)
            await away.close()
            for number in range(30):
                await send(at, number, 1_000_000)
            device, _ = await at.device(cam)
            await device.publish(topics.build("up", FLEET, "cam"), b"said")
            back = fleet.transport()
            heard = Recorder(back, topics.build("up", FLEET, "cam"))
            await back.subscribe(patterns)
            await back.connect()
            await device.publish(topics.build("up", FLEET, "cam"), b"and then")
            await until(lambda: b"and then" in heard.payloads, 20)
            await back.close()
            assert heard.payloads == [b"said", b"and then"]

    run(scene(), 60)


@contextlib.contextmanager
def few_files(soft: int) -> Iterator[None]:
    """A shell's limit of open files (1024 by default), smaller here."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_idle_connections_do_not_lock_the_fleet_out(fleet: Fleet) -> None:
    """300 without a greeting, where a program may open 200 files by default and more if it asks for them."""
    cam = enrolled(fleet, "cam", fleet.directory / "cam")

    async def scene() -> None:
        broker = fleet_broker(fleet)
        with few_files(200):
            await broker.start()
        with contextlib.ExitStack() as idle:
            try:
                for port in (fleet.record.port, fleet.record.enroll_port):
                    for _ in range(300):
                        idle.enter_context(socket.create_connection((HOST, port)))
                async with Attackers(fleet) as at:
                    device, _ = await at.device(cam)
                    await device.publish(topics.build("up", FLEET, "cam"), b"here")
            finally:
                await broker.stop()

    run(scene(), 30)


def test_a_stranger_who_knows_a_client_id_does_not_cut_its_owner_off(fleet: Fleet) -> None:
    cam = enrolled(fleet, "cam", fleet.directory / "cam")

    async def scene() -> None:
        async with fleet_broker(fleet), Attackers(fleet) as at:
            _, heard = await at.device(cam, topics.build("down", FLEET, "cam"))
            coordinator, _ = await at.coordinator()
            await at.newcomer(cam.record.client_id)
            await coordinator.publish(topics.build("down", FLEET, "cam"), b"still here")
            await heard.arrived(1)
            assert heard.connections == [True]
            assert isinstance(await fails(at.newcomer("x" * 50_000)), BrokerError)  # a session of 50 kB

    run(scene())


def test_an_enrolled_device_can_not_have_messages_retained(fleet: Fleet) -> None:
    cam = enrolled(fleet, "cam", fleet.directory / "cam")

    async def scene() -> None:
        async with fleet_broker(fleet), Attackers(fleet) as at:
            for number in range(3):
                device, heard = await at.device(cam, client_id=f"cam-{number}")
                topic = topics.build("up-object", FLEET, "cam", f"u-{number}")
                sending = asyncio.ensure_future(device.publish(topic, bytes(1000), retain=True))
                await until(lambda heard=heard: False in heard.connections)
                sending.cancel()
                await device.close()
            _, heard = await at.coordinator(*topics.coordinator_subscriptions(FLEET))
            device, _ = await at.device(cam)
            await device.publish(topics.build("up", FLEET, "cam"), b"own")
            await heard.arrived(1)
            assert heard.payloads == [b"own"]

    run(scene())


def test_the_limit_of_the_broker_is_the_codes_own() -> None:
    assert NEWCOMER_BYTES == MAX_MESSAGE_BYTES


def test_a_broker_of_newcomers_that_is_down_stops_nothing(fleet: Fleet) -> None:
    from coordinator.runtime.fleet_auth import Newcomers

    async def scene() -> None:
        told: list[str] = []
        newcomers = Newcomers(fleet, lambda client, payload: None, told.append)
        newcomers.start(fleet.local_url)
        await until(lambda: told)
        await newcomers.close()
        assert "devices cannot enrol now" in told[0]
        assert str(fleet.record.enroll_port) in told[0]

    run(scene())
