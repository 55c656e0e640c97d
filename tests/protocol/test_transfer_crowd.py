"""Many receivers behind a broker of finite rate: what is on its way is not sent again, and what one has is bounded."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import pytest

from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_CREDIT
from edgefl.protocol.messages import Need
from edgefl.records import ObjectRef
from edgefl.storage.partials import chunk_count
from edgefl.transfer import sender as sending
from edgefl.transfer.receiver import STALL_S, Instruction, Receiver, SendChunk, VerifyObject
from edgefl.transfer.sender import MOST_ALONE, Sender

CHUNK = DEFAULT_CHUNK_BYTES
MODEL = ObjectRef("a" * 64, 25 * CHUNK)
WINDOW = DEFAULT_CREDIT * CHUNK
TICK_S = 0.5


def own(number: int) -> ObjectRef:
    return ObjectRef(f"{number:064x}", 25 * CHUNK)


@dataclass
class Crowd:
    """Receivers of one object each, and a broker that hands out ``rate`` bytes a second, one message after another."""

    objects: list[ObjectRef]
    rate: float
    silent: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()  # places of messages that nobody gets
    now: float = 0.0
    free_at: float = 0.0
    held: int = 0  # bytes of chunks for one alone that the broker has
    most_held: int = 0
    delivered: int = 0
    messages: int = 0
    queue: list[tuple[float, int, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = itertools.count()
        self.names = [f"d{number}" for number in range(len(self.objects))]
        self.receivers = [
            Receiver("t", name, [ref], CHUNK, DEFAULT_CREDIT, incarnation=1 + place)
            for place, (name, ref) in enumerate(zip(self.names, self.objects, strict=True))
        ]
        self.sender = Sender("t", {ref.id: ref.size for ref in self.objects}, self.names)

    def at(self, when: float, what: object) -> None:
        heapq.heappush(self.queue, (when, next(self.count), what))

    def send(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if not isinstance(one, SendChunk):
                continue
            places = range(len(self.names)) if one.device is None else [int(one.device[1:])]
            self.messages += 1
            if one.device is not None:
                self.held += CHUNK
                self.most_held = max(self.most_held, self.held)
            for place in places:
                self.free_at = max(self.free_at, self.now) + CHUNK / self.rate
                if self.messages - 1 not in self.lost:
                    self.at(self.free_at, (place, one))

    def answer(self, place: int, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Need):
                self.at(self.now + 0.01, one)
            elif isinstance(one, VerifyObject):
                self.answer(place, self.receivers[place].on_verified(one.object_id, True, self.now))

    def run(self, until_s: float = 2000.0) -> float:
        """Seconds until all that are not silent have their object."""
        for place, (receiver, ref) in enumerate(zip(self.receivers, self.objects, strict=True)):
            count = chunk_count(ref.size, CHUNK)
            self.answer(place, receiver.start({ref.id: ((1 << count) - 1).to_bytes((count + 7) // 8, "little")}, 0.0))
        self.at(TICK_S, None)
        awaited = {name for place, name in enumerate(self.names) if place not in self.silent}
        while not awaited <= self.sender.completed:
            self.now, _, what = heapq.heappop(self.queue)
            assert self.now < until_s
            if what is None:
                self.at(self.now + TICK_S, None)
                self.send(self.sender.on_tick(self.now))
                assert counts_right(self.sender)
                for place, receiver in enumerate(self.receivers):
                    if place not in self.silent:
                        self.answer(place, receiver.on_tick(self.now))
            elif isinstance(what, Need):
                if int(what.device[1:]) not in self.silent or what.missing:
                    self.send(self.sender.on_need(what.device, what, self.now))
            else:
                place, chunk = what  # type: ignore[misc]
                self.delivered += CHUNK
                if chunk.device is not None:
                    self.held -= CHUNK
                if place not in self.silent:
                    self.answer(place, self.receivers[place].on_chunk(chunk.object_id, chunk.index, CHUNK, self.now))
        return self.now


def counts_right(sender: Sender) -> bool:
    """What the sender keeps of its receivers, so as not to look at each, is what a look at each finds."""
    receivers = sender._receivers
    in_step = sum(one.in_step for one in receivers.values())
    unserved = {name: one for name, one in receivers.items() if one.todo}
    return sender._in_step == in_step and sender._unserved == unserved


def again(crowd: Crowd) -> int:
    return sum(sent.again for sent in crowd.sender.take_sent().values())


def test_what_a_slow_broker_still_holds_is_not_sent_again() -> None:
    """200 windows of 1.5 MB take 15 s at 20 MB/s: longer than a receiver's patience, and than a sender's."""
    crowd = Crowd([MODEL] * 200, 20e6)
    took = crowd.run()
    assert again(crowd) == 0
    assert crowd.messages == 25, "each chunk is published once, for all"
    assert took < 1.2 * 200 * MODEL.size / 20e6 + 2


def test_it_is_sent_again_where_receivers_are_not_believed_to_be_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BROKER_RATE", 1e12)
    crowd = Crowd([MODEL] * 200, 20e6)
    crowd.run()
    assert again(crowd) > 10 * MODEL.size
    assert crowd.messages > 40 * 25


def test_a_silent_minority_holds_up_a_slow_broker_for_seconds() -> None:
    crowd = Crowd([MODEL] * 200, 20e6, silent=frozenset(range(20)))
    took = crowd.run()
    assert again(crowd) == 0
    assert took < 1.2 * 200 * MODEL.size / 20e6 + 15


def test_a_shared_chunk_that_is_lost_comes_by_a_later_request() -> None:
    crowd = Crowd([MODEL] * 200, 20e6, lost=frozenset({3}))
    assert crowd.run() < 200
    assert 200 * CHUNK <= again(crowd) <= 3 * 200 * CHUNK


def test_what_each_receives_alone_is_bounded_in_the_broker() -> None:
    crowd = Crowd([own(number) for number in range(100)], 20e6)
    took = crowd.run()
    assert crowd.most_held <= MOST_ALONE * WINDOW
    assert again(crowd) == 0
    assert took < 1.2 * 100 * MODEL.size / 20e6 + 5


def test_those_that_stopped_answering_give_their_place_to_others() -> None:
    crowd = Crowd([own(number) for number in range(2 * MOST_ALONE)], 20e6, silent=frozenset(range(MOST_ALONE)))
    assert crowd.run() < 60


def test_a_crowd_that_asks_again_while_it_waits_leaves_the_bound() -> None:
    crowd = Crowd([own(number) for number in range(300)], 16e6)
    crowd.run()
    assert crowd.most_held <= 1.1 * MOST_ALONE * WINDOW
    assert again(crowd) <= 30 * CHUNK


def test_a_broker_faster_than_reckoned_is_not_believed_to_be_behind() -> None:
    """200 MB at 100 MB/s are there after 2 s; the last chunk is lost, and asked for once its receiver is silent."""
    model = ObjectRef("b" * 64, 2000 * CHUNK)
    crowd = Crowd([model], 100e6, lost=frozenset({1999}))
    assert crowd.run() < 2 + 2 * STALL_S
    assert again(crowd) == CHUNK


def test_one_that_lost_a_chunk_gets_it_though_others_were_sent_it_since() -> None:
    sender = Sender("t", {MODEL.id: MODEL.size}, ["a"])
    sender.on_need("a", need_of("a", 1, 1), 0.0)
    sender.on_tick(1.0)
    others = [f"b{number}" for number in range(400)]
    for name in others:
        sender.on_need(name, need_of(name, 1, (1 << 25) - 1), 11.0)
    sender.on_tick(12.1)
    sender.on_need("a", need_of("a", 2, 1), 12.2)
    sender.on_tick(14.0)
    assert sender.take_sent()["a"].again == 2 * CHUNK, "a probe at 11 s, and what it asked for"


def test_what_went_another_way_is_asked_for_as_anything_else() -> None:
    sender = Sender("t", {MODEL.id: MODEL.size}, [f"d{number}" for number in range(400)])
    for number in range(400):
        sender.on_need(f"d{number}", need_of(f"d{number}", 1, (1 << 25) - 1), 0.0)
    sender.on_passed("d5", MODEL.id, 0, 10 * CHUNK)
    sender.on_tick(1.0)
    sender.on_need("d5", need_of("d5", 2, (1 << 25) - 1), 1.5)
    assert sender._receivers["d5"].sent == 16, "what was published for all, and may be on its way"


def need_of(device: str, step: int, chunks: int) -> Need:
    return Need(
        device=device,
        transfer="t",
        epoch=(1 << 32) + step,
        chunk_bytes=CHUNK,
        credit=DEFAULT_CREDIT,
        missing={MODEL.id: chunks.to_bytes(4, "little")},
    )
