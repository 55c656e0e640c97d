"""A study's cells on disk: the grid's cells, the run that each has or gets, and carrying one out where it stands."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edgefl.api.local_run import LocalOptions, check_installed_kinds
from edgefl.api.results import Report, Run
from edgefl.api.runs import read_run, referenced
from edgefl.config.profiles import RunSource, load_run
from edgefl.errors import EdgeFLError, MissingDependencyError
from edgefl.storage.disk import ledger_file

Grid = Mapping[str, Sequence[object]] | Sequence[Mapping[str, object]]


class Planned(NamedTuple):
    """A cell of the grid before its run.

    ``overrides``: its own fields; ``merged``: with those common to all cells; ``run``: the run's id, a hash of its
    settings and recipe after the run file's name.
    """

    overrides: dict[str, object]
    merged: dict[str, object]
    run: str


def combinations(grid: Grid) -> list[dict[str, object]]:
    """The grid's cells, the last field fastest."""
    if isinstance(grid, Mapping):
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [dict(cell) for cell in grid]


def planned(file: RunSource, common: dict[str, object], cell: dict[str, object]) -> Planned:
    """The cell with its run's id: the run's name, and a hash of its settings and recipe. Raises ConfigError."""
    merged = common | cell
    config, recipe = load_run(file, merged)
    # The name of such a kind says nothing of its layers: an edited one's cell would be taken for done.
    check_installed_kinds(config, file, "which a study cannot tell from another of its name")
    settings = [config.model_dump(mode="json"), recipe.model_dump(mode="json")]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return Planned(cell, merged, f"{config.name[:40]}-{digest[:12]}")


def done(options: LocalOptions, run: str) -> Run | None:
    """The cell's run, if there is one and it is done. Raises EdgeFLError for one that cannot be read."""
    directory = options.runs / run
    begun = (directory / "run.yaml").is_file() and ledger_file(directory)
    if begun and (record := read_run(directory)).status == "done":
        return Run(directory, Report(referenced(record, directory), directory))
    return None


def run_or_resume(options: LocalOptions, run: str, carry_out: Callable[[LocalOptions], Run]) -> tuple[Run | None, str]:
    """The cell's run, as it is if it is done, else begun or gone on with; or the error that it failed by."""
    try:
        if (found := done(options, run)) is not None:
            return found, ""
        begun = (options.runs / run / "run.yaml").is_file()
        return carry_out(options._replace(resume=run) if begun else options._replace(run=run)), ""
    except MissingDependencyError:  # of every cell
        raise
    except EdgeFLError as error:
        return None, f"{error.message} ({error.remedy})"
