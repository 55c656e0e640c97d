"""The record of a run: its ledger and its event log, brought up to the machine's state in transactions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.core import moves as do
from coordinator.core.moves import Event, Tick
from coordinator.core.state import NOTHING, Phase, State, changes
from coordinator.ledger.ledger import Ledger
from coordinator.runtime.event_log import FLEETING, Journal, row_of
from edgefl.errors import EdgeFLError
from edgefl.run_records import EventRow


class Move(NamedTuple):
    """The result of an event: the state, the instructions, and its rows of the event log."""

    state: State
    event: Event | None = None
    out: Sequence[do.Instruction] = ()
    rows: Sequence[EventRow] = ()


class Record:
    """``saved``: the state as the ledger has it. Saves without a visible effect wait for the next transaction."""

    def __init__(self, run: str, ledger: Ledger, journal: Journal, saved: State) -> None:
        self.ledger = ledger
        self.journal = journal
        self.saved = saved
        self._run = run
        self._unsaved: list[do.Save] = []

    def commit_moves(self, moves: Sequence[Move]) -> None:
        """Commit all that the moves save in one transaction, or keep it for the next where nothing relies on it."""
        saves = [one for move in moves for one in move.out if isinstance(one, do.Save)]
        rows = [row for move in moves for row in move.rows if row.kind not in FLEETING]
        if rows or any(map(_is_visible, moves)):
            self.commit(saves, rows, moves[-1].state)
        else:
            self._unsaved += saves

    def commit(self, saves: Sequence[do.Save], rows: Sequence[EventRow], state: State) -> None:
        """Bring the ledger up to ``state``; one that has not begun has no part in what the ledger holds."""
        begun = state.phase is not Phase.STARTING
        changed = changes(self.saved, state) if begun else NOTHING
        if self._unsaved or saves or rows or changed != NOTHING:
            self.ledger.commit(self._run, [*self._unsaved, *saves], rows, time.time(), changed)
        self.saved, self._unsaved = state if begun else self.saved, []

    def write(self, event: do.EmitEvent) -> None:
        """Record one event now."""
        row = row_of(event)
        self.ledger.commit(self._run, [], [row], time.time())
        self.journal.append(row)

    def write_failure(self, error: Exception, state: State) -> None:
        """Record the end of the run as far as that is possible; the caller raises the error itself."""
        known = isinstance(error, EdgeFLError)
        text = error.message if isinstance(error, EdgeFLError) else f"{type(error).__name__}: {error}"
        remedy = error.remedy if isinstance(error, EdgeFLError) else EdgeFLError.remedy
        row = row_of(do.EmitEvent("run_failed", data={"text": text, "remedy": remedy, "expected": known}))
        with contextlib.suppress(EdgeFLError):
            self.commit([do.SaveEnd("failed")], [row], state)
        with contextlib.suppress(EdgeFLError, OSError):
            self.journal.append(row)


def _is_visible(move: Move) -> bool:
    """Whether a process may rely on the move, so that the ledger has it first; time passing is as good a reason.

    A request for an update's chunks is no such reason: received chunks are on disk, and the device announces an update
    again that a coordinator does not know of.
    """
    recorded = {row.kind for row in move.rows} - FLEETING
    idle = do.Save | do.EmitEvent | do.Fetch
    return bool(recorded) or isinstance(move.event, Tick) or any(not isinstance(one, idle) for one in move.out)
