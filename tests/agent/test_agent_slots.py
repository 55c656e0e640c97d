"""Saved work of an agent: what a kill, a loss of power, a damaged or full disk and an earlier version leave of it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from device_agent.core import state as v
from device_agent.runtime import slots
from device_agent.runtime.store import AgentStore, Owner
from edgefl.errors import StoreError
from edgefl.protocol.messages import Attempt


def saved(number: int, longer: int = 0) -> v.Saved:
    return v.Saved(closed=Attempt("r" * (1 + longer), 1, number, 1))


def opened(directory: Path) -> AgentStore:
    return AgentStore(directory, Owner("d1", "f"))


def left(directory: Path) -> v.Saved:
    """The work that the next process finds."""
    with contextlib.closing(opened(directory)) as store:
        return store.load()


def kill(store: AgentStore) -> None:
    """The process ends without its last flush."""
    os.close(store._lock)
    store._lock = -1


def slot_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


class Disk:
    """What the disk has of each slot: what its last sync began with."""

    def __init__(self) -> None:
        self.has: dict[str, bytes] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def sync(self, descriptor: int) -> None:
        file = slot_of(descriptor)
        before = file.read_bytes()
        self.meanwhile()
        self.has[file.name] = before

    def lose_power(self, directory: Path, garbage: bytes | None) -> None:
        """Slots that have been written since hold garbage, or half of what was written."""
        for file in filter(Path.exists, slots.slot_files(directory)):
            if (data := file.read_bytes()) != self.has.get(file.name):
                file.write_bytes(data[: len(data) // 2] if garbage is None else garbage)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "fdatasync", disk.sync)
    return disk


GARBAGE = [b"", None, b"\0" * 4096, b"EFLwork1" + b"\xff" * 100]
DAMAGE = [b"\x93half", bytes(5 * 2**20), b"\x81\xa5offer\x81\xa8transfer\xa1\xff", b"\x81\xa1x" + b"\x91" * 9000]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["work.msgpack", "work.1"])
def test_damaged_work_is_set_aside_and_not_believed(tmp_path, damage, name):
    (tmp_path / name).write_bytes(damage)
    store = opened(tmp_path)
    assert store.load() == v.Saved()
    assert store.set_aside == [tmp_path / f"{name}.damaged"]
    assert store.set_aside[0].read_bytes() == damage
    for number in (1, 2, 3):
        store.save(saved(number))
    store.close()
    assert left(tmp_path) == saved(3)


def test_a_newest_record_of_another_version_is_set_aside_with_those_before_it(tmp_path):
    """An older one would bring back what the newest took back."""
    with contextlib.closing(opened(tmp_path)) as store:
        store.save(saved(1))
        store._slots.save(b"\x93half")
    with contextlib.closing(opened(tmp_path)) as store:
        assert store.load() == v.Saved()
        assert store.set_aside == [tmp_path / "work.0.damaged", tmp_path / "work.1.damaged"]
        store.save(saved(2))
    assert left(tmp_path) == saved(2)


def test_work_beyond_what_is_read_is_refused(tmp_path):
    with contextlib.closing(opened(tmp_path)) as store:
        store.save(saved(1))
        with pytest.raises(StoreError, match="bytes: at most 4194304 are read"):
            store.save(saved(2, longer=slots.MAX_FILE_BYTES))
        assert store.load() == saved(1)
        store.save(saved(3))
    assert left(tmp_path) == saved(3)


def test_what_is_saved_is_there_after_a_kill_before_the_disk_has_it(tmp_path):
    store = opened(tmp_path)
    for number in range(1, 9):
        store.save(saved(number, longer=1000 // number))
        assert store.load() == saved(number, longer=1000 // number)
    assert not store.flushed
    store.close()
    assert store.flushed


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("flushed", [True, False])
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path, monkeypatch, share, flushed):
    """Whether the record before it was flushed or not, and for as many saves as there are slots."""
    write = slots.write_all

    def killed(descriptor, data, offset):
        write(descriptor, data[: int(len(data) * share)], offset)
        raise KeyboardInterrupt

    for number in range(1, 3 * slots.SLOTS):
        store = opened(tmp_path)
        store.save(saved(number, longer=50_000 * (number % 2)))
        if flushed:
            store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(slots, "write_all", killed)
            with pytest.raises(KeyboardInterrupt):
                store.save(saved(99, longer=20_000))
        kill(store)
        store = opened(tmp_path)
        assert (store.load(), store.set_aside) == (saved(number, longer=50_000 * (number % 2)), [])
        kill(store)


@pytest.mark.parametrize("spoil", [lambda data: data[:20], lambda data: data[:-1], lambda data: data[:-3] + b"abc"])
def test_a_torn_slot_beside_a_whole_one_is_passed_over(tmp_path, spoil):
    store = opened(tmp_path)
    store.save(saved(1))
    store.save(saved(2))
    kill(store)
    newest = tmp_path / "work.1"
    newest.write_bytes(spoil(newest.read_bytes()))
    store = opened(tmp_path)
    assert (store.load(), store.set_aside) == (saved(1), [])
    store.close()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_loss_of_power_leaves_what_the_disk_had(tmp_path, disk, garbage):
    """With the next process saving in turn, which does not know what its predecessor had flushed."""
    number = 0
    for count in range(3 * slots.SLOTS):
        store = opened(tmp_path)
        lasting = store.load()
        for _ in range(count % 4):
            store.save(saved(number := number + 1))
        if count % 3 == 1:
            store.flush()
            lasting = store.load()
        for _ in range(count % 5):
            store.save(saved(number := number + 1))
        kill(store)
        disk.lose_power(tmp_path, garbage)
        assert left(tmp_path) == lasting


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("meanwhile", range(6))
def test_saves_during_a_flush_take_nothing_from_it(tmp_path, disk, garbage, meanwhile):
    """Neither while the disk is busy, whose last flush counts then, nor afterwards."""
    lost = tmp_path / "lost"
    store = opened(tmp_path)
    store.save(saved(1))
    store.flush()
    store.save(saved(2))

    def save_more():
        for number in range(3, 3 + meanwhile):
            store.save(saved(number))
            assert store.load() == saved(number)
        shutil.copytree(tmp_path, lost)
        disk.lose_power(lost, garbage)

    disk.meanwhile = save_more
    store.flush()
    disk.meanwhile = lambda: None
    assert store.flushed == (meanwhile == 0)
    for number in range(9, 15):
        store.save(saved(number))
    kill(store)
    disk.lose_power(tmp_path, garbage)
    assert (left(lost), left(tmp_path)) == (saved(1), saved(2))


def test_a_thread_that_flushes_beside_saves(tmp_path, monkeypatch):
    """The record flushed last is there at every moment; a slot on its way to the disk stays as it is."""
    store = opened(tmp_path)
    done = threading.Event()
    flushed: list[int] = []
    wrong: list[str] = []

    def sync(descriptor):
        file = slot_of(descriptor)
        before = file.read_bytes()
        done.wait(random.Random(len(flushed)).random() / 500)
        if file.read_bytes() != before:
            wrong.append(f"{file.name} was overwritten while it was flushed")

    def flush():
        while not done.is_set():
            store.flush()
            lasting = store._slots._lasting
            flushed.append(lasting[0])
            if lasting[0] and lasting not in {(number, slot) for number, slot, _ in slots._records(tmp_path)}:
                wrong.append(f"record {lasting[0]} is gone although it was the last flushed")

    monkeypatch.setattr(os, "fdatasync", sync)
    thread = threading.Thread(target=flush)
    thread.start()
    for number in itertools.count(1):
        store.save(saved(number, longer=number % 700))
        if number % 50 == 0:
            assert store.load() == saved(number, longer=number % 700)
            if wrong or len(set(flushed)) > 20:
                break
    done.set()
    thread.join()
    assert wrong == []
    store.close()


def test_a_disk_that_does_not_take_it_lets_another_process_in(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.save(saved(1))

    def refused(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refused)
        with pytest.raises(StoreError, match=r"cannot sync .*work\.0: Input/output error"):
            store.close()
        assert not store.flushed
    assert left(tmp_path) == saved(1)


@pytest.mark.parametrize("again", [False, True])
def test_after_a_failed_sync_the_record_is_written_again(tmp_path, monkeypatch, again):
    """The system takes what it could not write for written: a second sync alone would say that it is done."""
    dirty: set[Path] = set()
    disk: dict[Path, bytes] = {}
    broken, write = [False], os.pwrite

    def pwrite(descriptor, data, offset):
        dirty.add(slot_of(descriptor))
        return write(descriptor, data, offset)

    def sync(descriptor):
        file = slot_of(descriptor)
        if broken[0]:
            dirty.discard(file)
            raise OSError(errno.EIO, "Input/output error")
        if file in dirty:
            disk[file] = file.read_bytes()
            dirty.discard(file)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", sync)
    store = opened(tmp_path)
    store.save(saved(1))
    broken[0] = True
    with pytest.raises(StoreError):
        store.flush()
    broken[0] = False
    if again:
        kill(store)
        store = opened(tmp_path)
    store.flush()
    assert disk == {tmp_path / "work.0": (tmp_path / "work.0").read_bytes()}
    store.close()


def test_a_record_that_is_gone_after_a_failed_sync_is_told(tmp_path, monkeypatch):
    """Some file systems go back to what they had."""
    store = opened(tmp_path)
    store.save(saved(1))

    def lost(descriptor):
        slot_of(descriptor).write_bytes(b"")
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lost)
        with pytest.raises(StoreError, match="Input/output error"):
            store.flush()
    with pytest.raises(StoreError, match=r"work\.0 no longer holds what was saved"):
        store.flush()
    assert not store.flushed
    store.save(saved(2))
    store.close()
    assert left(tmp_path) == saved(2)


def test_a_full_disk_is_named_and_leaves_the_newest_record(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.save(saved(1))
    write = os.pwrite

    def full(descriptor, data, offset):
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2], offset)

    for _ in range(slots.SLOTS):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StoreError, match=r"cannot write .*work\.1 .*No space left") as refused:
                store.save(saved(2))
        assert "Free space" in refused.value.remedy
        assert store.load() == saved(1)
    store.save(saved(3))
    store.close()
    assert left(tmp_path) == saved(3)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.glob("work.*"))


@pytest.mark.parametrize("torn", [False, True])
def test_work_of_an_earlier_version_is_taken_up_and_its_files_go_with_the_first_save(tmp_path, torn):
    (tmp_path / "work.msgpack").write_bytes(b"" if torn else msgspec.msgpack.encode(saved(2)))
    (tmp_path / "work.copy").write_bytes(msgspec.msgpack.encode(saved(1)))
    aside = [tmp_path / "work.msgpack.damaged"] if torn else []
    store = opened(tmp_path)
    assert (store.load(), store.set_aside) == (saved(1) if torn else saved(2), aside)
    kill(store)
    store = opened(tmp_path)
    assert store.load() == (saved(1) if torn else saved(2)), "it has not saved anything"
    store.save(saved(3))
    assert store.flushed
    kill(store)
    assert names(tmp_path) == ["work.0", *(file.name for file in aside)]
    assert left(tmp_path) == saved(3)


def test_an_earlier_version_that_was_put_back_has_the_last_word(tmp_path):
    with contextlib.closing(opened(tmp_path)) as store:
        store.save(saved(1))
    (tmp_path / "work.msgpack").write_bytes(msgspec.msgpack.encode(saved(2)))
    with contextlib.closing(opened(tmp_path)) as store:
        assert store.load() == saved(2)
        store.save(saved(3))
    assert left(tmp_path) == saved(3)


def test_a_save_makes_no_file_once_there_are_slots_and_a_flush_syncs_one(tmp_path, monkeypatch):
    calls: list[str] = []
    store = opened(tmp_path)
    assert names(tmp_path) == []

    def count(name: str) -> None:
        call = getattr(os, name)

        def counted(*arguments, **options):
            if name != "open" or arguments[1] & os.O_CREAT:
                calls.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(os, name, counted)

    for name in ("open", "fsync", "fdatasync", "rename"):
        count(name)
    for number in range(1, 9):
        store.save(saved(number))
    store.flush()
    assert calls == ["open", "open", "fdatasync", "fsync"], "a slot for the newest, and one to write; their directory"
    calls.clear()
    for number in range(9, 17):
        store.save(saved(number))
    store.flush()
    store.flush()
    assert calls == ["open", "fdatasync", "fsync"], "a slot beside the one that the disk has"
    calls.clear()
    for number in range(17, 25):
        store.save(saved(number))
    store.flush()
    assert calls == ["fdatasync"]
    assert names(tmp_path) == ["work.0", "work.1", "work.2"], "no flush has gone on beside a save"
    store.close()
