"""Memory of a process as the kernel keeps it, from /proc. Standard library only: supervisors import this."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def status_bytes(field: str, pid: int | str = "self", proc: Path = _PROC) -> int | None:
    """A memory field of /proc/<pid>/status, such as VmRSS or VmHWM, in bytes; None when there is none."""
    try:
        text = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # the kernel prints kB
    return None


def resident_bytes(pid: int | str = "self", proc: Path = _PROC) -> int | None:
    """Resident size; None when the process is gone. Reads statm, which is four times cheaper than status."""
    try:
        fields = (proc / str(pid) / "statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else None


def started_at(pid: int, proc: Path = _PROC) -> int | None:
    """When a process started, in clock ticks since boot: with the pid it names one process for ever. None: gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()  # the name may hold blanks and brackets
    return int(after_name[19]) if len(after_name) > 19 else None
