"""A study file: a run file, a grid of overrides, and seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pydantic

from edgefl.api.cells import combinations
from edgefl.config.yaml_files import Values, read_yaml, validate
from edgefl.errors import Problem

#: Each cell is a directory with a ledger; more are a mistake in a grid rather than a wish.
MOST_CELLS = 10_000


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
