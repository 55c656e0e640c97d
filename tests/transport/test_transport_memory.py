"""The broker in memory: its faults come from the seed, and each is what its name says."""

from __future__ import annotations

import asyncio

import pytest
from faulty_broker import FaultyBroker
from transport_fixtures import MemoryWorld, Recorder, run, until

from edgefl.transport.interface import Will
from edgefl.transport.memory_broker import MemoryTransport

_NUMBERS = [str(i).encode() for i in range(200)]


def _received(broker: FaultyBroker) -> list[bytes]:
    """What one subscriber gets of 200 numbered messages, in order of arrival."""

    async def scenario() -> list[bytes]:
        world = MemoryWorld(broker)
        sender, _ = await world.connected("sender")
        _, received = await world.connected("receiver", "x")
        await asyncio.gather(*(sender.publish(world.topic("x"), number) for number in _NUMBERS))
        await asyncio.sleep(0.1)
        await world.close()
        return received.payloads

    return run(scenario())


def test_without_faults_everything_arrives_once_in_order() -> None:
    assert _received(FaultyBroker()) == _NUMBERS


def test_loss_drops_about_its_share_and_counts_it() -> None:
    broker = FaultyBroker(seed=1, loss=0.25)
    received = _received(broker)
    assert broker.dropped == 200 - len(received)
    assert 30 <= broker.dropped <= 70  # 50 expected, ± 3 standard deviations of 6.1
    assert received == sorted(received, key=int)


def test_duplicates_add_copies_and_lose_nothing() -> None:
    received = _received(FaultyBroker(seed=1, duplicate=0.25))
    assert 230 <= len(received) <= 270
    assert sorted(set(received), key=int) == _NUMBERS


def test_reordering_swaps_neighbours_and_loses_nothing() -> None:
    received = _received(FaultyBroker(seed=1, reorder=0.25))
    assert received != _NUMBERS
    assert sorted(received, key=int) == _NUMBERS


def test_the_last_message_is_not_held_back_for_ever() -> None:
    assert _received(FaultyBroker(reorder=1.0))[-1:] == _NUMBERS[-1:]


@pytest.mark.parametrize("fault", ["loss", "duplicate", "reorder"])
def test_the_same_seed_gives_the_same_faults_and_another_seed_others(fault: str) -> None:
    assert _received(FaultyBroker(7, **{fault: 0.3})) == _received(FaultyBroker(7, **{fault: 0.3}))
    assert _received(FaultyBroker(7, **{fault: 0.3})) != _received(FaultyBroker(8, **{fault: 0.3}))


def test_one_fault_does_not_move_another() -> None:
    alone = set(_received(FaultyBroker(seed=3, loss=0.3)))
    together = set(_received(FaultyBroker(seed=3, loss=0.3, duplicate=0.5, reorder=0.5)))
    assert alone == together


def test_delay_is_what_a_message_takes() -> None:
    async def scenario() -> float:
        world = MemoryWorld(FaultyBroker(delay_s=0.05))
        sender, _ = await world.connected("sender")
        _, received = await world.connected("receiver", "x")
        began = asyncio.get_running_loop().time()
        await sender.publish(world.topic("x"), b"1")
        await received.arrived(1)
        await world.close()
        return asyncio.get_running_loop().time() - began

    assert 0.05 <= run(scenario()) < 0.5


def test_a_message_in_flight_when_its_receiver_is_cut_arrives_after_it() -> None:
    async def scenario() -> None:
        world = MemoryWorld(FaultyBroker(delay_s=0.02))
        sender, _ = await world.connected("sender")
        receiver, received = await world.connected("receiver", "x")
        await asyncio.sleep(0)
        publishing = asyncio.create_task(sender.publish(world.topic("x"), b"1"))
        await asyncio.sleep(0)
        world.broker.cut(receiver._client_id, seconds=0.05)
        await publishing
        assert received.messages == []
        await received.arrived(1)
        assert received.connections == [True, False, True]
        await world.close()

    run(scenario())


def test_a_cut_client_that_closes_stays_away() -> None:
    async def scenario() -> None:
        broker = FaultyBroker()
        transport = MemoryTransport(broker, "one", Will("gone", b"!", retain=True))
        seen = Recorder(transport)
        await transport.connect()
        broker.cut("one", seconds=0.01)
        broker.cut("one")  # nothing left to cut: no second will
        await transport.close()
        await asyncio.sleep(0.03)
        assert seen.connections == [True, False]
        watcher = MemoryTransport(broker, "watcher")
        watched = Recorder(watcher)
        await watcher.subscribe(["gone"])
        await watcher.connect()
        await watched.arrived(1)
        assert watched.payloads == [b"!"]
        await watcher.close()

    run(scenario())


def test_a_second_client_with_the_same_id_takes_the_session_over() -> None:
    async def scenario() -> None:
        world = MemoryWorld()
        _, first = await world.connected("same", "x")
        second, seen = await world.connected("same", "x")
        await second.publish(world.topic("x"), b"1")
        await seen.arrived(1)
        await until(lambda: False in first.connections)
        assert first.messages == []
        await world.close()

    run(scenario())
