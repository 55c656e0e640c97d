"""Many light agents on one machine through one broker: who is asked, who is lost, what is sent twice.

Real coordinator, broker and supervisors; trainers echo (``benchmarks.network.echo_agents``), up to 1,000 agents a
process. Two loads: 1,000 agents of which each round asks 200; and 200 agents that all upload 2 MB at once to a
coordinator that is stopped for half of every second. Two more by name: 10,000 agents, of which each round asks 2,000,
with either model. A chunk the broker drops is one that has to be sent again, so bytes sent again are counted. Standard
error says how many devices have joined, and each round's seconds.

    python -m benchmarks.network.load [--case 10000] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from benchmarks.common import sections
from benchmarks.cost.resource_table import MIB
from benchmarks.network import echo
from coordinator.ledger.ledger import Ledger
from edgefl.run_records import EventRow
from edgefl.transport.broker import start_broker


class Load(msgspec.Struct, frozen=True):
    """``asked``: devices of a round, 0 for all. ``stopped_s``: how long of a second the coordinator stands still."""

    name: str
    case: echo.Case
    asked: int = 0
    stopped_s: float = 0.0


LOADS = (
    Load("1000", echo.Case("40KB", 16, 2, agents=1000, rounds=20, model_bytes=36_000), asked=200),
    Load("200x2MB", echo.Case("2MB", 128, 3, agents=200, rounds=3), stopped_s=0.5),
    Load("10000", echo.Case("40KB", 16, 2, agents=10_000, rounds=20, model_bytes=36_000), asked=2_000),
    Load("10000x2MB", echo.Case("2MB", 128, 3, agents=10_000, rounds=20, model_bytes=2_410_000), asked=2_000),
)
#: Without a device that joins or a round that ends for as long, a load has failed.
STALLED_S = 600.0
#: Parts of the model's size that an agent that was asked keeps on disk: the model and its update.
KEPT = 2
#: Those that are run where none is named.
USUAL = ("1000", "200x2MB")


class Outcome(msgspec.Struct, frozen=True):
    """What a load was like; ``lost``: devices of all rounds that were asked and not counted.

    ``cpu_s``: coordinator, broker and agents, from the first round's start on. ``moved_bytes``: payload of all rounds.
    """

    load: str
    model_bytes: int
    agents: int
    asked: int
    rounds: int
    connected_s: float
    round_s: float
    slowest_s: float
    lost: int
    resent_bytes: float
    dropped_for: int
    coordinator_peak_bytes: int
    broker_bytes: int
    moved_bytes: float
    cpu_s: dict[str, float]


def run_file(load: Load, test: Path) -> dict[str, Any]:
    """The echo benchmark's, with a draw of devices, and all of them needed."""
    found = echo.run_file(load.case, test)
    if load.asked:
        found["slots"] = {"select": {"random": {"share": load.asked / load.case.agents}}}
    return found


async def measured(load: Load, folder: Path) -> Outcome:
    """One load, from the first agent's start to the coordinator's end. Raises SystemExit where it fails."""
    test = folder / "test.npz"
    echo.test_set().save_npz(test)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(load, test)))
    run = folder / "runs" / "echo"
    async with start_broker(folder / "broker", "mosquitto") as broker:
        environment = {**os.environ, "EDGEFL_BROKER": broker.url, "OMP_NUM_THREADS": "1"}
        with echo.agents(load.case, folder, environment):
            command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events"]
            command += ["--run", "echo", "--directory", str(run.parent)]
            with (folder / "coordinator.log").open("wb") as log:
                coordinator = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            peak = asyncio.create_task(echo.highest(coordinator.pid))
            server = psutil.Process(broker.pid)
            first = asyncio.create_task(_at_the_first_round(coordinator.pid, server, run / "events.jsonl"))
            watching = asyncio.create_task(_watched(len(_agents()), run / "events.jsonl"))
            ending = asyncio.create_task(asyncio.to_thread(os.wait4, coordinator.pid, 0))
            try:
                async with _standing_still(coordinator.pid, load.stopped_s, run / "events.jsonl"):
                    await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not ending.done():
                    coordinator.kill()
                _, status, used = await ending
                coordinator.returncode = os.waitstatus_to_exitcode(status)
                watching.cancel()
                (fault,) = await asyncio.gather(watching, return_exceptions=True)
            cpu_s = {"coordinator": used.ru_utime + used.ru_stime, "broker": _spent(server), "agents": _of_agents()}
            broker_bytes = server.memory_info().rss
            if coordinator.returncode:
                first.cancel()
                why = f": {fault}" if isinstance(fault, RuntimeError) else ""
                raise SystemExit(
                    f"the coordinator of {load.name} ended with {coordinator.returncode}{why}; see {folder}"
                )
    rows = [msgspec.json.decode(line, type=EventRow) for line in (run / "events.jsonl").read_bytes().splitlines()]
    with Ledger(run / "ledger.sqlite", create=False) as ledger:
        report = ledger.report("echo")
    begun = [row.at for row in rows if row.kind == "round_started"]
    begun.append(next(row.at for row in reversed(rows) if row.kind == "round_closed"))
    seconds = [b - a for a, b in itertools.pairwise(begun)]
    joined = next(row.at for row in rows if row.kind == "device_joined")
    before = await first

    def total(*names: str) -> float:
        every = (figure for one in report.assignments for name, figure in one.measured.items() if name in names)
        return sum(figure.value or 0.0 for figure in every)

    return Outcome(
        load.name,
        next(row.data["bytes"] for row in rows if row.kind == "run_started"),
        load.case.agents,
        load.asked or load.case.agents,
        len(seconds),
        begun[0] - joined,
        statistics.median(seconds),
        max(seconds),
        sum(one.status != "done" for one in report.assignments),
        total("resent_up_bytes", "resent_down_bytes"),
        sum(b"being dropped" in line for line in broker.log.read_bytes().splitlines()),
        await peak,
        broker_bytes,
        total("payload_up_bytes", "payload_down_bytes"),
        {who: spent - before[who] for who, spent in cpu_s.items()},
    )


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _agents() -> list[psutil.Process]:
    """This process' children that are agents and run."""
    return [one for one in psutil.Process().children() if "benchmarks.network.echo_agents" in one.cmdline()]


def _of_agents() -> float:
    return sum(map(_spent, _agents()))


async def _watched(processes: int, file: Path) -> None:
    """Print what a run's events say of its progress. Raises RuntimeError when agents end, or nothing goes on."""
    joined, counted, round_at, moved, place = 0, 0, 0.0, time.monotonic(), 0
    while True:
        await asyncio.sleep(1.0)
        if len(_agents()) < processes:
            raise RuntimeError("a process of agents has ended")
        if time.monotonic() - moved > STALLED_S:
            raise RuntimeError(f"nothing went on for {STALLED_S:.0f} s")
        if not file.exists():
            continue
        with file.open("rb") as stream:
            stream.seek(place)
            lines = stream.readlines()
        for line in lines:
            if not line.endswith(b"\n"):
                break
            place += len(line)
            row = msgspec.json.decode(line, type=EventRow)
            joined += row.kind == "device_joined"
            if row.kind == "device_left":
                sys.stderr.write(f"{row.device} left: {row.data.get('reason')}\n")
            if row.kind == "round_started":
                round_at = row.at
            if row.kind == "round_closed":
                sys.stderr.write(f"round {row.round}: {row.at - round_at:.1f} s\n")
            if row.kind in {"device_joined", "round_closed"}:
                moved = time.monotonic()
        if joined != counted:
            counted = joined
            sys.stderr.write(f"{joined} joined\n")


async def _at_the_first_round(coordinator: int, server: psutil.Process, events: Path) -> dict[str, float]:
    """Processor time of each when the first round began."""
    while not (events.exists() and b'"round_started"' in events.read_bytes()):
        await asyncio.sleep(0.1)
    return {"coordinator": _spent(psutil.Process(coordinator)), "broker": _spent(server), "agents": _of_agents()}


@contextlib.asynccontextmanager
async def _standing_still(pid: int, stopped_s: float, events: Path) -> AsyncIterator[None]:
    """Stop the process for so long of every second, from its first round on."""

    async def stop() -> None:
        while not (events.exists() and b'"round_started"' in events.read_bytes()):
            await asyncio.sleep(0.1)
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(1 - stopped_s)

    stopping = asyncio.create_task(stop()) if stopped_s else None
    try:
        yield
    finally:
        if stopping is not None:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)


def _disk_bytes(load: Load) -> int:
    """Most that the devices that are asked leave on disk, and the coordinator's two rounds."""
    case = load.case
    share = load.asked / case.agents
    devices = case.agents * (1 - (1 - share) ** (case.rounds + 1))
    return int((KEPT * devices + 2 * load.asked) * case.model_bytes) + case.agents * 2**15


def page(found: list[Outcome]) -> str:
    """A table."""
    columns = ["agents", "asked", "model, KB", "rounds", "all connected, s", "a round, s", "slowest", "lost"]
    columns += ["dropped for", "sent again, KB", "payload, MB a round", "coordinator's peak, MiB", "broker, MiB"]
    columns += ["CPU s a round: coordinator", "broker", "agents"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for one in found:
        cells: list[object] = [one.agents, one.asked, f"{one.model_bytes / 1e3:,.0f}", one.rounds]
        cells += [f"{one.connected_s:.1f}", f"{one.round_s:.2f}", f"{one.slowest_s:.2f}", one.lost]
        cells += [one.dropped_for, f"{one.resent_bytes / 1e3:,.0f}", f"{one.moved_bytes / one.rounds / 1e6:,.1f}"]
        cells += [f"{one.coordinator_peak_bytes / MIB:,.0f}", f"{one.broker_bytes / MIB:,.0f}"]
        cells += [f"{one.cpu_s[who] / one.rounds:.2f}" for who in ("coordinator", "broker", "agents")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


#: Above the table.
_EXPLAINED = """Agents (up to 1,000 a process) of which each round asks a fifth, and 200 agents that upload 2 MB each
to a coordinator that stands still for half of every second. *Lost*: devices that were asked and not counted, of all
rounds. *Dropped for*: clients the broker told it was dropping messages for. *Sent again*: chunks that came too late
for whoever waited, and were sent twice. Processor time is of the rounds, from the first one's start on. What bounds
these loads is the processors' time of the agents: two cores serve all of them."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[load.name for load in LOADS], action="append")
    parser.add_argument("--keep", type=Path, help="folder to keep everything in")
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    options = parser.parse_args()
    found = []
    for load in LOADS:
        if load.name not in (options.case or USUAL):
            continue
        with tempfile.TemporaryDirectory(prefix="edgefl-load-") as temporary:
            folder = options.keep / load.name if options.keep else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            started = time.monotonic()
            if load.asked and shutil.disk_usage(folder).free < (needed := _disk_bytes(load)):
                raise SystemExit(
                    f"{load.name} needs {needed / 2**30:.0f} GiB of disk in {folder}; name another by --keep"
                )
            found.append(asyncio.run(measured(load, folder)))
        sys.stderr.write(f"{load.name}: {found[-1].round_s:.2f} s a round ({time.monotonic() - started:.0f} s)\n")
    text = page(found)
    if options.write is not None:
        busy = f"Load average at the end: {os.getloadavg()[0]:.0f}, on {os.cpu_count()} processors."
        sections.transport(options.write, "Load", "python -m benchmarks.network.load", f"{_EXPLAINED} {busy}\n\n{text}")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
