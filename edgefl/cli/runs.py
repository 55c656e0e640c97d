"""The runs in a directory: found by id, the beginning of one or ``latest``, read, and listed by ``edgefl runs``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgefl.cli.options import RUNS, Format, RunsOption, show
from edgefl.errors import RunError, StoreError
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Tone, table
from edgefl.run_records import RunReport
from edgefl.storage.disk import EVENTS, is_held, ledger_file, ledger_of

_TONES: dict[str, Tone] = {"done": "good", "failed": "bad", "interrupted": "warn"}


def command(
    runs: RunsOption = RUNS,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """List the runs, newest first: id, name, recipe, status, when, how long.

    Example: edgefl runs --format json
    """
    found, unreadable = read_runs(runs)
    for sentence in unreadable:
        sys.stderr.write(f"warning: {sentence}\n")
    keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
    body = [{key: getattr(report, key) for key in keys} for report in found]
    show(format, body, runs_table(found, str(runs), time.time()))


def runs_table(reports: Sequence[RunReport], where: str, now: float) -> Grid:
    """The runs there are, one a row; ``now``: seconds since the epoch."""

    def started(row: RunReport) -> Cell:
        return Cell(units.ago(now - row.started_at), tip=units.moment(row.started_at))

    def took(row: RunReport) -> str:
        return "" if row.finished_at is None else units.seconds(row.finished_at - row.started_at)

    columns: list[Column[RunReport]] = [
        Column("run", lambda row: row.run, key=True, text=True, whole=True),
        Column("recipe", lambda row: row.recipe, text=True),
        Column("status", lambda row: Cell(row.status, tone=_TONES.get(row.status, "")), text=True),
        Column("started", started, text=True),
        Column("took", took, text=True),
    ]
    if not all(row.run.startswith(row.name) for row in reports):  # an id begins with the name by default
        columns.insert(1, Column("name", lambda row: row.name, text=True))
    return table("Runs", columns, reports, empty=f"There is no run in {where}; start one with `edgefl run RUN.yaml`.")


def run_directories(runs: Path) -> list[Path]:
    """Directories in ``runs`` that have a ledger, the one that was written last first."""

    def changed(directory: Path) -> float:
        files = (ledger_file(directory), directory / EVENTS)  # the ledger may be a database elsewhere
        return max((file.stat().st_mtime for file in files if file is not None and file.is_file()), default=0.0)

    there = [path for path in runs.iterdir() if ledger_file(path)] if runs.is_dir() else []
    return sorted(there, key=changed, reverse=True)


def find_run(text: str, runs: Path) -> Path:
    """The directory of the run ``text`` names. Raises RunError naming what there is when none or several fit."""
    if "/" in text and ledger_file(Path(text)):
        return Path(text)
    directories = run_directories(runs)
    if not directories:
        raise RunError(
            f"there is no run in {runs}",
            remedy="Start one with `edgefl run RUN.yaml`, or name the directory with --runs DIR.",
        )
    if text == "latest":
        return directories[0]
    exact = [path for path in directories if path.name == text]
    fitting = exact or [path for path in directories if text and path.name.startswith(text)]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(path.name for path in (fitting or directories)[:10])
    if fitting:
        raise RunError(f"{text!r} fits {len(fitting)} runs: {known}", remedy="Type more of the run's id, or `latest`.")
    raise RunError(f"no run {text!r} in {runs}", remedy=f"Runs there: {known}. `edgefl runs` lists them all.")


def read_run(directory: Path) -> RunReport:
    """The report of the run in ``directory``. Raises StoreError when its ledger cannot be read."""
    from coordinator.ledger.ledger import Ledger

    place = ledger_of(directory)
    with Ledger(place, reading=True) as ledger:
        known = [report.run for report in ledger.runs()]
        # A renamed directory still holds its one run; a database may hold any others.
        name = directory.name if directory.name in known or isinstance(place, str) else ""
        return _as_it_stands(ledger.report(name), directory)


def read_runs(runs: Path) -> tuple[list[RunReport], list[str]]:
    """Every run in ``runs`` without its rows, newest first; and a sentence for each ledger that cannot be read."""
    directories = run_directories(runs)
    if not directories:
        return [], []  # nothing to read needs no database: a base install can say so
    from coordinator.ledger.ledger import Ledger

    found: list[RunReport] = []
    unreadable: list[str] = []
    for directory in directories:
        try:
            place = ledger_of(directory)
            with Ledger(place, reading=True) as ledger:
                here = [run for run in ledger.runs() if isinstance(place, Path) or run.run == directory.name]
                found += [_as_it_stands(run, directory) for run in here]
        except StoreError as error:
            unreadable.append(f"{directory}: {error.message}")
    return sorted(found, key=lambda report: report.started_at, reverse=True), unreadable


def _as_it_stands(report: RunReport, directory: Path) -> RunReport:
    """The report; of a run that is on record as running and that no coordinator holds, as interrupted."""
    interrupted = report.status == "running" and not is_held(directory)
    return msgspec.structs.replace(report, status="interrupted") if interrupted else report
