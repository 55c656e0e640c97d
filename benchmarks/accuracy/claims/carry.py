"""Carries the table's runs out: worker processes of a study's engine, and a line of results for each run."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.accuracy.claims.eligible import for_one_process, has_memory_budgets, refused
from benchmarks.accuracy.claims.outcome import Outcome, Results, outcome_of
from benchmarks.accuracy.claims.study import Trial, Values, digest
from edgefl.api.runs import read_run
from edgefl.api.study_cells import Work
from edgefl.api.study_pool import Ended, Told, carry_out_all, fitting, local_processes

#: Where runs lie until their line is written.
RUNS = Path("build") / "claims"
#: Runs of each worker between two looks at the clock.
BETWEEN = 3


class Job(NamedTuple):
    """A run that is due."""

    trial: Trial
    values: Values

    @property
    def run(self) -> str:
        """Its id, which follows from what it trains: one that was cut off goes on."""
        return f"{self.trial.cell.paper}-{digest(self.values)}"


class Limits(NamedTuple):
    """How many runs at once, the time (monotonic seconds) after which none begins, and the workers' program."""

    workers: int = 2
    until: float = float("inf")
    worker: str = "edgefl.api.study_worker"


def carry_out(jobs: Sequence[Job], results: Results, limits: Limits, what: str) -> bool:
    """Run the jobs and add a line for each; True when none is left."""
    started, done = time.monotonic(), 0
    by_run = {job.run: job for job in jobs}

    def ended(one: Ended) -> None:
        nonlocal done
        done += 1
        row = _outcome(by_run[one.run], one.error)
        results.add(row)
        left = (time.monotonic() - started) / done * (len(by_run) - done)
        sys.stderr.write(
            f"{what} {done}/{len(by_run)} · {by_run[one.run].trial.key}: {_headline(row)}; {left / 60:.0f} min left\n"
        )
        sys.stderr.flush()

    if not by_run:
        return True
    works = [Work(_carried_out(job.values), {}, job.run, str(RUNS), in_process=True) for job in by_run.values()]
    asyncio.run(_all(works, limits, Told(lambda text: print(text, file=sys.stderr), ended)))
    return done == len(by_run)


async def _all(works: Sequence[Work], limits: Limits, told: Told) -> None:
    engine = local_processes(RUNS / "logs", limits.worker)
    try:
        count = await fitting(engine, works, limits.workers, 0, told)
        for start in range(0, len(works), count * BETWEEN):
            if time.monotonic() >= limits.until:
                return
            await carry_out_all(engine, works[start : start + count * BETWEEN], count, told)
    finally:
        await engine.close()


def _carried_out(values: Values) -> Values:
    return for_one_process(values) if has_memory_budgets(values) else values


def _outcome(job: Job, error: str) -> Outcome:
    file = digest(job.values)
    if error:
        return Outcome(
            **job.trial.cell._asdict(), file=file, settings=job.trial.settings, short=job.trial.short, error=error
        )
    directory = RUNS / job.run
    row = outcome_of(job.trial, file, read_run(directory))
    shutil.rmtree(directory)
    if has_memory_budgets(job.values):
        short = {device: (why.needed or 0.0, why.allowed or 0.0) for device, why in refused(job.values).items()}
        return msgspec.structs.replace(row, refused=short)
    return row


def _headline(row: Outcome) -> str:
    if row.error:
        return row.error
    last = row.curve[-1].metrics if row.curve else {}
    told = next((v for name, v in last.items() if "|none|" in name and name.endswith("accuracy")), None)
    return "no accuracy" if told is None else f"{100 * told:.1f}"
