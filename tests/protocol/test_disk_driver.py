"""Both ends of a transfer on two object stores: what arrives, what was sent twice, who takes an object over."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import decode_chunks
from edgefl.protocol.messages import Need
from edgefl.records import ObjectRef
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.disk_driver import DiskReceiver, DiskSender, End, Superseded, lacking_bytes
from edgefl.transfer.receiver import STALL_S, STEP_BITS, Completed, Failed
from edgefl.transfer.sender import PROBE_S, Sent

#: Five chunks of 1000 bytes, the last of 500; and one of a single chunk.
LARGE, SMALL = bytes(range(250)) * 18, b"small"


class Link:
    """A sender and a receiver with a store each; ``messages`` of chunks wait until they are delivered."""

    def __init__(self, root: Path) -> None:
        self.source, self.target = ObjectStore(root / "source"), ObjectStore(root / "target")
        self.refs = [self.source.put(LARGE), self.source.put(SMALL)]
        self.messages: list[bytes] = []
        self.needs: list[Need] = []
        sizes = {ref.id: ref.size for ref in self.refs}
        self.again = 0
        self.sender = DiskSender(
            "t", sizes, self.source, lambda _, message: self.messages.append(message), on_sent=self._sent
        )
        self.receiver = self.another(self.refs)

    def _sent(self, device: str, sent: Sent) -> None:
        self.again += sent.again

    def another(self, refs: list[ObjectRef]) -> DiskReceiver:
        return DiskReceiver("t", "a", refs, self.target, self.needs.append)

    def deliver(self) -> End | None:
        """Everything that is asked for and sent, until nothing is under way; how it ended."""
        end: End | None = None
        while self.needs or self.messages:
            while self.needs:
                assert self.sender.on_need("a", self.needs.pop(0), 0.0) == []
            while self.messages:
                for chunk in decode_chunks(self.messages.pop(0)):
                    end = self.receiver.on_chunk(chunk, 0.0) or end
        return end


def test_objects_arrive_and_are_published_by_the_caller(tmp_path: Path) -> None:
    link = Link(tmp_path)
    assert link.receiver.start(1000, 4, 0.0) is None
    assert link.deliver() == Completed("a")
    assert (link.receiver.received_bytes, link.receiver.duplicate_bytes) == (4505, 0)
    assert not link.target.has(link.refs[0].id)
    link.target.publish(link.receiver.partials.values())
    assert [link.target.read(ref.id) for ref in link.refs] == [LARGE, SMALL]
    assert link.another(link.refs).start(1000, 4, 0.0) == Completed("a"), "nothing is missing any more"


def test_chunks_that_arrive_twice_are_counted_also_over_a_pause(tmp_path: Path) -> None:
    link = Link(tmp_path)
    link.receiver.start(1000, 2, 0.0)
    link.sender.on_need("a", link.needs.pop(0), 0.0)
    [first] = decode_chunks(link.messages[0])
    for _ in range(3):
        assert link.receiver.on_chunk(first, 0.0) is None
    link.receiver.pause()
    assert not link.receiver.running
    assert link.receiver.on_chunk(first, 0.0) is None, "a paused receiver takes nothing"
    assert (link.receiver.received_bytes, link.receiver.duplicate_bytes) == (1000, 2000)
    link.messages.clear()
    link.needs.clear()  # the acknowledgement of the first epoch
    link.receiver.start(1000, 2, 0.0)
    assert link.needs[-1].missing[link.refs[0].id] == b"\x1e", "the first chunk stayed on disk"
    assert link.deliver() == Completed("a")
    assert (link.receiver.received_bytes, link.receiver.duplicate_bytes) == (4505, 2000)


def test_an_object_taken_over_in_other_chunks_supersedes_the_transfer(tmp_path: Path) -> None:
    link = Link(tmp_path)
    link.receiver.start(1000, 4, 0.0)
    link.sender.on_need("a", link.needs.pop(0), 0.0)
    taken = link.another(link.refs[:1])
    taken.start(500, 4, 0.0)
    [first] = decode_chunks(link.messages[0])
    assert link.receiver.on_chunk(first, 0.0) == Superseded()
    assert taken.partials[first.object_id].missing() == b"\xff\x01", "all nine chunks of 500 bytes are still missing"
    assert link.receiver.received_bytes == 0


def test_an_object_that_is_wrong_three_times_fails(tmp_path: Path) -> None:
    link = Link(tmp_path)
    link.source.path(link.refs[1].id).write_bytes(b"smell")
    link.source.durable = False  # a device does not look at its objects before it sends them
    link.receiver.start(1000, 4, 0.0)
    assert link.deliver() == Failed("a", link.refs[1].id, "3 times the sha256 was wrong")


def test_what_is_not_offered_fails_and_senseless_sizes_are_refused(tmp_path: Path) -> None:
    link = Link(tmp_path)
    strange = Need("a", "t", epoch=1, chunk_bytes=1000, credit=4, missing={"0" * 64: b"\x01"})
    assert [failed.object_id for failed in link.sender.on_need("a", strange, 0.0)] == ["0" * 64]
    assert (link.messages, link.sender._sender.dropped.total()) == ([], 1)
    with pytest.raises(ProtocolError, match="chunks of 0 bytes"):
        link.receiver.start(0, 4, 0.0)


def test_what_a_device_lacked_is_counted_once_and_by_object(tmp_path: Path) -> None:
    link = Link(tmp_path)
    large, small = (ref.id for ref in link.refs)
    link.receiver.start(1000, 4, 0.0)
    assert link.needs[0].credit == 4
    assert link.deliver() == Completed("a")
    assert (link.sender.payload_bytes("a"), link.sender.payload_bytes("a", large)) == (4505, 4500)
    assert (link.sender.payload_bytes("a", small), link.sender.payload_bytes("b")) == (5, 0)
    again = Need("a", "t", epoch=2**62, chunk_bytes=1000, credit=4, missing={large: b"\x11", small: b"\x01"})
    link.sender.on_need("a", again, 0.0)
    assert link.sender.payload_bytes("a") == 4505, "a repetition is none of what it lacked"
    link.sender.on_need("b", Need("b", "t", 1, 1000, 4, missing={large: b"\x11"}), 0.0)
    assert link.sender.payload_bytes("b") == 1500


@pytest.mark.parametrize(
    ("bitmap", "size", "expected"),
    [(b"\x1f", 4500, 4500), (b"\x10", 4500, 500), (b"\x05", 4500, 2000), (b"\xe0", 4500, 0), (b"\x02", 2000, 1000)],
)
def test_bytes_of_a_bitmap(bitmap: bytes, size: int, expected: int) -> None:
    assert lacking_bytes(bitmap, size, 1000) == expected


def test_a_refused_need_counts_no_bytes(tmp_path: Path) -> None:
    link = Link(tmp_path)
    large = link.refs[0].id
    link.sender.on_need("a", Need("a", "other", 1, 1000, 4, missing={large: b"\x1f"}), 0.0)
    link.sender.on_need("a", Need("a", "t", 1, 1000, 4, missing={large: b"\x1f"}, done=True), 0.0)
    assert link.sender.payload_bytes("a") == 0


def test_ticks_and_reconnections_reach_both_ends(tmp_path: Path) -> None:
    link = Link(tmp_path)
    link.receiver.on_tick(0.0)
    link.receiver.ask_again(0.0)
    link.receiver.on_unheard(0.0)
    assert link.needs == [], "one that has not started asks for nothing"
    link.receiver.start(1000, 4, 0.0)
    link.receiver.on_tick(STALL_S - 0.1)
    link.receiver.on_unheard(3.0)
    link.receiver.on_tick(STALL_S)
    assert len(link.needs) == 1
    link.receiver.on_tick(3.0 + STALL_S)
    link.receiver.ask_again(9.0)
    assert [need.missing for need in link.needs] == [link.needs[0].missing] * 3
    link.sender.on_need("a", Need("a", "t", 1, 5000, 4, missing={link.refs[1].id: b"\x01"}), 0.0)
    link.messages.clear()
    link.sender.on_tick(PROBE_S - 0.1)
    assert link.messages == []
    link.sender.on_tick(PROBE_S)
    assert [chunk.data for message in link.messages for chunk in decode_chunks(message)] == [SMALL]
    assert link.again == len(SMALL)


def test_one_that_is_dropped_is_not_waited_for(tmp_path: Path) -> None:
    link = Link(tmp_path)
    sizes = {ref.id: ref.size for ref in link.refs}
    sender = DiskSender("t", sizes, link.source, lambda device, message: link.messages.append(message), ["a", "b"])
    sender.on_need("a", Need("a", "t", 1, 1000, 4, missing={link.refs[1].id: b"\x01"}), 0.0)
    assert link.messages == [], "b has not asked yet"
    sender.drop("b", 0.1)
    assert len(link.messages) == 1


def test_each_life_of_a_receiver_has_an_incarnation_of_31_bits(tmp_path: Path) -> None:
    link = Link(tmp_path)
    for _ in range(20):
        link.receiver.start(1000, 4, 0.0)
    assert 2**16 < max(need.epoch >> STEP_BITS for need in link.needs) < 2**31


def test_chunks_are_published_to_the_device_that_lacks_them_or_to_all(tmp_path: Path) -> None:
    link = Link(tmp_path)
    published: list[str | None] = []
    sizes = {ref.id: ref.size for ref in link.refs}
    sender = DiskSender("t", sizes, link.source, lambda device, message: published.append(device), ["a", "b"])
    large, small = (ref.id for ref in link.refs)
    sender.on_need("a", Need("a", "t", 1, 1000, 9, missing={large: b"\x1f"}), 0.0)
    sender.on_need("b", Need("b", "t", 1, 1000, 9, missing={large: b"\x1f", small: b"\x01"}), 0.0)
    assert set(published) == {None, "b"}


def test_a_receiver_that_has_everything_repeats_it_at_most_once_a_second(tmp_path: Path) -> None:
    link = Link(tmp_path)
    link.receiver.start(1000, 9, 0.0)
    link.sender.on_need("a", link.needs.pop(0), 0.0)
    chunks = [chunk for message in link.messages for chunk in decode_chunks(message)]
    for chunk in chunks:
        end = link.receiver.on_chunk(chunk, 10.0)
    assert end == Completed("a")
    link.needs.clear()
    assert link.receiver.on_chunk(chunks[0], 10.9) is None
    assert link.needs == []
    link.receiver.on_chunk(chunks[0], 11.0)
    assert [need.done for need in link.needs] == [True]
