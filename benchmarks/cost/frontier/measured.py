"""Step memory of schedules on real fleets: the kernel's high-water mark of the largest step on any device.

    python -m benchmarks.cost.frontier.measured                  # every task
    python -m benchmarks.cost.frontier.measured --only har-scratch

A run has two rounds of each stage, of one pass: more of either take no more memory. What libraries take in a process's
first step is part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

import edgefl
from benchmarks.accuracy.claims.study import Study, Values, digest
from benchmarks.common.result_lines import add_row, rows_in
from benchmarks.cost.frontier import RESULTS, study
from benchmarks.cost.frontier.figures import REFERENCE
from coordinator.ledger.ledger import Ledger
from edgefl.report.resources import measured
from edgefl.storage.disk import LEDGER

COMMAND = "python -m benchmarks.cost.frontier.measured"
FILE = "measured.jsonl"
#: Rounds of a stage that has any.
ROUNDS = 2
METHODS = (REFERENCE, "layer-wise 6+8+8 ×4", "heads 36")


class Peak(msgspec.Struct, frozen=True):
    """The largest step of a schedule on any device, in bytes. ``file``: digest of the run file."""

    task: str
    method: str
    file: str
    measured: float


def values_of(study: Study, task: str, method: str) -> Values:
    """The run file of a method, cut to what its memory takes to show."""
    cell = next(cell for cell in study.cells() if (cell.task, cell.method) == (task, method))
    values = study.run_file(cell, {"lr": 1e-3})
    values["training"] |= {"rounds": [min(n, ROUNDS) for n in values["training"]["rounds"]], "epochs": 1}
    return values


def measure(values: Values) -> float:
    """Bytes of the largest step that a fleet of processes reported. Raises SystemExit where none was measured."""
    with tempfile.TemporaryDirectory(prefix="edgefl-frontier-") as folder:
        run = edgefl.run(values, directory=folder, trainers=1, export=False, page=False)
        with Ledger(run.directory / LEDGER, create=False) as ledger:
            largest = measured("step_peak_bytes", ledger.report(run.id).assignments)
    if largest.value is None:
        raise SystemExit(f"{values['name']}: no device measured its step memory: {largest.reason}")
    return largest.value


def told(peaks: Sequence[Peak]) -> str:
    """A sentence for the page: each schedule's step memory as a part of end-to-end training's."""
    of = {method: {one.task: one.measured for one in peaks if one.method == method} for method in METHODS}
    whole, *others = of.values()
    found = []
    for method, own in zip(METHODS[1:], others, strict=True):
        less = [whole[task] / spent for task, spent in own.items() if task in whole]
        if less:
            found.append(f"{method} 1/{max(less):.1f} to 1/{min(less):.1f}")
    if not found:
        return "It was not measured."
    return f"On real fleets it was, in parts of end-to-end training's: {', '.join(found)} (`{COMMAND}`)."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only tasks whose name has this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines")
    options = parser.parse_args()
    made, path = study(), options.results / FILE
    done = {one.file for one in rows_in(path, Peak)}
    for task in made.tasks:
        for method in METHODS:
            if options.only not in task or task not in made.methods[method].get("tasks", made.tasks):
                continue
            values = values_of(made, task, method)
            if digest(values) in done:
                continue
            peak = Peak(task, method, digest(values), measure(values))
            add_row(path, peak)
            sys.stderr.write(f"{task}, {method}: {peak.measured / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
