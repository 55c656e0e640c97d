"""Restore of runs from a backup: nothing is in place before all of it was read and verified."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from coordinator.ledger.ledger import Ledger, made_of
from coordinator.ledger.tables import KEPT, MADE, RunRow, SnapshotRow
from coordinator.runtime.backup import MANIFEST, MEMBER, PIECE, ROWS, Contents, Member
from edgefl.errors import EdgeFLError, StoreError
from edgefl.protocol.topics import check_name
from edgefl.storage.disk import (
    LEDGER,
    gone_if_empty,
    hold_directory,
    is_held,
    ledger_of,
    make_directories,
    make_private,
    note_ledger,
    store_errors,
    sync_directory,
)

#: Bounds of what is held in memory: the manifest, a row of the ledger, members.
_MOST_MANIFEST, _MOST_ROW, _MOSTMEMBERS = 2**28, 2**28, 2**20
_DAMAGED = "Take another copy: this one was cut off, damaged, or is none of `edgefl-coordinator backup`."


def restore(file: Path, into: Path, ledger: str = "") -> Contents:
    """Write the runs of a copy in ``into``, each with a ledger of its own or in the database ``ledger``.

    Nothing is there before all of it has been read and found right; a run that is there stays. Raises StoreError.
    """
    with store_errors("read", file), file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        with store_errors("write", into), gone_if_empty(make_directories(into)):
            if shutil.disk_usage(into).free < size:
                raise StoreError(f"{into} has no room for the {size} bytes of {file}")
            with tempfile.TemporaryDirectory(dir=into, prefix=".restore-") as staging:
                contents = _unpacked(source, size, Path(staging))
                for run in contents.runs:
                    _check_free(into / run)
                for run, was in contents.runs.items():
                    _finish(Path(staging) / run, (into / run).resolve(), was, ledger)
                with contextlib.ExitStack() as undo:
                    for run, was in contents.runs.items():
                        place = into / run
                        if place.exists():  # what a restore that was cut off has left
                            shutil.rmtree(place)
                        (Path(staging) / run).rename(place)
                        undo.callback(shutil.rmtree, place)
                        if ledger:  # last, and at once: what is in a database is whole
                            with hold_directory(place):
                                _take_in(place, place.resolve(), was, ledger)
                            undo.callback(_forget, ledger, run)
                    undo.pop_all()
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
        if not MEMBER.fullmatch(info.name) or info.name in files or len(files) == _MOSTMEMBERS:
            raise StoreError(f"the copy has a member {info.name[:200]!r}, which is none of ours", remedy=_DAMAGED)
        if info.size > size:
            raise StoreError(f"{info.name} is said to be larger than the copy", remedy=_DAMAGED)
        path = staging / info.name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        hashed, left = hashlib.sha256(), info.size
        with path.open("xb") as out:
            while left and (piece := source.read(min(PIECE, left))):
                hashed.update(piece)
                left -= out.write(piece)
            os.fsync(out.fileno())
        source.read(-info.size % tarfile.BLOCKSIZE)
        files[info.name] = Member(info.size - left, hashed.hexdigest())
    raise StoreError("the copy ends before its manifest", remedy=_DAMAGED)


def _header(source: BinaryIO) -> tarfile.TarInfo | None:
    """Header of the next member; None at the end. Raises StoreError for format extensions, links and devices."""
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


def _check_free(place: Path) -> None:
    """Raise StoreError if a run is at ``place``; remains of an interrupted restore do not count."""
    if place.exists() and not _is_cut_off(place):
        remedy = "Name another directory with --into, or move that run away."
        raise StoreError(f"{place} is there already", remedy=remedy)


def _is_cut_off(place: Path) -> bool:
    """True for remains of a restore interrupted before its rows were in the database."""
    if not (place / ROWS).is_file() or is_held(place):
        return False
    with Ledger(ledger_of(place)) as opened:
        return all(known.run != place.name for known in opened.runs())


def _finish(staged: Path, place: Path, was: str, ledger: str) -> None:
    """Make a run's directory of its unpacked files: paths inside ``was`` are now in ``place``; and its own ledger."""
    make_private(staged)
    if (file := staged / "run.yaml").is_file():
        file.write_text(file.read_text(encoding="utf-8").replace(f"{was}/", f"{place}/"), encoding="utf-8")
    if ledger:
        note_ledger(staged, ledger)
    else:
        _take_in(staged, place, was, staged / LEDGER)


def _take_in(at: Path, place: Path, was: str, ledger: str | Path) -> None:
    """Insert the backup's rows, in the directory ``at``, into the ledger."""
    with Ledger(ledger) as opened, (at / ROWS).open("rb") as rows:
        opened.take_in(place.name, _rows(rows, f"{was}/", f"{place}/", place.name))
    (at / ROWS).unlink()


def _forget(ledger: str, run: str) -> None:
    with Ledger(ledger) as opened:
        opened.forget(run)


def _rows(source: BinaryIO, was: str, now: str, run: str) -> Iterator[msgspec.Struct]:
    """The backup's rows for a run made now, with paths moved from ``was`` to ``now``.

    Devices may have closed attempts that the copy is yet to make, and drop offers of them; those of a run that was made
    later they take, and refuse the original's from then on.
    """
    started, pieces = None, list[SnapshotRow]()
    for row in _read(source, was, now):
        if isinstance(row, SnapshotRow):
            pieces.append(row)
            continue
        started = row if isinstance(row, RunRow) else started
        yield row
    if started is None:
        raise StoreError(f"the copy's ledger has no run {run}", remedy=_DAMAGED)
    last, earlier = made_of(started, pieces)
    made_ms = max(round(1000 * time.time()), last + 1)  # also by a clock that is behind the original's
    for piece in pieces:
        yield msgspec.structs.replace(piece, value=_made(piece.value, run, made_ms))
    yield SnapshotRow(MADE, "", [*earlier[1:], *([last] if earlier else []), made_ms])


def _made(value: Any, run: str, made_ms: int) -> Any:
    """``value`` with ``made_ms`` set in all attempts of the run, at any depth."""
    if isinstance(value, dict):
        changed = {key: _made(one, run, made_ms) for key, one in value.items()}
        return {**changed, "made_ms": made_ms} if value.get("run") == run and "made_ms" in value else changed
    return [_made(one, run, made_ms) for one in value] if isinstance(value, list) else value


def _read(source: BinaryIO, was: str, now: str) -> Iterator[msgspec.Struct]:
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
