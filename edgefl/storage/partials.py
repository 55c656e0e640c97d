"""Objects that are still arriving: chunks in any order, on disk as they come, so that any process can go on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path

from edgefl.errors import ProtocolError, StoreError
from edgefl.records import ObjectRef
from edgefl.storage.disk import begin_sync, store_errors, write_all

#: Head of a chunk map: magic with version, and the chunk size it belongs to. One byte per chunk follows (1: here).
_MAP_HEAD = struct.Struct("<4sI")
_MAP_MAGIC = b"EFM2"
#: Bytes read at once while hashing: enough that hashing dominates, little beside any device's memory.
_READ_BYTES = 1024 * 1024
#: Bytes written between two calls of sync_file_range, each of which costs as much as writing half a chunk.
_BEGIN_BYTES = 1024 * 1024


def chunk_count(size: int, chunk_bytes: int) -> int:
    """Number of chunks of an object of ``size`` bytes; 0 for an empty one."""
    return -(-size // chunk_bytes)


def chunk_span(size: int, chunk_bytes: int, index: int) -> tuple[int, int]:
    """(offset, length) of a chunk in bytes. Raises ProtocolError when there is no such chunk."""
    if not 0 <= index < chunk_count(size, chunk_bytes):
        raise ProtocolError(f"chunk {index} of an object with {chunk_count(size, chunk_bytes)} chunks")
    offset = index * chunk_bytes
    return offset, min(chunk_bytes, size - offset)


class MemoryArrival:
    """An object that is finished, or arrives in memory and is given to ``keep`` once it is verified.

    As a ``PartialObject``, without a file of its own. ``known``: its bytes, where this process has them already; what
    comes is then counted only.
    """

    __slots__ = ("_keep", "_known", "_pieces", "abandoned", "chunk_bytes", "chunk_count", "finished", "ref", "verified")
    in_file = False

    def __init__(
        self,
        ref: ObjectRef,
        chunk_bytes: int,
        keep: Callable[[str, bytes], None] | None = None,
        known: bytes | None = None,
    ) -> None:
        self.ref = ref
        self.chunk_bytes = chunk_bytes
        self.chunk_count = chunk_count(ref.size, chunk_bytes)
        self.finished = self.verified = keep is None
        self.abandoned = False
        self._keep = keep
        self._known = known
        self._pieces: dict[int, bytes] = {}

    def takes(self, chunk_bytes: int) -> bool:
        """Whether chunks of this size are as good as its own."""
        alone = self.chunk_count <= 1 and chunk_count(self.ref.size, chunk_bytes) <= 1
        return self.verified or alone or chunk_bytes == self.chunk_bytes

    def missing(self, chunk_bytes: int = 0) -> bytes:
        """Bitmap of what is missing, in chunks of a size that it takes; 0: its own."""
        count = chunk_count(self.ref.size, chunk_bytes or self.chunk_bytes)
        lacking = bytearray((count + 7) // 8)
        if not self.verified:
            for index in range(count):
                if index not in self._pieces:
                    lacking[index >> 3] |= 1 << (index & 7)
        return bytes(lacking)

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Hold a chunk until all are verified. Raises ProtocolError on a wrong index or length."""
        _, length = chunk_span(self.ref.size, self.chunk_bytes, index)
        if len(data) != length:
            raise ProtocolError(f"chunk {index} of {self.ref.id[:12]} has {len(data)} bytes where {length} should be")
        if not self.verified and not self.abandoned:
            self._pieces[index] = bytes(data) if self._known is None else b""

    def verify(self) -> bool:
        """Whether its sha256 is right, whereupon it is kept; else it is forgotten, and the answer is False."""
        if self._keep is None or self.verified or self.abandoned or len(self._pieces) < self.chunk_count:
            return self.verified
        pieces, self._pieces = self._pieces, {}
        data = self._known
        if data is None:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces[index] for index in range(self.chunk_count))
        if data is self._known or hashlib.sha256(data).hexdigest() == self.ref.id:
            self._keep(self.ref.id, data)
            self.verified, self._known = True, None
        return self.verified

    def abandon(self) -> None:
        """Ignore later writes."""
        self.abandoned = True


class PartialObject:
    """An object that arrives in chunks, in any order. Made by ``ObjectStore.partial``; one thread at a time.

    Its file is made by ``reserve`` or with the first chunk. The map of what is here stands behind the data until all is
    verified, then the file is cut to the object's size. The data are written before the byte of the map that claims
    them, so the map under-claims after ``kill -9``. After a power cut it may over-claim: the hash finds that out, and
    the object starts from nothing. One of a single chunk has no map.
    """

    in_file = True
    _hashed_chunks: int

    def __init__(self, directory: Path, ref: ObjectRef, chunk_bytes: int, *, durable: bool = True) -> None:
        self.ref = ref
        self.chunk_bytes = chunk_bytes
        self.chunk_count = chunk_count(ref.size, chunk_bytes)
        self.path = directory / f"{ref.id}.data"
        self.finished = False  # in the store
        self.verified = False  # whole, and its sha256 is right
        self._durable = durable  # synced in the end: the disk may begin now
        self._unbegun = 0  # bytes written since the last sync_file_range
        self._lowest = ref.size  # their lowest offset
        self._files: list[int] = []  # the descriptor, while chunks arrive
        self._close = weakref.finalize(self, _close_all, self._files)
        self._here = bytearray(self.chunk_count)  # 1: chunk is on disk
        self.abandoned = False  # another holder has it
        self._restart_hash()
        self._resume()

    def takes(self, chunk_bytes: int) -> bool:
        """Whether chunks of this size are as good as its own."""
        whole = self.verified or max(self.chunk_count, chunk_count(self.ref.size, chunk_bytes)) <= 1
        return whole or chunk_bytes == self.chunk_bytes

    def missing(self, chunk_bytes: int = 0) -> bytes:
        """Bitmap of what is missing: bit i % 8 of byte i // 8 is set when chunk i is.

        ``chunk_bytes``: of a size that it takes; 0: its own.
        """
        bitmap = bytearray((chunk_count(self.ref.size, chunk_bytes or self.chunk_bytes) + 7) // 8)
        for index, here in enumerate(() if self.verified else self._here):
            if not here:
                bitmap[index >> 3] |= 1 << (index & 7)
        return bytes(bitmap)

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Store one chunk; one that is already here is ignored. Raises ProtocolError on a wrong index or length."""
        offset, length = chunk_span(self.ref.size, self.chunk_bytes, index)
        if len(data) != length:
            raise ProtocolError(f"chunk {index} of {self.ref.id[:12]} has {len(data)} bytes where {length} should be")
        if self.verified or self.abandoned or self._here[index]:
            return
        try:
            with store_errors("write", self.path, length):
                file = self._file()
                write_all(file, data, offset)
                if self.chunk_count > 1:
                    if self._durable:
                        self._begin_sync(file, offset, length)
                    write_all(file, b"\x01", self.ref.size + _MAP_HEAD.size + index)
        except StoreError:
            _close_all(self._files)
            raise
        self._here[index] = 1
        if index == self._hashed_chunks:  # hashing as chunks arrive in order leaves little to do at the end
            self._hash.update(data)
            self._hashed_chunks += 1

    def reserve(self) -> None:
        """Make the file of several chunks at its full length: other processes count what is in the store.

        Sparse where the file system can. Raises OSError.
        """
        if self.chunk_count > 1 and not self.verified and not any(self._here):
            try:
                self._file()
            except OSError:
                self._forget()
                raise
            _close_all(self._files)

    def verify(self) -> bool:
        """Whether everything is here and the sha256 is right; ``ObjectStore.publish`` then makes it a finished object.

        On a wrong hash everything is forgotten (``missing`` is full again) and the answer is False.
        """
        if self.verified or self.abandoned:
            return self.verified
        if not all(self._here):
            return False
        with store_errors("finish", self.path, self.ref.size):
            file, size = self._file(), self.ref.size
            offset = min(size, self._hashed_chunks * self.chunk_bytes)
            while offset < size and (block := os.pread(file, min(_READ_BYTES, size - offset), offset)):
                self._hash.update(block)
                offset += len(block)
            self._hashed_chunks = self.chunk_count
            if self._hash.hexdigest() != self.ref.id:
                self._forget()
                return False
            if self.chunk_count > 1:
                os.ftruncate(file, size)
            _close_all(self._files)
        self.verified = True
        return True

    def abandon(self) -> None:
        """Ignore later writes: the store has handed the object to another holder, or dropped it."""
        self.abandoned = True
        _close_all(self._files)

    def _file(self) -> int:
        """The descriptor; without any chunk the file is made."""
        if not self._files:
            fresh = not any(self._here)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if fresh else 0)
            self._files.append(os.open(self.path, flags, 0o644))
            if fresh and self.chunk_count > 1:
                self._write_map(self._files[0])
        return self._files[0]

    def _begin_sync(self, file: int, offset: int, length: int) -> None:
        self._unbegun += length
        self._lowest = min(self._lowest, offset)
        if self._unbegun >= _BEGIN_BYTES:
            begin_sync(file, self._lowest, self.ref.size - self._lowest)
            self._unbegun, self._lowest = 0, self.ref.size

    def _write_map(self, file: int) -> None:
        """Append the map to data without one; cut short by a kill, it fits nothing."""
        write_all(file, _MAP_HEAD.pack(_MAP_MAGIC, self.chunk_bytes) + self._here, self.ref.size)

    def _resume(self) -> None:
        """Take over a file of an earlier process, or delete one of a wrong length or map."""
        try:
            opened = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            return
        with opened as file:
            length = os.fstat(file.fileno()).st_size
            mapped = self._read_map(file.fileno(), length)
        if length == self.ref.size:  # cut and not renamed, or of a single chunk: whole if its sha256 says so
            self._here[:] = b"\x01" * self.chunk_count
            self.verify()
        elif not mapped:
            self._forget()

    def _read_map(self, file: int, length: int) -> bool:
        """Take over the map behind the data; False without a fitting one."""
        size = self.ref.size
        head = os.pread(file, _MAP_HEAD.size, size)
        if self.chunk_count <= 1 or len(head) < _MAP_HEAD.size:
            return False
        magic, before = _MAP_HEAD.unpack(head)
        if magic != _MAP_MAGIC or before < 1 or length != size + len(head) + (count := chunk_count(size, before)):
            return False
        here = os.pread(file, count, size + len(head))
        if len(here) != count or here.strip(b"\x00\x01"):
            return False
        if before == self.chunk_bytes:
            self._here[:] = here
            return True
        for index in range(self.chunk_count):
            begin, extent = chunk_span(size, self.chunk_bytes, index)
            self._here[index] = all(here[begin // before : (begin + extent - 1) // before + 1])
        os.ftruncate(file, size)  # the old map goes first: beside a part of the new one it would claim what is not here
        self._write_map(file)
        return True

    def _forget(self) -> None:
        """Begin with nothing."""
        _close_all(self._files)
        self.path.unlink(missing_ok=True)
        self._here = bytearray(self.chunk_count)
        self._restart_hash()

    def _restart_hash(self) -> None:
        self._hash = hashlib.sha256()
        self._hashed_chunks = 0  # the hash covers chunks 0 … this - 1


#: An object on its way into a store.
Arrival = PartialObject | MemoryArrival


def _close_all(files: list[int]) -> None:
    while files:
        with contextlib.suppress(OSError):
            os.close(files.pop())
