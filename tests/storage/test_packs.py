"""Packs: many small objects in one file and one sync, none lost by a crash, and no space for what is garbage."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from edgefl.errors import StoreError
from edgefl.records import ObjectRef
from edgefl.storage import packs as packs_module
from edgefl.storage import partials as partials_module
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.storage.packs import Packs
from edgefl.storage.shared import Shared

CHUNK = 96 * 1024
DRAW = random.Random(0)
MANY = [DRAW.randbytes(1000) for _ in range(8)]
IDS = [object_id(data) for data in MANY]


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def arrive(store: ObjectStore, *wanted: bytes) -> None:
    """The objects come in a chunk each, and are published together."""
    arrivals = [store.partial(ObjectRef(object_id(data), len(data)), CHUNK) for data in wanted]
    for arrival, data in zip(arrivals, wanted, strict=True):
        arrival.write(0, memoryview(data))
        assert arrival.verify()
    store.publish(arrivals)


def packs_of(store: ObjectStore) -> list[os.DirEntry[str]]:
    return list(os.scandir(store.root / "packs"))


def test_small_objects_share_a_file_and_read_as_any_other(store):
    arrive(store, *MANY)
    assert len(packs_of(store)) == 1
    assert not [file for file in store.root.iterdir() if file.is_file()]
    assert not list((store.root / "partial").iterdir())
    for name, data in zip(IDS, MANY, strict=True):
        assert store.has(name)
        assert (store.read(name), bytes(store.view(name)), store.size(name)) == (data, data, 1000)
        assert store.read_chunk(name, 600, 1) == data[600:]
        with store.file_of(name) as file:
            assert file.read() == data


def test_many_are_synced_once(store, monkeypatch):
    synced = []
    monkeypatch.setattr(packs_module.os, "fsync", synced.append)
    arrive(store, *MANY[:4])
    assert len(synced) == 3  # the pack, and that it is there: its directory, and that one's
    arrive(store, *MANY[4:])
    assert len(synced) == 4


def test_what_was_published_is_there_in_another_process(store):
    arrive(store, *MANY[:4])
    late = store.partial(ObjectRef(IDS[4], 1000), CHUNK)
    late.write(0, MANY[4])
    assert late.verify()  # and the process is killed
    again = ObjectStore(store.root)
    assert [again.read(name) for name in IDS[:4]] == MANY[:4]
    assert not again.has(IDS[4])
    assert again.partial(ObjectRef(IDS[4], 1000), CHUNK).missing() == b"\x01"


@pytest.mark.parametrize("cut", [1, 1000, 1010, 1043])
def test_a_torn_record_is_the_last_and_no_object(store, cut):
    arrive(store, *MANY)
    (pack,) = packs_of(store)
    os.truncate(pack.path, pack.stat().st_size - cut)
    again = ObjectStore(store.root)
    assert [again.has(name) for name in IDS] == [True] * 7 + [False]
    arrive(again, MANY[7])
    assert len(packs_of(store)) == 2
    assert [ObjectStore(store.root).read(name) for name in IDS] == MANY


def test_a_damaged_object_is_none(store):
    arrive(store, *MANY)
    (pack,) = packs_of(store)
    with Path(pack.path).open("r+b") as file:
        file.seek(44 + 500)
        file.write(b"damaged")
    assert [ObjectStore(store.root).has(name) for name in IDS] == [False] + [True] * 7


def test_a_length_beyond_the_file_is_no_record(store):
    arrive(store, *MANY)
    (pack,) = packs_of(store)
    with Path(pack.path).open("r+b") as file:
        file.seek(1044 + 36)
        file.write(b"\xff" * 8)
    assert [ObjectStore(store.root).has(name) for name in IDS] == [True] + [False] * 7


def test_a_pack_without_needed_objects_goes_as_one_file(store):
    arrive(store, *MANY)
    assert store.mark_garbage(set()) == 8 * 1044
    assert not packs_of(store)
    assert not any(store.has(name) for name in IDS)
    assert len(list((store.root / "dropped").iterdir())) == 1
    store.sweep()
    assert not list((store.root / "dropped").iterdir())
    assert not any(ObjectStore(store.root).has(name) for name in IDS)


def test_an_object_that_is_twice_in_a_pack_goes_with_it(tmp_path):
    packs, dropped = Packs(tmp_path / "packs"), tmp_path / "dropped"
    dropped.mkdir()
    for _ in range(2):  # two devices send equal updates packed, and a thread for each unpacks them
        packs.append(IDS[0], MANY[0])
        packs.sync()
    assert packs.set_aside(set(), dropped) == 2 * 1044
    assert IDS[0] not in packs


@pytest.mark.parametrize(("needed", "moved"), [(1, True), (3, True), (6, False)])
def test_few_needed_objects_move_to_another_pack(store, needed, moved):
    arrive(store, *MANY)
    (before,) = packs_of(store)
    store.mark_garbage(set(IDS[:needed]))
    assert [store.read(name) for name in IDS[:needed]] == MANY[:needed]  # also before they have moved
    store.sweep()
    (after,) = packs_of(store)
    assert (after.name != before.name) == moved
    assert after.stat().st_size == 1044 * (needed if moved else 8)
    for one in (store, ObjectStore(store.root)):
        assert [one.read(name) for name in IDS[:needed]] == MANY[:needed]


def test_space_stays_bounded_while_a_few_objects_of_each_round_stay(store):
    kept: list[bytes] = []
    for number in range(20):
        fresh = [random.Random(100 * number + i).randbytes(1000) for i in range(20)]
        arrive(store, *fresh)
        kept.append(fresh[0])
        store.mark_garbage({object_id(data) for data in kept})
        store.sweep()
        assert sum(pack.stat().st_size for pack in packs_of(store)) <= 2 * 1044 * len(kept)
    assert [ObjectStore(store.root).read(object_id(data)) for data in kept] == kept


def test_descriptors_stay_few_while_an_object_of_each_round_stays(store, monkeypatch):
    monkeypatch.setattr(packs_module, "_MOST_PACKS", 4)
    kept = [random.Random(number).randbytes(1000) for number in range(40)]
    for number, data in enumerate(kept):
        arrive(store, data)
        store.mark_garbage({object_id(one) for one in kept[: number + 1]})
        store.sweep()
        assert len(packs_of(store)) <= 5
        assert len(store._packs._packs) <= 5
    for one in (store, ObjectStore(store.root)):
        assert [one.read(object_id(data)) for data in kept] == kept


def test_garbage_goes_before_objects_move_on_a_full_disk(store, monkeypatch):
    arrive(store, *MANY[:2])
    store.mark_garbage({IDS[0], IDS[1]})
    arrive(store, *MANY[2:])
    store.mark_garbage({IDS[0], IDS[1], IDS[2]})  # of the second pack one is needed
    store.put(b"garbage")
    store.mark_garbage({IDS[0], IDS[1], IDS[2]})
    assert list((store.root / "dropped").iterdir())

    def refuse(descriptor: int, data: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packs_module, "write_all", refuse)
    with pytest.raises(StoreError, match="No space left"):
        store.sweep()
    assert not list((store.root / "dropped").iterdir())
    assert [ObjectStore(store.root).read(name) for name in IDS[:3]] == MANY[:3]


def test_two_threads_clean_at_a_time(store):
    arrive(store, *MANY)
    store.mark_garbage({IDS[0]})

    class Thin(list):
        def __bool__(self) -> bool:
            there = len(self) > 0
            self.clear()  # the other thread takes it between the question and the answer
            return there

    store._packs._thin = Thin(store._packs._thin)
    store.sweep()
    assert packs_of(store)[0].stat().st_size == 1044
    assert store.read(IDS[0]) == MANY[0]


def test_what_stays_in_a_state_is_a_file_for_other_programs(store):
    arrive(store, MANY[0])
    ref = store.put(MANY[0])
    assert store.path(ref.id).read_bytes() == MANY[0]
    store.mark_garbage({ref.id})
    store.sweep()
    assert not packs_of(store)  # it is there once
    assert store.read(ref.id) == MANY[0]


def test_another_process_finds_what_came_after_it_had_begun(store):
    reader = ObjectStore(store.root)
    arrive(store, MANY[0])
    assert reader.size(IDS[0]) == 1000
    assert reader.read(IDS[0]) == MANY[0]


def test_another_process_finds_what_moves_while_it_looks(store, monkeypatch):
    names = iter(f"{number:02}" for number in range(99, 0, -1))
    monkeypatch.setattr(packs_module.secrets, "token_hex", lambda _: next(names))
    arrive(store, *MANY[:3])
    store.mark_garbage({IDS[0]})
    arrive(store, MANY[3])
    assert len(packs_of(store)) == 2  # of which the reader opens the newest first
    reader, take_up = Packs(store.root / "packs"), Packs._take_up

    def take_up_and_be_late(self: Packs, path: Path) -> None:
        take_up(self, path)
        if self is reader and len(packs_of(store)) == 2:
            store.sweep()

    monkeypatch.setattr(Packs, "_take_up", take_up_and_be_late)
    reader.look()
    assert [reader.read(IDS[place]) for place in (0, 3)] == [MANY[0], MANY[3]]


def test_a_pack_of_a_killed_process_lasts_once_it_is_taken_up(store, monkeypatch):
    """It may have been killed after the objects were written, and before their directory was synced."""
    arrive(store, *MANY)
    synced = []
    monkeypatch.setattr(packs_module, "sync_directory", synced.append)
    assert ObjectStore(store.root).has(IDS[0])
    assert synced == [store.root / "packs", store.root]


def test_a_look_that_the_disk_broke_off_is_no_look(store, monkeypatch):
    arrive(store, *MANY)
    again, take_up = ObjectStore(store.root), Packs._take_up

    def refuse(self: Packs, path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Packs, "_take_up", refuse)
    with pytest.raises(StoreError, match=r"cannot read .*packs"):
        again.has(IDS[0])
    monkeypatch.setattr(Packs, "_take_up", take_up)
    assert all(map(again.has, IDS))


def test_an_object_is_there_while_it_is_written(tmp_path):
    packs = Packs(tmp_path / "packs")

    class Places(dict):
        def __contains__(self, name: object) -> bool:
            here = super().__contains__(name)
            packs._write()  # in another thread
            return here

    packs._places = Places()
    packs.append(IDS[0], MANY[0])
    assert IDS[0] in packs


def test_equal_objects_of_two_devices_last_with_either(store, monkeypatch):
    ref = ObjectRef(IDS[0], 1000)
    first, second = store.partial(ref, CHUNK), store.partial(ref, CHUNK)
    assert first is second
    first.write(0, MANY[0])
    assert first.verify()
    assert store.partial(ref, CHUNK).verified  # what a third device's announcement finds
    store.publish([])  # it brought nothing itself
    assert ObjectStore(store.root).read(IDS[0]) == MANY[0]


def test_a_wrong_object_is_asked_for_again(store):
    arrival = store.partial(ObjectRef(IDS[0], 1000), CHUNK)
    arrival.write(0, MANY[1])
    assert not arrival.verify()
    assert not store.has(IDS[0])
    assert arrival.missing() == b"\x01"
    arrive(store, MANY[0])


def test_a_full_disk_is_named_and_what_it_refused_is_written_later(store, monkeypatch):
    arrive(store, MANY[0])
    write, full = packs_module.write_all, True

    def refuse(descriptor: int, data: bytes, offset: int) -> None:
        if full:
            write(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data, offset)

    monkeypatch.setattr(packs_module, "write_all", refuse)
    with pytest.raises(StoreError, match=r"packs.*No space left"):
        arrive(store, MANY[1], MANY[2])
    full = False
    store.publish([])
    assert [ObjectStore(store.root).read(name) for name in IDS[:3]] == MANY[:3]


def test_a_devices_store_has_files(tmp_path):
    store = ObjectStore(tmp_path / "objects", durable=False)
    arrive(store, *MANY)
    assert not (store.root / "packs").exists()
    assert [store.path(name).read_bytes() for name in IDS] == MANY


def test_packs_have_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(packs_module, "_MOST_BYTES", 3000)
    packs = Packs(tmp_path / "packs")
    for name, data in zip(IDS, MANY, strict=True):
        packs.append(name, data)
        packs.sync()
    assert len(list((tmp_path / "packs").iterdir())) == 3
    assert packs.used_bytes() == 8 * 1044


def held_store(place: Path) -> tuple[ObjectStore, Shared]:
    shared = Shared()
    return ObjectStore(place, shared=shared), shared


def test_what_a_process_that_is_the_whole_fleet_gets_stays_in_memory_until_it_is_settled(tmp_path, monkeypatch):
    store, _ = held_store(tmp_path)
    synced = []
    monkeypatch.setattr(packs_module.os, "fsync", synced.append)
    arrive(store, *MANY)
    assert (synced, packs_of_dir(tmp_path)) == ([], [])
    assert [store.read(name) for name in IDS] == MANY
    store.settle(IDS[:2])
    assert len(synced) == 3
    assert [store.has(name) for name in IDS] == [True] * 8
    later = ObjectStore(tmp_path)
    assert [later.has(name) for name in IDS] == [True] * 2 + [False] * 6
    store.mark_garbage({IDS[3]})
    store.sweep()
    assert [store.has(name) for name in IDS] == [name == IDS[3] for name in IDS]


def test_more_than_may_be_held_is_written_unsynced(tmp_path, monkeypatch):
    store, _ = held_store(tmp_path)
    monkeypatch.setattr(packs_module, "_HELD_BYTES", 3500)
    monkeypatch.setattr(packs_module.os, "fsync", lambda descriptor: pytest.fail("synced"))
    arrive(store, *MANY[:3])
    assert packs_of_dir(tmp_path) == []
    arrive(store, *MANY[3:])
    assert len(packs_of_dir(tmp_path)) == 1
    assert [store.read(name) for name in IDS] == MANY


def test_an_object_of_several_chunks_that_the_process_has_is_neither_copied_nor_hashed(tmp_path, monkeypatch):
    store, shared = held_store(tmp_path)
    data = MANY[0] + MANY[1]
    ref = ObjectRef(object_id(data), len(data))
    mine = shared.share(ref.id, data)
    monkeypatch.setattr(partials_module.hashlib, "sha256", lambda data: pytest.fail("hashed again"))
    arrival = store.partial(ref, 1500)
    assert store.partial(ref, 1500) is arrival, "equal uploads of two devices help each other"
    arrival.write(1, data[1500:])
    assert not arrival.verify()
    assert arrival.missing() == b"\x01"
    arrival.write(0, data[:1500])
    assert arrival.verify()
    store.publish([arrival])
    assert store.read(ref.id) is mine.data


def packs_of_dir(place: Path) -> list[Path]:
    return list((place / "packs").glob("*"))
