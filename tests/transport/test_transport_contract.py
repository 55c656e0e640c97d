"""One suite for every transport: what callers may rely on, wherever the bytes travel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from transport_fixtures import MemoryWorld, MqttWorld, World, broker_kinds, fails, run, until

from edgefl.errors import BrokerError
from edgefl.transport.broker import start_broker
from edgefl.transport.interface import Will

WAYS = ["memory", *(f"{way}-{kind}" for kind in broker_kinds() for way in ("mqtt", "loop"))]


@pytest.fixture(scope="module", params=WAYS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where to connect; "" for the broker in memory. Real brokers run for the whole module."""
    if request.param == "memory":
        yield ""
        return
    broker = start_broker(tmp_path_factory.mktemp("broker"), request.param.partition("-")[2])
    asyncio.run(broker.start())
    yield broker.url
    asyncio.run(broker.stop())


@pytest.fixture
def world(url: str, request: pytest.FixtureRequest) -> World:
    way = request.node.callspec.params["url"]
    return MqttWorld(url, in_loop=way.startswith("loop")) if url else MemoryWorld()


def test_messages_arrive_whole_in_order_and_only_where_they_are_wanted(world: World) -> None:
    async def scenario() -> None:
        sender, _ = await world.connected("sender")
        _, one = await world.connected("one", "d/one/+")
        _, all_ = await world.connected("all", "#")
        sent = [(world.topic(f"d/{'one' if i % 2 else 'two'}/up"), bytes([i]) * i) for i in range(100)]
        await asyncio.gather(*(sender.publish(*message) for message in sent))
        await all_.arrived(100)
        await one.arrived(50)
        assert all_.messages == sent
        assert one.messages == [message for message in sent if "/one/" in message[0]]
        await world.close()

    run(scenario())


def test_what_was_published_while_a_client_was_away_waits_for_it(world: World) -> None:
    async def scenario() -> None:
        receiver, before = await world.connected("receiver", "x")
        sender, _ = await world.connected("sender")
        await receiver.close()
        for number in (b"1", b"2", b"3"):
            await sender.publish(world.topic("x"), number)
        _, after = await world.connected("receiver", "x")
        await after.arrived(3)
        assert before.messages == []
        assert sorted(after.payloads) == [b"1", b"2", b"3"]
        await world.close()

    run(scenario())


@pytest.mark.parametrize("away", [False, True])
def test_a_topic_that_is_unsubscribed_comes_no_longer_and_can_be_taken_up_again(world: World, away: bool) -> None:
    async def scenario() -> None:
        receiver, received = await world.connected("receiver", "x", "y")
        sender, _ = await world.connected("sender")
        if away:
            world.cut(receiver)
            await until(lambda: False in received.connections)
        receiver.unsubscribe([world.topic("x")])
        await until(lambda: received.connections[-1])
        await receiver.publish(world.topic("z"), b"")  # the broker has heard what was sent before
        for topic in ("x", "y"):
            await sender.publish(world.topic(topic), b"1")
        await received.arrived(1)
        await receiver.subscribe([world.topic("x")])
        for topic in ("x", "y"):
            await sender.publish(world.topic(topic), b"2")
        await received.arrived(3)
        assert received.messages == [(world.topic(at), text) for at, text in (("y", b"1"), ("x", b"2"), ("y", b"2"))]
        await world.close()

    run(scenario())


def test_lost_contact_sends_the_will_and_heals_itself(world: World) -> None:
    async def scenario() -> None:
        will = Will(world.topic("presence"), b"offline", retain=True)
        device, seen = await world.connected("device", "down", will=will)
        watcher, watched = await world.connected("watcher", "presence")
        world.cut(device)
        await until(lambda: False in seen.connections)
        await device.publish(world.topic("presence"), b"online", retain=True)  # waits for the reconnection
        await watched.arrived(2)
        await watcher.publish(world.topic("down"), b"welcome back")
        await until(lambda: b"welcome back" in seen.payloads)  # amqtt also sends it the retained presence, unasked
        assert seen.connections == [True, False, True]
        assert watched.payloads[0] == b"offline"
        assert watched.payloads[-1] == b"online"
        await device.publish(world.topic("presence"), b"", retain=True)
        await world.close()

    run(scenario())


def test_a_goodbye_sends_no_will(world: World) -> None:
    async def scenario() -> None:
        _, watched = await world.connected("watcher", "presence")
        device, seen = await world.connected("device", will=Will(world.topic("presence"), b"offline", retain=False))
        await device.publish(world.topic("presence"), b"leaving")
        await device.close()
        other, _ = await world.connected("other")
        await other.publish(world.topic("presence"), b"last")
        await watched.arrived(2)
        await asyncio.sleep(0.1)
        assert watched.payloads == [b"leaving", b"last"]
        assert seen.connections == [True]
        await world.close()

    run(scenario())


def test_a_retained_message_meets_later_subscribers_until_it_is_cleared(world: World) -> None:
    async def scenario() -> None:
        sender, _ = await world.connected("sender")
        await sender.publish(world.topic("state"), b"old", retain=True)
        await sender.publish(world.topic("state"), b"new", retain=True)
        _, late = await world.connected("late", "state")
        await late.arrived(1)
        await sender.publish(world.topic("state"), b"", retain=True)
        _, later = await world.connected("later", "state")
        await sender.publish(world.topic("state"), b"mark")
        await later.arrived(1)
        assert late.payloads[0] == b"new"
        assert later.payloads == [b"mark"]
        await world.close()

    run(scenario())


def test_the_largest_payload_passes_and_one_byte_more_is_refused(world: World) -> None:
    async def scenario() -> None:
        sender, _ = await world.connected("sender")
        _, received = await world.connected("receiver", "x")
        largest = bytes(sender.max_payload)
        await sender.publish(world.topic("x"), largest)
        await sender.publish(world.topic("x"), b"")
        await received.arrived(2)
        assert received.payloads == [largest, b""]
        error = await fails(sender.publish(world.topic("x"), largest + b"!"))
        assert isinstance(error, BrokerError)
        assert str(sender.max_payload) in error.message
        await world.close()

    run(scenario())


def test_bytes_are_counted_on_both_sides(world: World) -> None:
    async def scenario() -> None:
        sender, _ = await world.connected("sender")
        receiver, received = await world.connected("receiver", "x")
        sent, got = sender.bytes_sent, receiver.bytes_received
        await sender.publish(world.topic("x"), bytes(50_000))
        await received.arrived(1)
        size = 50_000 + len(world.topic("x"))
        assert size <= sender.bytes_sent - sent <= size + 64
        assert size <= receiver.bytes_received - got <= size + 64
        await world.close()

    run(scenario())


def test_callbacks_run_in_the_event_loops_thread(world: World) -> None:
    async def scenario() -> None:
        threads: set[int] = set()
        transport, _ = world.client("one")
        transport.on_message = lambda topic, payload: threads.add(threading.get_ident())
        transport.on_connection = lambda connected: threads.add(threading.get_ident())
        await transport.connect()
        assert threads == {threading.get_ident()}  # on_connection comes before connect returns
        threads.clear()
        await transport.subscribe([world.topic("x")])
        await transport.publish(world.topic("x"), b"to myself")
        await until(lambda: threads)
        assert threads == {threading.get_ident()}
        await world.close()

    run(scenario())


def test_a_failing_callback_costs_one_message(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        transport, received = await world.connected("one", "x")
        record = transport.on_message

        def fail_once(topic: str, payload: bytes) -> None:
            transport.on_message = record
            raise ZeroDivisionError

        transport.on_message = fail_once
        await transport.publish(world.topic("x"), b"1")
        await transport.publish(world.topic("x"), b"2")
        await received.arrived(1)
        assert received.payloads == [b"2"]
        await world.close()

    run(scenario())
    assert "ZeroDivisionError" in caplog.text


def test_subscriptions_made_before_connecting_hold_from_the_first_moment(world: World) -> None:
    async def scenario() -> None:
        receiver, received = world.client("receiver")
        await receiver.subscribe([world.topic("x"), world.topic("y")])
        receiver.unsubscribe([world.topic("y")])
        await receiver.connect()
        await receiver.publish(world.topic("x"), b"now")
        await received.arrived(1)
        assert received.connections == [True]
        await world.close()

    run(scenario())


def test_sending_before_the_beginning_or_after_the_end_is_an_error(world: World) -> None:
    async def scenario() -> None:
        transport, _ = world.client("one")
        assert isinstance(await fails(transport.publish(world.topic("x"), b"")), BrokerError)
        await transport.connect()
        await transport.close()
        await transport.close()
        assert isinstance(await fails(transport.publish(world.topic("x"), b"")), BrokerError)
        assert isinstance(await fails(transport.subscribe([world.topic("y")])), BrokerError)

    run(scenario())


def test_whoever_waits_for_the_broker_when_the_transport_closes_is_told(world: World) -> None:
    async def scenario() -> None:
        transport, _ = await world.connected("one")
        world.cut(transport)
        waiting = asyncio.ensure_future(transport.publish(world.topic("x"), b"never"))
        await asyncio.sleep(0)
        await transport.close()
        assert isinstance(await fails(waiting), BrokerError)

    run(scenario())
