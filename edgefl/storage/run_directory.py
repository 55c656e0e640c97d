"""The directory of a run: its name, and that it belongs to one coordinator at a time."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from edgefl.errors import StoreError
from edgefl.storage.disk import make_private, store_errors

#: The ledger's name in a run's directory.
LEDGER = "ledger.sqlite"
#: There in its place when the ledger is a database elsewhere: its URL, which may hold a password.
LEDGER_URL = "ledger.url"
#: Tries to take a run's lock, and the pause between: a reader that asks whether it is held needs microseconds.
LOCK_TRIES = 5
LOCK_PAUSE_S = 0.02
#: The run's events, as JSON lines.
EVENTS = "events.jsonl"


def ledger_file(directory: Path) -> Path | None:
    """The file that is a run's ledger, or says where it is; None: the directory is no run's."""
    return next((path for name in (LEDGER_URL, LEDGER) if (path := directory / name).is_file()), None)


def ledger_of(directory: Path) -> str | Path:
    """Where the ledger of the run in ``directory`` is, or would be: a URL or a path. Raises StoreError."""
    file = directory / LEDGER_URL
    if not file.is_file():
        return directory / LEDGER
    with store_errors("read", file):
        return file.read_text(encoding="utf-8").strip()


def note_ledger(directory: Path, url: str) -> None:
    """Keep where the ledger is, for its owner alone: reading and resuming the run need it. Raises StoreError."""
    file = directory / LEDGER_URL
    with store_errors("write", file):
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(url + "\n", encoding="utf-8")


def new_run_id(runs: Path, name: str) -> str:
    """``name``, the date and time; a number behind it when that is taken in ``runs``."""
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"[-64:].lstrip("-._")
    taken = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    return next(one for one in [stamp, *(f"{stamp[:60]}-{number}" for number in range(2, 1000))] if one not in taken)


def is_held(directory: Path) -> bool:
    """Whether a process holds the directory: True also where that is unknown, such as another user's."""
    try:
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def hold_directory(directory: Path) -> Iterator[None]:
    """Make the directory, for its owner alone, and hold it. Raises StoreError when it cannot, or another does.

    The lock goes with its process, so nothing is left behind by ``kill -9``.
    """
    make_private(directory)
    with store_errors("lock", directory / "lock"):
        lock = (directory / "lock").open("ab")
    with lock:
        if not _locked(lock):
            raise StoreError(
                f"another coordinator runs in {directory}",
                remedy="End it first, or choose another directory or run name.",
            )
        yield


def _locked(lock: BinaryIO) -> bool:
    """Take the lock, unless a process holds it; ``is_held`` of a report that is being made holds it for an instant."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    return False
