"""All systems and baselines on real data, in one regime: accuracy, rounds, bytes, FLOPs and memory.

Every run is a fleet of agents and a coordinator at a broker (``edgefl run --trainers``). First each method is tuned
with the same number of runs on samples that its devices set apart; then every cell of
``benchmarks/accuracy/one_regime.yaml`` is run. What has been run is never run again: stop it whenever you like,
the same command goes on.

    python -m benchmarks.accuracy.one_regime                    # tune, run, write the page
    python -m benchmarks.accuracy.one_regime --quick            # one seed, few methods and rounds: ten minutes
    python -m benchmarks.accuracy.one_regime --only har/mmic    # some of it
    python -m benchmarks.accuracy.one_regime --page             # the page of what there is
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median

from benchmarks.accuracy.table import measures
from benchmarks.accuracy.table.collect import Outcome, Results, digest, run_cell, stop_all
from benchmarks.accuracy.table.grid import EPOCHS, MULTIWAY, SHARE, Cell, Grid, Settings
from benchmarks.accuracy.table.page import write
from benchmarks.common.exclusive import claimed

RESULTS = Path("docs/results/one_regime")
Job = tuple[Cell, Settings]


class Runner:
    """Runs jobs, ``parallel`` at a time, until none is left or the time is up."""

    def __init__(self, grid: Grid, parallel: int, minutes: float) -> None:
        self.grid = grid
        self.parallel = parallel
        self.until = time.monotonic() + 60 * minutes if minutes else float("inf")
        self._spent: list[float] = []

    def run(self, jobs: list[Job], results: Results, what: str) -> bool:
        """True when all of them have been run."""
        waiting: Iterator[Job] = iter(jobs)
        running: set[Future[Outcome]] = set()
        finished = 0
        with ThreadPoolExecutor(self.parallel) as pool, stopped_with_us():
            while True:
                while len(running) < self.parallel and time.monotonic() < self.until and (job := next(waiting, None)):
                    running.add(pool.submit(self._one, *job))
                if not running:
                    return finished == len(jobs)
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    row = future.result()
                    results.add(row)
                    finished += 1
                    self._tell(row, what, finished, len(jobs))

    def _one(self, cell: Cell, settings: Settings) -> Outcome:
        values = self.grid.run_file(cell, settings)
        try:
            return run_cell(cell, settings, values)
        except Exception as error:  # it is told as this run's failure; the other runs go on
            about = {**cell._asdict(), "lr": settings.lr, "slots": settings.slots, "file": digest(values)}
            return Outcome(**about, error=f"{type(error).__name__}: {error}")

    def _tell(self, row: Outcome, what: str, finished: int, total: int) -> None:
        self._spent.append(row.wall_s)
        left = (total - finished) * median(self._spent) / self.parallel
        told = row.error or f"{headline(row):.1f}"
        sys.stderr.write(
            f"{what} {finished}/{total} · {row.cell.key} lr {row.lr:g}: {told} ({row.wall_s:.0f} s); "
            f"about {left / 60:.0f} min left\n"
        )
        sys.stderr.flush()


@contextlib.contextmanager
def stopped_with_us() -> Iterator[None]:
    """Runs under way end when this program is told to: they are run anew next time."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        stop_all()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def headline(row: Outcome) -> float:
    """What a line of progress tells: accuracy with all modalities, else the devices' own, in percent; else RSum."""
    told = (measures.complete(row), measures.own_accuracy(row), measures.rsum(row))
    return next((value for value in told if value is not None), 0.0)


def tune(grid: Grid, cells: list[Cell], runner: Runner, tried: Results) -> bool:
    """Spend the same number of runs on every method and task that ``cells`` need; True when that is done."""
    wanted = list(dict.fromkeys(grid.tuned_as(cell) for cell in cells))
    first = [(cell, one) for cell in wanted for one in grid.trials(cell) if due(grid, tried, cell, one)]
    if not runner.run(first, tried, "tuning"):
        return False
    rest = [
        (cell, one)
        for cell in wanted
        for one in grid.more_trials(cell, best(grid, tried, cell) or grid.default(cell), spent(grid, tried, cell))
        if due(grid, tried, cell, one)
    ]
    return runner.run(rest, tried, "tuning")


def due(grid: Grid, results: Results, cell: Cell, one: Settings) -> bool:
    """Whether this has still to be run: not when it ended well, nor when it failed twice."""
    rows = results.tries(cell, grid.run_file(cell, one))
    return all(row.error for row in rows) and len(rows) < 2


def of_grid(grid: Grid) -> Callable[[Outcome], bool]:
    """Whether a run is one of this grid's, not of the grid as it was once."""
    return lambda row: row.file == digest(grid.run_file(row.cell, Settings(row.lr, row.slots)))


def settings_of(grid: Grid, tried: Results, cell: Cell) -> list[Settings]:
    """What has been tried for a cell of this grid; an alternative that is no longer in it is not of it."""
    own = [{}, *grid.methods[cell.method].get("tune", [])]
    found = [Settings(row.lr, row.slots) for row in tried.rows if row.cell == cell and row.slots in own]
    return [one for i, one in enumerate(found) if one not in found[:i] and tried.tries(cell, grid.run_file(cell, one))]


def score(grid: Grid, row: Outcome) -> float | None:
    """What settings are judged by: RSum where that is told, for recall at 1 is coarse with few pairs a device."""
    return measures.known_rsum(row) if grid.tasks[row.task].get("metric") == "rsum" else row.score


def spent(grid: Grid, tried: Results, cell: Cell) -> list[Settings]:
    """What of a cell's budget is gone: settings that are not to be tried again."""
    return [one for one in settings_of(grid, tried, cell) if not due(grid, tried, cell, one)]


def best(grid: Grid, tried: Results, cell: Cell) -> Settings | None:
    """The settings with the highest score on the devices' own samples; None when none has a score."""
    found = [
        (value, one)
        for one in settings_of(grid, tried, cell)
        for row in tried.tries(cell, grid.run_file(cell, one))
        if (value := score(grid, row)) is not None
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def pretrain_for(grid: Grid, cells: list[Cell]) -> None:
    """Make the encoders that the start "pretrained" needs and that are not there yet."""
    from benchmarks.accuracy import pretrain

    for cell in cells:
        for one in grid.encoders(cell) if cell.start == "pretrained" else ():
            if not one.path.is_file():
                encoders = one.config if one.modality == MULTIWAY else {one.modality: one.config}
                multiway = one.modality == MULTIWAY
                source = {one.source: one.options}
                found = pretrain.make(source, encoders, one.path, multiway=multiway, share=SHARE, epochs=EPOCHS)
                told = ", ".join(f"{m} {100 * accuracy:.1f} %" for m, accuracy in found.items())
                sys.stderr.write(f"{one.path}: alone on the test part: {told}\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few methods and rounds: about ten minutes")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cells whose name has this")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run after this; 0: run all")
    parser.add_argument("--page", action="store_true", help="only write the page of what there is")
    parser.add_argument("--results", type=Path, help=f"folder of the results; default {RESULTS}, quick: build/quick")
    options = parser.parse_args()
    grid = Grid(quick=options.quick)
    folder = options.results or (Path("build/quick") if options.quick else RESULTS)
    files = (folder / "runs.jsonl", folder / "tuning.jsonl")
    cells = [cell for cell in grid.cells() if all(text in cell.key for text in options.only)]
    if not cells:
        parser.error(f"no cell's name has all of: {', '.join(options.only)}")
    runner = Runner(grid, options.parallel, options.minutes)
    try:
        if not options.page:
            with claimed(files[0]):
                _fill(grid, cells, runner, *map(Results, files))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    page = folder.with_suffix(".md")
    runs, tried = map(Results, files)
    command, mine = "python -m benchmarks.accuracy.one_regime" + " --quick" * options.quick, of_grid(grid)
    write(grid, runs.only(mine).newest(), tried.only(mine), page, command)
    sys.stderr.write(f"{page}\n")


def _fill(grid: Grid, cells: list[Cell], runner: Runner, runs: Results, tried: Results) -> None:
    """Pretrain, tune (not in the quick form) and run what has not been run."""
    pretrain_for(grid, cells)
    if not grid.quick and not tune(grid, cells, runner, tried):
        return
    settings = {cell: best(grid, tried, grid.tuned_as(cell)) or grid.default(cell) for cell in cells}
    runner.run([(cell, settings[cell]) for cell in cells if due(grid, runs, cell, settings[cell])], runs, "run")


if __name__ == "__main__":
    main()
