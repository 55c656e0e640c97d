"""The one door to files of a data set: regular ones, of bounded size, inside its folder.

A pipe waits for a writer, a device has no end, and a link may lead to a file that is no part of the data.
"""

from __future__ import annotations

import stat
from pathlib import Path

from edgefl.errors import DataError

#: For a file that is read line by line, with limits of its own.
ANY_SIZE = 2**63
_REMEDY = "Give a file itself: no pipe, device, socket, or link out of its folder."


def regular_file(path: Path, limit: int, name: str = "") -> Path:
    """``path``, where a regular file of at most ``limit`` bytes is; ``name``: for messages. Raises DataError."""
    name = name or str(path)
    try:
        info = path.stat()
    except FileNotFoundError:
        raise DataError(f"{name}: there is no such file", remedy="Check the path.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{name[:200]}: cannot be opened: {error}") from None
    if not stat.S_ISREG(info.st_mode):
        raise DataError(f"{name}: is not a file, but {_kind(info.st_mode)}", remedy=_REMEDY)
    if info.st_size > limit:
        raise DataError(f"{name}: has {info.st_size} bytes, more than the limit of {limit}", remedy="Split it.")
    return path


def regular_file_inside(root: Path, name: str, limit: int) -> Path:
    """The regular file ``name`` in the folder ``root``, links followed. Raises DataError, also for one outside."""
    try:
        path = (root / name).resolve()
        outside = not path.is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{name[:200]}: cannot be opened: {error}") from None
    if outside:
        raise DataError(f"{name}: leads out of the data set's folder", remedy=_REMEDY)
    return regular_file(path, limit, name)


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")
