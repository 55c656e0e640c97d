"""A study: the same run file under a grid of overrides, one run after the other or several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import msgspec

from edgefl.api.frames import frame
from edgefl.api.given_data import FOLDER, Column, Given, GivenData, with_data
from edgefl.api.needs import explained
from edgefl.api.results import Run
from edgefl.api.running import Made, carried_out, in_thread
from edgefl.api.study_cells import Grid, Work, combinations, done, planned, run_or_resume
from edgefl.api.study_pool import SILENT, Ended, Engine, Told, carry_out_all, fitting, local_processes
from edgefl.config.profiles import RunSource
from edgefl.config.yaml_files import plain
from edgefl.errors import ConfigError, Problem
from edgefl.report import resources
from edgefl.run_records import EventRow

if TYPE_CHECKING:
    import pandas as pd

EngineName = Literal["processes", "ray"]
#: Figures of a run in a study's frame, in base units: peaks of any device, else sums over devices and rounds.
COMPARED = ("step_peak_bytes", "flops", "payload_up_bytes", "payload_down_bytes", "compute_s", "energy_j")
_COLUMNS = {
    **dict.fromkeys(("run", "status"), "string"),
    "accuracy": "float64",
    **dict.fromkeys((*COMPARED, "run_s"), "float64"),
    "error": "string",
}


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
        """The table of ``rows`` as a data frame.

        A figure that was not measured is NaN. Raises MissingDependencyError without pandas.
        """
        return frame(
            {**dict.fromkeys(self._fields(), "object"), **_COLUMNS}, [tuple(row.values()) for row in self.rows()]
        )

    def rows(self) -> list[dict[str, object]]:
        """A row for each cell: its overrides, the run, its accuracy (0..1) and what training took, in base units.

        A figure that was not measured is None.
        """
        names = [*self._fields(), *_COLUMNS]
        values = ((*(cell.overrides.get(name) for name in self._fields()), *_figures(cell)) for cell in self.cells)
        return [dict(zip(names, row, strict=True)) for row in values]

    def _fields(self) -> list[str]:
        return list(dict.fromkeys(name for cell in self.cells for name in cell.overrides))


def _figures(cell: Cell) -> tuple[object, ...]:
    if cell.run is None:
        return ("", "failed", *[None] * (len(COMPARED) + 2), cell.error)
    record = cell.run.report.record
    took = None if record.finished_at is None else record.finished_at - record.started_at
    spent = (resources.fleet(name, record).value for name in COMPARED)
    return (cell.run.id, record.status, cell.run.accuracy, *spent, took, cell.error)


def study(
    file: RunSource | None = None,
    grid: Grid = MappingProxyType({}),
    *,
    data: GivenData = None,
    labels: Column | None = None,
    groups: Column | None = None,
    directory: str | Path = "studies",
    overrides: Mapping[str, object] | None = None,
    on_event: Callable[[EventRow], None] | None = None,
    trainers: int = 0,
    export: bool = False,
    in_process: bool = False,
    workers: int = 0,
    memory_mib: float = 0.0,
    engine: EngineName = "processes",
) -> Study:
    """Run a grid of overrides, one local fleet after the other; called again, only the cells that are not done yet.

    ``grid``: field -> its values (every combination is a cell), or the cells themselves, each field -> value.
    ``overrides``: for all cells. ``directory`` has a folder for each run, named after what it trains: a cell that is
    done there is kept, one that was cut off goes on, and a changed run file or value makes another run. ``data``,
    ``labels``, ``groups``, ``on_event``, ``trainers``, ``export``, ``in_process``: as of ``edgefl.run``. ``workers``:
    so many cells at once, each in a process of its own, as far as they fit ``memory_mib`` (default: a share of what is
    free). ``engine``: "ray" for those processes as actors of a Ray cluster (docs/studies.md), by default one for each
    of its cores. A cell that fails is in the result with its error, and the others go on. Raises ConfigError, before
    anything starts, if any cell's settings are wrong.
    """
    place = Path(directory)
    file, fields = with_data(file, Given(data, labels, groups), place / FOLDER)
    source = dict(file) if isinstance(file, Mapping) else str(file)
    fields |= overrides or {}
    common = Work(source, fields, "", str(place), trainers=trainers, in_process=in_process, export=export)
    cells = [planned(common, cell) for cell in combinations(grid)]
    if not workers and engine == "processes":
        made, feed = Made(export, page=False), on_event or (lambda _: None)
        ended = (run_or_resume(one, lambda options: carried_out(options, feed, made)) for one in cells)
        return Study(tuple(Cell(one.cell, *how) for one, how in zip(cells, ended, strict=True)), place)
    if on_event is not None:
        problem = Problem("on_event", "is of cells one after the other, in this process")
        raise ConfigError("the study", [problem], remedy="Leave workers and engine away, or on_event.")
    return at_once(cells, place, workers, int(memory_mib * 2**20), engine=engine)


def at_once(
    cells: Sequence[Work],
    place: Path,
    workers: int = 0,
    memory_bytes: int = 0,
    told: Told = SILENT,
    engine: EngineName = "processes",
) -> Study:
    """A study's cells in worker processes; what is done already is kept. Raises what concerns every cell.

    ``workers``, ``memory_bytes``: that all may take, 0: as the engine has room for.
    """
    works = {cell.run: cell for cell in cells}
    kept = {name: run for name, work in works.items() if (run := done(work)) is not None}
    for name in kept:
        told.ended(Ended(name, kept=True))
    left = [_sent(work) for name, work in works.items() if name not in kept]

    async def carry_out(begin: Callable[[], None]) -> dict[str, str]:
        begin()
        by = _engine(engine, place)
        try:
            count = await fitting(by, left, workers, memory_bytes, told)
            return await carry_out_all(by, left, count, told)
        finally:
            await by.close()

    try:
        errors = in_thread(lambda begin: asyncio.run(carry_out(begin))) if left else {}
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt("Call the study again: it keeps what is done and goes on.") from error
    found = []
    for cell in cells:
        run = kept.get(cell.run) or (None if errors.get(cell.run) else done(cell))
        lacking = "" if run else "its run is not done; call the study again"
        found.append(Cell(cell.cell, run, errors.get(cell.run) or lacking))
    return Study(tuple(found), place)


def _sent(work: Work) -> Work:
    """The cell in plain values, as a worker process gets it."""
    file = work.file if isinstance(work.file, str) else plain(work.file, "")
    return msgspec.structs.replace(work, file=file, overrides=plain(work.overrides, ""), cell={})


@explained("study")
def _engine(name: str, place: Path) -> Engine:
    if name == "ray":
        from edgefl.api.study_ray import ray_actors  # it is loaded by who asks for it

        return ray_actors(place)
    if name == "processes":
        return local_processes(place / "logs")
    raise ConfigError("the study", [Problem("engine", f"is {name!r}")], remedy="There are processes and ray.")
