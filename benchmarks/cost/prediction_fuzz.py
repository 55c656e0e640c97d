"""Predictions of random runs against what their devices measured, and whether accepted budgets were kept.

Each seed is a random valid run file (``random_runs``) with two devices, of which one has budgets near its own price.
Coordinator and agents run in one process; every trainer is the real one, a process of its own under its ceiling, so
that memory is measured. Compared is what a report shows of a device: the largest peaks, and the sums of all else.

    python -m benchmarks.cost.prediction_fuzz [--seeds 0-199] [--rows FILE.jsonl] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.cost.random_runs import WHOLE, NoRunError, RandomRun, Size, random_run
from coordinator.ledger.ledger import Ledger
from coordinator.runtime import evaluator
from coordinator.runtime.environment import Environment
from coordinator.runtime.runner import run as coordinate
from device_agent.many_agents import HostedTrainers
from device_agent.runtime.connect import Options, make_agent
from device_agent.runtime.trainer_process import TrainerProcess
from device_agent.trainer.process import Trainers
from edgefl.api.in_process import SIMULATED
from edgefl.errors import EdgeFLError
from edgefl.log_lines import line_writer
from edgefl.process.inline_worker import ComputeThread, InlineWorker
from edgefl.records import Budget, Refusal, Speed
from edgefl.resources.torch_threads import set_threads
from edgefl.run_records import AssignmentRow
from edgefl.storage.disk import LEDGER
from edgefl.transport.memory_broker import MemoryBroker, MemoryTransport

#: Longest that a run may take.
LIMIT_S = 180.0
NO_SPEED = Speed()


class Row(msgspec.Struct, frozen=True):
    """One device in one round: figures predicted and measured; ``refusal``: why it did not train."""

    device: str
    stage: int
    round: int
    status: str
    refusal: Refusal | None
    micro_batch: int
    predicted: dict[str, float]
    measured: dict[str, float]


class Outcome(msgspec.Struct, frozen=True):
    """A seed's run. ``base``: device -> bytes of its idle trainer; ``error``: how the run ended, if not well."""

    seed: int
    traits: dict[str, Any]
    budgets: dict[str, Budget]
    base: dict[str, int]
    rows: tuple[Row, ...]
    error: str = ""
    seconds: float = 0.0

    def trained(self) -> Iterator[tuple[str, list[Row]]]:
        """(Device, its rounds with an update) of every device that has one."""
        for device in self.base:
            if rows := [row for row in self.rows if row.device == device and row.status == "done"]:
                yield device, rows


def outcome(seed: int, folder: Path, speed: Speed = NO_SPEED, size: Size = WHOLE, *, alone: bool = True) -> Outcome:
    """The run of ``seed`` in ``folder``. Raises NoRunError.

    ``alone``: each trainer has a process of its own; else all are in this one, where memory is neither measured nor
    limited.
    """
    one = random_run(seed, folder / "draws", size)
    if not alone:
        free = {
            name: replace(budget, memory_bytes=None, step_memory_bytes=None) for name, budget in one.budgets.items()
        }
        one = one._replace(budgets=free)
    started, error = time.monotonic(), ""
    try:
        asyncio.run(asyncio.wait_for(_fleet(one, folder, speed, alone), LIMIT_S))
    except (EdgeFLError, asyncio.TimeoutError) as problem:
        error = f"{type(problem).__name__}: {problem}"[:300]
    with Ledger(folder / "run" / LEDGER) as ledger:
        report = ledger.report("fuzz")
    base = {row.device: row.capabilities.trainer_base_bytes for row in report.devices}
    rows = tuple(map(_row, report.assignments))
    return Outcome(seed, dict(one.traits), dict(one.budgets), base, rows, error, time.monotonic() - started)


async def _fleet(one: RandomRun, folder: Path, speed: Speed, alone: bool) -> None:
    """Coordinator and agents in this process, and trainers where they are not alone in theirs."""
    directory, broker = folder / "run", MemoryBroker()
    logs = directory / "logs"
    logs.mkdir(parents=True)
    with ComputeThread("edgefl-torch") as thread, contextlib.ExitStack() as stack:
        before = thread.submit(set_threads, 1).result()
        stack.callback(lambda: thread.submit(set_threads, before))
        trainers = Trainers(alone=False)
        inline = InlineWorker(trainers.handlers, thread, logs / "trainers.log", trainers.leave_off)
        trainer = TrainerProcess if alone else HostedTrainers([inline]).trainer
        agents = []
        for device, share in one.shares.items():
            options = Options(
                fleet="fuzz",
                device=device,
                data=str(share),
                state=str(folder / "devices" / device),
                budget=one.budgets[device],
                speed=speed,
                torch_device="cpu",
            )
            log = stack.enter_context((logs / f"{device}.log").open("a"))
            link = partial(MemoryTransport, broker, device)
            agents.append(make_agent(options, line_writer("text", log), trainer, link=link))
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        environment = Environment(
            directory,
            MemoryTransport(broker, "coordinator"),
            "fuzz",
            lambda event: None,
            worker=InlineWorker(evaluator.handlers, thread, logs / "evaluator.log"),
            timeouts=SIMULATED,
        )
        try:
            await coordinate(one.plan, environment, resume=False)
        finally:
            for agent in agents:
                agent.stop()
            await asyncio.gather(*tasks, return_exceptions=True)


def _row(row: AssignmentRow) -> Row:
    predicted, measured = (
        {name: figure.value for name, figure in figures.items() if figure.value is not None}
        for figures in (row.predicted, row.measured)
    )
    return Row(row.device, row.stage, row.round, row.status, row.refusal, row.micro_batch, predicted, measured)


def overruns(one: Outcome) -> list[tuple[str, int, int, str, float, float]]:
    """(Device, stage, round, limit, measured, allowed) of every round that was accepted and took more."""
    found = []
    for device, rows in one.trained():
        budget = one.budgets[device]
        for row in rows:
            spent = _spent(row.measured)
            for field, value in spent.items():
                allowed = getattr(budget, field)
                if allowed is not None and value is not None and value > allowed:
                    found.append((device, row.stage, row.round, field, value, float(allowed)))
    return found


def _spent(measured: Mapping[str, float]) -> dict[str, float | None]:
    payload = measured.get("payload_down_bytes", 0.0) + measured.get("payload_up_bytes", 0.0)
    return {
        "step_memory_bytes": measured.get("step_peak_bytes"),
        "memory_bytes": measured.get("process_peak_bytes"),
        "flops": measured.get("flops"),
        "payload_bytes": payload,
    }


def without_seconds(one: Outcome) -> Outcome:
    """The outcome without measured seconds, which a busy machine makes longer."""
    known = [{n: v for n, v in row.measured.items() if n != "compute_s"} for row in one.rows]
    rows = tuple(replace(row, measured=values) for row, values in zip(one.rows, known, strict=True))
    return replace(one, rows=rows)


def read(file: Path) -> list[Outcome]:
    """Outcomes as ``main`` has written them."""
    return [msgspec.json.decode(line, type=Outcome) for line in file.read_bytes().splitlines()]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-199", metavar="FIRST-LAST")
    parser.add_argument(
        "--rows", type=Path, default=Path("prediction_fuzz.jsonl"), help="seeds in it are not run again"
    )
    parser.add_argument("--profile", type=Path, help="from `edgefl-agent profile`, for seconds; default: measured now")
    parser.add_argument("--busy", action="store_true", help="leave seconds out: other programs ran meanwhile")
    parser.add_argument("--write", type=Path, help="folder for prediction_fuzz.md")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks.cost.prediction_page import page, summary
    from edgefl.config.profiles import load_device

    first, _, last = options.seeds.partition("-")
    known = {one.seed for one in read(options.rows)} if options.rows.exists() else set()
    wanted = [seed for seed in range(int(first), int(last or first) + 1) if seed not in known]
    if wanted:
        profile = options.profile or _measured(options.rows.with_suffix(".profile.yaml"))
        speed = load_device(str(profile)).speed.record()
    for seed in wanted:
        folder = Path(tempfile.mkdtemp(prefix="edgefl-fuzz-"))
        try:
            found = outcome(seed, folder, speed)
        except NoRunError as error:
            sys.stderr.write(f"{error}\n")
            continue
        finally:
            shutil.rmtree(folder)
        with options.rows.open("ab") as file:
            file.write(msgspec.json.encode(found) + b"\n")
        sys.stderr.write(f"seed {seed}: {found.seconds:.1f} s {found.error}\n")
    every = sorted(read(options.rows), key=lambda one: one.seed)
    if options.busy:
        every = [without_seconds(one) for one in every]
    sys.stdout.write(summary(every))
    if options.write is not None:
        (options.write / "prediction_fuzz.md").write_text(page(every))


def _measured(file: Path) -> Path:
    """A profile of this machine, measured by one thread, as a trainer computes."""
    import subprocess

    command = [sys.executable, "-m", "device_agent.cli", "profile", "--force", "--torch-device", "cpu"]
    subprocess.run([*command, "--out", str(file)], stdout=sys.stderr, check=True)
    return file


if __name__ == "__main__":
    main()
