"""Both ends of a transfer on two object stores: what arrives, what was sent twice, who takes an object over."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import decode_chunks
from edgefl.protocol.messages import Need
from edgefl.records import ObjectRef
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.disk_driver import DiskReceiver, DiskSender, End, Superseded
from edgefl.transfer.receiver import Completed, Failed

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
        self.sender = DiskSender("t", sizes, self.source, lambda device, message: self.messages.append(message))
        self.receiver = self.another(self.refs)

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
