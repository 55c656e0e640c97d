"""The verbs of the queue that a coordinator works through: show it, append a run, move and cancel one that waits."""

from __future__ import annotations

from pathlib import Path

import typer

from coordinator.runtime.queue_file import QUEUE, Entry, Queue, cancelled, edit, is_live, read, reordered, waiting_entry
from edgefl.cli.options import show
from edgefl.report.grid import Cell, Column, Grid, Record, Tone, table

_TONES: dict[str, Tone] = {"done": "good", "failed": "bad", "interrupted": "warn", "stopped": "warn"}
_Row = tuple[int, Entry, str]  # place among the waiting, or 0; entry; status


def queue(runs: Path, form: str) -> None:
    """Table of a queue: running, waiting and ended runs."""
    _show(read(runs), runs, form)


def add(file: str, runs: Path, form: str) -> None:
    """Append a run file's run."""
    from coordinator.runtime.queue import add as append
    from coordinator.runtime.start import RunOptions

    made = append(file, RunOptions(directory=runs))
    own = "by its file alone: --set of the queue's first files is not for it"
    _tell(made, runs, form, f"{made.entries[-1].run} waits, at place {len(made.of('waiting'))}\n{own}")


def reorder(run: str, place: int, runs: Path, form: str) -> None:
    """Give a waiting run another place."""
    made = edit(runs, lambda queue: reordered(queue, run, place))
    _tell(made, runs, form, f"{made.of('waiting')[place - 1].run} waits, at place {place}")


def cancel(run: str, runs: Path, form: str) -> None:
    """Take a waiting or interrupted run out."""
    live = is_live(runs)
    name = waiting_entry(read(runs), run, live=live).run
    made = edit(runs, lambda queue: cancelled(queue, name, live=live))
    _tell(made, runs, form, f"{name} is cancelled")


def _tell(queue: Queue, runs: Path, form: str, text: str) -> None:
    if form == "json":
        _show(queue, runs, form)
        return
    typer.echo(text)
    for note in _notes(queue, runs)[:1]:
        typer.echo(note)


def _show(queue: Queue, runs: Path, form: str) -> None:
    live, waiting = is_live(runs), queue.of("waiting")
    rows: list[_Row] = []
    for entry in queue.entries:
        status = "interrupted" if entry.status == "running" and not live else entry.status
        rows.append((waiting.index(entry) + 1 if entry in waiting else 0, entry, status))
    body: list[Record] = [
        {"run": one.run, "status": status, "place": place, "file": one.file, "code": one.code, "error": one.error}
        for place, one, status in rows
    ]
    show(form, {"live": live, "runs": body}, _grid(rows, _notes(queue, runs), runs))


def _notes(queue: Queue, runs: Path) -> list[str]:
    """Next step, if any, and reasons of failed runs."""
    ahead = bool(queue.of("running", "waiting"))
    idle = f"It stands still; `edgefl-coordinator run --resume {QUEUE}` goes on with it."
    failures = [f"{entry.run}: {entry.error}" for entry in queue.of("failed")]
    return [*([idle] if ahead and not is_live(runs) else []), *failures]


def _grid(rows: list[_Row], notes: list[str], runs: Path) -> Grid:
    columns: list[Column[_Row]] = [
        Column("place", lambda row: str(row[0] or "")),
        Column("run", lambda row: row[1].run, key=True, text=True, whole=True),
        Column("status", lambda row: Cell(row[2], tone=_TONES.get(row[2], "")), text=True),
        Column("run file", lambda row: Path(row[1].file).name, text=True),
    ]
    empty = f"There is no queue in {runs}; start one with `edgefl-coordinator run A.yaml B.yaml`."
    return table("Queue", columns, rows, notes, empty=empty)
