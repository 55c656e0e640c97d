"""The agent's I/O against a coordinator that speaks the real protocol: in memory, with and without faults."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from agent_fixtures import CHUNK_BYTES, DEVICE, FACTS, FLEET, Coordinator, Running, asked_chunks, attempt
from faulty_broker import FaultyBroker
from msgspec.structs import replace

from device_agent.core import state as v
from device_agent.runtime.agent import TICK_S, Agent, _free_bytes
from device_agent.runtime.by_url import ByUrl, Trust
from device_agent.runtime.slots import slot_files
from device_agent.runtime.store import AgentStore, Owner
from device_agent.runtime.trainer_process import Ended
from edgefl.errors import BrokerError, BrokerUnreachableError, DataError, EdgeFLError, StoreError
from edgefl.process.worker import WorkerFailedError
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.records import Figure, ObjectRef, Refusal
from edgefl.resources import control_group
from edgefl.transfer.receiver import Completed
from edgefl.transport import failures
from edgefl.transport.address import parse_url
from edgefl.transport.link import TlsFiles
from edgefl.transport.memory_broker import MemoryTransport


def play(scene):
    asyncio.run(asyncio.wait_for(scene, 20))


def test_a_round_goes_through_and_is_billed(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            hello = await coordinator.expect(m.Hello)
            assert (hello.device, hello.samples, hello.class_counts) == (DEVICE, {"": 40, "acc": 40}, (20, 20))
            assert (await coordinator.expect(m.Presence)).online
            offer = coordinator.offer()
            assert (await coordinator.expect(m.Accept)).attempt == offer.attempt
            update = await coordinator.take_update()
            assert coordinator.store.read(update.manifest["task"].id) == b"T" * 3000
            figures = update.figures
            assert figures["payload_down_bytes"].value == 8000  # 5000 + 3000, nothing was here before
            assert figures["payload_up_bytes"].value == 3000
            none = Figure(reason="messages do not leave this process")
            assert (figures["wire_up_bytes"], figures["wire_down_bytes"]) == (none, none)
            assert figures["wall_s"].value > 0
            assert figures["flops"].value == 12.0
            while running.agent.state.update is not None:
                await asyncio.sleep(0.01)
            assert running.store.load() == v.Saved(closed=offer.attempt)
            assert len(coordinator.heard[m.Progress]) == 1
            await coordinator.expect(m.Heartbeat)
        assert not coordinator.heard[m.Presence][-1].online
        assert running.trainer.stopped == 1

    play(scene())


def test_a_device_that_is_called_says_again_who_it_is_and_what_it_is_at(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a"):
            coordinator.chunk_limit = 1  # the download stays open
            await coordinator.expect(m.Hello)
            offer = coordinator.offer()
            await coordinator.expect(m.Accept)
            await coordinator.expect(m.Need)
            coordinator.heard.clear()
            await coordinator.transport.publish(topics.call(FLEET), b"")
            assert (await coordinator.expect(m.Hello)).working_on == offer.attempt
            assert (await coordinator.expect(m.Accept)).attempt == offer.attempt
            assert (await coordinator.expect(m.Need)).missing
        assert broker._retained == {}

    play(scene())


def test_chunks_that_others_share_do_not_come_to_a_device_that_does_not_fetch_them(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:

            async def received_of(transfer):
                before = running.agent.transport.bytes_received
                topic = topics.build("shared-object", FLEET, transfer=transfer)
                await coordinator.transport.publish(topic, b"c" * 5000)
                await asyncio.sleep(0.02)
                return running.agent.transport.bytes_received - before

            await coordinator.expect(m.Hello)
            assert await received_of("of-others") < 5000
            coordinator.chunk_limit = 1  # the download stays open
            offer = coordinator.offer()
            await coordinator.expect(m.Need)
            assert await received_of(offer.transfer) > 5000
            assert await received_of("of-others") < 5000
            coordinator.chunk_limit = None
            coordinator.offer(number=2)
            await coordinator.take_update()
            assert await received_of(offer.transfer) < 5000

    play(scene())


def test_free_memory_is_looked_up_for_heartbeats_alone(tmp_path, monkeypatch):
    looks = []
    _free_bytes.cache_clear()  # of a test before
    monkeypatch.setattr(control_group, "memory", lambda: looks.append(1) or control_group.Memory(9, 7))

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            running.agent.tick_s = 0.005  # a heartbeat comes every 0.2 s
            for _ in range(2):
                assert (await coordinator.expect(m.Heartbeat)).memory_free_bytes == 7

    play(scene())
    assert len(looks) < 20


def test_timers_rest_without_work_and_run_with_it(tmp_path, monkeypatch):
    ticks = []
    tick = Agent._tick
    monkeypatch.setattr(Agent, "_tick", lambda agent, now: (ticks.append(now), tick(agent, now))[1])

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            running.agent.tick_s = 0.01
            await coordinator.expect(m.Heartbeat)  # one every 0.2 s
            del ticks[:]
            await coordinator.expect(m.Heartbeat)
            assert len(ticks) <= 2
            coordinator.chunk_limit = 1
            coordinator.offer()
            await coordinator.expect(m.Need)  # and waits for chunks
            del ticks[:]
            await asyncio.sleep(0.5)
            assert len(ticks) > 10

    play(scene())


def test_the_second_round_fetches_only_what_changed(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a"):
            await coordinator.expect(m.Hello)
            coordinator.offer()
            await coordinator.take_update()
            coordinator.offer(number=2, parts={"acc/embed": b"e" * 5000, "task": b"n" * 2000})
            update = await coordinator.take_update()
            assert update.figures["payload_down_bytes"].value == 2000

    play(scene())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_object_is_fetched_again_and_the_round_trained(tmp_path, restarted):
    """One bit of an object that the second round needs as well."""

    def damage():
        (path,) = [p for p in (tmp_path / "a" / "objects").iterdir() if p.is_file() and p.read_bytes() == b"e" * 5000]
        path.write_bytes(b"E" + b"e" * 4999)

    async def second(coordinator):
        coordinator.offer(number=2, parts={"acc/embed": b"e" * 5000, "task": b"n" * 2000})
        update = await coordinator.take_update()
        if not restarted:
            assert update.figures["payload_down_bytes"].value == 7000
        assert not [one for one in coordinator.heard if isinstance(one, m.Decline)]

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator:
            async with Running(broker, tmp_path / "a") as agent:
                await coordinator.expect(m.Hello)
                coordinator.offer()
                await coordinator.take_update()
                if not restarted:
                    damage()
                    await second(coordinator)
                    assert "damaged objects are fetched again: 1" in str(agent.events("warning"))
                    return
            damage()
            coordinator.heard.clear()
            async with Running(broker, tmp_path / "a"):
                await coordinator.expect(m.Hello)
                await second(coordinator)

    play(scene())


@pytest.mark.parametrize("seed", range(3))
def test_lost_doubled_and_swapped_messages_change_nothing(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("edgefl.transfer.receiver.STALL_S", 0.3)

    async def scene():
        broker = FaultyBroker(seed=seed)
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            broker.duplicate, broker.reorder = 0.2, 0.2
            for number in (1, 2, 3):
                coordinator.offer(number=number, parts={"acc/embed": b"e" * 9000, "task": b"%d" % number * 3000})
                update = await coordinator.take_update()
                assert update.attempt == attempt(number)
                assert coordinator.store.read(update.manifest["task"].id) == b"%d" % number * 3000
            assert running.trainer.trained == [attempt(1), attempt(2), attempt(3)]

    play(scene())


def test_chunks_that_are_lost_are_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("edgefl.transfer.receiver.STALL_S", 0.2)

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a"):
            await coordinator.expect(m.Hello)
            coordinator.chunk_limit = 2
            coordinator.offer()
            first = await coordinator.expect(m.Need)
            assert asked_chunks(first) == 8
            while not (again := await coordinator.expect(m.Need)).missing:
                pass
            assert asked_chunks(again) == 6
            coordinator.chunk_limit = None
            update = await coordinator.take_update()
            assert update.figures["payload_down_bytes"].value == 8000

    play(scene())


class Late:
    """Holds back what the agent asks for until ``through``; ``said``: chunks of each question."""

    def __init__(self, transport):
        self.said = []
        self.through = asyncio.Event()
        self._publish = transport.publish
        transport.publish = self.publish

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        message = m.decode_up(payload) if topic.endswith("/up") else None
        if isinstance(message, m.Need) and message.missing:
            self.said.append(asked_chunks(message))
            await self.through.wait()
        await self._publish(topic, payload, retain=retain)


def test_what_the_broker_has_not_heard_yet_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("edgefl.transfer.receiver.STALL_S", 0.8)

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            late = Late(running.agent.transport)
            coordinator.chunk_limit = 2  # the others are lost, and asked for when all has been silent for long enough
            coordinator.offer()
            await coordinator.expect(m.Accept)
            await asyncio.sleep(1.6 + TICK_S)
            assert late.said == [8]
            late.through.set()
            await asyncio.sleep(0.7)
            assert late.said == [8]
            coordinator.chunk_limit = None
            await coordinator.take_update()
            assert late.said == [8, 6]

    play(scene())


def test_a_question_that_is_on_its_way_is_not_repeated_after_a_cut(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            late = Late(running.agent.transport)
            coordinator.offer()
            await coordinator.expect(m.Accept)
            broker.cut(DEVICE)
            await coordinator.expect(m.Hello)
            await coordinator.expect(m.Accept)  # with which it would ask again
            late.through.set()
            await coordinator.take_update()
            assert late.said == [8]

    play(scene())


def test_killed_while_fetching_it_goes_on_from_the_disk(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator:
            async with Running(broker, tmp_path / "a") as first:
                await coordinator.expect(m.Hello)
                coordinator.chunk_limit = 3
                offer = coordinator.offer()
                await coordinator.expect(m.Need)
                while first.agent.transport.bytes_received < 3 * CHUNK_BYTES:
                    await asyncio.sleep(0.01)
                await first.kill()
            coordinator.chunk_limit = None
            coordinator.heard.clear()
            async with Running(broker, tmp_path / "a") as second:
                assert second.blank.session != first.blank.session
                hello = await coordinator.expect(m.Hello)
                assert hello.working_on == offer.attempt
                assert (await coordinator.expect(m.Accept)).attempt == offer.attempt
                need = await coordinator.expect(m.Need)
                assert asked_chunks(need) == 5
                update = await coordinator.take_update()
                assert second.trainer.trained == [offer.attempt]
                figure = update.figures["payload_down_bytes"]  # the first process took its counters with it
                assert (figure.value, figure.reason) == (None, "the agent was restarted during the round")

    play(scene())


def test_killed_before_its_update_is_taken_it_announces_it_again_without_training(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator:
            async with Running(broker, tmp_path / "a") as first:
                await coordinator.expect(m.Hello)
                coordinator.offer()
                before = await coordinator.expect(m.Update)
                await first.kill()
            async with Running(broker, tmp_path / "a") as second:
                assert (await coordinator.expect(m.Hello)).working_on == before.attempt
                update = await coordinator.take_update()
                assert update == before
                assert second.trainer.trained == []

    play(scene())


def test_a_cut_connection_is_taken_up_again(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            coordinator.chunk_limit = 2
            coordinator.offer()
            await coordinator.expect(m.Need)
            broker.cut(DEVICE)
            coordinator.chunk_limit = None
            await coordinator.expect(m.Hello)
            await coordinator.take_update()
            online = [presence.online for presence in coordinator.heard[m.Presence]]
            assert online == [True, False, True]  # the middle one is the last will
            assert [event for event, _ in running.lines if "connected" in event] == [
                "connected",
                "disconnected",
                "connected",
            ]

    play(scene())


def test_an_update_that_two_cuts_in_a_row_seem_to_refuse_is_announced_again(tmp_path, monkeypatch):
    """A broker that restarts twice looks like one that closes the connection on a message (``Sizes``)."""

    async def scene():
        broker = FaultyBroker()
        refusals = ["it closes the connection"]
        publish = MemoryTransport.publish

        async def publishing(self, topic, payload, **how):
            if topic == topics.build("up", FLEET, DEVICE) and isinstance(m.decode_up(payload), m.Update) and refusals:
                raise failures.too_large(parse_url("mqtt://h"), topic, len(payload), refusals.pop())
            await publish(self, topic, payload, **how)

        monkeypatch.setattr(MemoryTransport, "publish", publishing)
        monkeypatch.setattr("device_agent.core.machine.ANNOUNCE_S", 0.1)
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            coordinator.offer()
            await coordinator.take_update()
            assert not refusals
            assert "closes the connection" in next(line["text"] for event, line in running.lines if event == "warning")

    play(scene())


def test_a_trainer_killed_by_its_ceiling_is_a_decline_and_the_agent_lives(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            refusal = Refusal("ceiling", 900.0, 800.0, "B", "killed")
            running.trainer.ends = [Ended(v.Result(refusal=refusal), alive=False)]
            coordinator.offer()
            decline = await coordinator.expect(m.Decline)
            assert (decline.refusal.needed, decline.refusal.allowed) == (900.0, 800.0)
            coordinator.offer(batch_size=4)  # planned again, within the same attempt
            await coordinator.take_update()
            assert running.trainer.warmed == 2

    play(scene())


def test_a_closed_round_is_left_off_and_the_next_one_trained(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            running.trainer.hold = asyncio.Event()
            coordinator.offer()
            await coordinator.expect(m.Accept)
            while not running.trainer.running:
                await asyncio.sleep(0.01)
            coordinator.send(m.Abort(attempt(1), "the round is closed"))
            coordinator.offer(number=2)
            await coordinator.expect(m.Accept)
            running.trainer.hold.set()
            assert (await coordinator.take_update()).attempt == attempt(2)
            assert running.trainer.trained == [attempt(2)]

    play(scene())


def test_garbage_and_messages_of_newer_versions_are_ignored(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            for topic, payload in [
                ("down", b"\xc1"),
                ("down", b"\x81\xa1t\xa6future"),
                ("down/o/down-r1-1-1", b"no chunk"),
            ]:
                await coordinator.transport.publish(f"edgefl/1/default/d/{DEVICE}/{topic}", payload)
            coordinator.offer()
            await coordinator.take_update()
            assert len(running.events("ignored")) == 2  # no chunk is looked at while nothing is fetched

    play(scene())


def test_offers_and_grants_that_make_no_sense_do_not_end_the_agent(tmp_path):
    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a"):
            await coordinator.expect(m.Hello)
            offer = coordinator.offer()
            update = await coordinator.expect(m.Update)
            for changes in ({"chunk_bytes": 10**9}, {"manifest": {"task": ObjectRef("f" * 64, -1)}}):
                coordinator.send(replace(offer, attempt=attempt(2), **changes))
                assert (await coordinator.expect(m.Decline)).refusal.reason == "transfer"
            name = update.manifest["task"].id
            for grant in (
                m.Grant(DEVICE, "up-1", 1, 0, 1, missing={name: b"\x07"}),
                m.Grant(DEVICE, "up-1", 2, CHUNK_BYTES, 1, missing={"f" * 64: b"\x07"}),
                m.Grant(DEVICE, "up-1", 3, CHUNK_BYTES, 1, missing={name: b"\xff\xff"}),
            ):
                coordinator.send(grant)
            coordinator.fetch(update)
            await coordinator.expect(Completed)
            assert coordinator.store.read(name) == b"T" * 3000

    play(scene())


@pytest.mark.parametrize("urls", [False, True])
def test_a_full_store_declines_with_the_reason(tmp_path, monkeypatch, urls):
    monkeypatch.setattr(ByUrl, "usable", lambda self, given, names: dict.fromkeys(names, "http://127.0.0.1:1/x"))

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            running.store.objects.limit_bytes = 6000
            if urls:
                running.agent._transfers._by_url = ByUrl(Trust(TlsFiles(), tls=False, host="127.0.0.1"), running.emit)
            await coordinator.expect(m.Hello)
            coordinator.offer()
            decline = await coordinator.expect(m.Decline)
            assert decline.refusal.reason == "disk"
            assert "6000 allowed" in decline.refusal.detail
            assert not running.task.done()

    play(scene())


def test_an_agent_whose_disk_is_full_declines_and_takes_part_when_there_is_room(tmp_path, monkeypatch):
    """Its work is saved in room that it has."""
    write = os.pwrite

    def full(descriptor, data, offset):
        file, own = Path(f"/proc/self/fd/{descriptor}").resolve(), tmp_path / "a"
        room = 4096 if file in slot_files(own) else 0  # what is fetched is sparse
        if file.is_relative_to(own) and offset + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a"):
            await coordinator.expect(m.Hello)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full)
                coordinator.offer()
                await coordinator.expect(m.Accept)
                decline = await coordinator.expect(m.Decline)
                assert (decline.refusal.reason, "No space left" in decline.refusal.detail) == ("disk", True)
            offer = coordinator.offer(number=2)
            assert (await coordinator.take_update()).attempt == offer.attempt

    play(scene())


def test_data_that_cannot_be_read_ends_the_agent_with_its_own_exit_code(tmp_path):
    async def scene():
        running = Running(FaultyBroker(), tmp_path / "a")

        async def warm(preparation):
            raise WorkerFailedError("no.npz: there is no such file", log=tmp_path / "log", kind="DataError")

        running.trainer.warm = warm
        with pytest.raises(EdgeFLError, match="no such file") as caught:
            await running.agent.run()
        assert caught.value.exit_code == DataError.exit_code

    play(scene())


def test_a_trainer_that_stumbles_while_warming_is_started_again_and_given_up_after_three_times(tmp_path, monkeypatch):
    monkeypatch.setattr("device_agent.runtime.trainer_process.TRAINER_RESTART_S", 0.01)

    async def scene(deaths):
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator:
            running = Running(broker, tmp_path / "a")

            async def warm(preparation):
                running.trainer.warmed += 1
                if running.trainer.warmed <= deaths:
                    raise WorkerFailedError("killed by signal 9", log=tmp_path / "log", status=-9)
                return FACTS

            running.trainer.warm = warm
            if deaths > 2:
                with pytest.raises(WorkerFailedError, match="signal 9"):
                    await running.agent.run()
            else:
                async with running:
                    await coordinator.expect(m.Hello)
            assert running.trainer.warmed == 3

    play(scene(2))
    (tmp_path / "a" / "facts.json").unlink()
    play(scene(3))


def test_an_unreachable_broker_is_dialled_again_and_refused_credentials_end_the_agent(tmp_path, monkeypatch):
    """A broker that says the device was revoked is dialled again as well, but seldom."""
    monkeypatch.setattr("device_agent.runtime.agent.DIAL_FIRST_S", 0.01)
    monkeypatch.setattr("edgefl.transport.link.REVOKED_S", 0.5)

    async def scene():
        running = Running(FaultyBroker(), tmp_path / "a")
        failures = [
            BrokerUnreachableError("cannot reach the broker mqtt://x:1: nothing listens on x:1"),
            BrokerUnreachableError("this device's certificate was revoked", finding="identity-revoked"),
            BrokerError("the broker mqtt://x:1 refuses the connection: it does not admit anonymous clients"),
        ]

        def dial():
            transport = Running.dial(running)

            async def connect():
                raise failures.pop(0)

            transport.connect = connect
            return transport

        running.agent.transport = dial()
        running.agent._dial_next = dial
        with pytest.raises(BrokerError, match="does not admit"):
            await running.agent.run()
        soon, seldom = (told["retry_s"] for told in running.events("unreachable"))
        assert soon <= 0.01
        assert seldom >= 0.25

    play(scene())


def test_a_state_directory_has_one_agent_and_one_owner(tmp_path):
    store = AgentStore(tmp_path, Owner("d1", "f"))
    with pytest.raises(StoreError, match="in use by another agent"):
        AgentStore(tmp_path, Owner("d1", "f"))
    store.close()
    with pytest.raises(StoreError, match="belongs to device 'd1' of fleet 'f', not to 'd2' of 'f'"):
        AgentStore(tmp_path, Owner("d2", "f"))
    AgentStore(tmp_path, Owner("d1", "f")).close()


def test_an_agent_has_its_disk_keep_what_it_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("device_agent.runtime.agent.FLUSH_S", 0.05)

    async def scene():
        broker = FaultyBroker()
        async with Coordinator(broker, tmp_path / "c") as coordinator, Running(broker, tmp_path / "a") as running:
            await coordinator.expect(m.Hello)
            coordinator.offer()
            await coordinator.take_update()
            while running.agent.state.update is not None or not running.store.flushed:
                await asyncio.sleep(0.01)
            assert running.store.load().update is None

    play(scene())
