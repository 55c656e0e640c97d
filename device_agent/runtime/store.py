"""State directory of an agent: its identity, the attempt in hand, the unsent update, the data's description.

Layout of the state directory::

    lock           held while an agent runs here
    identity.json  device name and fleet this directory belongs to
    work.0 … 3     values.Saved, in slots
    work.msgpack   the same of an earlier version or of a simulated device; counts while it is there
    work.copy      its copy as of the last sync; both go with the first save
    facts.json     values.DataFacts and the fingerprint of the data they were read from
    objects/       edgefl.storage.objects.ObjectStore
    trainer.log

Files are replaced whole, or slots written in turn, so that whatever ends the process leaves the old or the new.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from device_agent.core.state import DataFacts, Saved
from device_agent.runtime.slots import MAX_FILE_BYTES, Slots, read_newest, written_slots
from edgefl.errors import StoreError
from edgefl.storage.disk import make_private, read_at_most, store_errors, sweep_temporaries, sync_directory, write_new
from edgefl.storage.objects import ObjectStore

T = TypeVar("T")


class Owner(msgspec.Struct, frozen=True):
    """Owner of a state directory: device and fleet."""

    device: str = ""
    fleet: str = ""


class _Facts(msgspec.Struct, frozen=True):
    fingerprint: str = ""
    facts: DataFacts = DataFacts()


class AgentStore:
    """The state directory of one agent, locked while it is open. Raises StoreError when it cannot be used."""

    def __init__(self, directory: Path, owner: Owner, limit_bytes: int | None = None, *, fingerprint: str = "") -> None:
        self.directory = directory
        self.fingerprint = fingerprint  # of the local data
        self.set_aside: list[Path] = []  # files that could not be understood, under their new names
        make_private(directory)
        with store_errors("open", directory):
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(owner)
            sweep_temporaries(directory)
            self._slots = Slots(directory)
            self._earlier = [file for name in ("work.msgpack", "work.copy") if (file := directory / name).exists()]
            self.objects = ObjectStore(directory / "objects", limit_bytes, durable=False)
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self, owner: Owner) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"{self.directory} is in use by another agent", remedy="Stop it, or give each agent its own --state."
            ) from error
        known = self._read(self.directory / "identity.json", Owner)
        if known is not None and known != owner:
            raise StoreError(
                f"{self.directory} belongs to device {known.device!r} of fleet {known.fleet!r}, "
                f"not to {owner.device!r} of {owner.fleet!r}",
                remedy="Start it with that --device and --fleet, or give this device a --state of its own.",
            )
        if known is None:
            self._write(self.directory / "identity.json", msgspec.json.encode(owner))

    def close(self) -> None:
        """Release the directory for other processes. Raises StoreError if the last save cannot be flushed."""
        if self._lock < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._lock)
            self._lock = -1

    def load(self) -> Saved:
        """The saved work. Without any there is none to do: the coordinator offers again."""
        for file in self._earlier:
            if (saved := self._read(file, Saved)) is not None:
                return saved
        try:
            return read_newest(self.directory, Saved) or Saved()
        except ValueError:
            # The newest last: a kill in between leaves nothing older to be believed.
            for file in sorted(written_slots(self.directory), key=lambda slot: slot.stat().st_mtime_ns):
                self._set_aside(file)
            return Saved()

    def load_complete(self) -> Saved:
        """The saved work without updates whose objects are gone, which are trained again.

        Retained parts lost with power count as never retained.
        """
        saved, has = self.load(), self.objects.has
        here = [{part: ref for part, ref in one.manifest.items() if has(ref.id)} for one in saved.retained]
        kept = tuple(replace(one, manifest=found) for one, found in zip(saved.retained, here, strict=True))
        whole = saved.update is not None and all(has(ref.id) for ref in saved.update.manifest.values())
        return replace(saved, retained=kept, update=saved.update if whole else None)

    def save(self, saved: Saved) -> None:
        """Save the work for the next start, however this process ends. Raises StoreError.

        Safe from a loss of power only once ``flush`` has returned.
        """
        self._slots.save(msgspec.msgpack.encode(saved))
        if self._earlier:
            self.flush()
            with store_errors("remove", self._earlier[0]):
                for file in reversed(self._earlier):  # what is left, if not all can go, is the newer
                    file.unlink(missing_ok=True)
                sync_directory(self.directory)
            self._earlier = []

    @property
    def free_bytes(self) -> int:
        """Free space of the disk."""
        return shutil.disk_usage(self.directory).free

    @property
    def flushed(self) -> bool:
        """True if the last save is on disk."""
        return self._slots.flushed

    def flush(self) -> None:
        """Flush the last save to disk. Callable from any thread. Raises StoreError."""
        self._slots.flush()

    def load_facts(self) -> DataFacts | None:
        """The saved description of the data, None if the data has changed since."""
        known = self._read(self.directory / "facts.json", _Facts)
        return known.facts if known is not None and known.fingerprint == self.fingerprint else None

    def save_facts(self, facts: DataFacts) -> None:
        """Save the description of the data. Raises StoreError."""
        self._write(self.directory / "facts.json", msgspec.json.encode(_Facts(self.fingerprint, facts)))

    def _write(self, file: Path, data: bytes) -> None:
        with store_errors("write", file, len(data)):
            write_new(file, data)

    def _read(self, file: Path, kind: type[T]) -> T | None:
        decode = msgspec.json.decode if file.suffix == ".json" else msgspec.msgpack.decode
        with store_errors("read", file):
            try:
                return decode(read_at_most(file, MAX_FILE_BYTES), type=kind)
            except FileNotFoundError:
                return None
            except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
                # Renaming makes half-written files impossible; a damaged disk or another version remains.
                self._set_aside(file)
                return None

    def _set_aside(self, file: Path) -> None:
        with store_errors("rename", file):
            self.set_aside.append(file.replace(file.with_suffix(file.suffix + ".damaged")))


def owner_of(directory: Path) -> Owner | None:
    """Owner of a state directory; None if no agent has run there. Raises StoreError."""
    with store_errors("read", directory / "identity.json"):
        try:
            return msgspec.json.decode(read_at_most(directory / "identity.json", MAX_FILE_BYTES), type=Owner)
        except (FileNotFoundError, ValueError):
            return None


def fingerprint(source: str, *more: str) -> str:
    """Hash to detect changed data: path, size and time of the file, or of a folder's manifest."""
    path = Path(source)
    file = path / "manifest.jsonl" if path.is_dir() else path
    try:
        status = file.stat()
        seen = f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        seen = "absent"
    return hashlib.sha256("\0".join([source, seen, *more]).encode()).hexdigest()
