"""The directory of a run belongs to one coordinator at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from edgefl.disk import explained
from edgefl.errors import StoreError

#: The ledger's name in a run's directory.
LEDGER = "ledger.sqlite"


@contextlib.contextmanager
def hold_place(directory: Path) -> Iterator[None]:
    """Make the directory and hold it. Raises StoreError when it can not be written or another process holds it.

    The lock goes with its process, so nothing is left behind by ``kill -9``.
    """
    with explained("create", directory):
        directory.mkdir(parents=True, exist_ok=True)
    with explained("lock", directory / "lock"):
        lock = (directory / "lock").open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"another coordinator runs in {directory}",
                remedy="End it first, or choose another directory or run name.",
            ) from error
        yield
