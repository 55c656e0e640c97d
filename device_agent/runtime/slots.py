"""Slots of an agent's saved work: files that are overwritten in place.

A record is a magic, a checksum (XXH3), a running number, a length and contents; the checksum covers the last three. The
whole record with the highest number counts. A save overwrites neither the newest record, which a kill in the middle of
writing leaves, nor the one that the disk has, which a loss of power leaves, nor one that another thread is flushing,
which is to be the next that the disk has: so there are four slots.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from edgefl.errors import StoreError
from edgefl.storage.disk import store_errors, sync_directory, write_all

T = TypeVar("T")
#: An offer and an update of 120 KiB each, and the manifests retained of two rounds.
MAX_FILE_BYTES = 4 * 2**20
#: For the newest record, the one flushed last, the one that is being flushed, and the one that is being written.
SLOTS = 4
_MAGIC = b"EFLwork1"
_HEAD = struct.Struct("<8s8sQI")  # magic, checksum, running number, length
_CHECKED = struct.Struct("<QI")  # running number, length
_NONE = (0, -1)


class Slots:
    """The slots of a locked directory.

    One thread saves; any thread may flush. Raises StoreError.
    """

    def __init__(self, directory: Path) -> None:
        self._files = slot_files(directory)
        self._choosing = threading.Lock()  # held while a slot is chosen, not while the disk works
        self._syncing = threading.Lock()
        self._newest = max(((number, slot) for number, slot, _ in _records(directory)), default=_NONE)
        self._number = self._newest[0]  # given last
        self._flushing = self._lasting = _NONE  # the last record that a flush began with, and the last that it finished
        self._made, self._named = 1, 0  # grows with each slot made; the same as the last flush found it
        self._doubtful = True  # a sync may have failed, and the next would not tell what it dropped
        if self._newest != _NONE:
            self.flush()  # an earlier process may have ended before

    def save(self, data: bytes) -> None:
        """Write a record, for whoever reads after this process; not flushed."""
        with self._choosing:
            taken = {slot for _, slot in (self._newest, self._flushing, self._lasting)}
        self._number += 1  # used up, whether or not the disk takes it
        number, slot, whole = self._number, min({*range(SLOTS)} - taken), record(self._number, data)
        if len(whole) > MAX_FILE_BYTES:
            raise StoreError(
                f"{self._files[slot]} would be of {len(whole)} bytes: at most {MAX_FILE_BYTES} are read",
                remedy="Give the device fewer parts to train or to keep.",
            )
        with store_errors("write", self._files[slot], len(data)):
            try:
                descriptor = os.open(self._files[slot], os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                descriptor = os.open(self._files[slot], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._made += 1
            try:
                write_all(descriptor, whole, 0)
            finally:
                os.close(descriptor)
        self._newest = number, slot

    @property
    def flushed(self) -> bool:
        """True if the disk has the newest record."""
        return self._newest == self._lasting

    def flush(self) -> None:
        """Have the disk keep the newest record."""
        with self._syncing:
            with self._choosing:
                self._flushing = self._newest
            if self._flushing == self._lasting:
                return
            file = self._files[self._flushing[1]]
            with store_errors("sync", file):
                descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if self._doubtful:
                        if (found := _record_in(file)) is None or found[0] != self._flushing[0]:
                            raise StoreError(f"{file} no longer holds what was saved")
                        write_all(descriptor, record(*found), 0)
                    self._doubtful = True
                    os.fdatasync(descriptor)
                    self._doubtful = False
                finally:
                    os.close(descriptor)
                if (made := self._made) != self._named:
                    sync_directory(file.parent)
                    self._named = made
            self._lasting = self._flushing


def record(number: int, data: bytes) -> bytes:
    """A record as a slot holds it."""
    checked = _CHECKED.pack(number, len(data)) + data
    return _MAGIC + xxhash.xxh3_64_digest(checked) + checked


def slot_files(directory: Path) -> list[Path]:
    """Paths of all slots, whether or not they are there."""
    return [directory / f"work.{slot}" for slot in range(SLOTS)]


def read_newest(directory: Path, kind: type[T]) -> T | None:
    """Contents of the newest record; None where nothing has been saved.

    Raises StoreError, and ValueError where there is no whole record, or the newest is of another version.
    """
    if records := _records(directory):
        try:
            return msgspec.msgpack.decode(max(records)[2], type=kind)
        except RecursionError as error:  # an older one would bring back what the newest took back
            raise ValueError(str(error)) from error
    if written := written_slots(directory):
        raise ValueError(f"no whole record in {', '.join(file.name for file in written)}")
    return None


def written_slots(directory: Path) -> list[Path]:
    """Paths of non-empty slots."""
    return [file for file in slot_files(directory) if file.is_file() and file.stat().st_size]


def _records(directory: Path) -> list[tuple[int, int, bytes]]:
    """Number, slot and contents of every whole record. Raises StoreError."""
    found = [(slot, _record_in(file)) for slot, file in enumerate(slot_files(directory))]
    return [(one[0], slot, one[1]) for slot, one in found if one is not None]


def _record_in(file: Path) -> tuple[int, bytes] | None:
    """Number and contents of a slot's record, if whole. Raises StoreError."""
    with store_errors("read", file):
        try:
            opened = file.open("rb")
        except FileNotFoundError:
            return None
        with opened:
            head = opened.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            magic, checksum, number, length = _HEAD.unpack(head)
            # A slot that held a longer record is longer: the head bounds what is read, and is bounded.
            data = opened.read(length) if length <= MAX_FILE_BYTES - _HEAD.size else b""
    whole = magic == _MAGIC and len(data) == length and xxhash.xxh3_64_digest(head[16:] + data) == checksum
    return (number, data) if whole else None
