"""Backups of runs, also of running ones: ledger rows, objects and other files in one tar.

The file is a plain tar of regular files, without compression (weights have nothing to gain), so that its size bounds
what it unpacks to. Its last member, ``manifest.json``, has every other's size and sha256: nothing counts before it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from coordinator.core.state import State, decode
from coordinator.core.timeouts import Timeouts
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.tables import KEPT
from edgefl import __version__
from edgefl.aggregation.history import KEY as MEMORY
from edgefl.aggregation.history import Memory
from edgefl.errors import StoreError
from edgefl.plan.job import RunPlan
from edgefl.records import Manifest
from edgefl.storage.disk import EVENTS, NewFile, ledger_of, store_errors, sync_directory
from edgefl.storage.packs import PACKS, Packs

MANIFEST = "manifest.json"
ROWS = "ledger.jsonl"
#: Names of members: a run, and under it a file of one of these kinds. No part of a path begins with a dot.
_PART = r"[A-Za-z0-9_+][A-Za-z0-9_.+ -]{0,127}"
MEMBER = re.compile(
    rf"({_PART})/(objects/[0-9a-f]{{64}}|run\.yaml|{EVENTS}|{ROWS}|(shares|bundles(?:-f16|-int8)?)(/{_PART}){{1,4}})"
)
PIECE = 2**20
#: Times that a ledger is read whose objects a running coordinator has deleted meanwhile.
_TRIES = 5
_SET_APART = "Copy it by hand, and move it out of the run's directory meanwhile."


class Member(msgspec.Struct, frozen=True):
    """A file in the archive."""

    size: int
    sha256: str


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest. ``runs``: run -> the directory it was in, which its rows may name."""

    made_at: float
    version: str
    runs: dict[str, str]
    files: dict[str, Member]
    form: int = 1


class _Archive:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.files: dict[str, Member] = {}

    def add(self, name: str, source: BinaryIO, size: int) -> Member:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        try:
            self._file.write(info.tobuf(tarfile.USTAR_FORMAT))
        except ValueError as error:  # beyond 8 GiB, or 255 characters
            raise StoreError(f"{name} ({size} bytes) does not fit into a copy: {error}", remedy=_SET_APART) from error
        hashed, left = hashlib.sha256(), size
        while left and (piece := source.read(min(PIECE, left))):
            hashed.update(piece)
            left -= self._file.write(piece)
        if left:
            raise StoreError(f"{name} became shorter while it was copied", remedy="Take the copy again.")
        self._file.write(bytes(-size % tarfile.BLOCKSIZE))
        return self.files.setdefault(name, Member(size, hashed.hexdigest()))

    def add_file(self, name: str, path: Path) -> Member | None:
        """Add a file; None if it no longer exists."""
        try:
            with path.open("rb") as source:
                return self.add(name, source, os.fstat(source.fileno()).st_size)
        except FileNotFoundError:
            return None

    def add_bytes(self, name: str, data: bytes) -> None:
        self.add(name, io.BytesIO(data), len(data))

    def add_objects(self, run: str, store: Path) -> None:
        for path in sorted(store.glob("[0-9a-f]" * 64)):
            name = f"{run}/objects/{path.name}"
            if name not in self.files and (added := self.add_file(name, path)) and added.sha256 != path.name:
                raise StoreError(f"{path} is damaged: its sha256 is not its name", remedy="See to the disk first.")
        packs = Packs(store / PACKS)
        packs.look()
        for one in packs.names():
            name = f"{run}/objects/{one}"
            if name not in self.files and (data := packs.read(one)) is not None:
                self.add_bytes(name, data)


def back_up(directories: Iterable[Path], out: Path) -> Contents:
    """Back up runs, also running ones, to the file ``out``, written whole or not at all. Raises StoreError.

    Runs that have not begun are left out.
    """
    places: dict[str, str] = {}
    with store_errors("write", out):
        new = NewFile(out.parent, b"", 0o600)
        try:
            with open(new.descriptor, "wb", closefd=False) as file:
                archive = _Archive(file)
                for directory in directories:
                    if run := _add_run(archive, directory):
                        places[run] = str(directory.resolve())
                contents = Contents(time.time(), __version__, places, dict(archive.files))
                archive.add_bytes(MANIFEST, msgspec.json.encode(contents))
                file.write(bytes(2 * tarfile.BLOCKSIZE))
            os.fsync(new.descriptor)
            new.path.rename(out)
        finally:
            new.close()
        sync_directory(out.parent)
    return contents


def _add_run(archive: _Archive, directory: Path) -> str:
    """Add a run to the archive; its id, or "" if the ledger has no run yet."""
    place = ledger_of(directory)
    with Ledger(place, create=False) as ledger:
        known = [report.run for report in ledger.runs()]
        if directory.name in known:
            run = directory.name
        elif isinstance(place, Path) and known:  # its own, in a directory that was renamed
            run = known[0]
        else:
            return ""
        for path in (directory / "run.yaml", directory / EVENTS, *_beside(directory)):
            archive.add_file(f"{run}/{path.relative_to(directory)}", path)
        for _ in range(_TRIES):
            # What the ledger names was stored before, and may be deleted soon after: looked for on both sides of it.
            archive.add_objects(run, directory / "objects")
            rows = ledger.dump(run)
            archive.add_objects(run, directory / "objects")
            absent = [
                one for one in _needed(rows, directory / "objects") if f"{run}/objects/{one}" not in archive.files
            ]
            if not absent:
                break
        else:
            raise StoreError(f"{directory / 'objects'} lacks {len(absent)} objects that {run} goes on from")
    archive.add_bytes(f"{run}/{ROWS}", b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return run


def _beside(directory: Path) -> list[Path]:
    """Shares and exported bundles of a run; without hidden files and links."""
    folders = [directory / "shares", *sorted(directory.glob("bundles*"))]
    found = [path for folder in folders for path in sorted(folder.rglob("*"))]
    files = [path for path in found if path.is_file() and not path.is_symlink()]
    names = {path: str(path.relative_to(directory)) for path in files}
    seen = [path for path in files if "/." not in names[path]]
    if odd := [path for path in seen if not MEMBER.fullmatch(f"run/{names[path]}")]:
        raise StoreError(f"{odd[0]} has a name that a copy does not take", remedy=_SET_APART)
    return seen


def _needed(rows: Iterable[tuple[str, msgspec.Struct]], objects: Path) -> set[str]:
    """Ids of the objects for resuming the run.

    Of each stage's last state, the best of the stage under way, and updates that count in the open round or later.
    """
    by_table: dict[str, list[Any]] = {name: [] for name in KEPT}
    for name, row in rows:
        by_table[name].append(row)
    (made,) = by_table["runs"]
    last = {row.stage: row.manifest or {} for row in by_table["rounds"] if row.status == "done"}
    manifests: list[Manifest] = list(last.values()) or [made.manifest]
    kept = manifests[-1].get(MEMORY)
    if kept is not None and (objects / kept.id).exists():  # one that is gone is looked for again, as the others
        manifests.append(msgspec.json.decode((objects / kept.id).read_bytes(), type=Memory).stage.state)
    whole = State(msgspec.convert(made.plan, RunPlan), Timeouts())
    state = decode(whole, ((row.kind, row.name, row.value) for row in by_table["snapshots"]))
    if state is not None:
        counted = [*state.assignments.values(), *state.buffered.values()]
        manifests += [one.update.manifest for one in counted if one.status == "done" and one.update is not None]
    return {ref.id for manifest in manifests for ref in manifest.values()}
