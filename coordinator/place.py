"""The directory of a run: its name, and that it belongs to one coordinator at a time."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from edgefl.disk import explained
from edgefl.errors import StoreError

#: The ledger's name in a run's directory.
LEDGER = "ledger.sqlite"


def new_run_id(runs: Path, name: str) -> str:
    """``name``, the date and time; a number behind it when that is taken in ``runs``."""
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"[-64:].lstrip("-._")
    taken = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    return next(one for one in [stamp, *(f"{stamp[:60]}-{number}" for number in range(2, 1000))] if one not in taken)


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
