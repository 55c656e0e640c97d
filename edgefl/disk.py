"""Writing to disk so that a crash loses nothing half, and a refusing disk is a StoreError that names the file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from edgefl.errors import StoreError

_TEMPORARY = ".new-"


@contextlib.contextmanager
def explained(verb: str, path: Path, size: int | None = None) -> Iterator[None]:
    """Turn whatever the disk refuses into a StoreError that names the file, the bytes and the reason."""
    try:
        yield
    except OSError as error:
        amount = "" if size is None else f" ({size} bytes)"
        raise StoreError(f"cannot {verb} {path}{amount}: {error.strerror or error}") from error


def write_new(path: Path, data: bytes | bytearray | memoryview, mode: int = 0o644) -> None:
    """Write a whole file: temporary name, sync, rename, so that it is there fully or not at all. Raises OSError."""
    descriptor, temporary = _temporary(path.parent, mode)
    try:
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def sweep_temporaries(directory: Path) -> None:
    """Delete what crashed writers left in ``directory``; what a living process is writing stays. Raises OSError."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _temporary(directory: Path, mode: int) -> tuple[int, Path]:
    """A new locked file. The lock, gone with its process, tells a sweep that the file is not an orphan."""
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


def sync_file(path: Path) -> None:
    """Make what a file holds last through a power cut; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make renames and removals inside a directory last through a power cut; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
