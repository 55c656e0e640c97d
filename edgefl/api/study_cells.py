"""A study's cells: the grid they come from, as a file or not, the run that each has or gets, and carrying one out."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pydantic

from edgefl.api.local_run import LocalOptions, check_installed_kinds
from edgefl.api.results import Report, Run
from edgefl.api.runs import read_run, referenced
from edgefl.config.profiles import load_run
from edgefl.config.yaml_files import Values, read_yaml, validate
from edgefl.errors import EdgeFLError, MissingDependencyError, Problem
from edgefl.storage.disk import ledger_file

Grid = Mapping[str, Sequence[object]] | Sequence[Mapping[str, object]]
#: Each cell is a directory with a ledger; more are a mistake in a grid rather than a wish.
MOST_CELLS = 10_000


class Work(msgspec.Struct, frozen=True):
    """A cell and its run. ``cell``: its own fields of the grid; ``overrides``: with those common to all cells.

    ``directory``: where the study's runs are; ``run``: its id there. ``file``, ``trainers``, ``in_process``,
    ``export``: as of ``edgefl.run``.
    """

    file: str | dict[str, object] = ""
    overrides: dict[str, object] = {}
    run: str = ""
    directory: str = ""
    trainers: int = 0
    in_process: bool = False
    export: bool = False
    cell: dict[str, object] = {}


class StudyFile(Values):
    """``run``: a run file by path, relative to this file, or shipped name. ``overrides``: for all cells.

    ``grid``: field -> its values, every combination is a cell; or the cells themselves. Each is run with each of
    ``seeds``.
    """

    run: str
    overrides: dict[str, Any] = pydantic.Field(default_factory=dict)
    grid: dict[str, list[Any]] | list[dict[str, Any]] = pydantic.Field(default_factory=dict)
    seeds: list[pydantic.NonNegativeInt] = pydantic.Field(default_factory=list)

    def conflicts(self) -> list[Problem]:
        """No cell at all, too many of them, and two words on the seed."""
        lists = list(self.grid.values()) if isinstance(self.grid, dict) else []
        count = math.prod(map(len, lists)) if isinstance(self.grid, dict) else len(self.grid)
        count *= max(1, len(self.seeds))
        named = self.grid if isinstance(self.grid, dict) else {field for cell in self.grid for field in cell}
        found = []
        if not count or not (self.grid or self.seeds):
            found.append(Problem("grid", "has no cell: give values, or seeds"))
        if count > MOST_CELLS:
            found.append(Problem("grid", f"makes {count:,} cells, more than {MOST_CELLS:,}"))
        if self.seeds and "seed" in named:
            found.append(Problem("seeds", "are in grid as well, as seed"))
        return found

    def cells(self) -> list[dict[str, Any]]:
        """The overrides of each cell, the seed last and fastest."""
        seeds: list[dict[str, Any]] = [{"seed": seed} for seed in self.seeds] or [{}]
        return [cell | seed for cell in combinations(self.grid) for seed in seeds]


def read_study(file: Path) -> StudyFile:
    """The study in a file, its run file named from here. Raises ConfigError with every problem found."""
    values, lines = read_yaml(file)
    study = validate(StudyFile, values, str(file), lines)
    beside = file.parent / study.run
    return study.model_copy(update={"run": str(beside)}) if beside.is_file() else study


def combinations(grid: Grid) -> list[dict[str, object]]:
    """The grid's cells, the last field fastest."""
    if isinstance(grid, Mapping):
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [dict(cell) for cell in grid]


def planned(common: Work, cell: dict[str, object]) -> Work:
    """The cell with its run's id: the run's name, and a hash of its settings and recipe. Raises ConfigError."""
    merged = common.overrides | cell
    config, recipe = load_run(common.file, merged)
    # The name of such a kind says nothing of its layers: an edited one's cell would be taken for done.
    check_installed_kinds(config, common.file, "which a study cannot tell from another of its name")
    settings = [config.model_dump(mode="json"), recipe.model_dump(mode="json")]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    run = f"{config.name[:40]}-{digest[:12]}"
    return msgspec.structs.replace(common, overrides=merged, cell=cell, run=run)


def done(work: Work) -> Run | None:
    """The cell's run, if there is one and it is done. Raises EdgeFLError for one that cannot be read."""
    directory = Path(work.directory) / work.run
    begun = (directory / "run.yaml").is_file() and ledger_file(directory)
    if begun and (record := read_run(directory)).status == "done":
        return Run(directory, Report(referenced(record, directory), directory))
    return None


def run_or_resume(work: Work, carry_out: Callable[[LocalOptions], Run]) -> tuple[Run | None, str]:
    """Run a study's cell, or resume it, unless it is done.

    (run, "") or (None, error message). Raises MissingDependencyError, as it concerns every cell.
    """
    runs = Path(work.directory)
    options = LocalOptions(work.file, work.overrides, runs, trainers=work.trainers, in_process=work.in_process)
    try:
        if (found := done(work)) is not None:
            return found, ""
        begun = (runs / work.run / "run.yaml").is_file()
        return carry_out(options._replace(resume=work.run) if begun else options._replace(run=work.run)), ""
    except MissingDependencyError:  # of every cell
        raise
    except EdgeFLError as error:
        return None, f"{error.message} ({error.remedy})"
