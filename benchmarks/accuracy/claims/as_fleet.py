"""One cell of each task as a real fleet over MQTT, beside the same in one process: equal to the last bit, or not.

python -m benchmarks.accuracy.claims.as_fleet                 # the first cell of every task of every paper
python -m benchmarks.accuracy.claims.as_fleet --only mmic/har --short
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

import edgefl
from benchmarks.accuracy.claims.__main__ import RESULTS
from benchmarks.accuracy.claims.outcome import Results
from benchmarks.accuracy.claims.study import FOLDER, Cell, Study, Values, digest
from benchmarks.accuracy.claims.tuning import chosen
from benchmarks.common.result_lines import add_row, rows_in
from coordinator.ledger.ledger import Ledger
from edgefl.records import Manifest
from edgefl.storage.disk import LEDGER

FILE = "as-fleet.jsonl"


class Compared(msgspec.Struct, frozen=True):
    """A cell's two runs. ``states``: rounds with a state; ``equal``: of these, those whose object ids are the same.

    ``short``: with a third of the rounds.
    """

    paper: str
    task: str
    condition: str
    method: str
    seed: int
    file: str
    states: int
    equal: int
    fleet_s: float
    one_s: float
    short: bool = False

    @property
    def same(self) -> bool:
        """Whether every state is the same to the last bit."""
        return self.states > 0 and self.equal == self.states


def compared(cell: Cell, values: Values, *, short: bool = False) -> Compared:
    """Run the cell both ways and compare the states of all rounds."""
    with tempfile.TemporaryDirectory(prefix="edgefl-as-fleet-") as name:
        (fleet, fleet_s), (one, one_s) = (
            states(values, Path(name) / kind, in_process=kind == "one") for kind in ("fleet", "one")
        )
    every = fleet.keys() | one.keys()
    equal = sum(fleet.get(at) == one.get(at) for at in every)
    return Compared(
        **cell._asdict(),
        file=digest(values),
        states=len(every),
        equal=equal,
        fleet_s=fleet_s,
        one_s=one_s,
        short=short,
    )


def states(values: Values, directory: Path, *, in_process: bool) -> tuple[dict[tuple[int, int], Manifest], float]:
    """(stage, round) -> part -> object id, of every round of a run, and its seconds."""
    started = time.monotonic()
    trainers = 0 if in_process else 1
    run = edgefl.run(values, directory=directory, in_process=in_process, trainers=trainers, export=False, page=False)
    with Ledger(run.directory / LEDGER, create=False) as ledger:
        return ledger.states(run.id), time.monotonic() - started


def first_cells(only: Iterable[str]) -> list[tuple[Study, Cell]]:
    """The paper's own method of each task, its first condition and seed."""
    found = []
    for paper in sorted(path.stem for path in FOLDER.glob("*.yaml")):
        study = Study(paper)
        own = study.values.get("own_method", paper)
        for task, asked in study.tasks.items():
            if "budget" in asked:
                continue  # one process holds no memory budget: there, micro-batches round otherwise
            cell = Cell(paper, task, next(iter(asked["conditions"])), own, study.seeds[0])
            if all(text in cell.key for text in only):
                found.append((study, cell))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cells whose name has this")
    parser.add_argument("--short", action="store_true", help="a third of the rounds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines")
    options = parser.parse_args()
    path = options.results / FILE
    known = rows_in(path, Compared)
    for study, cell in first_cells(options.only):
        tried = Results(options.results / f"{study.paper}-tuning.jsonl")
        settings = chosen(study, cell, tried)
        lengths = {options.short, False}  # one that was compared in full needs no short one
        files = {digest(study.run_file(cell, settings, short=short)) for short in lengths}
        if any(one.file in files for one in known):
            continue
        found = compared(cell, study.run_file(cell, settings, short=options.short), short=options.short)
        add_row(path, found)
        told = "equal to the last bit" if found.same else f"only {found.equal} of {found.states} states are equal"
        sys.stderr.write(f"{cell.key}: {told}; fleet {found.fleet_s:.0f} s, one process {found.one_s:.0f} s\n")


if __name__ == "__main__":
    main()
