"""What else befalls a process of the crash matrix: a full disk, one that takes nothing, half-written files.

A process' directory is a file system of its own, small enough to be filled. ``Trouble`` follows one process: it tells
what to do when it has ended, until it has been started as it should be.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.crash_child import BALLAST, Point
from edgefl.errors import StoreError

#: Enough for three rounds of the matrix' model, and filled in a moment.
SIZE_MIB = 24
_CHILDREN_S = 15.0


@contextlib.contextmanager
def own_disk(directory: Path, at: Point | None) -> Iterator[None]:
    """A file system for ``directory`` where the point needs one. Needs root."""
    if at is None or at.what not in {"disk full", "read-only"}:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    _call("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "edgefl-crash", str(directory))
    try:
        yield
    finally:
        _call("umount", str(directory))


class Trouble:
    """Of one point, with the directory of the process it is about."""

    def __init__(self, at: Point, directory: Path) -> None:
        self._directory = directory
        self._after = {"disk full": [self._free], "read-only": [self._lock, self._unlock]}.get(at.what, [])
        if at.what == "half written":
            self._after = [self._spoil]

    def ended(self, code: int, killed: bool) -> bool:
        """Whether the process, which ended with ``code``, is to be started again."""
        if not self._after:
            return killed
        expected = killed if self._after[0] in {self._lock, self._spoil} else code == StoreError.exit_code
        if expected:
            self._after.pop(0)()
        return expected

    @property
    def left(self) -> str:
        """What has not happened that should have; "" when all has."""
        names: dict[Callable[[], None], str] = {
            self._free: "it did not end although its disk was full",
            self._lock: "it was not killed",
            self._unlock: "it did not end although its disk takes nothing",
            self._spoil: "it was not killed",
        }
        return names[self._after[0]] if self._after else ""

    def _free(self) -> None:
        (self._directory / BALLAST).unlink()

    def _lock(self) -> None:
        _call("mount", "-o", "remount,ro", str(self._directory))

    def _unlock(self) -> None:
        _call("mount", "-o", "remount,rw", str(self._directory))

    def _spoil(self) -> None:
        """As a loss of power leaves them: what was being written is there by half, with the name it was to have."""
        for file in [path for path in self._directory.rglob("*") if path.is_file()]:
            place = file.parent.name
            if file.name in {"work.msgpack", "events.jsonl"} or place == "partial":
                _cut(file, file.stat().st_size // 2 if file.name != "events.jsonl" else file.stat().st_size - 20)
            elif place == "objects" and self._is_device:
                _cut(file, file.stat().st_size // 2)
        objects = next(self._directory.rglob("objects"))
        (objects / ".new-0123456789abcdef").write_bytes(b"half of")
        if self._is_device:
            (objects / "boot").write_text("an earlier start of the machine")

    @property
    def _is_device(self) -> bool:
        """Devices do not sync their objects: a loss of power may leave any of them cut off."""
        return (self._directory / "identity.json").exists()


def _cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


def _call(*command: str) -> None:
    """Again while a child of the process, which ends with it, is still there."""
    until = time.monotonic() + _CHILDREN_S
    while (done := subprocess.run(command, check=False, capture_output=True, text=True)).returncode:
        if time.monotonic() > until:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        time.sleep(0.1)
