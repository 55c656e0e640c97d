"""Stores of simulated devices, in the memory of the process that holds the whole fleet.

A device's store answers as one on a disk does: what it has, what a transfer lacks, what its budget refuses. But equal
objects of all devices are one in memory, checked once, and what a device has without needing it now is a name alone:
the coordinator, in this process, has the bytes. What a device retains between rounds lies on the disk, for a run that
is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from device_agent.core.state import DataFacts, Saved
from device_agent.runtime.slots import read_newest, written_slots
from edgefl.errors import StoreError
from edgefl.protocol.messages import Offer
from edgefl.records import ObjectRef
from edgefl.storage.disk import make_private, store_errors, write_new
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.storage.partials import MemoryArrival, chunk_span
from edgefl.storage.shared import Bytes, Shared


class Pool(Shared):
    """The objects of a fleet's devices, and their stores.

    ``source``: the coordinator's directory of objects; ``handed``: a directory that is looked into before it.
    """

    def __init__(self, source: Path, handed: Path | None = None) -> None:
        super().__init__()
        self.stores: dict[str, MemoryObjects] = {}  # by device
        self.source = source
        self._handed = () if handed is None else (handed,)

    def fetched(self, name: str, places: Iterable[Path] = ()) -> Bytes:
        """An object that no device holds in memory, from the first of ``places`` that has it, or the coordinator's.

        Raises StoreError where it is not whole.
        """
        tried = (*places, *self._handed)
        path = next((one for place in tried if (one := place / name).is_file()), self.source / name)
        with store_errors("read", path):
            data = path.read_bytes()
        if object_id(data) != name:
            raise StoreError(f"{path} is damaged: its sha256 is not its name", remedy="Start the run again.")
        return self.share(name, data)


class MemoryObjects:
    """A simulated device's ``ObjectStore``. ``directory``: of what it retains; made when there is something."""

    def __init__(self, directory: Path, limit_bytes: int | None, pool: Pool) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._pool = pool
        self.sizes: dict[str, int] = {}  # of every object that the device has
        self._held: dict[str, Bytes] = {}  # those that it needs now
        self._open: dict[str, MemoryArrival] = {}
        self._whole: dict[str, bytes] = {}  # verified, and not published yet
        for file in retained_files(directory):
            self.sizes[file.name] = file.stat().st_size

    def has(self, name: str) -> bool:
        """See ``ObjectStore.has``."""
        return name in self.sizes

    sound = has  # memory does not lose bits

    def read(self, name: str) -> bytes:
        """See ``ObjectStore.read``."""
        if name not in self.sizes:
            raise StoreError(f"object {name[:12]} is not at this device")
        held = self._held.get(name) or self._pool.known(name) or self._pool.fetched(name, [self.directory])
        self._held[name] = held
        return held.data

    def view(self, name: str) -> memoryview:
        """See ``ObjectStore.view``."""
        return memoryview(self.read(name))

    def read_chunk(self, name: str, chunk_bytes: int, index: int) -> memoryview:
        """See ``ObjectStore.read_chunk``."""
        data = self.view(name)
        offset, length = chunk_span(len(data), chunk_bytes, index)
        return data[offset : offset + length]

    def put(self, data: bytes | bytearray | memoryview) -> ObjectRef:
        """See ``ObjectStore.put``."""
        ref = ObjectRef(object_id(data), memoryview(data).nbytes)
        if ref.id not in self.sizes:
            self._admit(ref)
            self.sizes[ref.id] = ref.size
        self._held[ref.id] = self._pool.share(ref.id, data if isinstance(data, bytes) else bytes(data))
        return ref

    def remove(self, name: str) -> None:
        """See ``ObjectStore.remove``."""
        self.sizes.pop(name, None)
        self._held.pop(name, None)

    def take(self, name: str, size: int, data: bytes | None) -> None:
        """Have an object that a trainer's process made; None: the coordinator has the bytes."""
        self.sizes[name] = size
        if data is not None:
            self._held[name] = self._pool.share(name, data)

    def partial(self, ref: ObjectRef, chunk_bytes: int) -> MemoryArrival:
        """See ``ObjectStore.partial``; here each transfer begins with nothing."""
        if ref.id in self.sizes:
            return MemoryArrival(ref, chunk_bytes)
        if ref.id not in self._open:
            self._admit(ref)
        known = self._pool.known(ref.id)
        if known is None and (self._pool.source / ref.id).is_file():  # else every device would put it together
            known = self._pool.fetched(ref.id)
        if known is not None:
            self._held[ref.id] = known
        here = None if known is None else known.data
        found = self._open[ref.id] = MemoryArrival(ref, chunk_bytes, self._whole.__setitem__, here)
        return found

    def publish(self, partials: Iterable[MemoryArrival]) -> None:
        """See ``ObjectStore.publish``."""
        for one in partials:
            if self._open.pop(one.ref.id, None) is not None:
                self.sizes[one.ref.id] = one.ref.size
                self._held[one.ref.id] = self._pool.share(one.ref.id, self._whole.pop(one.ref.id))

    def used_bytes(self) -> int:
        """See ``ObjectStore.used_bytes``."""
        return sum(self.sizes.values()) + sum(one.ref.size for one in self._open.values())

    def mark_garbage(self, keep: set[str]) -> int:
        """See ``ObjectStore.mark_garbage``; 0, since nothing is left to be swept."""
        for name in self.sizes.keys() - keep:
            self.remove(name)
        for name in self._open.keys() - keep:
            del self._open[name]
            self._held.pop(name, None)
            self._whole.pop(name, None)
        return 0

    def sweep(self) -> None:
        """See ``ObjectStore.sweep``."""

    def rest(self) -> None:
        """Part from the bytes of objects that the coordinator, or the disk, has as well."""
        self._held.clear()

    def retain(self, names: set[str]) -> None:
        """Have these objects on disk, and no others."""
        if not names and not self.directory.is_dir():
            return
        make_private(self.directory)
        with store_errors("write", self.directory):
            here = {file.name for file in retained_files(self.directory)}
            for name in (names & self.sizes.keys()) - here:
                write_new(self.directory / name, self.read(name), durable=False)
            for name in here - names:
                (self.directory / name).unlink(missing_ok=True)

    def _admit(self, ref: ObjectRef) -> None:
        if self.limit_bytes is not None and (used := self.used_bytes()) + ref.size > self.limit_bytes:
            raise StoreError(
                f"objects of the device: {used + ref.size} bytes needed ({used} used + {ref.size} new), "
                f"{self.limit_bytes} allowed",
                remedy="Raise the device's disk budget, or let it hold fewer parts.",
            )


class MemoryStore:
    """A simulated device's ``AgentStore``, in memory; only parts that it retains between rounds are on disk."""

    flushed = True
    free_bytes = None  # unknown

    def __init__(self, directory: Path, device: str, limit_bytes: int | None, pool: Pool) -> None:
        self.directory = directory
        self.set_aside: list[Path] = []
        self.objects = pool.stores[device] = MemoryObjects(directory / "objects", limit_bytes, pool)
        self._work = directory / "work.msgpack"
        self._lasts = self._work.is_file() or bool(written_slots(directory))
        self._packed = False

    def save(self, saved: Saved) -> None:
        """See ``AgentStore.save``."""
        if saved.retained or self._lasts:
            self._lasts = True
            self.objects.retain({ref.id for one in saved.retained for ref in one.manifest.values()})
            make_private(self.directory)
            data = msgspec.msgpack.encode(msgspec.structs.replace(saved, offer=None, update=None))
            with store_errors("write", self._work, len(data)):
                write_new(self._work, data, durable=False)
        if saved.offer is not None:
            self._packed = self._packed or packs(saved.offer)
        elif saved.update is None and not self._packed:  # else the next offer may be the difference to what is here
            self.objects.rest()

    def save_facts(self, facts: DataFacts) -> None:
        """Nothing: the data are read again."""

    def flush(self) -> None:
        """Nothing: a simulated device goes with its machine."""

    def close(self) -> None:
        """Part from the objects."""
        self.objects.rest()


#: A device's objects.
Objects = ObjectStore | MemoryObjects


def packs(offer: Offer) -> bool:
    """True if the coordinator may send a part as its difference to one that the device has."""
    return any(packing != "f32" for _, packing in offer.job.transfer.down)


def saved_in(directory: Path) -> Saved:
    """Parts that a device has retained, and whose objects are there; its update is trained again."""
    work = directory / "work.msgpack"
    file = work if work.is_file() else directory / "work.*"
    try:
        with store_errors("read", file):
            if file == work:
                saved = msgspec.msgpack.decode(work.read_bytes(), type=Saved)
            else:
                saved = read_newest(directory, Saved) or Saved()
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        remedy = f"Delete {directory / 'work.*'} and go on: the device then begins without what it has retained."
        raise StoreError(f"{file} cannot be read: {error}", remedy=remedy) from error
    here = {one.name for one in retained_files(directory / "objects")}
    kept = tuple(
        msgspec.structs.replace(one, manifest={part: ref for part, ref in one.manifest.items() if ref.id in here})
        for one in saved.retained
    )
    return msgspec.structs.replace(saved, retained=kept, offer=None, update=None)


def retained_files(directory: Path) -> list[Path]:
    """The objects that lie in a device's directory."""
    return [file for file in directory.glob("?" * 64) if file.is_file()]
