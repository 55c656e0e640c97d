"""Content-addressed objects on disk: files named by the sha256 of their bytes, shared by agent and coordinator.

A store is one directory: finished objects lie in it under their hex id, unfinished ones in ``partial/``, those that
nobody needs any more in ``dropped/`` until they are deleted, and what is being written under a ``.new-`` name that a
crash leaves behind and the next start sweeps away. A finished object is never changed. Several processes may read and
``put``; only one may hold partial objects.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

from edgefl.disk import explained, sweep_temporaries, sync_directory, sync_file, write_new
from edgefl.errors import ProtocolError, StoreError
from edgefl.partials import PartialObject, chunk_span
from edgefl.records import ObjectRef

_ID = re.compile(r"[0-9a-f]{64}")


def object_id(data: bytes | bytearray | memoryview) -> str:
    """The name of an object: sha256 of its bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def check_id(name: str) -> str:
    """``name`` itself. Raises ProtocolError when it is not 64 lower-case hex digits (ids come from peers)."""
    if not _ID.fullmatch(name):
        raise ProtocolError(f"{name[:80]!r} is not an object id (64 hex digits)")
    return name


class ObjectStore:
    """A directory of objects. Raises StoreError when the disk refuses or ``limit_bytes`` would be exceeded.

    ``limit_bytes`` bounds the sizes of finished and unfinished objects together; None: no limit.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = Path(root)
        self.limit_bytes = limit_bytes
        self._partials = self.root / "partial"
        self._dropped = self.root / "dropped"
        self._open: dict[str, PartialObject] = {}
        self._publishing = threading.Lock()  # equal objects of two devices are one
        self._proved: set[str] = set()  # whose sha256 this process has seen to be right
        with explained("open", self.root):
            self._partials.mkdir(parents=True, exist_ok=True)
            self._dropped.mkdir(exist_ok=True)
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
        """All bytes of a finished object. Raises StoreError when it is not here, or is not what it was.

        Its sha256 is checked when this process reads it for the first time, unless it has come in through it.
        """
        path = self.path(name)
        try:
            with explained("read", path):
                data = path.read_bytes()
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                error.remedy = f"{self.root} is not whole: copy it anew from where it is."
            raise
        if name not in self._proved:
            if object_id(data) != name:
                remedy = "Delete it: a device fetches it again. In a run's directory, put back a copy if there is one."
                raise StoreError(f"{path} is damaged: its sha256 is not its name", remedy=remedy)
            self._proved.add(name)
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
        self._proved.add(ref.id)
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
            opened = self._open[ref.id] = PartialObject(self._partials, ref, chunk_bytes, finished=self.has(ref.id))
        return opened

    def publish(self, partials: Iterable[PartialObject]) -> None:
        """Make verified objects finished ones, together: what is written first is synced as one with the rest."""
        with self._publishing:
            self._publish({one.ref.id: one for one in partials if not one.finished})

    def _publish(self, fresh: dict[str, PartialObject]) -> None:
        if not all(one.verified for one in fresh.values()):
            raise StoreError(f"objects in {self.root} can not be published before they are whole")
        for one in fresh.values():
            with explained("finish", one.path, one.ref.size):
                sync_file(one.path)
        with explained("finish", self.root):
            for one in fresh.values():
                one.path.rename(self.path(one.ref.id))
            if fresh:
                sync_directory(self.root)
        for one in fresh.values():
            one.settle()
            self._proved.add(one.ref.id)

    def used_bytes(self) -> int:
        """Sizes of all objects together, unfinished ones at their full size."""
        return sum(file.stat().st_size for file in self._files())

    def collect(self, keep: set[str]) -> int:
        """Drop every object, finished or not, whose id is not in ``keep``; the number of bytes ``empty`` gives back.

        Quick: files only leave their places. What drops them for good may take its time, in another thread. What is
        being published just now is waited for: its files are changing places.
        """
        freed = 0
        with self._publishing, explained("clean", self.root):
            for file in self._files():
                name = file.name.partition(".")[0]
                if name in keep:
                    continue
                freed += file.stat().st_blocks * 512  # unfinished ones are sparse
                self._proved.discard(name)
                if (unfinished := self._open.pop(name, None)) is not None:
                    unfinished.abandon()
                file.with_suffix(".map").unlink(missing_ok=True)
                file.rename(self._dropped / secrets.token_hex(8))
        return freed

    def empty(self) -> None:
        """Delete what ``collect`` has dropped. Raises StoreError. Callable from any thread."""
        with explained("clean", self._dropped):
            for file in self._dropped.iterdir():
                file.unlink(missing_ok=True)

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
        self.empty()
        for path in self._partials.iterdir():
            alone = path.suffix == ".map" and not path.with_suffix(".data").exists()
            if (self.root / path.stem).exists() or alone:
                path.unlink(missing_ok=True)
