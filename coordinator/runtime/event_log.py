"""The event log of a run: events.jsonl beside the ledger, passed on to live views; EdgeFL's warnings as events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from coordinator.core.moves import EmitEvent
from edgefl.run_records import EventRow
from edgefl.storage.disk import store_errors

#: Shown live but not kept in the ledger: hundreds a round.
FLEETING = frozenset({"progress"})
#: More than any event has.
LONGEST_LINE = 2**20


class Journal:
    """Appends events to a file of JSON lines and passes them on. A line that a crash has torn is cut off."""

    def __init__(self, file: Path, emit: Callable[[EventRow], None]) -> None:
        self._emit = emit
        self._name = file
        with store_errors("open", file):
            self._file = file.open("a+b", buffering=0)
            _cut_off_torn_line(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, row: EventRow) -> None:
        """Write one event and pass it on, also when writing fails."""
        try:
            with store_errors("write", self._name):
                self._file.write(msgspec.json.encode(row) + b"\n")
        finally:
            self._emit(row)


def _cut_off_torn_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LONGEST_LINE))
    end = file.read(min(size, LONGEST_LINE))
    if end and not end.endswith(b"\n"):
        file.truncate(size - len(end) + end.rfind(b"\n") + 1)


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


def row_of(event: EmitEvent) -> EventRow:
    """An event that happens now."""
    return EventRow(time.time(), event.kind, event.stage, event.round, event.device, event.data)
