"""A study: the same run file under a grid of overrides, one run after the other or several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from edgefl.api.cells import Grid, Planned, combinations, done, planned, run_or_resume
from edgefl.api.frames import frame
from edgefl.api.given_data import FOLDER, Column, Given, GivenData, with_data
from edgefl.api.local_run import LocalOptions
from edgefl.api.needs import explained
from edgefl.api.results import Run
from edgefl.api.running import Made, carried_out, in_thread
from edgefl.api.study_engine import Engine, Work, local_processes
from edgefl.api.study_queue import Ended, Told, carry_out_all, fitting
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
    cells = [planned(file, {**fields, **(overrides or {})}, cell) for cell in combinations(grid)]
    asked = LocalOptions(file, (), place, trainers=trainers, in_process=in_process)
    if not workers and engine == "processes":
        made, feed = Made(export, page=False), on_event or (lambda _: None)
        found = []
        for one in cells:
            options = asked._replace(overrides=one.merged)
            run, error = run_or_resume(options, one.run, lambda given: carried_out(given, feed, made))
            found.append(Cell(one.overrides, run, error))
        return Study(tuple(found), place)
    if on_event is not None:
        problem = Problem("on_event", "is of cells one after the other, in this process")
        raise ConfigError("the study", [problem], remedy="Leave workers and engine away, or on_event.")
    return at_once(cells, asked, AtOnce(workers, int(memory_mib * 2**20), export, engine=engine))


class AtOnce(NamedTuple):
    """Several cells at once. ``workers``, ``memory_bytes``: that all may take, 0: as the engine has room for."""

    workers: int = 0
    memory_bytes: int = 0
    export: bool = False
    told: Told = Told()
    engine: EngineName = "processes"


def at_once(cells: Sequence[Planned], options: LocalOptions, how: AtOnce) -> Study:
    """A study's cells in worker processes; what is done already is kept. Raises what concerns every cell."""
    place, file = options.runs, options.file
    source = plain(file, "") if isinstance(file, Mapping) else str(file)
    works = [
        Work(source, plain(cell.merged, ""), cell.run, str(place), options.trainers, options.in_process, how.export)
        for cell in {cell.run: cell for cell in cells}.values()
    ]
    kept = {work.run: run for work in works if (run := done(options, work.run)) is not None}
    for name in kept:
        how.told.ended(Ended(name, kept=True))
    left = [work for work in works if work.run not in kept]
    try:
        errors = in_thread(lambda begin: asyncio.run(_carry_out(begin, left, place, how))) if left else {}
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt("Call the study again: it keeps what is done and goes on.") from error
    found = []
    for cell in cells:
        run = kept.get(cell.run) or (None if errors.get(cell.run) else done(options, cell.run))
        lacking = "" if run else "its run is not done; call the study again"
        found.append(Cell(cell.overrides, run, errors.get(cell.run) or lacking))
    return Study(tuple(found), place)


async def _carry_out(begin: Callable[[], None], works: Sequence[Work], place: Path, how: AtOnce) -> dict[str, str]:
    begin()
    engine = _engine(how.engine, place)
    try:
        count = await fitting(engine, works, how.workers, how.memory_bytes, how.told)
        return await carry_out_all(engine, works, count, how.told)
    finally:
        await engine.close()


@explained("study")
def _engine(name: str, place: Path) -> Engine:
    if name == "ray":
        from edgefl.api.study_ray import ray_actors  # it is loaded by who asks for it

        return ray_actors(place)
    if name == "processes":
        return local_processes(place / "logs")
    raise ConfigError("the study", [Problem("engine", f"is {name!r}")], remedy="There are processes and ray.")
