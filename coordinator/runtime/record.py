"""The record of a run: its ledger and its event log, brought up to the machine's state in transactions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from coordinator.core import moves as do
from coordinator.core.moves import Event, Tick
from coordinator.core.state import NOTHING, Phase, State, changes
from coordinator.ledger.ledger import Ledger
from edgefl.errors import EdgeFLError
from edgefl.run_records import EventRow
from edgefl.storage.disk import store_errors

#: Shown live but not kept in the ledger: hundreds a round.
FLEETING = frozenset({"progress"})
#: Instructions without an effect outside this process.
_IDLE = do.SAVES | {EventRow, do.Fetch}
#: Saves that say where the run stands, and take the time of their commit.
_OF_THE_RUN = (do.SavedRound, do.TakenBack, do.SavePlan, do.SaveEnd)
#: Seconds after which a simulated fleet's record is brought up to date within a round: what a kill loses of a long one.
MOST_S = 5.0
#: More than any event has.
LONGEST_LINE = 2**20


class Move(NamedTuple):
    """The result of an event: the state, the instructions, and its rows of the event log."""

    state: State
    event: Event | None = None
    out: Sequence[do.Instruction] = ()
    rows: Sequence[EventRow] = ()


class Record:
    """Ledger and event log of a run. ``saved``: the ledger's state. Saves without visible effect wait for a commit.

    ``settle``: for a run whose whole fleet is this process, and goes with it: nothing has to be on record before
    others see it, and what does not end or begin a round waits for ``MOST_S``. It is called before each commit, for the
    objects of the updates that the committed state has.
    """

    def __init__(
        self,
        run: str,
        ledger: Ledger,
        journal: Journal,
        saved: State,
        settle: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self.journal = journal
        self.saved = saved
        self._run = run
        self._settle = settle
        self._unsaved: list[do.Save] = []
        self._rows: list[EventRow] = []
        self._committed_at = time.monotonic()

    def commit_moves(self, moves: Sequence[Move]) -> None:
        """Commit the moves' saves in one transaction, or defer them if no effect is visible."""
        saves: list[Any] = [one for move in moves for one in move.out if type(one) in do.SAVES]
        rows = [row for move in moves for row in move.rows if row.kind not in FLEETING]
        if self._is_due(moves, saves, rows):
            self.commit(saves, rows, moves[-1].state)
        else:
            self._unsaved += saves
            self._rows += rows

    def _is_due(self, moves: Sequence[Move], saves: Sequence[do.Save], rows: Sequence[EventRow]) -> bool:
        if self._settle is None:
            return bool(rows) or any(map(_is_visible, moves))
        late = time.monotonic() - self._committed_at > MOST_S
        return late or any(isinstance(one, _OF_THE_RUN) for one in saves)

    def commit(self, saves: Sequence[do.Save], rows: Sequence[EventRow], state: State) -> None:
        """Write saves, rows and the changes up to ``state`` to the ledger; none before the run has begun."""
        begun = state.phase is not Phase.STARTING
        changed = changes(self.saved, state) if begun else NOTHING
        if self._unsaved or self._rows or saves or rows or changed != NOTHING:
            if self._settle is not None:
                self._settle(objects_of(state))
            self.ledger.commit(self._run, [*self._unsaved, *saves], [*self._rows, *rows], time.time(), changed)
        self.saved, self._unsaved, self._rows = state if begun else self.saved, [], []
        self._committed_at = time.monotonic()

    def keep(self, saves: Sequence[do.Save]) -> None:
        """Save these with the next transaction."""
        self._unsaved += saves

    def write(self, row: EventRow) -> None:
        """Record one event now."""
        self.ledger.commit(self._run, [], [row], time.time())
        self.journal.append(row)

    def write_failure(self, error: Exception, state: State) -> None:
        """Record the end of the run as far as that is possible; the caller raises the error itself."""
        known = error if isinstance(error, EdgeFLError) else EdgeFLError(f"{type(error).__name__}: {error}")
        data = {"text": known.message, "remedy": known.remedy, "expected": known is error}
        row = EventRow(time.time(), "run_failed", data=data)
        with contextlib.suppress(EdgeFLError):
            self.commit([do.SaveEnd("failed")], [row], state)
        with contextlib.suppress(EdgeFLError, OSError):
            self.journal.append(row)


def objects_of(state: State) -> set[str]:
    """Ids of the objects of every update that a state has."""
    every = [*state.assignments.values(), *state.stragglers.values(), *state.buffered.values()]
    return {ref.id for one in every if one.update is not None for ref in one.update.manifest.values()}


def _is_visible(move: Move) -> bool:
    """True if others may see the move's effects, so that the ledger is written first; also for ticks.

    A request for an update's chunks is no such reason: received chunks are on disk, and the device announces an update
    again that a coordinator does not know of.
    """
    recorded = {row.kind for row in move.rows} - FLEETING
    return bool(recorded) or isinstance(move.event, Tick) or any(type(one) not in _IDLE for one in move.out)


class Journal:
    """Appends events to a file of JSON lines and passes them on. A line that a crash has torn is cut off."""

    def __init__(self, file: Path, emit: Callable[[EventRow], None]) -> None:
        self._emit = emit
        self._name = file
        with store_errors("open", file):
            self._file = file.open("a+b", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, size - LONGEST_LINE))
            end = self._file.read(min(size, LONGEST_LINE))
            if end and not end.endswith(b"\n"):
                self._file.truncate(size - len(end) + end.rfind(b"\n") + 1)

    def append(self, row: EventRow) -> None:
        """Write one event and pass it on, also when writing fails."""
        try:
            with store_errors("write", self._name):
                self._file.write(msgspec.json.encode(row) + b"\n")
        finally:
            self._emit(row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _LogToEvents(logging.Handler):
    def __init__(self, emit: Callable[[EventRow], None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        row = EventRow(record.created, "warning", data={"text": self.format(record), "source": record.name})
        try:
            self._loop.call_soon_threadsafe(self._emit, row)
        except RuntimeError:  # the loop is closed
            self.handleError(record)


@contextlib.contextmanager
def forward_warnings(emit: Callable[[EventRow], None]) -> Iterator[None]:
    """Forward warnings of EdgeFL's own loggers (a lost broker) as events; other loggers go to stderr."""
    handler, loggers = _LogToEvents(emit), [logging.getLogger(name) for name in ("edgefl", "coordinator")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def dated(event: EventRow, more: Mapping[str, object]) -> EventRow:
    """The event with the present time and ``more`` data."""
    return msgspec.structs.replace(event, at=time.time(), data={**event.data, **more})


def warning(text: str, stage: int = 0, number: int = 0, **more: object) -> EventRow:
    """A warning, perhaps of round ``number`` of a stage."""
    return EventRow(time.time(), "warning", stage, number, data={"text": text, **more})
