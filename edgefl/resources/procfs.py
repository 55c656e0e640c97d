"""Memory of a process as the kernel keeps it, from /proc. Standard library only: supervisors import this."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def status_bytes(field: str, pid: int | str = "self", proc: Path = _PROC) -> int | None:
    """A memory field of /proc/<pid>/status, such as VmRSS or VmHWM, in bytes; None when there is none."""
    wanted = field.encode()
    for line in _read(proc, pid, "status").splitlines():
        name, _, value = line.partition(b":")
        if name == wanted:
            return int(value.split()[0]) * 1024  # the kernel prints kB
    return None


def resident_bytes(pid: int | str = "self", proc: Path = _PROC) -> int | None:
    """Resident size; None when the process is gone. Reads statm, which is four times cheaper than status."""
    fields = _read(proc, pid, "statm").split()
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else None


def started_at(pid: int, proc: Path = _PROC) -> int | None:
    """When a process started, in clock ticks since boot: with the pid it names one process for ever. None: gone."""
    after_name = _read(proc, pid, "stat").rpartition(b")")[2].split()  # the name may hold blanks and brackets
    return int(after_name[19]) if len(after_name) > 19 else None


def _read(proc: Path, pid: int | str, file: str) -> bytes:
    """Empty when the process is gone. Without pathlib and codecs: a ceiling reads fifty times a second."""
    try:
        descriptor = os.open(f"{proc}/{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
