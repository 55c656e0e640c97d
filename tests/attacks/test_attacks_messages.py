"""Attacks by messages: forged, replayed, redirected, and made to break whoever decodes them. SECURITY.md lists them.

Here the attacker has got past the broker: it is the broker's operator, or an enrolled device that misbehaves.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agent_fixtures as agent
import numpy as np
import pytest
from coordinator_fixture import FLEET, FakeDevice, a_plan
from faulty_broker import FaultyBroker
from identity_fixture import a_fleet, enrolled
from msgspec.structs import replace
from test_coordinator_runner import Scene, played

from coordinator.runtime.inbound import Inbound
from device_agent.core.machine import initial, step
from device_agent.core.offer_check import replayed
from device_agent.core.state import Disk, Received, RetainedParts, Save, State, TrainerPhase
from edgefl.errors import BrokerError, ProtocolError
from edgefl.identity.device import Credentials
from edgefl.identity.fleet import Fleet
from edgefl.identity.keys import MAGIC, OVERHEAD_BYTES, Signer, Verifier
from edgefl.plan.job import RoundPolicy
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.protocol.chunks import MAX_CHUNK_BYTES, Chunk, decode_chunks, encode_chunk
from edgefl.protocol.packing import compress, decompress
from edgefl.protocol.tensors import DEFAULT_LIMIT_BYTES, decode_part
from edgefl.records import Attempt, ObjectRef
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.transport.address import check_protected, is_loopback

DOWN = topics.build("down", agent.FLEET, agent.DEVICE)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return a_fleet(tmp_path_factory.mktemp("fleet") / "fleet")


@pytest.fixture(scope="module")
def own(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return enrolled(fleet, agent.DEVICE, tmp_path_factory.mktemp("device"))


# Signatures


def test_what_is_signed_is_topic_and_body(fleet: Fleet) -> None:
    verifier = Verifier(fleet.signer.public)
    sealed = fleet.signer.seal(DOWN, b"body")
    assert len(sealed) == len(b"body") + OVERHEAD_BYTES
    assert verifier.open(DOWN, sealed) == b"body"
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(ProtocolError):
            verifier.open(DOWN, bytes(changed))
    elsewhere = [
        topics.build("down", agent.FLEET, "d2"),
        topics.build("down", "other", agent.DEVICE),
        DOWN + "\0",
        DOWN[:-1],
    ]
    for topic in elsewhere:
        with pytest.raises(ProtocolError):
            verifier.open(topic, sealed)
    for short in (b"", MAGIC, sealed[: OVERHEAD_BYTES - 1], m.encode(m.Drain("r1"))):
        with pytest.raises(ProtocolError):
            verifier.open(DOWN, short)


def test_a_device_with_an_identity_trains_only_what_its_coordinator_signed(
    fleet: Fleet, own: Credentials, tmp_path: Path
) -> None:
    """Unsigned, signed by another key, and signed for another device: none is even answered."""

    async def scene() -> None:
        broker = FaultyBroker()
        running = agent.Running(broker, tmp_path / "a", own, strict=True)
        async with agent.Coordinator(broker, tmp_path / "c") as coordinator, running:
            coordinator.seal = fleet.signer.seal
            await coordinator.expect(m.Hello)
            other = topics.build("down", agent.FLEET, "d2")
            forgeries = [None, Signer(bytes(32)).seal, lambda topic, body: fleet.signer.seal(other, body)]
            for number, seal in enumerate(forgeries, start=1):
                coordinator.seal = seal
                coordinator.offer(number=number)
            coordinator.seal = fleet.signer.seal
            true = coordinator.offer(number=9)
            assert (await coordinator.expect(m.Accept)).attempt == true.attempt
            await coordinator.take_update()
            assert running.trainer.trained == [true.attempt]
            assert len(running.events("ignored")) == 3
            assert m.Decline not in coordinator.heard

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_offer_that_arrives_on_another_devices_topic_is_not_read(
    fleet: Fleet, own: Credentials, tmp_path: Path
) -> None:
    """A broker that hands a device what was rightly signed for another."""

    async def scene() -> None:
        broker = FaultyBroker()
        running = agent.Running(broker, tmp_path / "a", own, strict=True)
        async with agent.Coordinator(broker, tmp_path / "c") as coordinator, running:
            coordinator.seal = fleet.signer.seal
            await coordinator.expect(m.Hello)
            offer = m.Offer(Attempt("r1", 1, 1, 1), 60.0, agent.job())
            other = topics.build("down", agent.FLEET, "d2")
            running.agent.on_message(other, fleet.signer.seal(other, m.encode(offer)))
            true = coordinator.offer(number=2)
            assert (await coordinator.expect(m.Accept)).attempt == true.attempt
            assert m.Decline not in coordinator.heard

    asyncio.run(asyncio.wait_for(scene(), 20))


# Replays to a device


def offers() -> Iterator[Any]:
    """What a device may be offered: (name, attempt, whether it is taken up after r2/s1/r3/a1)."""
    yield "the next", Attempt("r2", 1, 4, 1, made_ms=200), True
    yield "a newer run", Attempt("r3", 1, 1, 1, made_ms=300), True
    yield "the round before", Attempt("r2", 1, 2, 5, made_ms=200), False
    yield "the stage before", Attempt("r2", 0, 9, 1, made_ms=200), False
    yield "an older run", Attempt("r1", 9, 9, 9, made_ms=100), False
    yield "a run of the same moment", Attempt("r9", 9, 9, 9, made_ms=200), False


@pytest.mark.parametrize(("name", "attempt", "taken"), [pytest.param(*one, id=one[0]) for one in offers()])
def test_a_replayed_offer_is_refused_also_after_a_restart(name: str, attempt: Attempt, taken: bool) -> None:
    """Each is rightly signed: the coordinator once made it, and somebody kept it."""
    blank = State(device="d1", strict=True, connected=True, trainer=TrainerPhase.IDLE, facts=agent.FACTS)
    begun, saves = blank, []
    for event in (m.Welcome("c", run="r2", made_ms=200), an_offer(Attempt("r2", 1, 3, 1, made_ms=200))):
        begun, out = step(begun, Received(event, Disk(0, None)), 1.0)
        saves += [one.saved for one in out if isinstance(one, Save)]
    begun, _ = step(begun, Received(m.Drain("r2", made_ms=200)), 2.0)  # nothing is in hand any more
    restarted = replace(initial(blank, saves[-1], agent.FACTS), task=None, trainer=TrainerPhase.IDLE, connected=True)
    for state in (begun, restarted):
        after, out = step(state, Received(an_offer(attempt), Disk(0, None)), 3.0)
        assert (after.task is not None and after.task.attempt == attempt) == taken
        declines = [one.message for one in out if isinstance(getattr(one, "message", None), m.Decline)]
        assert [one.refusal.reason for one in declines] == ([] if taken else ["replay"])


def test_the_last_offer_of_a_finished_run_can_not_be_replayed() -> None:
    state = State(device="d1", strict=True, connected=True, trainer=TrainerPhase.IDLE, facts=agent.FACTS)
    last = an_offer(Attempt("r2", 1, 3, 1, made_ms=200))
    for event in (last, m.Drain("r2", made_ms=200, final=True), last):
        state, _ = step(state, Received(event, Disk(0, None)), 1.0)
    assert state.task is None
    assert state.dropped["closed-attempt"] == 1


def test_a_restored_run_goes_on_below_what_was_closed_and_the_original_is_refused_from_then_on() -> None:
    """What was retained before the round that the copy is in, is still there; without the time it was made, nothing."""
    own = RetainedParts(Attempt("r2", 1, 2, 1, made_ms=200), {})
    state = State(device="d1", strict=True, connected=True, trainer=TrainerPhase.IDLE, facts=agent.FACTS)
    state = replace(state, retained=(own, RetainedParts(Attempt("r3", 1, 2, 1, made_ms=200), {})))
    original = an_offer(Attempt("r2", 1, 3, 1, made_ms=200))
    for event in (m.Welcome("c", run="r2", made_ms=200), original, m.Abort(original.attempt)):
        state, _ = step(state, Received(event, Disk(0, None)), 1.0)
    copied = an_offer(Attempt("r2", 1, 3, 1, made_ms=300))
    for event in (m.Welcome("c2", run="r2", made_ms=300, earlier_ms=(200,)), copied, original):
        state, _ = step(state, Received(event, Disk(0, None)), 2.0)
    assert state.task is not None
    assert state.task.attempt == copied.attempt
    assert [one.attempt.made_ms for one in state.retained] == [300]
    assert state.declined is None
    assert state.dropped == {"not-wanted": 1, "closed-attempt": 1}
    later, _ = step(state, Received(an_offer(Attempt("r2", 2, 1, 1, made_ms=200)), Disk(0, None)), 3.0)
    assert later.task == state.task
    assert later.declined[1].refusal.reason == "replay"


def test_an_old_welcome_does_not_end_the_work_in_hand() -> None:
    state = State(device="d1", strict=True, connected=True, trainer=TrainerPhase.IDLE, facts=agent.FACTS)
    for event in (m.Welcome("c", run="r2", made_ms=200), an_offer(Attempt("r2", 1, 3, 1, made_ms=200))):
        state, _ = step(state, Received(event, Disk(0, None)), 1.0)
    after, _ = step(state, Received(m.Welcome("c", run="r1", made_ms=100)), 2.0)
    assert after.task == state.task
    assert after.dropped == {"old-run": 1}


def test_without_an_identity_an_older_run_may_go_on() -> None:
    state = State(newest=Attempt("r2", 1, 3, 1, made_ms=200))
    assert replayed(state, Attempt("r1", 1, 1, 1, made_ms=100)) is None


def an_offer(attempt: Attempt) -> m.Offer:
    return m.Offer(attempt, 60.0, agent.job(), transfer="t", chunk_bytes=1024, credit=4)


# What devices send


def test_a_replayed_update_counts_once_and_a_late_one_not_at_all(tmp_path: Path) -> None:
    """Every update of the run is sent again, right away and in the round after."""
    sent: list[m.Update] = []

    async def script(scene: Scene) -> None:
        running = asyncio.ensure_future(scene.coordinator(a_plan()))
        for name in ("a", "b"):
            await scene.device(name)
        device = scene.devices["a"]
        say = device.say

        def twice(message: Any, topic: str = "") -> None:
            say(message, topic)
            if isinstance(message, m.Update):
                for old in (*sent, message):
                    say(old)
                sent.append(message)

        device.say = twice  # type: ignore[method-assign]
        report = await running
        assert report.status == "done"
        counted = [row.participants for row in report.rounds]
        assert counted == [("a", "b")] * 3

    played(tmp_path, script)
    assert len(sent) == 3


def test_an_update_in_another_devices_name_is_not_counted(tmp_path: Path) -> None:
    """The broker binds the topic to the certificate; what is said on it must be of the topic's device."""

    async def script(scene: Scene) -> None:
        plan = a_plan(policy=RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=1.0))
        running = asyncio.ensure_future(scene.coordinator(plan))
        thief = await scene.device("thief")
        silent = await scene.device("silent", hold=True)
        await asyncio.wait_for(silent.offered.wait(), 5)
        forged = m.Update("silent", silent.offers[0].attempt, {}, {}, {"loss": 0.0})
        thief.say(forged)  # on its own topic, in another's name
        report = await running
        assert all("silent" not in row.participants for row in report.rounds)

    played(tmp_path, script)


@pytest.mark.parametrize("kind", [m.Hello, m.Update, m.Accept, m.Decline, m.Need, m.Heartbeat, m.Presence, m.Renew])
def test_no_message_in_another_devices_name_is_taken(kind: Any) -> None:
    inbound = Inbound(10.0, 1.0)
    channel = "presence" if kind is m.Presence else "up"
    assert inbound.read(topics.Topic(channel, "thief", ""), m.encode(kind(device="cam")), 0.0) is None
    assert inbound.dropped == {"forged": 1}


def test_a_path_in_a_part_name_is_an_unknown_part(tmp_path: Path) -> None:
    outside = tmp_path / "devices" / "escaped"
    names = ["../../escaped", "/etc/passwd", "acc/../../x", "acc/stage1\0", str(outside)]

    async def script(scene: Scene) -> None:
        plan = a_plan(policy=RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=5.0))
        running = asyncio.ensure_future(scene.coordinator(plan))
        await scene.device("honest")
        await scene.device("thief", beside=dict.fromkeys(names, b"owned"))
        report = await running
        assert report.status == "done"
        assert all("thief" not in row.participants for row in report.rounds)

    scene = played(tmp_path, script)
    assert any("parts it was not asked to train" in str(event.data) for event in scene.events)
    stored = {path.name for path in (tmp_path / "run").rglob("*")}
    assert not {"passwd", "escaped", "x"} & stored
    assert not outside.exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a" * 63 + "/", "A" * 64, "." * 64, ""])
def test_a_path_in_an_object_name_is_no_object(tmp_path: Path, name: str) -> None:
    store = ObjectStore(tmp_path / "store")
    with pytest.raises(ProtocolError):
        store.path(name)
    with pytest.raises(ProtocolError):
        store.partial(ObjectRef(name, 10), 10)
    with pytest.raises(ProtocolError):
        encode_chunk(Chunk(name, 0, b"x"))


@pytest.mark.parametrize("device", ["..", "../x", "a/b", "#", "+", "", "a" * 65, "ü", "a\0b"])
def test_a_name_that_is_no_topic_level_is_refused(device: str) -> None:
    with pytest.raises(ProtocolError):
        topics.check_name("device", device)
    with pytest.raises(ProtocolError):
        topics.parse(topics.build("up", FLEET, device))


# What is to break a decoder: it must be refused by its claim, before that is allocated.


def peak_bytes(action: Any) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def a_part(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps({"__metadata__": {"encoding": "f32"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack("<Q", 2**63) + b"{}", id="a header of 8 EiB"),
        pytest.param(struct.pack("<Q", 2**32) + b"{" * 1000, id="a header of 4 GiB"),
        pytest.param(a_part({"w": {"dtype": "F32", "shape": [2**31], "data_offsets": [0, 2**33]}}), id="8 GiB"),
        pytest.param(a_part({"w": {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}}), id="2^40 x 0"),
        pytest.param(a_part({"w": {"dtype": "F32", "shape": [2**31, 2**31, 4], "data_offsets": [0, 0]}}), id="wraps"),
        pytest.param(a_part({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), id="negative"),
    ],
)
def test_a_header_that_claims_gigabytes_is_refused_before_they_are_taken(data: bytes) -> None:
    def decode() -> None:
        try:
            tensors = decode_part(data)
        except ProtocolError:
            return
        assert all(tensor.size == 0 for tensor in tensors.values())  # nothing is nothing, in any shape

    assert peak_bytes(decode) < 2**20


def test_a_packed_bomb_is_refused_before_it_unfolds() -> None:
    """A few bytes that claim to be the largest values of a huge tensor; and a base they do not fit."""
    base = {"w": np.zeros((64, 64), np.float32)}
    honest = compress({"w": np.ones((64, 64), np.float32)}, base, "delta+int8", 0.1)
    huge = {"w": np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2**15, 2**15), (0, 0))}  # 4 GiB, unallocated
    with pytest.raises(ProtocolError):
        decompress(honest.data, huge, "delta+int8", DEFAULT_LIMIT_BYTES)

    def open_it() -> None:
        with pytest.raises(ProtocolError):
            decompress(honest.data, base, "delta+int8", 1000)  # the receiver's limit is smaller than what it unfolds to

    assert peak_bytes(open_it) < 2**20


def test_an_oversized_message_is_refused_unread() -> None:
    big = m.encode(m.Hello("d1"))[:-1] + bytes(m.MAX_MESSAGE_BYTES)
    for decode in (m.decode_up, m.decode_down):
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            decode(big)
    with pytest.raises(ProtocolError, match="carries 1 to"):
        decode_chunks(bytes(MAX_CHUNK_BYTES + 53))


def test_a_message_that_claims_more_than_it_holds_is_refused() -> None:
    """MessagePack lengths of 4 GiB, and nesting without end."""
    head = b"\x82\xa1t\xa5hello\xa6device"
    bombs = [head + b"\xdb\xff\xff\xff\xff", head + b"\xdd\xff\xff\xff\xff", head + b"\xdf\xff\xff\xff\xff"]
    bombs += [b"\x81\xa1x" + b"\x91" * 100_000, b"\x91" * 100_000]

    def decode() -> None:
        for bomb in bombs:
            with pytest.raises(ProtocolError):
                m.decode_up(bomb)

    assert peak_bytes(decode) < 2**20


def test_an_update_that_claims_gigabytes_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    class Boaster(FakeDevice):
        def say(self, message: Any, topic: str = "") -> None:
            if isinstance(message, m.Update):
                manifest = {part: ObjectRef(object_id(part.encode()), 2**40) for part in message.manifest}
                message = replace(message, manifest=manifest)
            super().say(message, topic)

    async def script(scene: Scene) -> None:
        running = asyncio.ensure_future(scene.coordinator(a_plan()))
        await scene.device("honest")
        boaster = scene.devices["boaster"] = Boaster(scene.broker, "boaster", tmp_path / "devices")
        await boaster.start()
        report = await running
        assert report.status == "done"
        assert all("boaster" not in row.participants for row in report.rounds)

    scene = played(tmp_path, script)
    assert any("can be right" in str(event.data) for event in scene.events)
    stored = [path.stat().st_size for path in (tmp_path / "run" / "objects").rglob("*") if path.is_file()]
    assert max(stored) < 2**20


# The way there


def test_a_broker_elsewhere_without_tls_needs_insecure() -> None:
    for url in (
        "mqtt://broker.example",
        "mqtt://192.0.2.7:1883",
        "mqtt://user:s3cret@10.0.0.1",
        "mqtt://[2001:db8::1]",
    ):
        with pytest.raises(BrokerError, match="without TLS") as caught:
            check_protected(url, insecure=False)
        assert "--insecure" in caught.value.remedy
        assert "s3cret" not in caught.value.message
        check_protected(url, insecure=True)
    for url in ("mqtt://localhost", "mqtt://127.0.0.1:9", "mqtt://[::1]", "mqtts://broker.example"):
        check_protected(url, insecure=False)
    assert not is_loopback("localhost.evil.example")
    assert not is_loopback("127.0.0.1.evil.example")


def test_every_attack_has_a_test_and_stands_in_the_list() -> None:
    """SECURITY.md names tests that exist, and every test of these two files but those beside an attack."""
    here = Path(__file__).parents[1]
    told = set(re.findall(r"`(test_\w+)`", (here.parent / "SECURITY.md").read_text(encoding="utf-8")))
    tests = {
        path.name: set(re.findall(r"(?m)^def (test_\w+)", path.read_text(encoding="utf-8")))
        for path in here.glob("*/test_*.py")
    }
    there = tests["test_attacks.py"] | tests["test_attacks_messages.py"]
    beside = {
        test_every_attack_has_a_test_and_stands_in_the_list.__name__,
        "test_without_an_identity_an_older_run_may_go_on",
    }
    assert there - beside <= told <= set().union(*tests.values())
    assert len(told) >= 15
