"""Objects set aside in a transfer: they come another way, and are asked for as chunks only where they do not."""

from __future__ import annotations

from pathlib import Path

from edgefl.protocol.chunks import Chunk
from edgefl.protocol.messages import Need
from edgefl.records import ObjectRef
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.transfer.disk_driver import DiskReceiver, DiskSender
from edgefl.transfer.receiver import ChunkIndex, Receiver, StoreChunk, VerifyObject
from edgefl.transfer.sender import Sent

LARGE, SMALL = bytes(range(250)) * 42, b"small"  # 10,500 bytes: eleven chunks of 1,000
REFS = [ObjectRef(object_id(data), len(data)) for data in (LARGE, SMALL)]
CHUNK_BYTES = 1000


def receiver(*aside: ObjectRef) -> Receiver:
    made = Receiver("t", "a", REFS, CHUNK_BYTES, 4, incarnation=1)
    made.set_aside(ref.id for ref in aside)
    return made


def missing() -> dict[str, bytes]:
    return {REFS[0].id: b"\xff\x07", REFS[1].id: b"\x01"}


def asked(need: object) -> set[str]:
    assert isinstance(need, Need)
    return set(need.missing)


def test_only_what_is_not_set_aside_is_asked_for_and_acknowledged() -> None:
    made = receiver(REFS[0])
    (need,) = made.start(missing(), 0.0)
    assert asked(need) == {REFS[1].id}
    for index in range(9):  # more than a window: none of it is acknowledged
        assert made.on_chunk(REFS[0].id, index, CHUNK_BYTES, 1.0) == [StoreChunk(REFS[0].id, index)]
    (again,) = made.on_tick(6.0)  # the silence of what was asked for counts, whatever else comes
    assert asked(again) == {REFS[1].id}
    assert made.on_chunk(REFS[1].id, 0, 5, 7.0) == [StoreChunk(REFS[1].id, 0), VerifyObject(REFS[1].id)]
    assert made.on_tick(99.0) == []
    made.set_aside(())
    (need,) = made.on_stall(99.0)
    assert need.missing == {REFS[0].id: b"\x00\x06"}


def test_a_transfer_of_which_all_is_set_aside_asks_for_nothing_and_ends() -> None:
    made = receiver(*REFS)
    assert made.start(missing(), 0.0) == []
    assert made.on_tick(99.0) == made.on_stall(99.0) == []
    for ref in REFS:
        for index in range(-(-ref.size // CHUNK_BYTES)):
            made.on_chunk(ref.id, index, min(CHUNK_BYTES, ref.size - index * CHUNK_BYTES), 100.0)
    assert made.on_verified(REFS[0].id, True, 100.0) == []
    done, _ = made.on_verified(REFS[1].id, True, 100.0)
    assert isinstance(done, Need)
    assert done.done


def test_gaps_are_runs_of_missing_bytes() -> None:
    made = receiver(REFS[0])
    made.start(missing(), 0.0)
    assert made.gap(REFS[0].id) == (0, 10_500)
    for index in (0, 1, 4):
        made.on_chunk(REFS[0].id, index, CHUNK_BYTES, 0.0)
    assert made.gap(REFS[0].id) == (2000, 4000)
    assert made.gap(REFS[1].id) is None  # it is asked for as a chunk
    index = ChunkIndex({ref.id: ref.size for ref in REFS}, CHUNK_BYTES)
    lacking = index.pack({REFS[0].id: b"\xec\x05", REFS[1].id: b"\x01"})
    assert list(index.runs(REFS[0].id, lacking)) == [(2000, 4000), (5000, 9000), (10_000, 10_500)]
    assert list(index.runs(REFS[1].id, lacking)) == [(0, 5)]


def test_an_object_that_came_wrong_another_way_is_asked_for_as_chunks(tmp_path: Path) -> None:
    needs: list[Need] = []
    made = DiskReceiver("t", "a", REFS[:1], ObjectStore(tmp_path, durable=False), needs.append)
    made.set_aside([REFS[0].id])
    assert made.start(CHUNK_BYTES, 4, 0.0) is None
    assert needs == []
    for index in range(11):
        data = LARGE[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        made.on_chunk(Chunk(REFS[0].id, index, b"x" + data[1:]), 1.0)
    assert [asked(need) for need in needs] == [{REFS[0].id}]
    assert made.gap(REFS[0].id) is None


def test_bytes_that_passed_another_way_are_counted_as_chunks_once(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    sizes = {store.put(data).id: len(data) for data in (LARGE, SMALL)}
    told: list[Sent] = []
    made = DiskSender(
        "t", sizes, store, lambda *_: None, on_sent=lambda device, sent: told.append(sent), chunk_bytes=CHUNK_BYTES
    )
    made.on_asked("a", REFS[0].id, 10_500)
    for begin in range(0, 10_500, 700):  # pieces of another size than chunks
        made.on_passed("a", REFS[0].id, begin, begin + 700)
    assert (sum(sent.first for sent in told), sum(sent.again for sent in told)) == (10_500, 0)
    made.on_passed("a", REFS[0].id, 2000, 4000)
    assert told[-1] == Sent(0, 2000)
    assert made.payload_bytes("a") == made.payload_bytes("a", REFS[0].id) == made.sent_bytes("a") == 10_500
