"""A simulated device's store answers as one on a disk does, and holds no more than it needs."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import msgspec
import pytest

from device_agent.core.state import RetainedParts, Saved
from device_agent.runtime.memory_store import MemoryObjects, MemoryStore, Objects, Pool, saved_in
from device_agent.runtime.slots import written_slots
from device_agent.runtime.store import AgentStore, Owner
from edgefl.errors import ProtocolError, StoreError
from edgefl.plan.job import Job, Transfer
from edgefl.protocol.messages import Offer, Update
from edgefl.records import Attempt, ObjectRef
from edgefl.storage.objects import ObjectStore, object_id

CHUNK = 4
WORK = Offer(Attempt("r", 1, 1, 1))


def opened(kind: str, place: Path, limit: int | None = None) -> Objects:
    if kind == "disk":
        return ObjectStore(place / "objects", limit, durable=False)
    return MemoryObjects(place / "objects", limit, Pool(place / "source"))


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_both_kinds_of_store_answer_alike(kind: str, tmp_path: Path) -> None:
    store = opened(kind, tmp_path, limit=20)
    ref = store.put(b"0123456789")
    assert ref == ObjectRef(object_id(b"0123456789"), 10)
    assert (store.has(ref.id), store.has("a" * 64), store.used_bytes()) == (True, False, 10)
    assert bytes(store.read_chunk(ref.id, CHUNK, 2)) == b"89"
    with pytest.raises(ProtocolError):
        store.read_chunk(ref.id, CHUNK, 3)
    assert bytes(store.view(ref.id)) == store.read(ref.id) == b"0123456789"
    with pytest.raises(StoreError, match=r"21 bytes needed \(10 used \+ 11 new\), 20 allowed"):
        store.put(b"x" * 11)
    coming = ObjectRef(object_id(b"abcdef"), 6)
    arriving = store.partial(coming, CHUNK)
    assert arriving.missing() == b"\x03"
    with pytest.raises(ProtocolError, match="has 1 bytes where 4 should be"):
        arriving.write(0, b"a")
    with pytest.raises(StoreError, match="16 used"):
        store.partial(ObjectRef("b" * 64, 5), CHUNK)
    arriving.write(1, b"ef")
    assert (arriving.missing(), arriving.verify()) == (b"\x01", False)
    arriving.write(0, b"abcX")
    assert (arriving.verify(), arriving.missing()) == (False, b"\x03"), "the sha256 is wrong: all of it comes again"
    arriving.write(0, b"abcd")
    arriving.write(1, b"ef")
    assert arriving.verify()
    assert not store.has(coming.id)
    store.publish([arriving])
    assert store.read(coming.id) == b"abcdef"
    assert store.partial(coming, CHUNK).missing() == b"\x00"
    store.mark_garbage({coming.id})
    assert (store.has(ref.id), store.used_bytes()) == (False, 6)
    store.remove(coming.id)
    with pytest.raises(StoreError):
        store.read(coming.id)


def test_equal_objects_of_two_devices_are_one_and_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(tmp_path / "objects")
    first, second = (MemoryStore(tmp_path / name, name, None, pool).objects for name in ("a", "b"))
    ref = first.put(b"0123456789")
    monkeypatch.setattr("device_agent.runtime.memory_store.object_id", lambda data: pytest.fail("hashed again"))
    arriving = second.partial(ref, CHUNK)
    for index, data in enumerate((b"0123", b"4567", b"89")):
        arriving.write(index, data)
    assert arriving.verify()
    second.publish([arriving])
    assert second.read(ref.id) is first.read(ref.id)


def test_what_received_an_object_keeps_no_bytes_of_it(tmp_path: Path) -> None:
    """A transfer's last state is kept with the agent: of a thousand that were asked, a thousand models."""
    pool = Pool(tmp_path / "objects")
    objects = MemoryStore(tmp_path / "a", "a", None, pool).objects
    ref = ObjectRef(object_id(b"abcdef"), 6)
    arriving = objects.partial(ref, CHUNK)
    arriving.write(0, b"abcd")
    arriving.write(1, b"ef")
    assert arriving.verify()
    objects.publish([arriving])
    assert (arriving._known, arriving._pieces) == (None, {})
    arriving.write(1, b"ef")  # once more, and too late
    assert (arriving.verify(), arriving._pieces) == (True, {})
    another = objects.partial(ref, CHUNK)
    again = MemoryStore(tmp_path / "b", "b", None, pool).objects.partial(ref, CHUNK)
    again.write(0, b"abcd")
    again.write(1, b"ef")
    assert (again._known, again.verify(), again._known) == (b"abcdef", True, None)
    assert another.verified
    assert objects.read(ref.id) == b"abcdef"


def test_what_a_device_does_not_need_now_is_a_name_and_comes_from_the_coordinator(tmp_path: Path) -> None:
    source = ObjectStore(tmp_path / "objects")
    ref = source.put(b"0123456789")
    pool = Pool(source.root)
    store = MemoryStore(tmp_path / "a", "a", None, pool)
    store.objects.put(b"0123456789")
    store.save(Saved(update=Update("a", WORK.attempt)))
    assert pool.known(ref.id) is not None
    store.save(Saved())  # the update was acknowledged
    gc.collect()
    assert pool.known(ref.id) is None
    assert store.objects.has(ref.id), "a fleet's device has it, and would not fetch it again"
    assert store.objects.read(ref.id) == b"0123456789"
    assert not (tmp_path / "a").exists(), "nothing of it is on the disk"
    source.path(ref.id).write_bytes(b"damaged")
    store.objects.rest()
    gc.collect()
    with pytest.raises(StoreError, match="is damaged"):
        store.objects.read(ref.id)


def test_what_may_come_as_a_difference_stays_whole(tmp_path: Path) -> None:
    """The coordinator may part from the base before the device has used it."""
    pool = Pool(tmp_path / "objects")
    store = MemoryStore(tmp_path / "a", "a", None, pool)
    ref = store.objects.put(b"base")
    packed = Job(transfer=Transfer(down=(("*", "delta"),)))
    store.save(Saved(offer=msgspec.structs.replace(WORK, job=packed)))
    store.save(Saved())
    gc.collect()
    assert pool.known(ref.id) is not None


def test_retained_parts_outlast_the_process_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    store = MemoryStore(tmp_path / "a", "a", None, Pool(tmp_path / "objects"))
    kept, sent = store.objects.put(b"kept"), store.objects.put(b"sent")
    saved = Saved(retained=(RetainedParts(WORK.attempt, {"head/a": kept}),), closed=WORK.attempt)
    store.save(msgspec.structs.replace(saved, update=Update("a", WORK.attempt, {"task": sent})))
    store.close()
    assert saved_in(tmp_path / "a") == saved
    again = MemoryStore(tmp_path / "a", "a", None, Pool(tmp_path / "objects")).objects
    assert (again.read(kept.id), again.has(sent.id)) == (b"kept", False)
    (tmp_path / "a" / "objects" / kept.id).unlink()
    assert saved_in(tmp_path / "a").retained == (RetainedParts(WORK.attempt, {}),), "lost ones count as never retained"
    store.save(Saved())
    assert saved_in(tmp_path / "a") == Saved(), "what is retained no more is not taken up again"


def test_what_an_agent_with_a_store_on_disk_has_left_is_taken_up(tmp_path: Path) -> None:
    """Of a run that was begun with processes; the update is trained again."""
    with contextlib.closing(AgentStore(tmp_path / "a", Owner("a", "f"))) as before:
        kept, sent = before.objects.put(b"kept"), before.objects.put(b"sent")
        saved = Saved(retained=(RetainedParts(WORK.attempt, {"head/a": kept}),), closed=WORK.attempt)
        before.save(msgspec.structs.replace(saved, offer=WORK, update=Update("a", WORK.attempt, {"task": sent})))
    assert saved_in(tmp_path / "a") == saved
    store = MemoryStore(tmp_path / "a", "a", None, Pool(tmp_path / "objects"))
    assert (store.objects.read(kept.id), store.objects.used_bytes()) == (b"kept", 8)
    store.save(saved)
    assert not (tmp_path / "a" / "objects" / sent.id).exists()


def test_a_round_that_retained_nothing_is_remembered(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path / "a", "a", None, Pool(tmp_path / "objects"))
    saved = Saved(retained=(RetainedParts(WORK.attempt, {}),))
    store.save(saved)
    assert saved_in(tmp_path / "a") == saved


def test_a_file_of_what_is_retained_that_a_loss_of_power_has_spoilt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "work.msgpack"
    file.write_bytes(b"")
    with pytest.raises(StoreError, match=str(file)):
        saved_in(tmp_path)


def test_a_directory_goes_from_processes_to_memory_and_back(tmp_path: Path) -> None:
    """Whoever saved last counts; and slots that are not whole are named."""
    works = [Saved(retained=(RetainedParts(Attempt("run", 1, number, 1), {}),)) for number in range(3)]
    with contextlib.closing(AgentStore(tmp_path, Owner("a", "f"))) as store:
        store.save(works[0])
    assert saved_in(tmp_path) == works[0]
    MemoryStore(tmp_path, "a", None, Pool(tmp_path / "objects")).save(works[1])
    assert saved_in(tmp_path) == works[1]
    with contextlib.closing(AgentStore(tmp_path, Owner("a", "f"))) as store:
        assert store.load() == works[1]
        store.save(works[2])
    assert saved_in(tmp_path) == works[2]
    MemoryStore(tmp_path, "a", None, Pool(tmp_path / "objects")).save(Saved())
    assert saved_in(tmp_path) == Saved(), "what is retained no more is not taken up again"
    (tmp_path / "work.msgpack").unlink()
    for file in written_slots(tmp_path):
        file.write_bytes(b"half")
    with pytest.raises(StoreError, match=r"work\.\* cannot be read: no whole record in work\.0"):
        saved_in(tmp_path)
