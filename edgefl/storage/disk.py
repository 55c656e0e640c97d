"""Writing to disk so that a crash loses nothing half, and a refusing disk is a StoreError that names the file."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from edgefl.errors import StoreError

_LOG = logging.getLogger(__name__)
_TEMPORARY = ".new-"
#: SYNC_FILE_RANGE_WRITE of Linux' sync_file_range: start writing and do not wait.
_WRITE = 2
#: Files that are synced together: as many are open at a time.
_OPEN = 64


class store_errors:  # noqa: N801 - used like a function; a class costs a third of a generator, on every small object
    """Turn whatever the disk refuses into a StoreError that names the file, the bytes and the reason."""

    __slots__ = ("_path", "_size", "_verb")

    def __init__(self, verb: str, path: str | Path, size: int | None = None) -> None:
        self._verb, self._path, self._size = verb, path, size

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            amount = "" if self._size is None else f" ({self._size} bytes)"
            raise StoreError(f"cannot {self._verb} {self._path}{amount}: {error.strerror or error}") from error


def make_private(directory: Path) -> None:
    """Make a directory whose files are its owner's alone, whatever the umask; one of ours that is open is closed.

    Its parents are made as the umask says. Where the file system has no permissions (FAT, exFAT), it warns and goes on.
    Raises StoreError.
    """
    with store_errors("create", directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o700:
            try:
                directory.chmod(0o700)
            except PermissionError:  # of an owner: the file system's answer
                _LOG.warning("%s can be read by others: its file system keeps no permissions", directory)


def write_new(path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a whole file: temporary name, sync, rename, so that it is there fully or not at all. Raises OSError.

    Not ``durable``: without the syncs, so that a loss of power may leave anything under its name.
    """
    with NewFile(path.parent, data, mode) as new:
        if durable:
            new.sync()
        new.rename(path)
    if durable:
        sync_directory(path.parent)


class NewFile:
    """A whole file under a temporary name, which goes with the process or with ``close`` unless it was renamed.

    Raises OSError.
    """

    def __init__(self, directory: Path, data: bytes | bytearray | memoryview, mode: int = 0o644) -> None:
        self._descriptor, self.path = _temporary(directory, mode)
        self._named = False
        try:
            write_all(self._descriptor, data, 0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_sync(self) -> None:
        """Have the disk begin."""
        begin_sync(self._descriptor, 0, 0)

    def sync(self) -> None:
        """Wait for the disk."""
        os.fsync(self._descriptor)

    def rename(self, path: str | Path) -> None:
        """Give it its name."""
        self.path.rename(path)
        self._named = True

    def close(self) -> None:
        """Let go of it."""
        if not self._named:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def boot_id() -> str:
    """Changes when the machine is started; "" where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def begin_sync(descriptor: int, offset: int, length: int) -> None:
    """Have the disk begin with these bytes of a file that is synced later; ``length`` 0: all from ``offset`` on.

    Does nothing where the system has no such call.
    """
    if (begin := _sync_file_range()) is not None:
        begin(descriptor, offset, length, _WRITE)


@cache
def _sync_file_range() -> Any:
    import ctypes  # 1 MB that a device's supervisor needs not hold

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def read_at_most(path: Path, limit: int) -> bytes:
    """All bytes of a file (or pipe) that has at most ``limit``. Raises OSError, ValueError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        # Reading takes memory for as much as it is asked for.
        data = file.read(min(limit, status.st_size) + 1 if stat.S_ISREG(status.st_mode) else limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data


def sweep_temporaries(directory: Path) -> None:
    """Delete what crashed writers left in ``directory``; what a living process is writing stays. Raises OSError."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _temporary(directory: Path, mode: int) -> tuple[int, Path]:
    """A new locked file. The lock, gone with its process, keeps a sweep from taking it for an orphan."""
    while True:
        path = directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # a sweep took it between open and flock


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; raises OSError."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def sync_files(paths: Sequence[str | Path]) -> None:
    """Make what files hold last through a power cut, together: the disk begins with all of them. Raises StoreError."""
    for first in range(0, len(paths), _OPEN):
        with contextlib.ExitStack() as stack:
            opened: list[tuple[str | Path, int]] = []
            for path in paths[first : first + _OPEN]:
                with store_errors("sync", path):
                    opened.append((path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
                stack.callback(os.close, opened[-1][1])
            for _, descriptor in opened if len(opened) > 1 else ():
                begin_sync(descriptor, 0, 0)
            for path, descriptor in opened:
                with store_errors("sync", path):
                    os.fsync(descriptor)


def sync_directory(path: str | Path) -> None:
    """Make renames and removals inside a directory last through a power cut; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
