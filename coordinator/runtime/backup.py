"""Copies of runs in one file, taken also while they go on: the ledger's rows, the objects, what lies beside them.

The file is a plain tar of regular files, without compression (weights have nothing to gain), so that its size bounds
what it unpacks to. Its last member, ``manifest.json``, has every other's size and sha256: nothing counts before it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from coordinator.core.state import State, decode
from coordinator.core.timeouts import Timeouts
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.tables import KEPT
from edgefl import __version__
from edgefl.errors import EdgeFLError, StoreError
from edgefl.plan.job import RunPlan
from edgefl.protocol.topics import check_name
from edgefl.records import Manifest
from edgefl.storage.disk import EVENTS, LEDGER, ledger_of, make_private, note_ledger, store_errors, sync_directory

MANIFEST = "manifest.json"
ROWS = "ledger.jsonl"
#: Names of members: a run, and under it a file of one of these kinds. No part of a path begins with a dot.
_PART = r"[A-Za-z0-9_+][A-Za-z0-9_.+ -]{0,127}"
_MEMBER = re.compile(rf"({_PART})/(objects/[0-9a-f]{{64}}|run\.yaml|{EVENTS}|{ROWS}|(shares|bundles)(/{_PART}){{1,3}})")
_PIECE = 2**20
#: Bounds of what is held in memory: the manifest, a row of the ledger, members.
_MOST_MANIFEST, _MOST_ROW, _MOST_MEMBERS = 2**28, 2**28, 2**20
#: Times that a ledger is read whose objects a running coordinator has deleted meanwhile.
_TRIES = 5
_DAMAGED = "Take another copy: this one was cut off, damaged, or is none of `edgefl-coordinator backup`."


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
        self._file.write(info.tobuf(tarfile.USTAR_FORMAT))
        hashed, left = hashlib.sha256(), size
        while left and (piece := source.read(min(_PIECE, left))):
            hashed.update(piece)
            left -= self._file.write(piece)
        if left:
            raise StoreError(f"{name} became shorter while it was copied", remedy="Take the copy again.")
        self._file.write(bytes(-size % tarfile.BLOCKSIZE))
        return self.files.setdefault(name, Member(size, hashed.hexdigest()))

    def add_file(self, name: str, path: Path) -> Member | None:
        """None: it is gone."""
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


def back_up(directories: Iterable[Path], out: Path) -> Contents:
    """Copy these runs, of which any may be going on, into the file ``out``: whole, or not at all. Raises StoreError."""
    places: dict[str, str] = {}
    new = out.with_name(f".{out.name}.new")
    try:
        with store_errors("write", out), new.open("wb") as file:
            new.chmod(0o600)
            archive = _Archive(file)
            for directory in directories:
                places[_add_run(archive, directory)] = str(directory.resolve())
            contents = Contents(time.time(), __version__, places, dict(archive.files))
            archive.add_bytes(MANIFEST, msgspec.json.encode(contents))
            file.write(bytes(2 * tarfile.BLOCKSIZE))
            file.flush()
            os.fsync(file.fileno())
            new.rename(out)
            sync_directory(out.parent)
    finally:
        new.unlink(missing_ok=True)
    return contents


def _add_run(archive: _Archive, directory: Path) -> str:
    with Ledger(ledger_of(directory), create=False, reading=True) as ledger:
        known = [report.run for report in ledger.runs()]
        run = directory.name if directory.name in known or not known else known[0]
        for path in (directory / "run.yaml", directory / EVENTS, *_beside(directory)):
            archive.add_file(f"{run}/{path.relative_to(directory)}", path)
        for _ in range(_TRIES):
            # What the ledger names was stored before, and may be deleted soon after: looked for on both sides of it.
            archive.add_objects(run, directory / "objects")
            rows = ledger.dump(run)
            archive.add_objects(run, directory / "objects")
            absent = [one for one in _needed(rows) if f"{run}/objects/{one}" not in archive.files]
            if not absent:
                break
        else:
            raise StoreError(f"{directory / 'objects'} lacks {len(absent)} objects that {run} goes on from")
    archive.add_bytes(f"{run}/{ROWS}", b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return run


def _beside(directory: Path) -> list[Path]:
    """Files that a run cannot be resumed without, or that took long to make; nothing that is a link."""
    found = [path for folder in ("shares", "bundles") for path in sorted((directory / folder).rglob("*"))]
    files = (path for path in found if path.is_file() and not path.is_symlink())
    return [path for path in files if _MEMBER.fullmatch(f"run/{path.relative_to(directory)}")]


def _needed(rows: Iterable[tuple[str, msgspec.Struct]]) -> set[str]:
    """Objects that the run goes on from: each stage's last state, and the updates that count in the open round."""
    by_table: dict[str, list[Any]] = {name: [] for name in KEPT}
    for name, row in rows:
        by_table[name].append(row)
    (made,) = by_table["runs"]
    last = {row.stage: row.manifest or {} for row in by_table["rounds"] if row.status == "done"}
    manifests: list[Manifest] = list(last.values()) or [made.manifest]
    whole = State(msgspec.convert(made.plan, RunPlan), Timeouts())
    state = decode(whole, ((row.kind, row.name, row.value) for row in by_table["snapshots"]))
    if state is not None and state.open is not None:
        counted = [one for one in state.open.assignments.values() if one.status == "done"]
        manifests += [one.update.manifest for one in counted if one.update is not None]
    return {ref.id for manifest in manifests for ref in manifest.values()}


def restore(file: Path, into: Path, ledger: str = "") -> Contents:
    """Write the runs of a copy in ``into``, each with a ledger of its own or in the database ``ledger``.

    Nothing is there before all of it has been read and found right; a run that is there stays. Raises StoreError.
    """
    with store_errors("read", file), file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        with store_errors("write", into):
            into.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(into).free < size:
                raise StoreError(f"{into} has no room for the {size} bytes of {file}")
            with tempfile.TemporaryDirectory(dir=into, prefix=".restore-") as staging:
                contents = _unpacked(source, size, Path(staging))
                for run in contents.runs:
                    if (into / run).exists():
                        remedy = "Name another directory with --into, or move that run away."
                        raise StoreError(f"{into / run} is there already", remedy=remedy)
                for run, was in contents.runs.items():
                    _finish(Path(staging) / run, (into / run).resolve(), was, ledger)
                    (Path(staging) / run).rename(into / run)
                sync_directory(into)
    return contents


def _unpacked(source: BinaryIO, size: int, staging: Path) -> Contents:
    """The files of an archive in ``staging``, all of them as the manifest says."""
    files: dict[str, Member] = {}
    while (info := _header(source)) is not None:
        if info.name == MANIFEST:
            if info.size > _MOST_MANIFEST:
                raise StoreError(f"the copy's manifest has {info.size} bytes", remedy=_DAMAGED)
            return _checked(source.read(info.size), files, staging)
        if not _MEMBER.fullmatch(info.name) or info.name in files or len(files) == _MOST_MEMBERS:
            raise StoreError(f"the copy has a member {info.name[:200]!r}, which is none of ours", remedy=_DAMAGED)
        if info.size > size:
            raise StoreError(f"{info.name} is said to be larger than the copy", remedy=_DAMAGED)
        path = staging / info.name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        hashed, left = hashlib.sha256(), info.size
        with path.open("xb") as out:
            while left and (piece := source.read(min(_PIECE, left))):
                hashed.update(piece)
                left -= out.write(piece)
            os.fsync(out.fileno())
        source.read(-info.size % tarfile.BLOCKSIZE)
        files[info.name] = Member(info.size - left, hashed.hexdigest())
    raise StoreError("the copy ends before its manifest", remedy=_DAMAGED)


def _header(source: BinaryIO) -> tarfile.TarInfo | None:
    """The next member's; None at the end. Extensions of the format, links and devices are refused."""
    block = source.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or not any(block):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise StoreError(f"the copy cannot be read: {error}", remedy=_DAMAGED) from error
    if info.type != tarfile.REGTYPE or info.size < 0:
        raise StoreError(f"the copy has a member {info.name[:200]!r} that is no file", remedy=_DAMAGED)
    return info


def _checked(manifest: bytes, files: Mapping[str, Member], staging: Path) -> Contents:
    try:
        contents = msgspec.json.decode(manifest, type=Contents)
        runs = {check_name("run", run) for run in contents.runs}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, EdgeFLError) as error:
        raise StoreError(f"the copy's manifest cannot be read: {error}", remedy=_DAMAGED) from error
    differing = [name for name in {**files, **contents.files} if files.get(name) != contents.files.get(name)]
    differing += [name for name in files if "/objects/" in name and files[name].sha256 != name[-64:]]
    if differing or contents.form != 1 or runs != {name.partition("/")[0] for name in files}:
        raise StoreError(f"the copy is damaged: {', '.join(differing[:5]) or 'its runs'}", remedy=_DAMAGED)
    if absent := [run for run in runs if not (staging / run / ROWS).is_file()]:
        raise StoreError(f"the copy has no ledger of {', '.join(absent)}", remedy=_DAMAGED)
    return contents


def _finish(staged: Path, place: Path, was: str, ledger: str) -> None:
    """Make a run's directory of its unpacked files: the ledger, and paths inside ``was`` as they are in ``place``."""
    make_private(staged)
    if (file := staged / "run.yaml").is_file():
        file.write_text(file.read_text(encoding="utf-8").replace(f"{was}/", f"{place}/"), encoding="utf-8")
    with Ledger(ledger or staged / LEDGER) as opened, (staged / ROWS).open("rb") as rows:
        opened.take_in(place.name, _rows(rows, f"{was}/", f"{place}/"))
    (staged / ROWS).unlink()
    if ledger:
        note_ledger(staged, ledger)


def _rows(source: BinaryIO, was: str, now: str) -> Iterator[msgspec.Struct]:
    while line := source.readline(_MOST_ROW):
        try:
            table, values = msgspec.json.decode(line, type=tuple[str, dict[str, Any]])
            if table in {"runs", "bundles"}:
                values = _moved(values, was, now)
            yield msgspec.convert(values, KEPT[table])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
            raise StoreError(f"a row of the copy's ledger makes no sense: {error}", remedy=_DAMAGED) from error


def _moved(value: Any, was: str, now: str) -> Any:
    if isinstance(value, dict):
        return {key: _moved(one, was, now) for key, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, was, now) for one in value]
    return now + value.removeprefix(was) if isinstance(value, str) and value.startswith(was) else value
