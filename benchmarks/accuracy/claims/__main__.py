"""What each paper claims, on real data: tunes every method alike, runs each cell, writes the page.

python -m benchmarks.accuracy.claims                   # all papers; what has been run is not run again
python -m benchmarks.accuracy.claims --paper mmic      # one of them
python -m benchmarks.accuracy.claims --minutes 60      # begin no run after an hour
python -m benchmarks.accuracy.claims --page            # the page of what there is
python -m benchmarks.accuracy.claims --quick           # a preview: one seed, a sixth of the rounds
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.accuracy.claims import baseline, taking_part
from benchmarks.accuracy.claims.carry import RUNS, Job, Limits, carry_out
from benchmarks.accuracy.claims.outcome import Outcome, Results
from benchmarks.accuracy.claims.study import Cell, Study, Trial, digest, papers
from benchmarks.accuracy.claims.tuning import chosen, decisive, tune
from benchmarks.common.exclusive import claimed

RESULTS = Path("docs/results/systems")
#: Where ``--quick`` puts its lines and page.
QUICK = RUNS / "quick"


def jobs_of(study: Study, cells: list[Cell], tried: Results, runs: Results) -> list[Job]:
    """The cells that are due, each with the settings that won."""
    found = []
    for cell in cells:
        settings = chosen(study, cell, tried)
        job = Job(Trial(cell, settings, short=False), study.run_file(cell, settings))
        if runs.of(cell, digest(job.values)) is None:
            found.append(job)
    return found


def trials_of(study: Study, folder: Path) -> Results:
    """What tuning has tried. A quick study has the settings that the whole one has chosen, else the middle ones."""
    return Results((RESULTS if study.quick else folder) / f"{study.paper}-tuning.jsonl")


def fill(study: Study, folder: Path, only: list[str], limits: Limits) -> bool:
    """Tune and run what is due; True when nothing is left. A quick study tunes nothing."""
    tried, runs = trials_of(study, folder), Results(folder / f"{study.paper}-runs.jsonl")
    cells = [cell for cell in study.cells() if all(text in cell.key for text in only)]
    if not study.quick:
        tasks = list(dict.fromkeys(cell.task for cell in cells))
        baseline.fill(study, tasks, folder / baseline.FILE)
        taking_part.fill(study, tasks, folder / taking_part.FILE)
        if not tune(study, cells, tried, limits):
            return False
    return carry_out(jobs_of(study, cells, tried, runs), runs, limits, "run")


def standing(study: Study, folder: Path) -> tuple[Study, list[Outcome], list[Outcome]]:
    """The study, the good runs of its grid as it is now with the settings that won, and the trials that chose them."""
    tried, runs = trials_of(study, folder), Results(folder / f"{study.paper}-runs.jsonl")
    rows = []
    for cell in study.cells():
        row = runs.of(cell, digest(study.run_file(cell, chosen(study, cell, tried))))
        if row is not None:
            rows.append(row)
    return study, rows, [] if study.quick else decisive(study, tried)


def main() -> None:
    """The command line."""
    known = papers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="append", choices=known, help="one paper's claims; again: another's as well")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cells whose name has this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after this; 0: run all")
    parser.add_argument("--page", action="store_true", help="only write the page of what there is")
    parser.add_argument(
        "--quick", action="store_true", help=f"a preview of one seed and a sixth of the rounds, into {QUICK}"
    )
    parser.add_argument("--results", type=Path, help=f"folder of the lines and plots (default: {RESULTS})")
    options = parser.parse_args()
    folder = options.results or (QUICK if options.quick else RESULTS)
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    studies = [Study(paper, quick=options.quick) for paper in options.paper or known]
    if not options.page:
        with claimed(RUNS / "lock"):
            for study in studies:
                limits = Limits(options.workers, until)
                if worker := study.values.get("worker"):
                    limits = limits._replace(worker=worker)
                fill(study, folder, options.only, limits)
    from benchmarks.accuracy.claims.page import write

    page = folder.with_suffix(".md")
    found = [standing(Study(paper, quick=options.quick), folder) for paper in known]
    told = RESULTS if options.quick else folder
    write(found, page, baseline.kept(told / baseline.FILE), taking_part.kept(told / taking_part.FILE))
    sys.stderr.write(f"{page}\n")


if __name__ == "__main__":
    main()
