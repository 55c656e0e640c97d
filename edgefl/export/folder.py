"""Folders of an export: built beside their places and moved there once complete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from edgefl.errors import ExportError
from edgefl.export.bundle_format import INDEX_FILE, INDEX_FORMAT, MAX_MANIFEST_BYTES, Index
from edgefl.export.precision_record import EXACT, Precision
from edgefl.storage.disk import read_at_most, store_errors, sync_directory


def folder_of(directory: Path, kind: Precision) -> Path:
    """Folder for the bundles of a precision, such as ``bundles`` and ``bundles-int8``."""
    return directory if kind == EXACT else directory.with_name(f"{directory.name}-{kind}")


@contextmanager
def replaced(places: Sequence[Path]) -> Iterator[list[Path]]:
    """New empty folders to fill in the block, then moved to ``places``; none is moved after an error.

    Raises ExportError when something else is in a place, StoreError when the disk refuses.
    """
    places = [place.resolve() for place in places]
    for place in places:
        check_target(place)
    building: list[Path] = []
    with store_errors("write bundles to", places[0]):
        try:
            for place in places:
                place.parent.mkdir(parents=True, exist_ok=True)
                building.append(Path(tempfile.mkdtemp(prefix=f".{place.name}.new-", dir=place.parent)))
            yield building
            publish(building, places)
        except BaseException:
            for new in building:
                shutil.rmtree(new, ignore_errors=True)
            raise


def check_target(directory: Path) -> None:
    """Raise ExportError for a target with anything but an earlier export, since all of it is replaced."""
    if not directory.exists():
        return
    other = f"{directory} exists and is not an earlier export"
    remedy = "Name a new or empty directory with -o DIR."
    if not directory.is_dir():
        raise ExportError(other, remedy=remedy)
    names = {path.name for path in directory.iterdir()}
    if not names:
        return
    try:
        index = msgspec.json.decode(read_at_most(directory / INDEX_FILE, MAX_MANIFEST_BYTES), type=Index)
    except (OSError, ValueError):
        raise ExportError(other, remedy=remedy) from None
    known = {INDEX_FILE, *(row.name for row in index.bundles)}
    if index.format != INDEX_FORMAT or names - known:
        raise ExportError(f"{other}: it holds {', '.join(sorted(names - known))[:200]}", remedy=remedy)


def publish(building: Sequence[Path], places: Sequence[Path]) -> None:
    """Replace old folders by new ones; restore the old ones if a move fails. Raises OSError."""
    there: list[Path] = []
    with ExitStack() as back:
        for new, place in zip(building, places, strict=True):
            new.chmod(0o755)  # mkdtemp's 0700 would keep a server of another user out
            if place.exists():
                old = new.with_name(f"{new.name}.old")
                place.rename(old)
                back.callback(old.rename, place)
                there.append(old)
            new.rename(place)
            back.callback(place.rename, new)
            sync_directory(place.parent)
        back.pop_all()
    for old in there:
        shutil.rmtree(old, ignore_errors=True)
