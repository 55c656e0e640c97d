"""A public data set from its archive to the folder that ``edgefl.data.named`` reads."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgefl.data.arrays import Array, write_npz
from edgefl.data.named import data_home
from edgefl.errors import DataError
from edgefl.fetch import hapt
from edgefl.fetch.archive import Archive
from edgefl.fetch.download import Progress, Wanted, download, file_sha256
from edgefl.fetch.registry import Source
from edgefl.storage.disk import hold_directory, store_errors, write_new

#: Name of a converter -> members that it reads, and the conversion itself.
CONVERTERS: dict[str, tuple[str, Callable[[Archive], dict[str, Array]]]] = {"hapt": (hapt.MEMBERS, hapt.convert)}
#: Beside the arrays: where they come from, under which licence, by which hash.
ORIGIN = "origin.json"
#: Archives on their way, below the folder of data sets.
PARTS = ".fetch"
#: Of an archive of another hash than the known one: as much again, since it is another file.
_SLACK = 2


class FetchOptions(NamedTuple):
    """A fetch as the user asks for it.

    ``into``: the folder of data sets, default EDGEFL_DATA, else the user's own; ``place``: another address, or a file
    on this disk. ``sha256``: the archive's, as the user knows it, in place of the known one; ``first_seen``: take
    whatever comes, and tell its hash.
    """

    into: Path | None = None
    place: str = ""
    sha256: str = ""
    first_seen: bool = False


class Fetched(NamedTuple):
    """A fetched data set: its folder, the archive's sha256, and whether it was there already."""

    folder: Path
    sha256: str = ""
    already: bool = False


def fetch(source: Source, options: FetchOptions, progress: Progress) -> Fetched:
    """Download, check and convert a data set. Raises DataError, StoreError.

    The folder appears whole or not at all, and the archive is deleted then. One that is there already is left alone.
    """
    home = options.into or data_home()
    folder, work = home / source.name, home / PARTS / source.name
    if folder.exists():
        return Fetched(folder, already=True)
    sha256 = _expected(source, options)
    with store_errors("create", work):
        work.mkdir(parents=True, exist_ok=True)
    with hold_directory(work, what="another fetch goes on", remedy="Wait for its end."):
        archive = _archive(source, options, sha256, work, progress)
        found = sha256 or file_sha256(archive)
        pattern, convert = CONVERTERS[source.converter]
        with Archive(archive, pattern) as opened:
            arrays = convert(opened)
        new = work / "new"
        shutil.rmtree(new, ignore_errors=True)
        write_npz(new / f"{source.name}.npz", arrays)
        origin = {**source.model_dump(), "sha256": found, "url": options.place or source.url}
        with store_errors("write", folder):
            write_new(new / ORIGIN, msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n")
            new.rename(folder)
    shutil.rmtree(work, ignore_errors=True)
    return Fetched(folder, found)


def _expected(source: Source, options: FetchOptions) -> str:
    """The sha256 that the archive must have; "": the user takes whatever comes. Raises DataError."""
    given = options.sha256.strip().lower()
    if given and not re.fullmatch(r"[0-9a-f]{64}", given):
        raise DataError(f"{options.sha256[:80]!r} is no sha256", remedy="Give its 64 hexadecimal digits.")
    if given or options.first_seen:
        return given
    if source.sha256 is None:
        raise DataError(
            f"{source.name}: the archive's sha256 is not known to EdgeFL",
            remedy="Give it by --sha256 if you know it; --accept-first-seen takes what comes and tells its sha256.",
        )
    return source.sha256


def _archive(source: Source, options: FetchOptions, sha256: str, work: Path, progress: Progress) -> Path:
    """The archive on this disk, checked. Raises DataError, StoreError."""
    known = sha256 == source.sha256
    place, limit = options.place, _SLACK * source.bytes
    if place and "://" not in place:
        found = Path(place)
        if not found.is_file():
            raise DataError(f"{place}: there is no such file", remedy="Name the archive as downloaded by hand.")
        if (size := found.stat().st_size) > limit:
            text = f"{place}: has {size} bytes, more than the limit of {limit}, twice the known archive's"
            raise DataError(text, remedy="Name the archive as downloaded by hand.")
        if sha256 and (has := file_sha256(found)) != sha256:
            remedy = "Give that of the file by --sha256 if you trust it."
            raise DataError(f"{place}: has the sha256 {has}, not {sha256}", remedy=remedy)
        return found
    wanted = Wanted(place or source.url, limit, source.bytes if known else None, sha256)
    target = work / f"{hashlib.sha256(wanted.url.encode()).hexdigest()}.zip"  # what another address left is not taken
    if not target.is_file() or (sha256 and file_sha256(target) != sha256):
        download(wanted, target, progress)
    return target
