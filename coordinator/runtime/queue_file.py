"""The queue of a directory of runs: its entries in order, kept in one file that is edited under a lock.

The coordinator that works through the queue and every terminal read, change and replace the file in one step, so that
none loses what another wrote; ``kill -9`` leaves the file as it was before the step or after it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgefl.errors import ControlError, StoreError
from edgefl.storage.disk import is_held, make_private, store_errors, write_new

#: The queue's name, and of its directory among those of the runs.
QUEUE = "queue"
FILE = "queue.json"
_EDIT = "edit"


class Entry(msgspec.Struct, frozen=True):
    """A run of the queue. ``file``: the run file as it was named; ``code``, ``error``: how it failed."""

    run: str
    file: str = ""
    status: Literal["waiting", "running", "done", "stopped", "failed", "cancelled"] = "waiting"
    code: int = 0
    error: str = ""


class Queue(msgspec.Struct, frozen=True):
    """Runs in the order of their execution.

    ``broker``: of their run files, or ``given`` by its URL at the start; "" for one with a password, which is not kept.
    ``identity``: directory of the fleet's identity, "" for none.
    """

    broker: str = ""
    entries: tuple[Entry, ...] = ()
    given: bool = False
    identity: str = ""

    def of(self, *status: str) -> list[Entry]:
        """Entries with one of these statuses, in order."""
        return [entry for entry in self.entries if entry.status in status]

    def noted(self, run: str, **changes: Any) -> Queue:
        """The queue with these fields of a run's entry changed."""
        entries = [msgspec.structs.replace(one, **changes) if one.run == run else one for one in self.entries]
        return msgspec.structs.replace(self, entries=tuple(entries))


def taken(queue: Queue) -> Queue:
    """The queue with its next run running: an interrupted one, else the first that waits."""
    ahead = queue.of("running") or queue.of("waiting")
    return queue.noted(ahead[0].run, status="running") if ahead else queue


def reordered(queue: Queue, run: str, place: int) -> Queue:
    """The queue with a waiting run at this place of the waiting ones; 1: next. Raises ControlError."""
    entry, waiting = waiting_entry(queue, run), queue.of("waiting")
    if not 1 <= place <= len(waiting):
        raise ControlError(f"there is no place {place} in the queue", remedy=f"Name one of 1 to {len(waiting)}.")
    rest = [one for one in waiting if one != entry]
    rest.insert(place - 1, entry)
    others = [one for one in queue.entries if one.status != "waiting"]
    return msgspec.structs.replace(queue, entries=(*others, *rest))


def cancelled(queue: Queue, run: str, *, live: bool) -> Queue:
    """The queue without a waiting or interrupted run, whose entry says so. Raises ControlError."""
    return queue.noted(waiting_entry(queue, run, live=live).run, status="cancelled")


def waiting_entry(queue: Queue, run: str, *, live: bool = True) -> Entry:
    """The entry of a waiting run by its name's begin.

    Not ``live``, no coordinator works: also of an interrupted one. Raises ControlError.
    """
    exact = [entry for entry in queue.entries if entry.run == run]
    fitting = exact or [entry for entry in queue.entries if run and entry.run.startswith(run)]
    if len(fitting) != 1:
        known = ", ".join(entry.run for entry in fitting or queue.of("waiting")) or "none"
        text = f"{run!r} fits {len(fitting)} runs of the queue" if fitting else f"the queue has no run {run!r}"
        raise ControlError(text, remedy=f"{'These are' if fitting else 'Waiting runs are'}: {known}.")
    (entry,) = fitting
    if entry.status == "running" and live:
        raise ControlError(
            f"{entry.run} does not wait: it has begun", remedy=f"`edgefl runs stop {entry.run}` ends it."
        )
    if entry.status not in {"waiting", "running"}:
        raise ControlError(f"{entry.run} does not wait: it is {entry.status}", remedy="There is nothing to do.")
    return entry


def is_live(runs: Path) -> bool:
    """Whether a coordinator works through the queue of this directory."""
    return is_held(runs / QUEUE)


def read(runs: Path) -> Queue:
    """The queue of a directory of runs; empty where there is none. Raises StoreError."""
    file = runs / QUEUE / FILE
    try:
        with store_errors("read", file):
            data = file.read_bytes() if file.exists() else b"{}"
        return msgspec.json.decode(data, type=Queue)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = "Delete it, and add the runs that wait again."
        raise StoreError(f"{file} is damaged: {error}", remedy=remedy) from error


def edit(runs: Path, change: Callable[[Queue], Queue]) -> Queue:
    """Replace the queue by ``change`` of it; the new one, once it is on the disk. Raises StoreError."""
    place = runs / QUEUE
    make_private(place)
    with store_errors("lock", place / _EDIT):
        lock = (place / _EDIT).open("ab")
    with lock:
        with store_errors("lock", place / _EDIT):
            fcntl.flock(lock, fcntl.LOCK_EX)  # each holds it for one write
        queue = change(read(runs))
        with store_errors("write", place / FILE):
            write_new(place / FILE, msgspec.json.encode(queue), mode=0o600)  # a broker's URL may hold a password
    return queue
