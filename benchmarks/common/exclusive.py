"""A lock by which one process alone writes a benchmark's results."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """While this program holds ``path`` no other one does: it would run the same cells. Else it exits, saying why."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{path} is being written by another run of this benchmark: wait for it, or name other --results")
        yield
