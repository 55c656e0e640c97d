"""What is told about a run: events.jsonl beside the ledger, and whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from coordinator.instructions import Tell
from edgefl.disk import explained
from edgefl.report.rows import EventRow

#: Told live but not kept in the ledger: hundreds a round.
FLEETING = frozenset({"progress"})


class Journal:
    """Appends events to a file of JSON lines and passes them on."""

    def __init__(self, file: Path, emit: Callable[[EventRow], None]) -> None:
        self._emit = emit
        self._name = file
        with explained("open", file):
            self._file = file.open("ab", buffering=0)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def tell(self, row: EventRow) -> None:
        """Write one event and pass it on, also when it can not be written."""
        try:
            with explained("write", self._name):
                self._file.write(msgspec.json.encode(row) + b"\n")
        finally:
            self._emit(row)


def row_of(tell: Tell) -> EventRow:
    """An event that happens now."""
    return EventRow(time.time(), tell.kind, tell.stage, tell.round, tell.device, tell.data)
