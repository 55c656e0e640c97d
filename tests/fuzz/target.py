"""What a fuzz target is, how one input is tried on it, and what counts as a finding."""

from __future__ import annotations

import functools
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import EdgeFLError

CORPUS = Path(__file__).parent / "corpus"
MIB = 2**20


@dataclass(frozen=True)
class Target:
    """A decoder and its contract. ``run`` gives bytes to it and asserts what holds of what comes out.

    Only ``errors`` may leave ``run``; none at all where it is empty. ``form``: how ``mutate`` takes the bytes apart.
    ``room``: (bytes it may allocate whatever it is given, bytes for each byte it is given), with what the target itself
    needs to check the contract; numpy's arrays count, also what of them is never touched.
    """

    name: str
    decoder: str
    run: Callable[[bytes], None]
    errors: tuple[type[EdgeFLError], ...]
    form: str = "bytes"
    room: tuple[int, int] = (MIB, 16)
    slow: bool = False  # takes some milliseconds or more: CI tries fewer inputs


def attempt(target: Target, data: bytes) -> EdgeFLError | None:
    """What the decoder refuses this input with, None when it takes it. Whatever else is raised is a finding."""
    try:
        target.run(data)
    except EdgeFLError as error:
        if type(error) is EdgeFLError or not isinstance(error, target.errors) or not (error.message and error.remedy):
            raise
        return error
    return None


def measured(target: Target, data: bytes) -> tuple[EdgeFLError | None, int]:
    """The same, and the most bytes that were allocated at a time while it ran."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        refused = attempt(target, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return refused, peak - before


def room_for(target: Target, data: bytes) -> int:
    """Bytes the target may allocate for this input."""
    return target.room[0] + target.room[1] * len(data)


@functools.cache
def _workplace() -> tempfile.TemporaryDirectory[str]:
    """In memory where that is possible: fuzzing writes a file for each input."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="edgefl-fuzz-", dir=shared if shared.is_dir() else None)


def scratch(name: str) -> Path:
    """A folder of this process for a target's files; gone when the process ends."""
    folder = Path(_workplace().name) / name
    folder.mkdir(exist_ok=True)
    return folder
