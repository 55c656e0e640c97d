"""Memory limits of control groups: this process' own group and its ancestors, of versions 1 and 2.

A container shows its own group as the root of the hierarchy, a service manager's unit lies below it, and either version
may hold the memory controller: whatever sets a limit counts. Page cache that was not touched for a while is
used memory to the kernel, which gives it back before it refuses anything, so it is free here. No torch and no numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_ROOT = Path("/")


class Memory(NamedTuple):
    """Memory, in bytes, of the machine or the tightest control group."""

    total_bytes: int
    free_bytes: int


class _Files(NamedTuple):
    """Names of the memory controller's files in one version."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str  # field of memory.stat, with what lies in the group's children


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Above memory.high the kernel slows a group down until it is of no use, so that it is a limit, too.
_V2 = _Files(("memory.high", "memory.max"), "memory.current", "inactive_file")


def memory(root: Path = _ROOT) -> Memory:
    """Memory that this process may use: in total, and free now. ``root``: of the file system with /proc and /sys."""
    machine = psutil.virtual_memory()
    return within(machine.total, machine.available, root)


def within(total: int, free: int, root: Path = _ROOT) -> Memory:
    """``total`` and ``free`` bytes of the machine after every limit on this process."""
    for group, files in _groups(root):
        limit = min((size for name in files.limits if (size := _number(group / name)) is not None), default=None)
        if limit is None:
            continue
        used = (_number(group / files.used) or 0) - _reclaimable(group, files)
        total, free = min(total, limit), max(0, min(free, limit - used))
    return Memory(total, free)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Groups of this process in each possible memory hierarchy, root first."""
    hierarchies = root / "sys/fs/cgroup"
    own = _own(root)
    for place, files, path in (
        (hierarchies, _V2, own.get("")),
        (hierarchies / "unified", _V2, own.get("")),  # beside version 1
        (hierarchies / "memory", _V1, own.get("memory")),
    ):
        yield place, files
        group = place
        # A path may be the host's, where the group is mounted as the root: then there is nothing below it.
        for name in PurePosixPath(path or "/").parts[1:]:
            group /= name
            if name != "..":
                yield group, files


def _own(root: Path) -> dict[str, str]:
    """Controller -> path of this process' group; "" for version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _reclaimable(group: Path, files: _Files) -> int:
    """Page cache that the kernel gives back first."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{files.reclaimable} ")), 0)


def _number(file: Path) -> int | None:
    """A file's number of bytes; None without the file, and where it says "max": no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
