"""Packs: small objects one behind the other in append-only files, so that many cost one file and one sync.

A pack is records: magic, sha256 and length of an object, then its bytes. Every process begins packs of its own, so that
a record torn by a crash is the last of its file. Where few of a pack's objects are still needed, these are written
again into the newest, as log-structured file systems clean their segments (Rosenblum and Ousterhout 1992).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from edgefl.storage.disk import store_errors, sync_directory, write_all

#: The directory of packs in a store.
PACKS = "packs"
_HEAD = struct.Struct("<4s32sQ")
_MAGIC = b"EFP1"
#: A pack that is as large gets no further object: what is cleaned at a time stays small beside a server's memory.
_MOST_BYTES = 64 * 2**20
#: Bytes of objects that are written together at the latest: the updates of a hundred devices with small models.
_WAITING_BYTES = 4 * 2**20
#: The same where nothing is written before it must last: the updates of a thousand devices with small models.
_HELD_BYTES = 256 * 2**20
#: Where there are more, those below half of ``_MOST_BYTES`` become one: each holds a descriptor, and select() takes
#: none from 1024 on.
_MOST_PACKS = 64


class _Pack:
    """An open file of records. ``end``: its bytes; ``synced``: those that last through a power cut."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.end = self.synced = 0
        self.names: list[str] = []
        weakref.finalize(self, os.close, descriptor)  # a reader in another thread may still hold it


class _Place(NamedTuple):
    pack: _Pack
    offset: int
    size: int


class Packs:
    """The packs in a directory. One process writes; any thread of it, and other processes, may read.

    ``held``: objects stay in memory until ``settle``. Every method raises StoreError when the disk refuses.
    """

    def __init__(self, folder: Path, *, held: bool = False) -> None:
        self._folder = folder
        self._held = held
        self._packs: dict[str, _Pack] = {}  # by file name
        self._places: dict[str, _Place] = {}
        self._waiting: dict[str, bytes] = {}  # not written yet
        self._waiting_bytes = 0
        self._newest: _Pack | None = None
        self._thin: list[_Pack] = []  # to be cleaned
        self.looked = False  # the packs of earlier processes are taken up
        self._lock = threading.RLock()
        self._syncing = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._waiting or name in self._places  # in the order in which ``_write`` moves it

    def size(self, name: str) -> int:
        """Bytes of an object that is here."""
        waiting = self._waiting.get(name)
        return self._places[name].size if waiting is None else len(waiting)

    def read(self, name: str) -> bytes | None:
        """Bytes of an object; None: it is not here."""
        if (waiting := self._waiting.get(name)) is not None:
            return waiting
        place = self._places.get(name)
        if place is None:
            return None
        with store_errors("read", place.pack.path):
            return os.pread(place.pack.descriptor, place.size, place.offset)

    def names(self) -> Iterator[str]:
        """Ids of the objects there are."""
        return iter([*self._places, *self._waiting])

    def used_bytes(self) -> int:
        """Bytes of all packs together."""
        return sum(pack.end for pack in list(self._packs.values()))

    def look(self) -> None:
        """Take up the packs of earlier processes, once: whole records, which last through a power cut then."""
        with self._lock, store_errors("read", self._folder):
            while not self.looked and self._folder.is_dir():
                with os.scandir(self._folder) as found:
                    paths = sorted(Path(file.path) for file in found)
                try:
                    for path in paths:
                        self._take_up(path)
                except FileNotFoundError:  # its process has just moved what is needed behind what another had
                    continue
                sync_directory(self._folder)  # a process that was killed may not have come to it
                sync_directory(self._folder.parent)
                break
            self.looked = True

    def _take_up(self, path: Path) -> None:
        pack = self._packs.get(path.name)
        if pack is None:
            pack = self._packs[path.name] = _Pack(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        size = os.fstat(pack.descriptor).st_size
        os.fsync(pack.descriptor)
        while len(head := os.pread(pack.descriptor, _HEAD.size, pack.end)) == _HEAD.size:
            magic, digest, length = _HEAD.unpack(head)
            offset = pack.end + _HEAD.size
            if magic != _MAGIC or length > size - offset:
                break
            if hashlib.sha256(os.pread(pack.descriptor, length, offset)).digest() == digest:
                self._put(pack, digest.hex(), offset, length)
            pack.end = pack.synced = offset + length

    def _put(self, pack: _Pack, name: str, offset: int, size: int) -> None:
        self._places[name] = _Place(pack, offset, size)
        pack.names.append(name)

    def append(self, name: str, data: bytes) -> None:
        """Take an object, to be written with others; ``sync`` makes it last."""
        with self._lock:
            self._waiting[name] = data
            self._waiting_bytes += len(data)
            if self._waiting_bytes > (_HELD_BYTES if self._held else _WAITING_BYTES):
                self._write(self._waiting)

    def _write(self, chosen: Mapping[str, bytes]) -> None:
        """Write these of what waits behind the others; the next attempt replaces what the disk has refused."""
        with self._lock, store_errors("write", self._folder, self._waiting_bytes):
            if not chosen:
                return
            pack = self._newest
            if pack is None or pack.end >= _MOST_BYTES:
                pack = self._newest = self._begin()
            records = [
                (name, _HEAD.pack(_MAGIC, bytes.fromhex(name), len(data)), data) for name, data in chosen.items()
            ]
            write_all(pack.descriptor, b"".join(piece for _, head, data in records for piece in (head, data)), pack.end)
            for name, head, data in records:
                self._put(pack, name, pack.end + len(head), len(data))
                pack.end += len(head) + len(data)
            self._wait({name: data for name, data in self._waiting.items() if name not in chosen})

    def _wait(self, waiting: dict[str, bytes]) -> None:
        self._waiting, self._waiting_bytes = waiting, sum(map(len, waiting.values()))

    def _begin(self) -> _Pack:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / secrets.token_hex(8)
        pack = _Pack(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        self._packs[path.name] = pack
        return pack

    def sync(self) -> None:
        """Make all objects last through a power cut, but for held ones. The disk is waited for once for all of them."""
        if not self._held:
            self.settle(self._waiting)

    def settle(self, names: Collection[str]) -> None:
        """Make these objects last, and all that were written before."""
        with self._syncing, store_errors("sync", self._folder):
            with self._lock:
                self._write({name: data for name, data in self._waiting.items() if name in names})
            for pack in [one for one in list(self._packs.values()) if one.synced < one.end]:
                begun, end = not pack.synced, pack.end
                os.fsync(pack.descriptor)
                if begun:
                    sync_directory(self._folder)
                    sync_directory(self._folder.parent)
                pack.synced = end

    def set_aside(self, keep: set[str], dropped: Path) -> int:
        """Move packs without an object of ``keep`` into ``dropped``; what is written next begins another.

        Returns their bytes. ``clean`` sees to those that are mostly garbage.
        """
        freed = 0
        self.look()
        with self._lock, store_errors("clean", self._folder):
            if self._newest is not None and self._newest.end:
                self._newest = None
            self._wait({name: data for name, data in self._waiting.items() if name in keep})
            thin, many = [], len(self._packs) > _MOST_PACKS
            for pack in list(self._packs.values()):
                needed = [name for name in self._of(pack) if name in keep]
                if not needed and pack is not self._newest:
                    freed += self._forget(pack)
                    pack.path.rename(dropped / secrets.token_hex(8))
                elif 2 * sum(self._places[name].size for name in needed) < pack.end or (
                    many and 0 < pack.end < _MOST_BYTES // 2
                ):
                    for name in set(self._of(pack)).difference(needed):
                        del self._places[name]
                    thin.append(pack)
            self._thin = thin
        return freed

    def clean(self) -> None:
        """Write the needed objects of packs that are mostly garbage, or too many, into the newest; delete those packs.

        Callable from several threads at a time.
        """
        while True:
            try:
                pack = self._thin.pop()
            except IndexError:
                return
            names = self._of(pack)
            for name in names:
                if (data := self.read(name)) is not None:
                    self.append(name, data)
            self.settle(names) if self._held else self.sync()
            with self._lock, store_errors("clean", pack.path):
                if pack.path.name in self._packs:
                    self._forget(pack)
                    pack.path.unlink()

    def _of(self, pack: _Pack) -> list[str]:
        """The objects that are read from this pack."""
        names = dict.fromkeys(pack.names)  # two threads may have appended equal objects
        return [name for name in names if (place := self._places.get(name)) and place.pack is pack]

    def _forget(self, pack: _Pack) -> int:
        for name in self._of(pack):
            del self._places[name]
        del self._packs[pack.path.name]
        return pack.end
