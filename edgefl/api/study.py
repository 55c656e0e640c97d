"""A study: the same run file under a grid of overrides, one run after the other; finished ones are kept."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgefl.api.frames import frame
from edgefl.api.local_run import LocalOptions
from edgefl.api.results import Report, Run
from edgefl.api.running import Made, carried_out
from edgefl.api.runs import read_run
from edgefl.config.profiles import RunSource, load_run
from edgefl.errors import EdgeFLError, MissingDependencyError
from edgefl.report import resources
from edgefl.run_records import EventRow
from edgefl.storage.disk import ledger_file

if TYPE_CHECKING:
    import pandas as pd

#: Figures of a run in a study's frame, in base units: peaks of any device, else sums over devices and rounds.
COMPARED = ("step_peak_bytes", "flops", "payload_up_bytes", "payload_down_bytes", "compute_s", "energy_j")
_COLUMNS = {
    **dict.fromkeys(("run", "status"), "string"),
    "accuracy": "float64",
    **dict.fromkeys((*COMPARED, "run_s"), "float64"),
    "error": "string",
}
Grid = Mapping[str, Sequence[object]] | Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Cell:
    """One run of a study. ``overrides``: field -> value; ``error``: why there is no finished run."""

    overrides: dict[str, object]
    run: Run | None = None
    error: str = ""


@dataclass(frozen=True)
class Study:
    """The runs of a study, in the grid's order, the last field fastest."""

    cells: tuple[Cell, ...] = field(repr=False)
    directory: Path

    def to_pandas(self) -> pd.DataFrame:
        """A row for each cell: its overrides, the run, its accuracy (0..1) and what training took, in base units.

        A figure that was not measured is NaN. Raises MissingDependencyError without pandas.
        """
        fields = list(dict.fromkeys(name for cell in self.cells for name in cell.overrides))
        types = {**dict.fromkeys(fields, "object"), **_COLUMNS}
        return frame(types, [(*(cell.overrides.get(name) for name in fields), *_figures(cell)) for cell in self.cells])


def _figures(cell: Cell) -> tuple[object, ...]:
    if cell.run is None:
        return ("", "failed", *[None] * (len(COMPARED) + 2), cell.error)
    record = cell.run.report.record
    took = None if record.finished_at is None else record.finished_at - record.started_at
    spent = (resources.fleet(name, record).value for name in COMPARED)
    return (cell.run.id, record.status, cell.run.accuracy, *spent, took, cell.error)


class _Planned(NamedTuple):
    """A cell before its run. ``run``: the run's id, which follows from what the cell trains."""

    overrides: dict[str, object]
    merged: dict[str, object]
    run: str


def study(
    file: RunSource,
    grid: Grid,
    *,
    directory: str | Path = "studies",
    overrides: Mapping[str, object] | None = None,
    on_event: Callable[[EventRow], None] | None = None,
    trainers: int = 0,
    export: bool = False,
) -> Study:
    """Run a grid of overrides, one local fleet after the other; called again, only the cells that are not done yet.

    ``grid``: field -> its values (every combination is a cell), or the cells themselves, each field -> value.
    ``overrides``: for all cells. ``directory`` has a folder for each run, named after what it trains: a cell that is
    done there is kept, one that was cut off goes on, and a changed run file or value makes another run.
    ``on_event``, ``trainers``, ``export``: as of ``edgefl.run``. A cell that fails is in the result with its error, and
    the others go on. Raises ConfigError, before anything starts, if any cell's settings are wrong.
    """
    place = Path(directory)
    made, feed = Made(export, page=False), on_event or (lambda _: None)
    cells = []
    for planned in [_planned(file, dict(overrides or {}), cell) for cell in _combinations(grid)]:
        options = LocalOptions(file, planned.merged, place, trainers=trainers)
        cells.append(_carried_out(options, planned, lambda one: carried_out(one, feed, made)))
    return Study(tuple(cells), place)


def _combinations(grid: Grid) -> list[dict[str, object]]:
    if isinstance(grid, Mapping):
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [dict(cell) for cell in grid]


def _planned(file: RunSource, common: dict[str, object], cell: dict[str, object]) -> _Planned:
    """The cell with its run's id: the run's name, and a hash of its settings and recipe. Raises ConfigError."""
    merged = common | cell
    config, recipe = load_run(file, merged)
    settings = [config.model_dump(mode="json"), recipe.model_dump(mode="json")]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return _Planned(cell, merged, f"{config.name[:40]}-{digest[:12]}")


def _carried_out(options: LocalOptions, planned: _Planned, carry_out: Callable[[LocalOptions], Run]) -> Cell:
    """The cell's run: as it is if it is done, else begun or gone on with."""
    directory = options.runs / planned.run
    begun = (directory / "run.yaml").is_file()
    try:
        if begun and ledger_file(directory) and (record := read_run(directory)).status == "done":
            return Cell(planned.overrides, Run(directory, Report(record, directory)))
        given = options._replace(resume=planned.run) if begun else options._replace(run=planned.run)
        return Cell(planned.overrides, carry_out(given))
    except MissingDependencyError:  # of every cell
        raise
    except EdgeFLError as error:
        return Cell(planned.overrides, error=f"{error.message} ({error.remedy})")
