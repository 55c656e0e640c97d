"""Runs on disk: the directory that a run's id names, its report, and files written for the user."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl.errors import DataError, ModelError, RunError, StoreError, some_of
from edgefl.run_records import EndToEnd, Reference, RunReport
from edgefl.storage.disk import EVENTS, REFERENCE, SHARES, TEST, is_held, ledger_file, ledger_of, write_new

if TYPE_CHECKING:
    from edgefl.data.arrays import Indices
    from edgefl.data.dataset import Dataset

RUNS = Path("runs")
#: A run's page, in its directory.
PAGE = "report.html"
#: Folder of a run's bundles, in its directory.
BUNDLES = "bundles"
#: What the run would have cost end to end, priced once, beside its ledger.
END_TO_END = "end_to_end.json"


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file the user asked for. Raises StoreError that names it and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(f"cannot write {path}: {reason}", remedy="Name another file.") from error


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
            remedy="Name their directory by --runs DIR or EDGEFL_RUNS, or start one with `edgefl run RUN.yaml`.",
        )
    if text == "latest":
        return directories[0]
    exact = [path for path in directories if path.name == text]
    fitting = exact or [path for path in directories if text and path.name.startswith(text)]
    if len(fitting) == 1:
        return fitting[0]
    known = some_of([path.name for path in fitting or directories], 10)
    if fitting:
        raise RunError(f"{text!r} fits {len(fitting)} runs: {known}", remedy="Type more of the run's id, or `latest`.")
    near = difflib.get_close_matches(text, [path.name for path in directories], n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise RunError(f"no run {text!r} in {runs}", remedy=f"{meant}Runs there: {known}. `edgefl runs` lists them all.")


class NotBegunError(RunError):
    """A run whose coordinator is still making the first weights: its ledger has nothing of it."""


def read_run(directory: Path) -> RunReport:
    """The report of the run in ``directory``. Raises StoreError when its ledger cannot be read, NotBegunError."""
    from coordinator.ledger.database import NoLedgerError
    from coordinator.ledger.ledger import Ledger

    place, text = ledger_of(directory), f"run {directory.name} has not begun: its coordinator makes the first weights"
    not_begun = NotBegunError(text, remedy="Try again in a moment; it waits for its devices then.")
    try:
        with Ledger(place, create=False) as ledger:
            known = [report.run for report in ledger.runs()]
            # A renamed directory still holds its one run; a database may hold any others.
            name = directory.name if directory.name in known or isinstance(place, str) else ""
            if not (name in known if name else known) and is_held(directory):
                raise not_begun
            return _as_it_stands(ledger.report(name), directory)
    except NoLedgerError:
        if is_held(directory):
            raise not_begun from None
        raise


def priced(report: RunReport, directory: Path) -> RunReport:
    """The report with the price of the same run end to end: as kept in ``directory``, else made now and kept there.

    The report stays as it is without torch, where its model cannot be built here, and before anything was trained.
    """
    if not any(row.status == "done" for row in report.assignments):
        return report
    kept, found = directory / END_TO_END, dict[str, EndToEnd]()
    with suppress(OSError, msgspec.DecodeError):  # absent, or not whole: it is priced again
        found = msgspec.json.decode(kept.read_bytes(), type=dict[str, EndToEnd])
    if found and found.keys() >= {row.device for row in report.devices}:
        return msgspec.structs.replace(report, end_to_end=found)
    from coordinator.ledger.ledger import Ledger

    try:
        from edgefl.pricing.end_to_end import price_end_to_end

        with Ledger(ledger_of(directory), create=False) as ledger:
            found = price_end_to_end(ledger.plan(report.run), report.devices)
    except ModelError:
        return report
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return report
    if not found:  # it is end to end itself, which takes no tracing to tell
        return report
    with suppress(OSError):  # another user's run can be read and not written: it is priced each time
        write_new(kept, msgspec.json.encode(found))
    return msgspec.structs.replace(report, end_to_end=found)


def referenced(report: RunReport, directory: Path) -> RunReport:
    """The report with the scores of simple models: as kept in ``directory``, else made now of its shares, and kept.

    The report stays as it is where the shares are elsewhere, nothing is labelled, or scikit-learn is not installed.
    """
    kept, test = directory / REFERENCE, directory / SHARES / f"{TEST}.npz"
    with suppress(OSError, msgspec.DecodeError):  # absent, or not whole: it is made again
        return msgspec.structs.replace(report, reference=msgspec.json.decode(kept.read_bytes(), type=Reference))
    shares = [path for row in report.devices if (path := directory / SHARES / f"{row.device}.npz").is_file()]
    if report.status != "done" or not test.is_file():
        return report
    try:
        from edgefl.api.reference import reference_scores, rows_to_fit
        from edgefl.data.dataset import Dataset

        tests = Dataset.load_npz(test)
        samples = _together(directory, partial(rows_to_fit, names=tests.label_names))
        scores = reference_scores(samples or [Dataset.load_npz(path) for path in shares], tests)
    except DataError:
        return report
    except ModuleNotFoundError as error:
        if error.name not in {"sklearn", "scipy"}:  # the latter comes with the former, and is imported first
            raise
        return report
    if scores is None:
        return report
    with suppress(OSError):  # another user's run can be read and not written: it is made each time
        write_new(kept, msgspec.json.encode(scores))
    return msgspec.structs.replace(report, reference=scores)


def _together(directory: Path, some: Callable[[Dataset], Indices]) -> list[Dataset]:
    """``some`` samples of all devices, for shares as rows of one file; else []."""
    from edgefl.api.run_inputs import population_of
    from edgefl.config.profiles import load_run

    file = directory / "run.yaml"
    population = population_of(load_run(str(file))[0], directory / SHARES, mapped=True) if file.is_file() else None
    return [] if population is None else population.shares(some)


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
            with Ledger(place, create=False) as ledger:
                here = [run for run in ledger.runs() if isinstance(place, Path) or run.run == directory.name]
                found += [_as_it_stands(run, directory) for run in here]
        except StoreError as error:
            unreadable.append(f"{directory}: {error.message}")
    return sorted(found, key=lambda report: report.started_at, reverse=True), unreadable


def _as_it_stands(report: RunReport, directory: Path) -> RunReport:
    """The report; of a run that is on record as running and that no coordinator holds, as interrupted."""
    interrupted = report.status == "running" and not is_held(directory)
    return msgspec.structs.replace(report, status="interrupted") if interrupted else report
