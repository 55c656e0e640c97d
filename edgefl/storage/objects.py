"""Content-addressed objects on disk: files named by the sha256 of their bytes, shared by agent and coordinator.

A store is one directory: finished objects lie in it under their hex id, unfinished ones in ``partial/``, small ones
that have arrived in the files of ``packs/`` (of ``durable`` stores only), those that are garbage in ``dropped/`` until
they are deleted, and files that are being written under a ``.new-`` name that a crash leaves behind and the next start
sweeps away. A finished object is never changed. Several processes may read and ``put``; only one may hold partial
objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import re
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from edgefl.errors import DamagedObjectError, ProtocolError, StoreError
from edgefl.records import ObjectRef
from edgefl.storage.disk import (
    NewFile,
    begin_sync,
    boot_id,
    store_errors,
    sweep_temporaries,
    sync_directory,
    sync_files,
    write_new,
)
from edgefl.storage.file_pages import known
from edgefl.storage.packs import PACKS, Packs
from edgefl.storage.partials import Arrival, MemoryArrival, PartialObject, chunk_span
from edgefl.storage.shared import Shared

_ID = re.compile(r"[0-9a-f]{64}")
#: From this size on mapping is quicker than reading, and worth a descriptor for as long as it is read.
_MAPPED_BYTES = 2**20
#: From this size on an object arrives in a file, whoever sends it: written among others it would be in memory twice.
_IN_MEMORY_BYTES = 16 * 2**20
#: Bytes of small objects that are kept in memory: the parts of a few states.
_RECENT_BYTES = 8 * 2**20


def object_id(data: bytes | bytearray | memoryview) -> str:
    """The name of an object: sha256 of its bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def _sha256(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


def check_id(name: str) -> str:
    """``name`` itself. Raises ProtocolError when it is not 64 lower-case hex digits (ids come from peers)."""
    if not _ID.fullmatch(name):
        raise ProtocolError(f"{name[:80]!r} is not an object id (64 hex digits)")
    return name


class ObjectStore:
    """A directory of objects. Raises StoreError when the disk refuses or ``limit_bytes`` would be exceeded.

    ``limit_bytes`` bounds the sizes of finished and unfinished objects together; None: no limit. ``durable``: objects
    are synced to the disk: the coordinator's. A device does not: its objects can be fetched or trained again, a kill
    loses nothing, and many objects are gone before the disk has to write them. The first process after
    the machine was started looks whether its objects are right. ``shared``: the objects of a process that holds the
    whole fleet; what arrives in a ``durable`` store is then theirs, and lasts once it is settled.
    """

    def __init__(
        self, root: Path, limit_bytes: int | None = None, *, durable: bool = True, shared: Shared | None = None
    ) -> None:
        self.root = Path(root)
        self._root = os.fspath(root)
        self.limit_bytes = limit_bytes
        self.durable = durable
        self._partials = self.root / "partial"
        self._dropped = self.root / "dropped"
        self._shared = shared
        self._packs = Packs(self.root / PACKS, held=shared is not None)
        self._recent: dict[str, bytes] = {}  # small objects read last, proved
        self._remembering = threading.Lock()
        self._open: dict[str, Arrival] = {}
        self._publishing = threading.Lock()  # equal objects of two devices are one
        self._proved: set[str] = set()  # whose sha256 this process has seen to be right
        self._sound: dict[str, tuple[int, int]] = {}  # time and size of files that ``sound`` has read
        with store_errors("open", self.root):
            self._partials.mkdir(parents=True, exist_ok=True)
            self._dropped.mkdir(exist_ok=True)
            sweep_temporaries(self.root)
            self.sweep()
            for path in self._partials.iterdir():
                if path.suffix in {".map", ".new"} or (self.root / path.stem).exists():  # maps: of earlier versions
                    path.unlink(missing_ok=True)
            if not durable:
                self._look_after_boot()

    def path(self, name: str) -> Path:
        """Where the object lies when it is finished, unless in a pack (it may not exist)."""
        return Path(self._at(name))

    def has(self, name: str) -> bool:
        """Whether the object is finished, or small and verified: ``publish`` makes the latter last."""
        return name in self._packs or os.path.isfile(self._at(name)) or self._looked_up(name)

    def _looked_up(self, name: str) -> bool:
        """Whether the object lies in a pack of an earlier process."""
        if self.durable and not self._packs.looked:
            self._packs.look()
        return name in self._packs

    def sound(self, name: str) -> bool:
        """Whether the object is finished and is what it is named by; one that is not goes, and can be fetched again.

        Read whole, in blocks, unless this process has done so and its file has not changed since.
        """
        path = self._at(name)
        with store_errors("read", path):
            try:
                found = os.stat(path)
            except FileNotFoundError:
                return False
            mark = (found.st_mtime_ns, found.st_size)
            if self._sound.get(name) != mark:
                if _sha256(path) != name:
                    self.remove(name)
                    return False
                self._sound[name] = mark
        return True

    def remove(self, name: str) -> None:
        """Delete a damaged object."""
        self._proved.discard(name)
        self._sound.pop(name, None)
        self._recent.pop(name, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(name))

    def size(self, name: str) -> int:
        """Size in bytes of a finished object. Raises StoreError when it is not here."""
        path = self._at(name)
        if name in self._packs:
            return self._packs.size(name)
        try:
            with store_errors("look up", path):
                return os.stat(path).st_size
        except StoreError:
            if self._looked_up(name):
                return self._packs.size(name)
            raise

    def read(self, name: str) -> bytes:
        """All bytes of a finished object. Raises StoreError when it is not here, or is not what it was.

        Its sha256 is checked when this process reads it for the first time, unless it has come in through it.
        """
        if (recent := self._recent.get(name)) is not None:
            return recent
        path = self._at(name)
        data = self._packs.read(name)
        try:
            if data is None:
                with store_errors("read", path), open(path, "rb", buffering=0) as file:
                    data = file.read()
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                if self._looked_up(name):  # of another process
                    return self.read(name)
                error.remedy = f"{self.root} is not whole: copy it again from where it is."
            raise
        if name not in self._proved:
            if object_id(data) != name:
                remedy = "In a run's directory, put back a copy of it if there is one."
                if not self.durable:  # the next offer brings it again
                    self.remove(name)
                    remedy = "It is deleted, and fetched again with the next offer."
                raise DamagedObjectError(f"{path} is damaged: its sha256 is not its name", remedy=remedy)
            self._proved.add(name)
        return data

    def _remember(self, name: str, data: bytes) -> None:
        if len(data) < _MAPPED_BYTES:
            with self._remembering:
                self._recent[name] = data
                while sum(map(len, self._recent.values())) > _RECENT_BYTES:  # seldom: what is here is not read again
                    del self._recent[next(iter(self._recent))]

    def view(self, name: str, *, again: bool = False) -> memoryview:
        """As ``read``, read-only, without a copy in memory of what is large.

        ``again``: it will be read often, and stays in memory where it is small. What lies on a disk that fails
        meanwhile ends the process (SIGBUS).
        """
        if name in self._recent or name in self._packs:
            return memoryview(self.read(name))
        with contextlib.suppress(OSError), open(self._at(name), "rb", buffering=0) as file:
            large = os.fstat(file.fileno()).st_size >= _MAPPED_BYTES
            if large and (name in self._proved or _sha256(self._at(name)) == name):
                self._proved.add(name)
                return memoryview(known(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)))
        data = self.read(name)
        if again:
            self._remember(name, data)
        return memoryview(data)

    def file_of(self, name: str) -> BinaryIO:
        """A finished object as a file. Raises StoreError when it is not here."""
        path = self._at(name)
        if not os.path.isfile(path) and (name in self._packs or self._looked_up(name)):
            return io.BytesIO(self.read(name))
        with store_errors("read", path):
            return open(path, "rb")

    def read_chunk(self, name: str, chunk_bytes: int, index: int) -> bytes:
        """The bytes of one chunk of a finished object. Raises ProtocolError when there is no such chunk.

        Who answers for its objects (``durable``) looks first whether this one is right, once a process, and raises
        StoreError where it is not: whoever fetched it would be taken for the culprit.
        """
        path = self._at(name)
        if self.durable and name not in self._proved:
            self.read(name)
        if (whole := self._recent.get(name) or self._packs.read(name)) is not None:
            offset, length = chunk_span(len(whole), chunk_bytes, index)
            return whole[offset : offset + length]
        with store_errors("read", path), open(path, "rb", buffering=0) as file:
            offset, length = chunk_span(os.fstat(file.fileno()).st_size, chunk_bytes, index)
            data = os.pread(file.fileno(), length, offset)
        if len(data) != length:
            raise StoreError(f"cannot read {path}: {len(data)} bytes where {length} should be")
        return data

    def put(self, data: bytes | bytearray | memoryview) -> ObjectRef:
        """Store ``data`` durably under its hash; an object that is already here is not written again."""
        ref = ObjectRef(object_id(data), memoryview(data).nbytes)
        if not os.path.isfile(self._at(ref.id)):  # a pack is no place for what stays, and what other programs read
            self._admit(ref)
            with store_errors("write", self._at(ref.id), ref.size):
                self._write(ref.id, data)
        self._proved.add(ref.id)
        return ref

    def _write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        write_new(self.path(name), data, durable=self.durable)

    def append(self, data: bytes) -> ObjectRef:
        """Store ``data`` as what arrives is stored: durably from the next ``publish`` on."""
        if not self._packing or len(data) >= _MAPPED_BYTES:
            return self.put(data)
        ref = ObjectRef(object_id(data), len(data))
        if not self.has(ref.id):
            self._keep(ref.id, data)
        return ref

    def settle(self, names: Collection[str]) -> None:
        """Make these last, of what has arrived in memory alone."""
        self._packs.settle(names)

    @property
    def held(self) -> bool:
        """True if arriving objects are kept in memory until ``settle`` writes them."""
        return self._shared is not None

    @property
    def _packing(self) -> bool:
        return self.durable and self.limit_bytes is None

    @contextlib.contextmanager
    def write_batch(self) -> Iterator[ObjectStore]:
        """This store, for one thread, whose puts are synced together when the block ends: the disk works meanwhile.

        Until then they are in the batch alone; after an error they are gone, but for some of very many, which are then
        garbage in the store.
        """
        batch = _WriteBatch(self)
        try:
            yield batch
            batch.flush()
        finally:
            batch.close()

    def partial(self, ref: ObjectRef, chunk_bytes: int) -> Arrival:
        """The object as far as it has arrived, from the disk also in chunks of another size.

        Asked twice for one object, it gives the same answer, so that equal uploads of two devices help each
        other and neither can overwrite what the other brought. In chunks of another size it is handed over: whoever
        had it finds it abandoned.
        """
        check_id(ref.id)
        if ref.size < 0 or chunk_bytes < 1:
            raise ProtocolError(f"object of {ref.size} bytes in chunks of {chunk_bytes}")
        known = self._open.get(ref.id)
        if known is not None and known.ref == ref and known.takes(chunk_bytes):
            return known
        if known is not None:
            if known.verified and known.ref != ref:
                raise ProtocolError(f"object {ref.id[:12]} has {known.ref.size} bytes, not {ref.size}")
            self._abandon(ref.id)
        if self.has(ref.id):
            return MemoryArrival(ref, chunk_bytes)
        shared = self._shared
        if self._packing and 0 < ref.size <= (chunk_bytes if shared is None else _IN_MEMORY_BYTES):
            here = None if shared is None or (found := shared.known(ref.id)) is None else found.data
            arrival = self._open[ref.id] = MemoryArrival(ref, chunk_bytes, self._keep, here)
            return arrival
        with store_errors("write", self._partials / ref.id, ref.size):
            if self.limit_bytes is not None:
                file = self._partials / f"{ref.id}.data"
                if not file.exists() or file.stat().st_size < ref.size:  # else it is counted at its full length
                    file.unlink(missing_ok=True)
                    self._admit(ref)
            opened = PartialObject(self._partials, ref, chunk_bytes, durable=self.durable)
            if self.limit_bytes is not None:
                opened.reserve()
            self._open[ref.id] = opened
        return opened

    def _keep(self, name: str, data: bytes) -> None:
        """Take a verified object."""
        self._packs.append(name, data)
        self._proved.add(name)

    def chunk_size_in_progress(self, names: Iterable[str], chunk_bytes: int) -> int:
        """Bytes of a chunk in which one of these objects arrives already; ``chunk_bytes`` where that is no matter."""
        opened = [one for one in map(self._open.get, names) if one is not None and not one.takes(chunk_bytes)]
        return min((one.chunk_bytes for one in opened), default=chunk_bytes)

    def publish(self, partials: Iterable[Arrival]) -> None:
        """Make verified objects finished ones, together: what is written first is synced as one with the rest."""
        with self._publishing:
            fresh = {one.ref.id: one for one in partials if not one.finished}
            if not all(one.verified for one in fresh.values()):
                raise StoreError(f"objects in {self.root} cannot be published before they are whole")
            self._finish({name: one.path for name, one in fresh.items() if isinstance(one, PartialObject)})
            self._packs.sync()  # also what another upload brought
            for name, one in fresh.items():
                one.finished = True
                self._proved.add(name)
                self._open.pop(name, None)

    def _finish(self, written: Mapping[str, Path]) -> None:
        """Make files objects of the store: synced together, then renamed."""
        if self.durable:
            sync_files(list(written.values()))
        with store_errors("finish", self.root):
            for name, path in written.items():
                os.rename(path, f"{self._root}/{name}")
            if written and self.durable:
                sync_directory(self._root)

    def used_bytes(self) -> int:
        """Sizes of all objects together, unfinished ones at their full size."""
        # What arrives in this process counts without its map, in another process with it.
        sizes = {name: one.ref.size for name, one in list(self._open.items()) if one.in_file}
        for file in self._files():
            sizes.setdefault(file.name.removesuffix(".data"), file.stat().st_size)
        return sum(sizes.values()) + self._packs.used_bytes()

    def mark_garbage(self, keep: set[str]) -> int:
        """Set all objects outside ``keep`` aside for ``sweep``; returns their bytes.

        Unfinished objects too. Quick, since files are only renamed: ``sweep`` deletes them, moves what few are needed
        of a pack, and may take its time, in another thread. Waits for an object that is being published, since its
        files are being renamed too.
        """
        freed = 0
        with self._publishing, store_errors("clean", self.root):
            here = set[str]()
            for file in self._files():
                name, _, unfinished = file.name.partition(".")
                if name in keep:
                    here.add(file.name)
                    continue
                freed += file.stat().st_blocks * 512  # unfinished ones are sparse
                self._proved.discard(name)
                self._sound.pop(name, None)
                if unfinished:
                    self._abandon(name)
                os.rename(file.path, self._dropped / secrets.token_hex(8))
            for name in self._open.keys() - keep:  # of which nothing has come yet
                self._abandon(name)
            if self._packing:
                freed += self._packs.set_aside(keep - here, self._dropped)
                self._proved &= keep
                with self._remembering:
                    self._recent = {name: data for name, data in self._recent.items() if name in keep}
        return freed

    def _abandon(self, name: str) -> None:
        if (opened := self._open.pop(name, None)) is not None:
            opened.abandon()

    def sweep(self) -> None:
        """Delete what ``mark_garbage`` has dropped. Raises StoreError. Callable from any thread."""
        with store_errors("clean", self._dropped):
            with os.scandir(self._dropped) as found:
                paths = [file.path for file in found]
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        self._packs.clean()  # afterwards: it needs space, which a full disk has now

    def _at(self, name: str) -> str:
        return f"{self._root}/{check_id(name)}"

    def _files(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._root) as finished, os.scandir(self._partials) as partial:
            found = [file for file in finished if _ID.fullmatch(file.name)]
            return found + [file for file in partial if file.name.endswith(".data")]

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

    def _look_after_boot(self) -> None:
        """Delete objects that a loss of power has left half written."""
        seen = self.root / "boot"
        now = boot_id()
        if now and seen.is_file() and seen.read_text(encoding="ascii", errors="replace") == now:
            return
        for entry in self._files():
            if not _ID.fullmatch(entry.name):
                continue
            if _sha256(entry.path) != entry.name:
                os.unlink(entry.path)
        write_new(seen, now.encode(), durable=False)  # after a loss of power it is another boot anyway


class _WriteBatch(ObjectStore):
    """See ``ObjectStore.write_batch``: shares everything but the new objects with the store."""

    #: Files that are open at a time.
    _MOST = 64

    def __init__(self, store: ObjectStore) -> None:
        vars(self).update(vars(store))
        self._new: dict[str, NewFile] = {}

    def flush(self) -> None:
        """Make all new objects part of the store."""
        self._finish({name: new.path for name, new in self._new.items()})
        self._release()

    def close(self) -> None:
        """Drop the objects that ``flush`` has not made part of the store."""
        self._proved.difference_update(self._new)
        with contextlib.suppress(OSError):  # the next start sweeps; the first error is the one to raise
            self._release()

    def _release(self) -> None:
        while self._new:
            self._new.popitem()[1].close()

    def _write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        if len(self._new) == self._MOST:
            self.flush()
        self._new[name] = new = NewFile(self.root, data)
        if self.durable:
            begin_sync(new.descriptor, 0, 0)

    def _at(self, name: str) -> str:
        new = self._new.get(name)
        return super()._at(name) if new is None else os.fspath(new.path)
