"""A study's worker, ``python -m edgefl.api.study_worker``: answers ``carry_out`` and ``estimate`` over its pipes."""

from __future__ import annotations

import argparse
import signal
from contextlib import suppress

import msgspec

from edgefl.api.run_inputs import TRAINER_BYTES, PlanOptions, price_of
from edgefl.api.running import Made, carry_out
from edgefl.api.study_cells import Work, run_or_resume
from edgefl.api.study_pool import Estimate
from edgefl.errors import ConfigError, DataError, ModelError
from edgefl.process.parent_death import die_with_parent
from edgefl.process.worker import Handler, Note, serve
from edgefl.resources.process_memory import current_rss_bytes, idle_rss_bytes, peak_bytes, settle

#: What a process keeps once torch has trained in it, beside data and step: 418 MiB after a cell, 334 after pricing it
#: (torch 2.13, CPU, Linux).
TRAINED_BYTES = 84 * 2**20


def run_cell(body: object, note: Note) -> str:
    """Carry out a cell where it stands; the error that it failed by, "": none."""
    work = msgspec.convert(body, Work)
    made = Made(work.export, page=False)
    try:
        return run_or_resume(work, lambda one: carry_out(one, lambda _: None, made, lambda: None))[1]
    finally:
        settle()  # the next cell reads its data on top of what this one has not given back


def estimate(body: object, note: Note) -> list[Estimate]:
    """Memory of each cell that can be priced, by what it takes to price those up to it and by its price.

    One without a price, such as one whose data are not there, fails by the same error when it is carried out.
    """
    found = []
    for work in msgspec.convert(body, list[Work]):
        with suppress(ConfigError, DataError, ModelError):
            found.append(_estimate(work))
    return found


def _estimate(work: Work) -> Estimate:
    before = current_rss_bytes()
    price = price_of(work.file, work.overrides, PlanOptions())
    steps: dict[str, int] = {}
    for plan in price.devices:
        steps[plan.device] = max(steps.get(plan.device, 0), plan.placement.cost.step_peak_bytes)
    # A cell's data are read again in a process that has loaded torch by then, which was not there the first time.
    settled = idle_rss_bytes()
    process = max(settled, settled + (peak_bytes() or settled) - before)
    if work.in_process:
        return Estimate(process + TRAINED_BYTES, max(steps.values(), default=0))
    others = (len(steps) if not work.trainers else work.trainers) + 1  # trainers, and the evaluator
    return Estimate(process, sum(steps.values()), others * TRAINER_BYTES)


HANDLERS: dict[str, Handler] = {"carry_out": run_cell, "estimate": estimate}


def main() -> None:
    """Serve until the study closes the pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=0)
    die_with_parent(parser.parse_args().parent, signal.SIGTERM, "a study's worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the study decides
    serve(HANDLERS)


if __name__ == "__main__":
    main()
