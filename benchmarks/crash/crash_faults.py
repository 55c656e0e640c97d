"""What else befalls a process of the crash matrix: a full or read-only disk, half-written files, a clock that jumps.

Where a disk is full or read-only, the process' directory is a file system of its own, small enough to be filled.
``Trouble`` follows the process: what to do when it has ended, until it has been started as it should be, and whether
the trouble has taken place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from benchmarks.crash.crash_child import AHEAD, BALLAST, BEHIND, DAY_S, FULL, READ_ONLY, TORN, Point
from edgefl.errors import StoreError

#: Enough for three rounds of the matrix' model, and filled in a moment.
SIZE_MIB = 24
_CHILDREN_S = 15.0


def unavailable(points: list[Point]) -> str:
    """Why these cannot be tried here; "" when they can."""
    mounted = [at for at in points if at.what in {FULL, READ_ONLY}]
    if mounted and os.geteuid() != 0:
        return (
            f"{mounted[0]} and {len(mounted) - 1} more mount a file system: run it as root, or choose others by --only"
        )
    return ""


@contextlib.contextmanager
def own_disk(directory: Path, at: Point) -> Iterator[None]:
    """A file system for ``directory`` where the point needs one. Raises RuntimeError when it cannot be mounted."""
    if at.what not in {FULL, READ_ONLY}:
        yield
        return
    directory.mkdir()
    _mount("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "edgefl-crash", str(directory))
    try:
        yield
    finally:
        _mount("umount", str(directory))


class Trouble:
    """Of one point, with the directory of the process it is about."""

    def __init__(self, at: Point, directory: Path) -> None:
        self._at = at
        self._directory = directory
        self._torn: list[str] = []
        steps: dict[str, list[Callable[[], None]]] = {
            FULL: [self._free],
            READ_ONLY: [self._lock, self._unlock],
            TORN: [self._tear],
        }
        self._due = steps.get(at.what, [])

    def ended(self, code: int, killed: bool) -> bool:
        """Whether the process, which ended with ``code``, is to be started again. Raises RuntimeError."""
        if not self._due:
            return killed
        expected = killed if self._due[0] in {self._lock, self._tear} else code == StoreError.exit_code
        if expected:
            self._due.pop(0)()
        return expected

    def lacking(self, log: Path) -> str:
        """What of the trouble has not taken place; "" when all has. ``log``: JSON lines that the process wrote."""
        if self._due:
            return f"it did not end although it found its disk {self._at.what}"
        if self._at.what == TORN and not self._torn:
            return "nothing was half written"
        if self._at.what in {AHEAD, BEHIND} and not _jumped(log):
            return "its clock has not jumped"
        return ""

    def _free(self) -> None:
        (self._directory / BALLAST).unlink()

    def _lock(self) -> None:
        _mount("mount", "-o", "remount,ro", str(self._directory))

    def _unlock(self) -> None:
        _mount("mount", "-o", "remount,rw", str(self._directory))

    def _tear(self) -> None:
        """As a loss of power may leave what is not synced; and a file that was being written, under its first name."""
        objects = next(self._directory.rglob("objects"))
        slots = sorted(self._directory.glob("work.*"), key=lambda slot: slot.stat().st_mtime_ns)
        files = [*(objects / "partial").iterdir(), *slots[-1:]]  # saved last
        if (self._directory / "identity.json").exists():  # devices do not sync their objects
            files += [path for path in objects.iterdir() if path.is_file()]
            (objects / "boot").write_text("an earlier start of the machine")
        files = [file for file in files if file.name != "boot" and file.stat().st_size]
        for file in files:
            os.truncate(file, file.stat().st_size // 2)
        for file in self._directory.rglob("events.jsonl"):
            os.truncate(file, file.stat().st_size - 20)
            files.append(file)
        (objects / ".new-0123456789abcdef").write_bytes(b"half of")
        self._torn = [file.name for file in files]


def _jumped(log: Path) -> bool:
    rows = [msgspec.json.decode(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    times = [row["at"] for row in rows if "at" in row]
    return any(abs(abs(b - a) - DAY_S) < DAY_S / 2 for a, b in itertools.pairwise(times))


def _mount(*command: str) -> None:
    """Again while a child of the process, which ends with it, is still there. Raises RuntimeError."""
    until = time.monotonic() + _CHILDREN_S
    while (done := subprocess.run(command, check=False, capture_output=True, text=True)).returncode:
        if "busy" not in done.stderr or time.monotonic() > until:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        time.sleep(0.1)
