"""The object store: nothing half, nothing wrong, nothing lost by a crash, and a disk that refuses is named."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.errors import ProtocolError, StoreError
from edgefl.records import ObjectRef
from edgefl.storage import disk
from edgefl.storage.disk import sync_files
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.storage.partials import PartialObject, chunk_count, chunk_span

DATA = random.Random(0).randbytes(1000)
REF = ObjectRef(object_id(DATA), len(DATA))
CHUNK = 96  # 11 chunks, the last of 40 bytes


def piece(index: int, data: bytes = DATA, chunk: int = CHUNK) -> bytes:
    return data[index * chunk : (index + 1) * chunk]


def write_all(partial: PartialObject, data: bytes) -> None:
    for index in range(partial.chunk_count):
        partial.write(index, piece(index, data, partial.chunk_bytes))


def members(bitmap: bytes) -> set[int]:
    return {number for number in range(8 * len(bitmap)) if bitmap[number // 8] >> number % 8 & 1}


def map_of(here, size: int = REF.size, chunk: int = CHUNK) -> bytes:
    """What stands behind the data while these chunks are here."""
    return b"EFM2" + chunk.to_bytes(4, "little") + bytes(i in here for i in range(chunk_count(size, chunk)))


def arriving(store: ObjectStore) -> Path:
    (file,) = (store.root / "partial").iterdir()
    return file


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def test_put_names_by_content_and_is_idempotent(store):
    ref = store.put(b"abc")
    assert ref == ObjectRef("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 3)  # FIPS 180-2
    assert store.put(bytearray(b"abc")) == store.put(memoryview(b"abc")) == ref
    assert store.has(ref.id)
    assert (store.read(ref.id), store.size(ref.id), store.path(ref.id).read_bytes()) == (b"abc", 3, b"abc")
    assert [file.name for file in store.root.iterdir() if file.is_file()] == [ref.id]
    assert ObjectStore(store.root).read(ref.id) == b"abc"


def completed(store: ObjectStore, partial: PartialObject) -> bool:
    """Whether it is whole; it is then published."""
    whole = partial.verify()
    if whole:
        store.publish([partial])
    return whole


def test_the_empty_object(store):
    assert store.read(store.put(b"").id) == b""


def test_reading_chunks(store):
    store.put(DATA)
    assert b"".join(store.read_chunk(REF.id, CHUNK, index) for index in range(11)) == DATA
    with pytest.raises(ProtocolError, match="chunk 11 of an object with 11 chunks"):
        store.read_chunk(REF.id, CHUNK, 11)


@pytest.mark.parametrize("name", ["", "../secret", "A" * 64, "g" * 64, "a" * 63, "a" * 64 + "\n", "/etc/passwd"])
def test_ids_can_not_be_paths(store, name):
    for act in (store.has, store.path, store.read, store.size, lambda name: store.partial(ObjectRef(name, 1), 1)):
        with pytest.raises(ProtocolError, match="not an object id"):
            act(name)


def test_an_absent_object_is_an_error_that_names_the_file(store):
    for act in (store.read, store.size, lambda name: store.read_chunk(name, 5, 0)):
        with pytest.raises(StoreError, match=f"{REF.id}.*No such file"):
            act(REF.id)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(11)))
def test_chunks_in_any_order_make_the_object(tmp_path_factory, order):
    store = ObjectStore(tmp_path_factory.mktemp("objects"))
    partial = store.partial(REF, CHUNK)
    assert partial.chunk_count == 11
    for number, index in enumerate(order):
        assert members(partial.missing()) == set(order[number:])
        assert not completed(store, partial)
        partial.write(index, memoryview(piece(index)))
        partial.write(index, bytes(len(piece(index))))  # a duplicate does not overwrite
    assert completed(store, partial)
    assert completed(store, partial)
    assert store.read(REF.id) == DATA
    assert not any(store.root.joinpath("partial").iterdir())
    assert partial.missing() == bytes(2)
    partial.write(0, piece(0))


def test_it_goes_on_from_the_disk(store):
    first = store.partial(REF, CHUNK)
    for index in (0, 1, 7):
        first.write(index, piece(index))
    again = ObjectStore(store.root).partial(REF, CHUNK)
    assert members(again.missing()) == set(range(11)) - {0, 1, 7}
    for index in members(again.missing()):
        again.write(index, piece(index))
    assert completed(store, again)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 10)), st.integers(1, 1200), st.integers(1, 1200))
def test_it_goes_on_in_chunks_of_another_size(tmp_path_factory, here, middle, last):
    """Whatever the sizes: nothing is claimed that is not there, and what is missing makes it whole."""
    root = tmp_path_factory.mktemp("objects")
    first = ObjectStore(root).partial(REF, CHUNK)
    for index in here:
        first.write(index, piece(index))
    first.abandon()
    covered = {byte for index in here for byte in range(index * CHUNK, min(len(DATA), (index + 1) * CHUNK))}
    for size in (middle, last):
        store = ObjectStore(root)
        partial = store.partial(REF, size)
        claimed = set(range(partial.chunk_count)) - members(partial.missing())
        if partial.chunk_count == 1 and not claimed:
            continue  # it comes whole, and what lies in files is left alone
        covered &= {byte for i in claimed for byte in range(i * size, min(len(DATA), (i + 1) * size))}
        assert covered == {byte for i in claimed for byte in range(i * size, min(len(DATA), (i + 1) * size))}
    for index in members(partial.missing()):
        partial.write(index, DATA[index * last : (index + 1) * last])
    assert completed(store, partial)
    assert store.read(REF.id) == DATA


CHANGES = [
    "size",
    "map cut",
    "map garbage",
    "data cut",
    "data gone",
    "map gone",
    "earlier version",
    "no chunks",
    "longer",
    "empty",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_starts_anew(store, change):
    first = store.partial(REF, CHUNK)
    first.write(0, piece(0))
    file = arriving(store)
    ref, whole = REF, file.read_bytes()
    changed = {
        "map cut": whole[:-1],
        "map garbage": whole[:-1] + b"\x07",
        "data cut": whole[1:],
        "map gone": whole[: REF.size],
        "earlier version": whole[: REF.size] + b"EFM1" + whole[REF.size + 4 :],
        "no chunks": whole[: REF.size + 4] + bytes(4),
        "longer": whole + b"\x01",
        "empty": b"",
    }
    if change == "size":
        ref = ObjectRef(REF.id, 900)
    elif change == "data gone":
        file.unlink()
    else:
        file.write_bytes(changed[change])
    again = ObjectStore(store.root).partial(ref, CHUNK)
    assert members(again.missing()) == set(range(chunk_count(ref.size, CHUNK)))
    assert not file.exists()
    again.write(1, piece(1))
    assert file.read_bytes() == bytes(CHUNK) + piece(1) + bytes(ref.size - 2 * CHUNK) + map_of([1], ref.size)


@pytest.mark.parametrize("after", ["half a chunk", "a chunk", "half a map"])
def test_killed_between_two_writes_it_claims_what_was_there_before(store, after):
    """The bytes by hand: a kill after each of the writes that a chunk makes."""
    file = store.root / "partial" / f"{REF.id}.data"
    if after == "half a map":  # of the file that its first chunk makes
        file.write_bytes(bytes(REF.size) + map_of([])[:10])
    else:
        half = DATA[: CHUNK // 2] if after == "half a chunk" else DATA[:CHUNK]
        file.write_bytes(half + bytes(5 * CHUNK - len(half)) + piece(5) + bytes(REF.size - 6 * CHUNK) + map_of([5]))
    again = store.partial(REF, CHUNK)
    assert set(range(11)) - members(again.missing()) == ({5} if after != "half a map" else set())
    for index in members(again.missing()):
        again.write(index, piece(index))
    assert completed(store, again)
    assert store.read(REF.id) == DATA


def test_a_chunk_that_the_disk_takes_half_of_is_not_claimed(store, monkeypatch):
    partial = store.partial(REF, CHUNK)
    partial.write(3, piece(3))
    write = disk.write_all

    def half(file: int, data: bytes, offset: int) -> None:
        write(file, data[: (len(data) + 1) // 2], offset)  # all of one byte
        if len(data) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("edgefl.storage.partials.write_all", half)
        with pytest.raises(StoreError, match="Input/output error"):
            partial.write(5, piece(5))
    for one in (partial, ObjectStore(store.root).partial(REF, CHUNK)):
        assert set(range(11)) - members(one.missing()) == {3}
    write_all(partial, DATA)
    assert completed(store, partial)


def test_a_file_that_is_deleted_while_it_arrives_is_named_and_not_made_of_holes(store):
    store.partial(REF, CHUNK).write(0, piece(0))
    again = ObjectStore(store.root).partial(REF, CHUNK)
    arriving(store).unlink()
    with pytest.raises(StoreError, match=f"cannot write .*{REF.id}.data .*No such file"):
        again.write(1, piece(1))


@pytest.mark.parametrize("chunk", [CHUNK, 2000])
def test_what_was_cut_and_not_renamed_is_taken_when_it_is_right(store, chunk):
    first = store.partial(REF, CHUNK)
    write_all(first, DATA)
    assert arriving(store).stat().st_size == REF.size + 8 + 11
    assert first.verify()
    assert arriving(store).read_bytes() == DATA
    after = ObjectStore(store.root, durable=False)
    again = after.partial(REF, chunk)
    assert again.verified
    assert not any(again.missing())
    assert completed(after, again)
    assert after.read(REF.id) == DATA


@pytest.mark.parametrize("chunk", [CHUNK, 2000])
def test_what_was_cut_and_is_wrong_starts_from_nothing(store, chunk):
    """As a power cut may leave it, or a kill between the end of one map and the next."""
    (store.root / "partial" / f"{REF.id}.data").write_bytes(DATA[:-1] + b"?")
    store = ObjectStore(store.root, durable=False)
    again = store.partial(REF, chunk)
    assert members(again.missing()) == set(range(chunk_count(REF.size, chunk)))
    assert not completed(store, again)
    write_all(again, DATA)
    assert completed(store, again)


@pytest.mark.parametrize(("size", "claimed"), [(40, {0, 1, 12, 13, 24}), (200, {2}), (95, {0}), (2000, set())])
def test_a_map_in_chunks_of_another_size_replaces_the_one_before(store, size, claimed):
    """Chunks 0, 5 and 10 of 96 bytes, bytes 0 … 95, 480 … 575 and 960 … 999; 95 bytes make 11 chunks as well."""
    store = ObjectStore(store.root, durable=False)  # else what is one chunk arrives in memory
    first = store.partial(REF, CHUNK)
    for index in (0, 5, 10) if size != 200 else (4, 5, 6):  # bytes 384 … 671
        first.write(index, piece(index))
    first.abandon()
    again = ObjectStore(store.root, durable=False).partial(REF, size)
    assert set(range(again.chunk_count)) - members(again.missing()) == claimed
    if size == 2000:
        assert not any((store.root / "partial").iterdir()), "it comes whole"
    else:
        assert arriving(store).read_bytes()[REF.size :] == map_of(claimed, chunk=size)
    store = ObjectStore(store.root, durable=False)
    back = store.partial(REF, CHUNK)
    for index in members(back.missing()):
        back.write(index, piece(index))
    assert completed(store, back)


def test_a_map_is_replaced_only_after_the_one_before_is_gone(store, monkeypatch):
    """Where the disk refuses in between, nothing is claimed that is not here."""
    write_all(first := store.partial(REF, CHUNK), DATA)
    first.abandon()
    damaged = bytearray(arriving(store).read_bytes())
    damaged[REF.size + 8 : REF.size + 10] = b"\x00\x00"
    damaged[: 2 * CHUNK] = bytes(2 * CHUNK)
    arriving(store).write_bytes(damaged)

    def cut_short(file: int, data: bytes, offset: int) -> None:
        os.pwrite(file, data[:12], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("edgefl.storage.partials.write_all", cut_short)
        with pytest.raises(StoreError, match="No space left"):
            store.partial(REF, 95)
    again = ObjectStore(store.root).partial(REF, 95)
    assert members(again.missing()) == set(range(11))


def test_an_arrival_has_one_descriptor_and_only_while_chunks_come(store):
    def opened() -> int:
        return sum(os.path.realpath(file).endswith(".data") for file in Path("/proc/self/fd").iterdir())

    refs = [ObjectRef(object_id(DATA[n:]), len(DATA) - n) for n in range(6)]
    arrivals = [store.partial(ref, CHUNK) for ref in refs]
    assert opened() == 0
    assert not any((store.root / "partial").iterdir())
    for arrival in arrivals[:4]:
        arrival.write(1, bytes(CHUNK))
    assert opened() == 4
    arrivals[2].abandon()
    assert opened() == 3
    for index in range(11):
        arrivals[4].write(index, piece(index, DATA[4:]))
    assert opened() == 4
    assert arrivals[4].verify()
    assert opened() == 3
    for index in range(11):
        arrivals[1].write(index, piece(index, DATA[1:]))
    assert not arrivals[1].verify(), "its chunk 1 is wrong"
    assert opened() == 2
    store.mark_garbage({refs[3].id})
    assert opened() == 1
    del arrival, arrivals[:]
    store._open.clear()
    gc.collect()
    assert opened() == 0


def test_the_disk_begins_with_a_mebibyte_at_a_time(tmp_path, monkeypatch):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("edgefl.storage.partials.begin_sync", lambda file, *span: calls.append(span))
    data = random.Random(1).randbytes(5 * 2**19)
    ref, chunk = ObjectRef(object_id(data), len(data)), 2**18
    for durable in (True, False):
        store = ObjectStore(tmp_path / f"{durable}", durable=durable)
        partial = store.partial(ref, chunk)
        for index in (1, 0, 3, 2, 9, 6, 8, 7, 4, 5):
            partial.write(index, piece(index, data, chunk))
        assert completed(store, partial)
    assert calls == [(0, len(data)), (6 * chunk, len(data) - 6 * chunk)]


def test_a_wrong_hash_starts_anew_and_the_right_bytes_still_make_it(store):
    partial = store.partial(REF, CHUNK)
    for order in (range(11), reversed(range(11))):
        for index in order:
            partial.write(index, piece(index) if index != 4 else bytes(CHUNK))
        assert not completed(store, partial)
        assert not store.has(REF.id)
        assert members(partial.missing()) == set(range(11))
    for index in range(11):
        partial.write(index, piece(index))
    assert completed(store, partial)


def test_a_map_that_claims_too_much_is_found_out(store):
    """What a power cut can leave: the map reached the disk, the data did not."""
    partial = store.partial(REF, CHUNK)
    (store.root / "partial" / f"{REF.id}.data").write_bytes(bytes(REF.size) + map_of(range(11)))
    again = ObjectStore(store.root).partial(REF, CHUNK)
    assert again.missing() == bytes(2)
    assert not completed(store, again)
    assert members(again.missing()) == set(range(11))
    partial.abandon()


@pytest.mark.parametrize(("index", "data"), [(11, b"x" * 40), (-1, b"x"), (0, b"x" * 95), (10, b"x" * 96)])
def test_a_chunk_that_does_not_fit_is_a_protocol_error(store, index, data):
    partial = store.partial(REF, CHUNK)
    with pytest.raises(ProtocolError):
        partial.write(index, data)


def test_an_object_that_is_here_already_lacks_nothing(store):
    store.put(DATA)
    partial = store.partial(REF, CHUNK)
    assert partial.missing() == bytes(2)
    assert completed(store, partial)


def test_an_empty_object_is_complete_at_once(store):
    partial = store.partial(ObjectRef(object_id(b""), 0), CHUNK)
    assert partial.missing() == b""
    assert completed(store, partial)
    assert store.read(object_id(b"")) == b""


def test_two_holders_of_one_object_share_it_and_can_not_spoil_it(store):
    honest, other = store.partial(REF, CHUNK), store.partial(REF, CHUNK)
    for index in range(11):
        honest.write(index, piece(index))
        other.write(index, b"?" * len(piece(index)))
    assert completed(store, other)
    assert completed(store, honest)
    assert store.read(REF.id) == DATA


def test_a_holder_with_another_chunk_size_takes_over(store):
    first = store.partial(REF, CHUNK)
    second = store.partial(REF, 500)
    assert members(second.missing()) == {0, 1}
    write_all(second, DATA)
    first.write(1, b"?" * CHUNK)
    assert first.abandoned
    assert not completed(store, first)
    assert completed(store, second)
    assert store.read(REF.id) == DATA


def test_a_second_holder_can_ask_in_what_chunks_an_object_arrives_already(store):
    assert store.chunk_size_in_progress([REF.id], CHUNK) == CHUNK
    first = store.partial(REF, 500)
    assert store.chunk_size_in_progress(["0" * 64, REF.id], CHUNK) == 500
    small = ObjectRef(object_id(b"small"), 5)
    alone = store.partial(small, 10)
    assert store.chunk_size_in_progress([small.id], CHUNK) == CHUNK, "one chunk in either size"
    assert store.partial(small, CHUNK) is alone
    write_all(first, DATA)
    assert first.verify()
    assert store.chunk_size_in_progress([REF.id], CHUNK) == CHUNK, "nothing of it is to come"
    assert store.partial(REF, CHUNK) is first
    assert first.missing(CHUNK) == bytes(2)
    store.publish([first])
    assert store.chunk_size_in_progress([REF.id], CHUNK) == CHUNK


def test_what_is_put_together_is_there_at_the_end_of_the_block_or_not_at_all(store):
    with store.write_batch() as batch:
        refs = [batch.put(str(n).encode()) for n in range(3)]
        assert [bytes(batch.view(ref.id)) for ref in refs] == [b"0", b"1", b"2"]
        assert batch.has(refs[0].id)
        assert not store.has(refs[0].id)
    assert [store.read(ref.id) for ref in refs] == [b"0", b"1", b"2"]
    lost = []
    with pytest.raises(StoreError, match="cannot look up"), store.write_batch() as batch:
        lost.append(batch.put(b"lost")) or batch.size("0" * 64)
    assert not store.has(lost[0].id)
    assert sorted(path.name for path in store.root.iterdir() if path.is_file()) == sorted(ref.id for ref in refs)


def test_more_is_put_together_than_files_may_be_open(store, monkeypatch):
    monkeypatch.setattr("edgefl.storage.objects._WriteBatch._MOST", 2)
    with store.write_batch() as batch:
        refs = [batch.put(bytes([n])) for n in range(5)]
        assert all(batch.size(ref.id) == 1 for ref in refs)
    assert all(store.has(ref.id) for ref in refs)


@pytest.mark.parametrize("mapped_bytes", [1, 2**20])
def test_a_view_is_proved_once_and_outlives_the_object(store, monkeypatch, mapped_bytes):
    monkeypatch.setattr("edgefl.storage.objects._MAPPED_BYTES", mapped_bytes)
    ref = store.put(DATA)
    view = store.view(ref.id)
    store.mark_garbage(set())
    store.sweep()
    assert bytes(view) == DATA
    with pytest.raises(StoreError, match="No such file"):
        store.view(ref.id)
    broken = store.put(b"right")
    store.path(broken.id).write_bytes(b"wrong")
    with pytest.raises(StoreError, match="damaged"):
        ObjectStore(store.root).view(broken.id)
    assert bytes(store.view(store.put(b"").id)) == b""


def test_what_is_not_what_it_is_named_by_goes_where_it_can_be_fetched_again(store, tmp_path):
    device = ObjectStore(tmp_path / "device", durable=False)
    ref = device.put(DATA)
    assert device.sound(ref.id)
    flip(device.path(ref.id))
    assert not device.sound(ref.id), "though this process has seen it right"
    assert not device.has(ref.id)
    assert not device.sound(ref.id)
    device.put(DATA)
    assert device.sound(ref.id)
    flip(device.path(ref.id))
    with pytest.raises(StoreError, match="damaged") as raised:
        ObjectStore(device.root, durable=False).read(ref.id)
    assert "fetched again" in raised.value.remedy
    assert not device.has(ref.id)
    kept = store.put(DATA)
    flip(store.path(kept.id))
    with pytest.raises(StoreError, match="damaged"):
        ObjectStore(store.root).read(kept.id)
    assert store.has(kept.id), "a coordinator's is evidence, and may be mended"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_unfinished_objects_are_sparse(store):
    store.partial(ObjectRef(object_id(b"large"), 2**30), 2**20).write(0, bytes(2**20))
    assert arriving(store).stat().st_blocks * 512 < 2**21


def test_orphans_are_swept_at_open_and_what_is_being_written_is_not(store):
    orphan, living = store.root / ".new-0", store.root / ".new-1"
    for file in (orphan, living):
        file.write_bytes(b"half")
    store.put(b"kept")
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ObjectStore(store.root)
        assert not orphan.exists()
        assert living.exists()
    ObjectStore(store.root)
    assert not living.exists()
    assert store.has(object_id(b"kept"))


def test_leftovers_of_a_crash_between_publishing_and_cleaning_are_swept(store):
    store.partial(REF, CHUNK).write(0, piece(0))
    store.put(DATA)
    ObjectStore(store.root)
    assert not any((store.root / "partial").iterdir())


def test_what_arrived_in_an_earlier_version_begins_from_nothing(store):
    """It had its map in a file of its own."""
    data, apart = (store.root / "partial" / f"{REF.id}.{suffix}" for suffix in ("data", "map"))
    data.write_bytes(piece(0) + bytes(REF.size - CHUNK))
    apart.write_bytes(b"EFM1" + CHUNK.to_bytes(4, "little") + b"\x01" + bytes(10))
    again = ObjectStore(store.root)
    assert not apart.exists()
    assert members(again.partial(REF, CHUNK).missing()) == set(range(11))
    assert not data.exists()


def test_collect_keeps_what_is_named_and_counts_what_it_gives_back(store):
    kept, gone = store.put(b"kept" * 2000), store.put(b"gone" * 2000)
    unfinished = store.partial(REF, CHUNK)
    unfinished.write(0, piece(0))
    assert store.mark_garbage({kept.id, REF.id}) >= 8000
    assert not store.has(gone.id)
    assert ObjectStore(store.root).partial(REF, CHUNK).missing() == unfinished.missing()
    assert store.mark_garbage({kept.id}) > 0
    unfinished.write(1, piece(1))  # ignored: the store has dropped it
    assert not completed(store, unfinished)
    store.sweep()
    assert sorted(file.name for file in store.root.rglob("*") if file.is_file()) == [kept.id]
    assert store.mark_garbage({kept.id}) == 0


def test_the_limit_names_both_numbers_and_counts_unfinished_objects_fully(tmp_path):
    store = ObjectStore(tmp_path, limit_bytes=2500)
    store.put(DATA)
    other = ObjectRef(object_id(b"other"), 1000)
    arriving = store.partial(other, CHUNK)
    assert store.used_bytes() == 2000
    arriving.write(0, bytes(CHUNK))
    assert store.used_bytes() == 2000, "without its map"
    with pytest.raises(StoreError, match=r"3000 bytes needed .* 2500 allowed"):
        store.put(bytes(1000))
    with pytest.raises(StoreError, match=r"3000 bytes needed .* 2500 allowed"):
        store.partial(ObjectRef(object_id(b"third"), 1000), CHUNK)
    store.put(DATA)
    store.partial(other, 100)
    store.put(bytes(500))


def test_another_process_counts_what_is_to_arrive_here(tmp_path):
    """A device's trainer stores its update beside what the supervisor fetches."""
    store = ObjectStore(tmp_path, limit_bytes=2500, durable=False)
    store.partial(ObjectRef(object_id(b"other"), 1000), CHUNK)
    trainer = ObjectStore(tmp_path, limit_bytes=2500, durable=False)
    with pytest.raises(StoreError, match=r"\(10\d\d used \+ 2000 new\), 2500 allowed"):
        trainer.put(bytes(2000))
    trainer.put(bytes(1400))


def test_one_that_is_named_larger_later_does_not_pass_the_limit(tmp_path):
    store = ObjectStore(tmp_path, limit_bytes=2500, durable=False)
    store.partial(ObjectRef(REF.id, 500), CHUNK)
    with pytest.raises(StoreError, match=r"3000 bytes needed \(0 used \+ 3000 new\), 2500 allowed"):
        store.partial(ObjectRef(REF.id, 3000), CHUNK)
    store.partial(ObjectRef(REF.id, 2500), CHUNK)
    assert store.used_bytes() == 2500


def test_a_file_that_cannot_be_made_whole_is_not_left(tmp_path, monkeypatch):
    store = ObjectStore(tmp_path, limit_bytes=2500, durable=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StoreError, match="No space left"):
            store.partial(REF, CHUNK)
    assert list((tmp_path / "partial").iterdir()) == []
    arriving = store.partial(REF, CHUNK)
    write_all(arriving, DATA)
    assert completed(store, arriving)


def test_whoever_names_a_verified_object_with_another_size_does_not_get_it_deleted(store):
    arriving = store.partial(REF, CHUNK)
    write_all(arriving, DATA)
    assert arriving.verify()
    with pytest.raises(ProtocolError, match="has 1000 bytes, not 999"):
        store.partial(ObjectRef(REF.id, 999), CHUNK)
    store.publish([arriving])
    assert store.read(REF.id) == DATA


def test_what_fills_the_limit_to_the_byte_arrives(tmp_path):
    pieces = [DATA[n:] for n in range(3)]
    refs = [ObjectRef(object_id(data), len(data)) for data in pieces]
    store = ObjectStore(tmp_path, limit_bytes=sum(ref.size for ref in refs), durable=False)
    arrivals = [store.partial(ref, CHUNK) for ref in refs]
    for arrival in arrivals[:2]:  # nothing of the third has come
        arrival.write(0, bytes(CHUNK))
    assert store.used_bytes() == store.limit_bytes
    again = [store.partial(ref, 200) for ref in refs]  # handed over, and not counted twice
    assert all(one.abandoned for one in arrivals)
    for one, data in zip(again, pieces, strict=True):
        write_all(one, data)
        assert completed(store, one)
    assert store.used_bytes() == store.limit_bytes


@contextlib.contextmanager
def full_disk(directory: Path):
    """A file system of 64 KiB, or where mounting is not permitted a limit of 64 KiB a file; the errno to expect."""
    mounted = shutil.which("mount") and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "edgefl-test", str(directory)], capture_output=True
    ).returncode  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        yield errno.ENOSPC if mounted else errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if mounted:
            subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_is_named_and_leaves_what_was_finished(tmp_path):
    with full_disk(tmp_path) as code:
        store = ObjectStore(tmp_path)
        kept = store.put(bytes(1000))
        with pytest.raises(StoreError, match=rf"cannot write .*\(100000 bytes\): {os.strerror(code)}") as error:
            store.put(b"x" * 100_000)
        assert error.value.exit_code == 15
        assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [kept.id]
        if code == errno.ENOSPC:
            data = b"y" * 100_000
            partial = store.partial(ObjectRef(object_id(data), len(data)), 10_000)
            with pytest.raises(StoreError, match=r"cannot write .*\(10000 bytes\): No space left"):
                write_all(partial, data)
            assert 4 <= len(members(partial.missing())) <= 8
            assert ObjectStore(tmp_path).partial(partial.ref, 10_000).missing() == partial.missing()
        assert store.read(kept.id) == bytes(1000)


def test_an_object_arrives_after_all_once_the_disk_has_room(tmp_path):
    data = random.Random(2).randbytes(100_000)
    store = ObjectStore(tmp_path)
    partial = store.partial(ObjectRef(object_id(data), len(data)), 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, index in ((50_000, 0), (100_050, 0), (100_108, 99)):  # no file, half a map, no byte more than the map
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            if limit < 100_108:
                with pytest.raises(StoreError, match=r"cannot write .*\(1000 bytes\): File too large"):
                    partial.write(index, piece(index, data, 1000))
                assert members(partial.missing()) == set(range(100))
            else:
                partial.write(index, piece(index, data, 1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    partial.abandon()
    partial = ObjectStore(tmp_path).partial(partial.ref, 1000)
    assert members(partial.missing()) == set(range(99))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_500, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write .*\(1000 bytes\): File too large"):
            write_all(partial, data)  # half of chunk 20 is on the disk, or the map has no room
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert members(partial.missing()) >= set(range(20, 99))
    write_all(partial, data)
    assert completed(store, partial)
    assert store.read(partial.ref.id) == data


def test_every_refusal_of_the_disk_is_a_store_error(store, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    partial = store.partial(REF, CHUNK)
    for index in range(11):
        partial.write(index, piece(index))
    monkeypatch.setattr(disk.os, "fsync", refuse)
    for act in (lambda: store.put(b"abc"), lambda: completed(store, partial)):
        with pytest.raises(StoreError, match="Read-only file system"):
            act()
    monkeypatch.undo()
    assert not store.has(object_id(b"abc"))
    assert not list(store.root.glob(".new-*"))
    assert completed(store, partial)


def test_a_directory_that_can_not_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot open"):
        ObjectStore(tmp_path / "file" / "objects")


WRITER = """
    import sys, random
    from pathlib import Path
    from edgefl.storage.objects import ObjectStore, object_id
    from edgefl.records import ObjectRef
    data = random.Random(5).randbytes(2_000_000)
    store = ObjectStore(Path(sys.argv[1]))
    partial = store.partial(ObjectRef(object_id(data), len(data)), 1000)
    missing = partial.missing()
    indices = [i for i in range(2000) if missing[i // 8] >> i % 8 & 1]
    random.shuffle(indices)
    print("ready", flush=True)
    for index in indices:
        partial.write(index, data[index * 1000 : (index + 1) * 1000])
    print(partial.verify(), flush=True)
    store.publish([partial])
"""


def test_killed_while_writing_the_map_never_claims_what_is_not_there(tmp_path):
    data = random.Random(5).randbytes(2_000_000)
    ref = ObjectRef(object_id(data), len(data))
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    for delay_s in (0.002, 0.008, 0.015):
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            process.stdout.readline()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delay_s)
            process.send_signal(signal.SIGKILL)
    store = ObjectStore(tmp_path)
    missing = members(store.partial(ref, 1000).missing())
    claimed = set(range(2000)) - missing
    assert claimed
    if not store.has(ref.id):
        found = (tmp_path / "partial" / f"{ref.id}.data").read_bytes()
        assert all(found[i * 1000 : (i + 1) * 1000] == data[i * 1000 : (i + 1) * 1000] for i in claimed)
    finished = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert finished.stdout.split() == ["ready", "True"]
    assert ObjectStore(tmp_path).read(ref.id) == data


@given(st.integers(0, 10_000), st.integers(1, 500))
def test_chunks_tile_the_object(size, chunk):
    spans = [chunk_span(size, chunk, index) for index in range(chunk_count(size, chunk))]
    assert [offset for offset, _ in spans] == list(range(0, size, chunk))
    assert sum(length for _, length in spans) == size
    assert all(1 <= length <= chunk for _, length in spans)


def test_a_store_that_does_not_sync_drops_after_a_boot_what_a_loss_of_power_has_torn(tmp_path, monkeypatch):
    root = tmp_path / "objects"
    store = ObjectStore(root, durable=False)
    whole, torn = store.put(b"whole"), store.put(b"torn")
    store.path(torn.id).write_bytes(b"to")
    assert ObjectStore(root, durable=False).has(torn.id), "the same boot: a kill tears nothing"
    monkeypatch.setattr("edgefl.storage.objects.boot_id", lambda: "another")
    after = ObjectStore(root, durable=False)
    assert (after.has(whole.id), after.has(torn.id)) == (True, False)


def test_dropping_objects_waits_for_those_that_are_being_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt is aborted while its objects are synced in another thread: neither finds the other's files gone."""
    store = ObjectStore(tmp_path)
    data = bytes(3000)
    partial = store.partial(ObjectRef(object_id(data), len(data)), 1000)
    for index in range(3):
        partial.write(index, data[1000 * index : 1000 * (index + 1)])
    assert partial.verify()
    syncing, go_on = threading.Event(), threading.Event()

    def slow(paths: list[Path]) -> None:
        syncing.set()
        assert go_on.wait(10)

    monkeypatch.setattr("edgefl.storage.objects.sync_files", slow)
    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(store.publish, [partial])
        assert syncing.wait(10)
        dropping = pool.submit(store.mark_garbage, set())
        assert wait([dropping], 0.2).not_done
        go_on.set()
        publishing.result(10)
        assert dropping.result(10) > 0
    assert not store.has(object_id(data))


def test_a_file_that_can_not_be_synced_is_named(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(150)]
    for file in files:
        file.write_bytes(b"x")
    before = len(list(Path("/proc/self/fd").iterdir()))
    sync_files(files)
    files[-1].unlink()
    with pytest.raises(StoreError, match=f"cannot sync {files[-1]}: No such file"):
        sync_files(files)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
