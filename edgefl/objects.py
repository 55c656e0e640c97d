"""Content-addressed objects on disk: files named by the sha256 of their bytes, shared by agent and coordinator.

A store is one directory: finished objects lie in it under their hex id, unfinished ones in ``partial/``, and what is
being written under a ``.new-`` name that a crash leaves behind and the next start sweeps away. A finished object is
never changed. Several processes may read and ``put``; only one may hold partial objects.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path

from edgefl.disk import explained, sweep_temporaries, sync_directory, write_file, write_new
from edgefl.errors import ProtocolError, StoreError
from edgefl.records import ObjectRef

_ID = re.compile(r"[0-9a-f]{64}")
#: Head of a chunk map: magic with version, and the chunk size it belongs to. One byte per chunk follows (1: here).
_MAP_HEAD = struct.Struct("<4sI")
_MAP_MAGIC = b"EFM1"
#: Bytes read at once while hashing: enough that hashing dominates (375 MB/s here), little beside any device's memory.
_READ_BYTES = 1024 * 1024


def object_id(data: bytes | bytearray | memoryview) -> str:
    """The name of an object: sha256 of its bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def check_id(name: str) -> str:
    """``name`` itself. Raises ProtocolError when it is not 64 lower-case hex digits (ids come from peers)."""
    if not _ID.fullmatch(name):
        raise ProtocolError(f"{name[:80]!r} is not an object id (64 hex digits)")
    return name


def chunk_count(size: int, chunk_bytes: int) -> int:
    """How many chunks an object of ``size`` bytes has; 0 for an empty object."""
    return -(-size // chunk_bytes)


def chunk_span(size: int, chunk_bytes: int, index: int) -> tuple[int, int]:
    """(offset, length) of a chunk in bytes. Raises ProtocolError when there is no such chunk."""
    if not 0 <= index < chunk_count(size, chunk_bytes):
        raise ProtocolError(f"chunk {index} of an object with {chunk_count(size, chunk_bytes)} chunks")
    offset = index * chunk_bytes
    return offset, min(chunk_bytes, size - offset)


class ObjectStore:
    """A directory of objects. Raises StoreError when the disk refuses or ``limit_bytes`` would be exceeded.

    ``limit_bytes`` bounds the sizes of finished and unfinished objects together; None: no limit.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = Path(root)
        self.limit_bytes = limit_bytes
        self._partials = self.root / "partial"
        self._open: dict[str, PartialObject] = {}
        with explained("open", self.root):
            self._partials.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def path(self, name: str) -> Path:
        """Where the object lies when it is finished (it may not exist)."""
        return self.root / check_id(name)

    def has(self, name: str) -> bool:
        """Whether the object is finished."""
        return self.path(name).is_file()

    def size(self, name: str) -> int:
        """Size in bytes of a finished object. Raises StoreError when it is not here."""
        with explained("look up", self.path(name)):
            return self.path(name).stat().st_size

    def read(self, name: str) -> bytes:
        """All bytes of a finished object. Raises StoreError when it is not here, or is not what it was."""
        path = self.path(name)
        try:
            with explained("read", path):
                data = path.read_bytes()
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                error.remedy = f"{self.root} is not whole: copy it anew from where it is."
            raise
        if object_id(data) != name:
            remedy = "Delete it: a device fetches it again. In a run's directory, put back a copy if there is one."
            raise StoreError(f"{path} is damaged: its sha256 is not its name", remedy=remedy)
        return data

    def read_chunk(self, name: str, chunk_bytes: int, index: int) -> bytes:
        """The bytes of one chunk of a finished object. Raises ProtocolError when there is no such chunk."""
        with explained("read", self.path(name)), self.path(name).open("rb", buffering=0) as file:
            offset, length = chunk_span(os.fstat(file.fileno()).st_size, chunk_bytes, index)
            data = os.pread(file.fileno(), length, offset)
        if len(data) != length:
            raise StoreError(f"cannot read {self.path(name)}: {len(data)} bytes where {length} should be")
        return data

    def put(self, data: bytes | bytearray | memoryview) -> ObjectRef:
        """Store ``data`` durably under its hash; an object that is already here is not written again."""
        ref = ObjectRef(object_id(data), memoryview(data).nbytes)
        if not self.has(ref.id):
            self._admit(ref)
            with explained("write", self.path(ref.id), ref.size):
                write_new(self.path(ref.id), data)
        return ref

    def partial(self, ref: ObjectRef, chunk_bytes: int) -> PartialObject:
        """The object as far as it has arrived. Goes on from the disk when the chunk size is the same, else anew.

        Asked twice for one object, it gives the same PartialObject, so that equal uploads of two devices help each
        other and neither can overwrite what the other brought.
        """
        check_id(ref.id)
        if ref.size < 0 or chunk_bytes < 1:
            raise ProtocolError(f"object of {ref.size} bytes in chunks of {chunk_bytes}")
        self._open = {name: one for name, one in self._open.items() if not one.finished}
        known = self._open.get(ref.id)
        if known is not None and (known.ref, known.chunk_bytes) == (ref, chunk_bytes):
            return known
        if known is not None:
            known.abandon()
        with explained("write", self._partials / ref.id, ref.size):
            if not self.has(ref.id) and not (self._partials / f"{ref.id}.data").exists():
                self._admit(ref)
            opened = self._open[ref.id] = PartialObject(self, self._partials, ref, chunk_bytes)
        return opened

    def used_bytes(self) -> int:
        """Sizes of all objects together, unfinished ones at their full size."""
        return sum(file.stat().st_size for file in self._files())

    def collect(self, keep: set[str]) -> int:
        """Delete every object, finished or not, whose id is not in ``keep``; the number of bytes given back."""
        freed = 0
        with explained("clean", self.root):
            for file in self._files():
                name = file.name.partition(".")[0]
                if name in keep:
                    continue
                freed += file.stat().st_blocks * 512  # unfinished ones are sparse
                if (unfinished := self._open.pop(name, None)) is not None:
                    unfinished.abandon()
                file.unlink(missing_ok=True)
                file.with_suffix(".map").unlink(missing_ok=True)
        return freed

    def _files(self) -> list[Path]:
        finished = [file for file in self.root.iterdir() if _ID.fullmatch(file.name)]
        return finished + list(self._partials.glob("*.data"))

    def _admit(self, ref: ObjectRef) -> None:
        if self.limit_bytes is None:
            return
        used = self.used_bytes()
        if used + ref.size > self.limit_bytes:
            raise StoreError(
                f"object store {self.root}: {used + ref.size} bytes needed ({used} used + {ref.size} new), "
                f"{self.limit_bytes} allowed",
                remedy="Raise the device's disk budget, or let it hold fewer parts.",
            )

    def _sweep(self) -> None:
        sweep_temporaries(self.root)
        for path in self._partials.iterdir():
            pair = path.with_suffix(".map" if path.suffix == ".data" else ".data")
            if (self.root / path.stem).exists() or not pair.exists():
                path.unlink(missing_ok=True)


class PartialObject:
    """An object that arrives in chunks, in any order. Made by :meth:`ObjectStore.partial`; one thread at a time.

    The data are written before the map that claims them, so the map under-claims after ``kill -9``. After a power cut
    it may over-claim: the hash finds that out, and the object starts anew.
    """

    def __init__(self, store: ObjectStore, directory: Path, ref: ObjectRef, chunk_bytes: int) -> None:
        self.ref = ref
        self.chunk_bytes = chunk_bytes
        self.chunk_count = chunk_count(ref.size, chunk_bytes)
        self._store = store
        self._data = directory / f"{ref.id}.data"
        self._map = directory / f"{ref.id}.map"
        self._here = bytearray(self.chunk_count)  # 1: chunk is on disk
        self._finished = store.has(ref.id)
        self._abandoned = False
        self._restart_hash()
        if not self._finished and not self._resume():
            self._create()

    @property
    def finished(self) -> bool:
        """Whether ``complete`` has been true."""
        return self._finished

    def missing(self) -> bytes:
        """Bitmap of what is missing: bit i % 8 of byte i // 8 is set when chunk i is."""
        bitmap = bytearray((self.chunk_count + 7) // 8)
        if not self._finished:
            for index, here in enumerate(self._here):
                if not here:
                    bitmap[index >> 3] |= 1 << (index & 7)
        return bytes(bitmap)

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Store one chunk; one that is already here is ignored. Raises ProtocolError on a wrong index or length."""
        offset, length = chunk_span(self.ref.size, self.chunk_bytes, index)
        if len(data) != length:
            raise ProtocolError(f"chunk {index} of {self.ref.id[:12]} has {len(data)} bytes where {length} should be")
        if self._finished or self._abandoned or self._here[index]:
            return
        with explained("write", self._data, length):
            write_file(self._data, data, offset)
            write_file(self._map, b"\x01", _MAP_HEAD.size + index)
        self._here[index] = 1
        if index == self._hashed_chunks:  # hashing as chunks arrive in order leaves little to do at the end
            self._hash.update(data)
            self._hashed_chunks += 1

    def complete(self) -> bool:
        """Whether everything is here and the sha256 is right; it is then a finished object of the store.

        On a wrong hash everything is forgotten (``missing`` is full again) and the answer is False.
        """
        if self._finished or self._abandoned:
            return self._finished
        if not all(self._here):
            return False
        with explained("finish", self._data, self.ref.size):
            self._hash_rest()
            if self._hash.hexdigest() != self.ref.id:
                self._create()
                return False
            self._publish()
        return True

    def abandon(self) -> None:
        """Ignore later writes: the store has handed the object to another holder, or dropped it."""
        self._abandoned = True

    def _publish(self) -> None:
        descriptor = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._data.rename(self._store.path(self.ref.id))
        sync_directory(self._store.root)
        self._map.unlink(missing_ok=True)
        self._finished = True

    def _resume(self) -> bool:
        try:
            known = self._map.read_bytes()
            size = self._data.stat().st_size
        except FileNotFoundError:
            return False
        head, here = known[: _MAP_HEAD.size], known[_MAP_HEAD.size :]
        if (
            head != _MAP_HEAD.pack(_MAP_MAGIC, self.chunk_bytes)
            or (size, len(here)) != (self.ref.size, self.chunk_count)
            or here.strip(b"\x00\x01")
        ):
            return False
        self._here[:] = here
        return True

    def _create(self) -> None:
        """Begin with nothing: the map goes first, so that no moment has an old map beside new data."""
        self._map.unlink(missing_ok=True)
        self._data.unlink(missing_ok=True)
        with self._data.open("xb") as file:
            file.truncate(self.ref.size)  # sparse: reserves the length, not the blocks
        self._here = bytearray(self.chunk_count)
        self._map.write_bytes(_MAP_HEAD.pack(_MAP_MAGIC, self.chunk_bytes) + self._here)
        self._restart_hash()

    def _restart_hash(self) -> None:
        self._hash = hashlib.sha256()
        self._hashed_chunks = 0  # the hash covers chunks 0 … this - 1

    def _hash_rest(self) -> None:
        with self._data.open("rb", buffering=0) as file:
            file.seek(self._hashed_chunks * self.chunk_bytes)
            while block := file.read(_READ_BYTES):
                self._hash.update(block)
        self._hashed_chunks = self.chunk_count
