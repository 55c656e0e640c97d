"""Transfers: the conversation chunk by chunk, then whole fleets on a network that loses, doubles and reorders."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import Chunk, decode_chunks, encode_chunk
from edgefl.protocol.messages import Grant, Need, decode_down, encode
from edgefl.records import ObjectRef
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import chunk_count
from edgefl.transfer.receiver import (
    MAX_CHUNKS,
    MAX_STALL_S,
    STALL_S,
    ChunkIndex,
    Completed,
    Failed,
    Receiver,
    SendChunk,
    StoreChunk,
    VerifyObject,
)
from edgefl.transfer.sender import GATHER_S, PACE_STALL_S, PROBE_S, Sender, in_at_least

CHUNK = 10
TICK_S = 0.5


def name(number: int) -> str:
    return f"{number:064x}"


def refs(*chunks: int) -> list[ObjectRef]:
    """Objects 0, 1, … with so many chunks each (the last one is 3 bytes short)."""
    return [ObjectRef(name(number), count * CHUNK - 3) for number, count in enumerate(chunks)]


def sizes(objects: list[ObjectRef]) -> dict[str, int]:
    return {ref.id: ref.size for ref in objects}


def bitmap(count: int, missing: set[int] | None = None) -> bytes:
    numbers = range(count) if missing is None else missing
    return sum(1 << number for number in numbers).to_bytes((count + 7) // 8, "little")


def members(missing: dict[str, bytes]) -> set[tuple[str, int]]:
    return {(key, i) for key, bits in missing.items() for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1}


def everything(objects: list[ObjectRef]) -> dict[str, bytes]:
    return {ref.id: bitmap(chunk_count(ref.size, CHUNK)) for ref in objects}


def need(device: str = "a", epoch: int = 1, **fields: object) -> Need:
    return Need(**{"device": device, "transfer": "t", "epoch": epoch, "chunk_bytes": CHUNK, "credit": 2, **fields})


def duplicates(receiver: Receiver) -> int:
    return receiver.dropped["duplicate"] + receiver.dropped["finished"]


class Counting(Sender):
    """Counts chunks by topic, and how often a receiver falls out of step."""

    shared_sent = own_sent = stalls = 0

    @property
    def active(self) -> set[str]:
        return set(self._receivers)

    @property
    def in_step(self) -> set[str]:
        return {device for device, receiver in self._receivers.items() if receiver.in_step}

    def on_tick(self, now: float) -> list:
        before = self.in_step
        instructions = super().on_tick(now)
        self.stalls += len(before - self.in_step)
        return instructions

    def _send(self, device, number, takers, now):
        if device is None:
            self.shared_sent += 1
        elif takers:  # else it is a probe
            self.own_sent += 1
        return super()._send(device, number, takers, now)


@dataclass
class Device:
    """A receiver with its disk; a restart keeps the disk and begins a new life."""

    label: str
    objects: list[ObjectRef]
    credit: int
    life: int = 0
    disk: dict[str, set[int]] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    deaf: bool = False
    completed: int = 0
    stored: Counter = field(default_factory=Counter)

    def boot(self, now: float) -> list:
        self.life += 1
        self.receiver = Receiver("t", self.label, self.objects, CHUNK, self.credit, incarnation=self.life)
        missing = {}
        for ref in self.objects:
            if ref.id not in self.verified:
                count = chunk_count(ref.size, CHUNK)
                missing[ref.id] = bitmap(count, set(range(count)) - self.disk.setdefault(ref.id, set()))
        return self.receiver.start(missing, now)


class Network:
    """A sender and devices in virtual time. Loss, duplication and delay strike each delivery by itself."""

    def __init__(self, devices: list[Device], sender: Sender, *, seed=0, loss=0.0, duplicate=0.0, jitter_s=0.0):
        self.random = random.Random(seed)
        self.loss, self.duplicate, self.jitter_s = loss, duplicate, jitter_s
        self.devices = {device.label: device for device in devices}
        self.sender = sender
        self.layout = ChunkIndex(sender._sizes, CHUNK)
        self.now = 0.0
        self.queue: list = []
        self.serial = 0
        self.epochs: dict[str, int] = {}  # the epoch the sender goes by
        self.wanted: dict[str, set] = {}
        self.flying: dict[str, int] = {}
        self.acknowledged: dict[str, int] = {}
        self.log: list[SendChunk] = []
        self.at(TICK_S, "tick", None)

    def at(self, when: float, kind: str, what: object) -> None:
        self.serial += 1
        heapq.heappush(self.queue, (when, self.serial, kind, what))

    def deliver(self, kind: str, what: object) -> None:
        for _ in range(2 if self.random.random() < self.duplicate else 1):
            if self.random.random() >= self.loss:
                self.at(self.now + 0.01 + self.random.random() * self.jitter_s, kind, what)

    def from_device(self, device: Device, instructions: list) -> None:
        for one in instructions:
            if isinstance(one, Need):
                self.deliver("need", (device.label, one))
            elif isinstance(one, StoreChunk):
                device.disk[one.object_id].add(one.index)
                device.stored[one.object_id, one.index] += 1
            elif isinstance(one, VerifyObject):
                device.verified.add(one.object_id)
                self.from_device(device, device.receiver.on_verified(one.object_id, True, self.now))
            elif isinstance(one, Completed):
                device.completed += 1

    def from_sender(self, instructions: list) -> None:
        for one in instructions:
            if isinstance(one, SendChunk):
                self.log.append(one)
                self.count(one)
                for label in self.devices if one.device is None else [one.device]:
                    self.deliver("chunk", (label, one))

    def count(self, one: SendChunk) -> None:
        """Nobody in step, and nobody served alone, ever has more than its credit in flight."""
        for label, wanted in self.wanted.items():
            if one.device in (None, label) and (one.object_id, one.index) in wanted:
                wanted.discard((one.object_id, one.index))
                self.flying[label] += 1
                if one.device == label or label in self.sender.in_step:
                    assert self.flying[label] <= self.devices[label].credit

    def told(self, label: str, message: Need) -> None:
        if message.done:
            self.wanted.pop(label, None)
        elif message.missing and self.sender._epochs._present.get(label) != self.epochs.get(label):
            self.epochs[label] = self.sender._epochs._present[label]
            self.flying[label] = self.acknowledged[label] = 0
            self.wanted[label] = members(message.missing)
        elif message.epoch == self.epochs.get(label) and message.received > self.acknowledged[label]:
            step = min(message.received - self.acknowledged[label], self.flying[label])
            self.flying[label] -= step
            self.acknowledged[label] += step

    def boot(self, *labels: str) -> None:
        for label in labels or self.devices:
            self.from_device(self.devices[label], self.devices[label].boot(self.now))

    def step(self) -> None:
        self.now, _, kind, what = heapq.heappop(self.queue)
        if kind == "tick":
            self.at(self.now + TICK_S, "tick", None)
            self.from_sender(self.sender.on_tick(self.now))
            for device in self.devices.values():
                if not device.deaf and device.life:
                    self.from_device(device, device.receiver.on_tick(self.now))
        elif kind == "need":
            answer = self.sender.on_need(*what, self.now)
            self.told(*what)
            self.from_sender(answer)
        elif kind == "call":
            what()
        else:
            label, chunk = what
            device = self.devices[label]
            if not device.deaf and device.life:
                length = self.layout.length(chunk.object_id, chunk.index)
                self.from_device(device, device.receiver.on_chunk(chunk.object_id, chunk.index, length, self.now))

    def run(self, until_s: float = 3000, labels: list[str] | None = None) -> float:
        """Until those devices (all) have everything and the sender knows; the virtual time that is then."""
        awaited = set(labels or self.devices)
        while not awaited <= self.sender.completed:
            assert self.now < until_s, f"not finished: {awaited - self.sender.completed}"
            self.step()
        for label in awaited:
            device = self.devices[label]
            assert device.receiver.finished
            assert device.verified == set(sizes(device.objects))
        return self.now


def fleet(count: int, objects: list[ObjectRef], credit: int = 4, **network: object) -> Network:
    devices = [Device(f"d{number}", objects, credit) for number in range(count)]
    return Network(devices, Counting("t", sizes(objects), [device.label for device in devices]), **network)


# --- the conversation, by hand -------------------------------------------------------------------------------------


def test_one_object_of_three_chunks_with_a_window_of_two():
    objects = refs(3)
    receiver = Receiver("t", "a", objects, CHUNK, 2, incarnation=7)
    sender = Counting("t", sizes(objects))
    [asked] = receiver.start(everything(objects), 0.0)
    assert asked == need(epoch=(7 << 32) + 1, missing={name(0): b"\x07"})
    assert sender.on_need("a", asked, 0.0) == [SendChunk("a", name(0), 0), SendChunk("a", name(0), 1)]
    stored, progress = receiver.on_chunk(name(0), 0, CHUNK, 0.1)
    assert stored == StoreChunk(name(0), 0)
    assert progress == need(epoch=(7 << 32) + 1, received=1)
    assert sender.on_need("a", progress, 0.1) == [SendChunk("a", name(0), 2)]
    assert receiver.on_chunk(name(0), 2, CHUNK - 3, 0.2)[0] == StoreChunk(name(0), 2)
    assert receiver.on_chunk(name(0), 1, CHUNK, 0.2) == [StoreChunk(name(0), 1), VerifyObject(name(0))]
    done, completed = receiver.on_verified(name(0), True, 0.3)
    assert done.done
    assert completed == Completed("a")
    assert sender.on_need("a", done, 0.3) == [Completed("a")]
    assert sender.on_need("a", done, 0.3) == []
    assert sender.dropped == {"completed": 1}
    assert (receiver.received, duplicates(receiver), sender.own_sent, sender.shared_sent) == (3, 0, 3, 0)


def test_a_receiver_that_has_everything_says_so_at_once():
    receiver = Receiver("t", "a", refs(3), CHUNK, 2, incarnation=7)
    done, completed = receiver.start({}, 0.0)
    assert done.done
    assert completed == Completed("a")
    assert Counting("t", sizes(refs(3))).on_need("a", done, 0.0) == [Completed("a")]


def test_stored_but_unverified_and_empty_objects_are_verified_without_asking():
    objects = [*refs(3), ObjectRef(name(9), 0)]
    receiver = Receiver("t", "a", objects, CHUNK, 2, incarnation=7)
    assert receiver.start({name(0): b"\x00", name(9): b""}, 0.0) == [VerifyObject(name(0)), VerifyObject(name(9))]
    assert receiver.on_verified(name(9), True, 0.0) == []
    assert receiver.on_verified(name(0), True, 0.0)[-1] == Completed("a")


def test_a_grant_is_as_good_as_a_need():
    [asked] = Receiver("t", "a", refs(1), CHUNK, 2, incarnation=7).start(everything(refs(1)), 0.0)
    grant = Grant(**asdict(asked))
    assert decode_down(encode(grant)) == grant
    assert Counting("t", sizes(refs(1))).on_need("a", grant, 0.0) == [SendChunk("a", name(0), 0)]


def test_a_wrong_hash_asks_for_the_whole_object_again_and_gives_up_at_the_third():
    receiver = Receiver("t", "a", refs(1, 1), CHUNK, 2, incarnation=7)
    receiver.start(everything(refs(1, 1)), 0.0)
    for attempt in range(3):
        assert receiver.on_chunk(name(0), 0, CHUNK - 3, 1.0)[1] == VerifyObject(name(0))
        [answer] = receiver.on_verified(name(0), False, 1.0)
        if attempt < 2:
            assert answer.missing[name(0)] == b"\x01"
            assert answer.epoch & 0xFFFF == attempt + 2
    assert answer == Failed("a", name(0), "3 times the sha256 was wrong")


def test_a_receiver_counts_what_it_ignores():
    receiver = Receiver("t", "a", refs(2), CHUNK, 4, incarnation=7)
    receiver.start(everything(refs(2)), 0.0)
    receiver.on_chunk(name(0), 0, CHUNK, 0.0)
    unknown = [(name(5), 0, CHUNK), (name(6), 1, CHUNK)]
    for chunk in ((name(0), 0, CHUNK), (name(0), 2, CHUNK), *unknown, (name(0), 1, CHUNK)):
        assert receiver.on_chunk(*chunk, 0.0) == []
    assert receiver.on_verified(name(0), True, 0.0) == []
    expected = ("duplicate", "index_out_of_range", "wrong_size", "unexpected_verdict")
    assert receiver.dropped == dict.fromkeys(expected, 1) | {"unknown_object": 2}


def test_a_sender_counts_what_it_ignores():
    sender = Counting("t", sizes(refs(3)))
    full = {"missing": {name(0): b"\x07"}}
    assert sender.on_need("a", need(epoch=5, **full), 0.0)
    ignored = {
        "unknown_transfer": need(epoch=6, transfer="other", **full),
        "wrong_device": need("b", 6, **full),
        "malformed": need(epoch=6, credit=0, **full),
        "stale_epoch": need(epoch=4, **full),
        "unknown_epoch": need(epoch=6, received=1),
        "stale_progress": need(epoch=5),
        "unfit_bitmap": need(epoch=6, missing={name(0): b"\x08"}),
    }
    for message in ignored.values():
        assert sender.on_need("a", message, 0.0) == []
    assert sender.dropped == dict.fromkeys(ignored, 1)
    assert sender.on_need("a", need(epoch=5, received=1), 0.0) == [SendChunk("a", name(0), 2)]


def test_a_sender_says_which_object_it_lacks():
    [failed] = Counting("t", sizes(refs(1))).on_need("a", need(missing={name(4): b"\x01"}), 0.0)
    assert isinstance(failed, Failed)
    assert (failed.device, failed.object_id) == ("a", name(4))


def test_what_an_earlier_life_of_a_restarted_receiver_said_is_stale():
    sender = Counting("t", sizes(refs(3)))
    earlier, later, missing = (9 << 32) + 5, (3 << 32) + 1, {name(0): b"\x07"}
    assert sender.on_need("a", need(epoch=earlier, missing=missing), 0.0)
    assert sender.on_need("a", need(epoch=later, missing=missing), 0.0)
    assert sender.on_need("a", need(epoch=earlier, missing=missing), 0.0) == []
    assert sender.on_need("a", need(epoch=earlier, received=1), 0.0) == []
    assert sender.dropped == {"stale_epoch": 2}
    assert sender.on_need("a", need(epoch=later, received=1), 0.0) == [SendChunk("a", name(0), 2)]


def test_a_life_that_was_taken_for_replaced_comes_back_by_asking():
    """Messages of two lives that overtook each other: the one that goes on asking is the living one."""
    sender = Counting("t", sizes(refs(3)))
    living, dead, missing = (9 << 32) + 1, (3 << 32) + 1, {name(0): b"\x07"}
    sender.on_need("a", need(epoch=living, missing=missing), 0.0)
    sender.on_need("a", need(epoch=dead, missing=missing), 0.0)
    assert len(sender.on_need("a", need(epoch=living + 1, missing=missing), STALL_S)) == 2
    sender.on_need("a", need(epoch=dead + 1, missing=missing), STALL_S)
    assert sender.on_need("a", need(epoch=living + 1, done=True), STALL_S) == [Completed("a")]


def test_one_chunk_size_while_others_are_served_and_a_new_one_for_a_device_alone():
    sender = Counting("t", {name(0): 27})
    assert len(sender.on_need("a", need(missing={name(0): b"\x07"}), 0.0)) == 2
    assert sender.on_need("b", need("b", chunk_bytes=9, missing={name(0): b"\x07"}), 0.0) == []
    assert sender.dropped == {"chunk_bytes": 1}
    assert len(sender.on_need("a", need(epoch=2, chunk_bytes=27, missing={name(0): b"\x01"}), 0.0)) == 1
    assert sender.chunk_bytes == 27
    assert sender.take_sent()["a"].again == 0, "the first of the new chunks is none of those sent before"


def test_silence_doubles_the_patience_and_a_chunk_restores_it():
    receiver = Receiver("t", "a", refs(3), CHUNK, 4, incarnation=7)
    receiver.start(everything(refs(3)), 0.0)
    now, pauses = 0.0, []
    for _ in range(6):
        start = now
        while not receiver.on_tick(now):
            now += 0.5
        pauses.append(now - start)
    assert pauses == [STALL_S, 10, 20, 40, MAX_STALL_S, MAX_STALL_S]
    receiver.on_chunk(name(0), 1, CHUNK, now)
    [again] = receiver.on_tick(now + STALL_S)
    assert again.missing == {name(0): b"\x05"}
    assert again.received == 0


def test_a_lost_done_is_repeated_when_the_sender_probes():
    objects = refs(1)
    receiver, sender = Receiver("t", "a", objects, CHUNK, 2, incarnation=7), Counting("t", sizes(objects))
    [asked] = receiver.start(everything(objects), 0.0)
    [chunk] = sender.on_need("a", asked, 0.0)
    receiver.on_chunk(name(0), 0, CHUNK - 3, 0.1)
    receiver.on_verified(name(0), True, 0.1)  # this done is lost
    assert sender.on_tick(PROBE_S - 0.1) == []
    assert sender.on_tick(PROBE_S) == [chunk]
    [done] = receiver.on_chunk(name(0), 0, CHUNK - 3, PROBE_S)
    assert receiver.on_chunk(name(0), 0, CHUNK - 3, PROBE_S) == []
    assert sender.on_need("a", done, PROBE_S) == [Completed("a")]
    assert receiver.on_stall(PROBE_S)[0].done


def test_what_could_not_be_heard_is_waited_for_and_says_nothing_of_the_link():
    receiver = Receiver("t", "a", refs(3), CHUNK, 4, incarnation=7)
    receiver.start(everything(refs(3)), 0.0)
    for second in range(1, 301):
        receiver.on_unheard(float(second))
    receiver.on_chunk(name(0), 0, CHUNK, 300.5)
    assert receiver.on_tick(300.5 + STALL_S - 0.1) == []
    [again] = receiver.on_tick(300.5 + STALL_S)
    assert again.missing == {name(0): b"\x06"}


def test_a_probe_is_the_smallest_chunk_that_was_sent():
    objects = refs(2, 3)  # the last chunk of each is the smallest
    sender = Counting("t", sizes(objects))
    sent = sender.on_need("a", need(missing=everything(objects), credit=9), 0.0)
    least = min(sent, key=lambda one: sender._index.length(one.object_id, one.index))
    assert sender.on_tick(PROBE_S) == [least]
    assert sent[0] != least
    assert sender.take_sent()["a"].again == sender._index.length(least.object_id, least.index) < CHUNK


def test_probing_slows_down():
    sender = Counting("t", sizes(refs(1)))
    sender.on_need("a", need(missing={name(0): b"\x01"}), 0.0)
    probed = [second for second in range(700) if sender.on_tick(float(second))]
    assert probed == [10, 30, 70, 150, 310, 470, 630]


# --- many receivers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receivers", [2, 3, 10])
def test_a_broadcast_sends_each_chunk_once_when_nothing_is_lost(receivers):
    network = fleet(receivers, refs(20, 1, 12), jitter_s=0.02)
    network.boot()
    network.run()
    assert network.sender.shared_sent == 33
    assert network.sender.own_sent == 0
    assert all(chunk.device is None for chunk in network.log)
    assert len(set(network.log)) == len(network.log) == 33
    assert all(not device.receiver.dropped for device in network.devices.values())


def test_the_first_chunk_waits_for_those_expected_and_no_longer_than_documented():
    objects = refs(2)
    sender = Counting("t", sizes(objects), ["a", "b", "c"])
    assert sender.on_need("a", need("a", missing=everything(objects)), 0.0) == []
    assert sender.on_need("b", need("b", missing=everything(objects)), 0.2) == []
    assert sender.on_tick(GATHER_S - 0.1) == []
    assert sender.on_tick(GATHER_S) == [SendChunk(None, name(0), 0), SendChunk(None, name(0), 1)]


def test_nobody_is_waited_for_after_it_was_dropped():
    sender = Counting("t", sizes(refs(1)), ["a", "b"])
    assert sender.on_need("a", need(missing=everything(refs(1))), 0.0) == []
    assert sender.drop("b", 0.1) == [SendChunk("a", name(0), 0)]


def test_what_few_lack_goes_to_each_alone():
    """Four in step; object 0 is lacked by all (published once), 1 by three (once), 2 by two (twice alone)."""
    objects = refs(2, 2, 2)
    network = fleet(4, objects)
    for number, device in enumerate(network.devices.values()):
        device.objects = objects[: 3 if number < 2 else 2 if number == 2 else 1]
    network.boot()
    network.run()
    assert network.sender.shared_sent == 4
    assert network.sender.own_sent == 2 * 2


def test_a_late_joiner_shares_the_rest_and_gets_the_beginning_alone():
    network = fleet(3, refs(200))
    network.sender._awaited.clear()
    network.boot("d0", "d1")
    network.at(0.5, "call", lambda: network.boot("d2"))
    network.run()
    assert network.sender.shared_sent == 200
    assert 0 < network.sender.own_sent < 200
    assert duplicates(network.devices["d2"].receiver) <= network.devices["d2"].credit


def test_a_stalled_receiver_delays_the_rest_at_most_the_documented_time_and_finishes_later():
    undisturbed = fleet(6, refs(100))
    undisturbed.boot()
    reference_s = undisturbed.run()
    network = fleet(6, refs(100))
    network.boot()
    device = network.devices["d3"]
    network.at(0.1, "call", lambda: setattr(device, "deaf", True))
    network.at(60.0, "call", lambda: setattr(device, "deaf", False))
    others = [label for label in network.devices if label != "d3"]
    assert network.run(labels=others) <= reference_s + PACE_STALL_S + TICK_S
    assert network.sender.stalls == 1
    assert network.sender.shared_sent == 100
    assert not device.receiver.finished
    network.run(labels=["d3"])
    assert network.sender.shared_sent == 100
    assert network.sender.own_sent <= 100


def test_one_that_asks_anew_while_it_blocks_is_served_alone_and_only_what_is_not_published_for_all():
    objects = refs(6)
    sender = Counting("t", sizes(objects), ["a", "b", "c"])
    for device in "abc":
        sender.on_need(device, need(device, missing=everything(objects)), 0.0)
    assert sender.shared_sent == 2  # the window of each is full now
    lost = {name(0): bitmap(6, {1, 2, 3, 4, 5})}
    assert sender.on_need("a", need("a", epoch=2, missing=lost), 0.1) == [SendChunk("a", name(0), 1)]
    assert sender.in_step == {"b", "c"}
    sender.on_need("b", need("b", received=2), 0.2)
    published = sender.on_need("c", need("c", received=2), 0.2)
    assert published == [SendChunk(None, name(0), 2), SendChunk(None, name(0), 3)]


def test_who_was_awaited_in_vain_is_not_awaited_again():
    objects = refs(1)
    sender = Counting("t", sizes(objects), ["a", "never"])
    assert sender.on_need("a", need(missing=everything(objects)), 0.0) == []
    assert sender.on_tick(GATHER_S) == [SendChunk("a", name(0), 0)]
    sender.on_need("a", need(done=True), 1.1)
    assert sender.on_need("b", need("b", missing=everything(objects)), 1.2) == [SendChunk("b", name(0), 0)]


def test_a_new_epoch_counts_from_zero():
    receiver = Receiver("t", "a", refs(9), CHUNK, 4, incarnation=7)
    receiver.start(everything(refs(9)), 0.0)
    receiver.on_chunk(name(0), 0, CHUNK, 0.0)
    receiver.on_stall(1.0)
    assert len(receiver.on_chunk(name(0), 1, CHUNK, 1.0)) == 1
    assert receiver.on_chunk(name(0), 2, CHUNK, 1.0)[1].received == 2


def test_messages_of_two_lives_that_overtake_each_other():
    network = fleet(1, refs(1), 1, jitter_s=0.3)
    network.boot()
    network.at(0.0, "call", lambda: network.boot("d0"))
    network.run(until_s=4 * STALL_S)


def test_two_that_stall_together_delay_the_rest_once():
    network = fleet(5, refs(100))
    network.boot()
    for label in ("d0", "d4"):
        network.devices[label].deaf = True
    assert network.run(labels=["d1", "d2", "d3"]) <= 2.0 + PACE_STALL_S + TICK_S


def test_a_trickle_of_acknowledgements_is_a_stall_too():
    objects = refs(100)
    sender = Counting("t", sizes(objects), ["a", "b"])
    for device in ("a", "b"):
        sender.on_need(device, need(device, credit=8, missing=everything(objects)), 0.0)
    for tenths in range(1, 40):
        now = tenths / 10
        sender.on_tick(now)
        sender.on_need("b", need("b", received=tenths * 10), now)
        sender.on_need("a", need("a", received=tenths // 10), now)
    assert sender.in_step == {"b"}


def test_after_an_outage_of_the_broker_those_in_step_share_again():
    network = fleet(5, refs(100))
    network.boot()
    network.at(0.2, "call", lambda: setattr(network, "loss", 1.0))
    network.at(20.0, "call", lambda: setattr(network, "loss", 0.0))
    network.run()
    assert network.sender.stalls == 5
    assert network.sender.own_sent <= 5 * 4  # what was in flight for each when it broke, at most
    assert network.sender.shared_sent <= 100 + 4


def test_a_restarted_receiver_is_sent_only_what_it_lacks():
    network = fleet(1, refs(50))
    network.boot()
    while network.devices["d0"].receiver.received < 20:
        network.step()
    network.queue = [entry for entry in network.queue if entry[2] == "tick"]  # what was under way is lost with it
    sent_before, had = len(network.log), set(network.devices["d0"].disk[name(0)])
    network.boot()
    network.run()
    assert [chunk.index for chunk in network.log[sent_before:]] == sorted(set(range(50)) - had)
    assert set(network.devices["d0"].stored.values()) == {1}


def test_a_restarted_sender_goes_on_when_the_receivers_ask_again():
    network = fleet(3, refs(60))
    network.boot()
    while network.devices["d0"].receiver.received < 20:
        network.step()
    had = network.devices["d0"].receiver.received
    network.sender = Counting("t", sizes(refs(60)), list(network.devices))
    network.epochs.clear()
    network.run()
    assert network.sender.shared_sent <= 60 - had
    assert network.now < 3 * STALL_S


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    receivers=st.integers(1, 5),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    credit=st.integers(1, 8),
    loss=st.sampled_from([0.0, 0.02, 0.2]),
    duplicate=st.sampled_from([0.0, 0.3]),
    jitter_s=st.sampled_from([0.0, 0.3, 4.0]),
    events=st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 4), st.sampled_from(["deaf", "hears", "restarts", "asks", "drop"])),
        max_size=8,
    ),
)
def test_everything_arrives_whatever_the_network_does(
    seed, receivers, chunks, credit, loss, duplicate, jitter_s, events
):
    network = fleet(receivers, refs(*chunks), credit, seed=seed, loss=loss, duplicate=duplicate, jitter_s=jitter_s)

    def announce_again() -> None:
        """As the coordinator does for a device of which it has heard nothing."""
        for label in network.devices.keys() - network.sender.completed - network.sender.active:
            network.from_device(network.devices[label], network.devices[label].receiver.on_stall(network.now))

    def happen(device: Device, what: str) -> None:
        if what == "restarts":
            network.boot(device.label)
        elif what == "asks":
            network.from_device(device, device.receiver.on_stall(network.now))
        elif what == "drop":
            network.wanted.pop(device.label, None)
            network.from_sender(network.sender.drop(device.label, network.now))
        else:
            device.deaf = what == "deaf"

    network.boot()
    for when, number, what in events:
        device = network.devices[f"d{number % receivers}"]
        network.at(when, "call", lambda device=device, what=what: happen(device, what))
    network.at(30.1, "call", lambda: [setattr(device, "deaf", False) for device in network.devices.values()])
    for again in range(31, 2000, 30):
        network.at(again, "call", announce_again)
    network.run()
    for device in network.devices.values():
        assert set(device.stored.values()) == {1}
        assert sum(device.stored.values()) == sum(chunks)


NEEDS = st.builds(
    Need,
    device=st.sampled_from(["a", "b"]),
    transfer=st.sampled_from(["t", "t", "u"]),
    epoch=st.builds(lambda life, step: (life << 32) + step, st.integers(0, 2), st.integers(-1, 4)),
    chunk_bytes=st.sampled_from([CHUNK, CHUNK, CHUNK, 0, 7]),
    credit=st.integers(-1, 300),
    received=st.integers(-1, 20),
    missing=st.dictionaries(st.sampled_from([name(0), name(1), name(2)]), st.binary(max_size=2), max_size=2),
    done=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(NEEDS, max_size=15))
def test_no_message_makes_a_sender_raise_or_send_what_was_not_asked_for(messages):
    sender = Counting("t", sizes(refs(5, 9)))
    asked: set[tuple[str, int]] = set()
    for now, message in enumerate(messages):
        asked |= members(message.missing)
        for one in [*sender.on_need(message.device, message, float(now)), *sender.on_tick(float(now))]:
            if isinstance(one, SendChunk):
                assert (one.object_id, one.index) in asked


def test_real_bytes_from_store_to_store(tmp_path):
    """The loop a runner has: read, encode, decode, write, verify; the receiver is restarted in the middle."""
    source, target = ObjectStore(tmp_path / "source"), ObjectStore(tmp_path / "target")
    datas = [random.Random(size).randbytes(size) for size in (1000, 1, 0, 96, 97)]
    objects = [source.put(data) for data in datas]
    sender = Counting("t", sizes(objects))

    def serve(life: int, chunks_at_most: int) -> bool:
        store = ObjectStore(target.root)
        partials = {ref.id: store.partial(ref, 96) for ref in objects if not store.has(ref.id)}
        receiver = Receiver("t", "a", objects, 96, 3, incarnation=life)
        todo = receiver.start({key: partial.missing() for key, partial in partials.items()}, 0.0)
        arrived = None
        while todo:
            one = todo.pop(0)
            if isinstance(one, Need):
                todo += sender.on_need("a", one, 0.0)
            elif isinstance(one, SendChunk):
                chunks_at_most -= 1
                if chunks_at_most < 0:
                    return False
                data = source.read_chunk(one.object_id, sender.chunk_bytes, one.index)
                (arrived,) = decode_chunks(encode_chunk(Chunk(one.object_id, one.index, data)))
                todo[:0] = receiver.on_chunk(arrived.object_id, arrived.index, len(arrived.data), 0.0)
            elif isinstance(one, StoreChunk):
                partials[one.object_id].write(one.index, arrived.data)
            elif isinstance(one, VerifyObject):
                ok = partials[one.object_id].verify()
                if ok:
                    store.publish([partials[one.object_id]])
                todo += receiver.on_verified(one.object_id, ok, 0.0)
        return receiver.finished

    assert not serve(1, 5)
    assert serve(2, 100)
    assert sender.completed == {"a"}
    assert [target.read(ref.id) for ref in objects] == datas


# --- sets of chunks ------------------------------------------------------------------------------------------------


@given(st.lists(st.sets(st.integers(0, 40)), max_size=9), st.integers(1, 10))
def test_counting_in_all_sets_at_once_is_counting_one_by_one(sets, least):
    counts = Counter(number for one in sets for number in one)
    packed = in_at_least(least, [sum(1 << number for number in one) for one in sets])
    assert packed == sum(1 << number for number, count in counts.items() if count >= least)


@given(st.lists(st.integers(0, 95), min_size=1, max_size=6), st.data())
def test_bitmaps_and_sets_of_chunks_are_inverse(lengths, data):
    layout = ChunkIndex({name(number): length for number, length in enumerate(lengths)}, CHUNK)
    total = sum(chunk_count(length, CHUNK) for length in lengths)
    chunks = data.draw(st.integers(0, 2**total - 1))
    assert layout.pack(layout.unpack(chunks)) == chunks
    for number in range(total):
        assert layout.number(*layout.locate(number)) == number


@pytest.mark.parametrize("chunk_bytes", [0, 10**9])
def test_a_layout_refuses_chunk_sizes_out_of_bounds(chunk_bytes):
    with pytest.raises(ProtocolError, match="are allowed"):
        ChunkIndex({name(0): 100}, chunk_bytes)


def test_a_layout_refuses_more_chunks_than_a_message_can_ask_for():
    ChunkIndex({name(0): MAX_CHUNKS}, 1)
    with pytest.raises(ProtocolError, match="use larger chunks"):
        ChunkIndex({name(0): MAX_CHUNKS, name(1): 1}, 1)


# Slow links: what is late is not lost


def slow_transfer(chunk_bytes: int, chunks: int, chunk_s: float, credit: int = 4) -> tuple[Receiver, int, int]:
    """A transfer whose link takes ``chunk_s`` a chunk, one after the other.

    The receiver, the chunks sent, and the bytes of those the sender knows to have sent more than once.
    """
    objects = [ObjectRef(name(0), chunks * chunk_bytes)]
    sizes_of = {ref.id: ref.size for ref in objects}
    receiver = Receiver("t", "a", objects, chunk_bytes, credit, incarnation=7)
    sender, now, free_at = Counting("t", sizes_of, ["a"]), 0.0, 0.0
    on_the_way: list[tuple[float, int]] = []
    sent = 0

    def send(instructions: list[object]) -> None:
        nonlocal free_at, sent
        for one in instructions:
            if isinstance(one, SendChunk):
                free_at, sent = max(free_at, now) + chunk_s, sent + 1
                on_the_way.append((free_at, one.index))

    def answer(instructions: list[object]) -> None:
        for one in instructions:
            if isinstance(one, Need):
                send(sender.on_need("a", one, now))
            elif isinstance(one, VerifyObject):
                answer(receiver.on_verified(one.object_id, True, now))

    answer(receiver.start({name(0): bitmap(chunks)}, now))
    while not receiver.finished or on_the_way:
        now += 0.25
        while on_the_way and on_the_way[0][0] <= now:
            answer(receiver.on_chunk(name(0), on_the_way.pop(0)[1], chunk_bytes, now))
        answer(receiver.on_tick(now))
        send(sender.on_tick(now))
        assert now < 10_000
    return receiver, sent, sender.take_sent()["a"].again


@pytest.mark.parametrize("chunk_bytes", [96 * 1024, 384 * 1024])
def test_at_256_kbit_s_nothing_is_sent_twice(chunk_bytes: int) -> None:
    receiver, sent, again = slow_transfer(chunk_bytes, 12, 8 * chunk_bytes / 256_000)
    assert (sent, receiver.duplicate_bytes, again) == (12, 0, 0)


def test_a_link_slower_than_thought_is_learned_from_its_first_chunk() -> None:
    """9 s a chunk: the first window is asked for again, once, and probed once; then the pace is known."""
    receiver, sent, again = slow_transfer(96 * 1024, 12, 9.0)
    assert receiver.finished
    assert sent <= 12 + 4 + 1
    assert receiver.duplicate_bytes == again == (sent - 12) * 96 * 1024
