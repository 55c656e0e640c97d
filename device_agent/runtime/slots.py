"""Slots of an agent's saved work: files that are overwritten in place.

A record is a magic, a checksum (XXH3) and what that is of: running number, length and contents. The whole record with
the highest number counts. A save overwrites neither the newest record, which a kill in the middle of writing leaves,
nor the one that the disk has, which a loss of power leaves, nor one that another thread is flushing, which is to be the
next that the disk has: so there are four slots.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from edgefl.storage.disk import store_errors, sync_directory, write_all

T = TypeVar("T")
#: An offer and an update of 120 KiB each, and the manifests retained of two rounds.
MAX_FILE_BYTES = 4 * 2**20
#: Of the newest record, the disk's, the one that is being flushed, and the one that is being written.
SLOTS = 4
_MAGIC = b"EFLwork1"
_HEAD = struct.Struct("<8s8sQI")  # magic, checksum, running number, length
_CHECKED = struct.Struct("<QI")  # of the head, what the checksum is of as well
_NONE = (0, -1)


class Slots:
    """The slots of a directory, of which this process has the lock. One thread saves; any thread may flush.

    Raises StoreError.
    """

    def __init__(self, directory: Path) -> None:
        self._files = slot_files(directory)
        self._choosing = threading.Lock()  # what is flushed, or overwritten: an instant
        self._syncing = threading.Lock()
        self._newest = max(((number, slot) for number, slot, _ in _records(directory)), default=_NONE)
        self._flushing = self._lasting = _NONE  # the last record that a flush began with, and the last that it finished
        self._made, self._named = 1, 0  # slots made so far, and of how many the disk has the names
        if self._newest != _NONE:
            self.flush()  # an earlier process may have ended before

    def save(self, data: bytes) -> None:
        """Write a record, for whoever reads after this process; not flushed."""
        with self._choosing:
            taken = {slot for _, slot in (self._newest, self._flushing, self._lasting)}
        number, slot = self._newest[0] + 1, min({*range(SLOTS)} - taken)
        with store_errors("write", self._files[slot], len(data)):
            try:
                descriptor = os.open(self._files[slot], os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                descriptor = os.open(self._files[slot], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._made += 1
            try:
                write_all(descriptor, record(number, data), 0)
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
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(descriptor)
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
    """The files that are slots; not all need be there."""
    return [directory / f"work.{slot}" for slot in range(SLOTS)]


def read_newest(directory: Path, kind: type[T]) -> T | None:
    """Contents of the newest record; None where nothing has been saved.

    Raises StoreError, and ValueError where there is something, but no whole record.
    """
    for _, _, data in sorted(_records(directory), reverse=True):
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (ValueError, RecursionError):  # of another version: msgspec's errors are ValueErrors
            continue
    if written := written_slots(directory):
        raise ValueError(f"no whole record in {', '.join(file.name for file in written)}")
    return None


def written_slots(directory: Path) -> list[Path]:
    """The slots that are not empty."""
    return [file for file in slot_files(directory) if file.is_file() and file.stat().st_size]


def _records(directory: Path) -> list[tuple[int, int, bytes]]:
    """Number, slot and contents of every whole record. Raises StoreError."""
    found = []
    for slot, file in enumerate(slot_files(directory)):
        with store_errors("read", file):
            try:
                opened = file.open("rb")
            except FileNotFoundError:
                continue
            with opened:
                head = opened.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    continue
                magic, checksum, number, length = _HEAD.unpack(head)
                # A slot that held a longer record is longer: the head bounds what is read, and is bounded.
                data = opened.read(length) if length <= MAX_FILE_BYTES - _HEAD.size else b""
        if magic == _MAGIC and len(data) == length and xxhash.xxh3_64_digest(head[16:] + data) == checksum:
            found.append((number, slot, data))
    return found
