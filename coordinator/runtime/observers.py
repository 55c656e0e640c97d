"""Observers of a run's events beside its display: log lines, and writers for TensorBoard and MLflow."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from coordinator.runtime.record import FLEETING
from edgefl.errors import ConfigError, MissingDependencyError, Problem, StoreError
from edgefl.log_lines import Emit, LineHandler
from edgefl.plan.job import RunPlan
from edgefl.process.parent_death import leashed
from edgefl.report.track import TOLD, WRITERS
from edgefl.run_records import EventRow

_LOG = logging.getLogger(__name__)
Take = Callable[[EventRow], None]
#: Events that wait for a writer; one that falls further behind is given up.
_MOST_WAITING = 10_000
#: Seconds for a writer to end when the run has: MLflow may still be importing.
_GOODBYE_S = 30.0


def logged(emit: Take, line: Emit, *, run: str, fleet: str) -> Take:
    """``emit``, and a log line of each event but progress. Warnings of libraries become lines as well."""
    logging.basicConfig(handlers=[LineHandler(line)], level=logging.WARNING, force=True)

    def take(row: EventRow) -> None:
        emit(row)
        if row.kind in FLEETING or row.data.get("source"):  # a warning of ours has become a line already
            return
        place = {"device": row.device, "stage": row.stage or None, "round": row.round or None}
        line(row.kind, **{**row.data, **place, "run": run, "fleet": fleet, "at": row.at})

    return take


@contextlib.contextmanager
def tracked(emit: Take, wanted: Sequence[str], plan: RunPlan, directory: Path) -> Iterator[Take]:
    """``emit``, and the writers ``wanted`` (KIND or KIND:TARGET), each in a process that ends with the block.

    Raises ConfigError, MissingDependencyError before anything begins; later a writer's fault is a warning.
    """
    writers = [Tracker(*_read(text, directory), plan, directory) for text in wanted]

    def take(row: EventRow) -> None:
        emit(row)
        if row.kind in TOLD:
            for writer in writers:
                writer.put(row)

    try:
        yield take if writers else emit
    finally:
        for writer in writers:
            writer.close()


def _read(text: str, directory: Path) -> tuple[str, str]:
    kind, _, target = text.partition(":")
    if kind not in WRITERS:
        raise ConfigError("--track", [Problem(text, f"is none of {', '.join(WRITERS)}, perhaps with :TARGET")])
    if importlib.util.find_spec(WRITERS[kind][1]) is None:
        raise MissingDependencyError(kind if kind != "mlflow" else "mlflow-skinny", kind)
    place = str((directory / kind).resolve())
    return kind, target or (f"file:{place}" if kind == "mlflow" else place)


class Tracker:
    """A writer's process, fed by a thread so that the run never waits for it."""

    def __init__(self, kind: str, target: str, plan: RunPlan, directory: Path) -> None:
        self._kind, self._told = kind, False
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._log = directory / "logs" / f"track-{kind}.log"
        rounds = json.dumps([stage.rounds for stage in plan.stages])
        command = [sys.executable, "-m", "edgefl.report.track", kind, target, plan.run, rounds]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as out:
                self._process = subprocess.Popen(leashed(command), stdin=subprocess.PIPE, stdout=out, stderr=out)
        except OSError as error:
            raise StoreError(f"the writer for {kind} cannot be started: {error}") from error
        self._thread = threading.Thread(target=self._feed, name=f"edgefl-{kind}", daemon=True)
        self._thread.start()

    def put(self, row: EventRow) -> None:
        """Pass an event on, unless the writer has ended or falls behind."""
        if self._lines.qsize() > _MOST_WAITING:
            self._warn("it does not keep up")
        elif not self._told:
            self._lines.put(msgspec.json.encode(row) + b"\n")

    def _feed(self) -> None:
        pipe = self._process.stdin
        try:
            while pipe is not None and (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()
        except OSError:  # it has ended
            self._process.wait()
            self._warn(self._last_words())
        finally:
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _warn(self, why: str) -> None:
        if not self._told:
            self._told = True
            _LOG.warning("nothing more is written for %s: %s (%s)", self._kind, why, self._log)

    def _last_words(self) -> str:
        words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return words[-1][:500] if words else f"status {self._process.returncode}"

    def close(self) -> None:
        """Let the writer finish the events queued so far, then end its process."""
        self._lines.put(None)
        self._thread.join(_GOODBYE_S)
        try:
            if self._process.wait(_GOODBYE_S):
                self._warn(self._last_words())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._warn("it did not end")
