"""Cost beside accuracy over whole runs: tunes and runs every schedule, writes docs/results/frontier.md.

A run is a fleet in one process (`edgefl study`'s worker processes); what has been run is not run again.

    python -m benchmarks.accuracy.encoders                 # once: the encoders of the pretrained tasks
    python -m benchmarks.cost.frontier --only har          # tasks and methods whose names have this
    python -m benchmarks.cost.frontier --minutes 60        # begin no run after an hour
    python -m benchmarks.cost.frontier --page              # the page of what there is
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.accuracy.claims.__main__ import fill, standing
from benchmarks.accuracy.claims.carry import RUNS, Limits
from benchmarks.common.exclusive import claimed
from benchmarks.common.result_lines import rows_in
from benchmarks.cost.frontier import RESULTS, measured, study
from benchmarks.cost.frontier.page import Shown, write


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cells whose name has this")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after this; 0: run all")
    parser.add_argument("--page", action="store_true", help="only write the page of what there is")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines and plots")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    if not options.page:
        with claimed(RUNS / "frontier.lock"):
            fill(study(), options.results, options.only, Limits(options.workers, until))
    made, rows, tried = standing(study(), options.results)
    write(
        made,
        Shown(rows, len(tried), measured.told(rows_in(options.results / measured.FILE, measured.Peak))),
        options.results.with_suffix(".md"),
    )


if __name__ == "__main__":
    main()
