"""A folder of bundles takes the place of an earlier one as a whole, and never of anything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from edgefl.errors import ExportError
from edgefl.export.manifest import INDEX_FILE, INDEX_FORMAT, MAX_MANIFEST_BYTES, Index
from edgefl.storage.disk import read_at_most, sync_directory


def check_target(directory: Path) -> None:
    """An existing target may only hold an earlier export: it will be replaced as a whole."""
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


def publish(building: Path, directory: Path) -> None:
    """Put the new folder in the place of the old one, which is there until the new one is."""
    old = building.with_name(f"{building.name}.old")
    replaced = directory.exists()
    if replaced:
        directory.rename(old)
    try:
        building.rename(directory)
    except BaseException:
        if replaced:
            old.rename(directory)
        raise
    sync_directory(directory.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
