"""Seconds of a round in which nothing is trained: all processes as they are, but trainers that echo.

Each agent sends back every part with one value changed, so that all bytes go both ways and every object is new. A
round is from one start to the next: offers, download, upload, checks, aggregation, ledger. Beside it, through the same
broker, what plain paho clients need to move the same bytes (``benchmarks.network.raw_broker``). Up to four agents are
processes of their own with a trainer process each; more share four processes.

    python -m benchmarks.network.echo [--case 40KB] [--broker mosquitto] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from benchmarks.common import sections
from benchmarks.cost.resource_table import MIB
from benchmarks.network import raw_broker
from benchmarks.network.echo_agents import CLASSES, MODALITY, SAMPLES, SHAPE
from device_agent.runtime.connect import Options
from edgefl.data.dataset import Dataset
from edgefl.records import Budget
from edgefl.run_records import EventRow
from edgefl.transport.broker import start_broker

#: Agents that have a process of their own; more are dealt to as many.
PROCESSES = 4
#: Most of them in one, which holds five descriptors for each.
MOST_IN_ONE = 1000
READY_S = 300.0
#: For agents to say goodbye, thousands in a process; then they are killed.
LEAVE_S = 60.0


class Case(msgspec.Struct, frozen=True):
    """A size of model and fleet. ``goal_s``: seconds of a round on two cores, 0 for none.

    ``model_bytes``: about; 0 where nobody asks.
    """

    name: str
    width: int
    depth: int
    agents: int = 4
    rounds: int = 20
    goal_s: float = 0.0
    model_bytes: int = 0


CASES = (
    Case("40KB", 16, 2, rounds=150, goal_s=0.1),
    Case("1MB", 96, 2),
    Case("28MB", 384, 4, rounds=16, goal_s=1.5),
    Case("40KBx200", 16, 2, agents=200, rounds=8),
)


class Outcome(msgspec.Struct, frozen=True):
    """One case through one broker. Seconds are medians; ``cpu_s``: of all processes, a round, without the broker's."""

    case: str
    broker: str
    agents: int
    model_bytes: int
    round_s: float
    slowest_s: float
    raw_s: float
    coordinator_peak_bytes: int
    coordinator_cpu_s: float
    agents_cpu_s: float


def run_file(case: Case, test: Path) -> dict[str, Any]:
    """End-to-end training of one sensor encoder, all of which travels in every round."""
    encoder = {"kind": "sensor", "width": case.width, "depth": case.depth, "heads": 2, "patch": 4}
    return {
        "name": "echo",
        "seed": 1,
        "recipe": "end_to_end",
        "data": {"test": str(test)},
        "model": {
            "stages": 1,
            "encoders": {MODALITY: encoder},
            "head": {"width": 16, "out": 8, "dropout": 0.0},
            "fusion_width": 8,
        },
        "training": {"rounds": [case.rounds + 1], "batch_size": 10},
        "round": {"devices": case.agents, "join_s": max(READY_S, 0.15 * case.agents), "quorum": 1.0},
        "evaluate": "stage",
    }


def test_set() -> Dataset:
    """Noise with the agents' shapes and labels."""
    draw = np.random.default_rng(0)
    return Dataset(
        {MODALITY: draw.normal(size=(SAMPLES, *SHAPE)).astype(np.float32)},
        {MODALITY: np.ones(SAMPLES, dtype=bool)},
        np.arange(SAMPLES) % len(CLASSES),
        CLASSES,
        [str(row) for row in range(SAMPLES)],
    )


async def measured(case: Case, kind: str, folder: Path, options: Sequence[str] = ()) -> Outcome:
    """Broker, raw rounds, then the run itself. ``options``: more of the coordinator's command line."""
    test = folder / "test.npz"
    test_set().save_npz(test)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(case, test)))
    async with start_broker(folder / "broker", kind) as broker:
        run = folder / "runs" / "echo"
        environment = {**os.environ, "EDGEFL_BROKER": broker.url, "OMP_NUM_THREADS": "1"}
        with agents(case, folder, environment) as spent:
            command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events"]
            command += ["--run", "echo", "--directory", str(run.parent), *options]
            coordinator = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            peak = asyncio.create_task(highest(coordinator.pid))
            _, status, used = await asyncio.to_thread(os.wait4, coordinator.pid, 0)
            coordinator.returncode = os.waitstatus_to_exitcode(status)
            if coordinator.returncode:
                raise SystemExit(f"the coordinator of {case.name} ended with {coordinator.returncode}; see {folder}")
        rows = [msgspec.json.decode(line, type=EventRow) for line in (run / "events.jsonl").read_bytes().splitlines()]
        begun = [row.at for row in rows if row.kind == "round_started"]
        begun.append(next(row.at for row in reversed(rows) if row.kind == "round_closed"))
        seconds = [b - a for a, b in itertools.pairwise(begun[1:])]  # before the first, agents were idle
        size = next(row.data["bytes"] for row in rows if row.kind == "run_started")
        raw = await asyncio.to_thread(raw_broker.measured, broker.url, min(case.agents, PROCESSES), size, case.rounds)
    return Outcome(
        case.name,
        broker.kind,
        case.agents,
        size,
        statistics.median(seconds),
        max(seconds),
        raw,
        await peak,
        (used.ru_utime + used.ru_stime) / len(begun),
        sum(spent) / len(begun),
    )


async def highest(pid: int) -> int:
    """The kernel's high-water mark of a process' memory, when it was last looked at before its end."""
    peak = 0
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return peak
        peak = next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), peak)
        if any(line.startswith("State:\tZ") for line in lines):
            return peak
        await asyncio.sleep(0.1)


@contextlib.contextmanager
def agents(case: Case, folder: Path, environment: dict[str, str]) -> Iterator[list[float]]:
    """The agents' processes; afterwards the CPU seconds each has used, its trainer's with it."""
    names = [f"agent-{n:03d}" for n in range(case.agents)]
    children, used_s = [], list[float]()
    processes = max(min(PROCESSES, case.agents), -(-case.agents // MOST_IN_ONE))
    for n in range(processes):
        every = [
            Options(device=name, data=str(folder / "test.npz"), state=str(folder / name), budget=Budget())
            for name in names[n::processes]
        ]
        file = folder / f"agents-{n}.json"
        file.write_bytes(msgspec.json.encode(every))
        command = [sys.executable, "-m", "benchmarks.network.echo_agents", str(file)]
        children.append(subprocess.Popen(command, env=environment))
    try:
        yield used_s
    finally:
        for child in children:
            child.send_signal(signal.SIGTERM)
        until = time.monotonic() + LEAVE_S
        for child in children:
            while not (ended := os.wait4(child.pid, os.WNOHANG))[0] and time.monotonic() < until:
                time.sleep(0.05)
            if not ended[0]:
                child.kill()
                ended = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(ended[1])
            used_s.append(ended[2].ru_utime + ended[2].ru_stime)


def page(found: Sequence[Outcome]) -> str:
    """A table."""
    columns = ["model × agents", "broker", "a round, s", "slowest", "raw, s", "÷ raw", "MB/s"]
    columns += ["CPU s: coordinator", "agents", "coordinator's peak, MiB"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for one in found:
        cells = [
            f"{one.model_bytes / 1e3:,.0f} KB × {one.agents}",
            one.broker,
            f"{one.round_s:.3f}",
            f"{one.slowest_s:.3f}",
            f"{one.raw_s:.3f}",
            f"{one.round_s / one.raw_s:.1f}",
            f"{2 * one.agents * one.model_bytes / one.round_s / 1e6:,.0f}",
            f"{one.coordinator_cpu_s:.2f}",
            f"{one.agents_cpu_s:.2f}",
            f"{one.coordinator_peak_bytes / MIB:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--broker", choices=("mosquitto", "amqtt"), action="append")
    parser.add_argument("--keep", type=Path, help="folder to keep everything in")
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    options = parser.parse_args()
    found = []
    for kind in options.broker or ("mosquitto", "amqtt"):
        for case in CASES:
            if options.case and case.name not in options.case:
                continue
            with tempfile.TemporaryDirectory(prefix="edgefl-echo-") as temporary:
                folder = options.keep / f"{kind}-{case.name}" if options.keep else Path(temporary)
                folder.mkdir(parents=True, exist_ok=True)
                started = time.monotonic()
                found.append(asyncio.run(measured(case, kind, folder)))
            sys.stderr.write(f"{kind} {case.name}: {found[-1].round_s:.3f} s ({time.monotonic() - started:.0f} s)\n")
    text = page(found)
    if options.write is not None:
        explained = (__doc__ or "").split("\n\n")[1]
        sections.transport(
            options.write, "Rounds without training", "python -m benchmarks.network.echo", f"{explained}\n\n{text}"
        )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
