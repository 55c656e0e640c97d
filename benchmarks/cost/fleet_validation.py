"""A forecast held against reality: one run file as a simulation with traces, and with real agents that follow them.

200 devices come and go by traces in FLASH's form (stretches of a minute or two); a round asks a tenth of those that are
there. First `edgefl simulate` predicts the run with this machine's measured profile, slowed by a factor; then the
coordinator, a mosquitto and 200 real agents (two processes, a trainer process each) do it, each device as much slower
than its training was (``benchmarks.cost.validation_agents``), started and stopped by its trace. Links are loopback, and
predicted as such. Needs both processors alone: minutes of real time are compared.

    python -m benchmarks.cost.fleet_validation [--agents 200] [--asked 20] [--rounds 24] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import yaml

import edgefl
from benchmarks.common.sections import put
from benchmarks.cost.validation_agents import Fleet
from benchmarks.crash.crash_fleet import end_all
from coordinator.ledger.ledger import Ledger
from device_agent.measured_profile import measured_profile
from device_agent.runtime.connect import Options
from edgefl.api.run_inputs import shares_of
from edgefl.api.simulation import DeviceKind, drawn_fleet
from edgefl.config.profiles import load_run
from edgefl.report.forecast import forecast
from edgefl.run_records import EventRow, RunReport
from edgefl.transport.broker import start_broker

PROCESSES, PHONES, HOUR_S = 2, 40, 3600
#: Mean seconds there and away.
THERE_S, AWAY_S = 90.0, 45.0
#: How much slower a device is than this machine, so that all that a round asks fit on its processors.
SLOWER = 60.0
SAMPLES, CLASSES, SHAPE, EACH = 6_000, 6, (32, 3), 60
READY_S = 180.0
HEAD = """# A real fleet, predicted and measured

How far the forecast of a fleet whose devices come and go is from the fleet itself.
"""
TITLE = "The same run, simulated and with real agents"


class Outcome(NamedTuple):
    """A run. ``first_s``: when its first round opened, from the begin of the traces on; ``ends``: of those asked.

    ``payload_bytes``: of all that were asked; ``update_bytes``: of one whose update counts, in the mean.
    """

    seconds: float
    first_s: float
    round_s: list[float]
    payload_bytes: float
    update_bytes: float
    asked: list[list[str]]
    ends: dict[str, int]


def write_files(folder: Path, agents: int, seed: int) -> None:
    """Samples, and the phones' states."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, SAMPLES)
    means = rng.normal(size=(CLASSES, *SHAPE))
    windows = (means[labels] + rng.normal(size=(SAMPLES, *SHAPE))).astype(np.float32)
    np.savez(folder / "train.npz", sensor=windows[1000:], label=labels[1000:])
    np.savez(folder / "test.npz", sensor=windows[:1000], label=labels[:1000])
    phones = {}
    for n in range(PHONES):
        at, there = datetime(2020, 1, 2), bool(rng.random() < THERE_S / (THERE_S + AWAY_S))  # noqa: DTZ001 - no zone
        lines, end = [f"{at}\tscreen_lock", f"{at}\tbattery_charged_on"], at + timedelta(seconds=HOUR_S)
        while at < end:
            lines.append(f"{at}\t{'wifi' if there else '4g'}")
            at += timedelta(seconds=1 + int(rng.exponential(THERE_S if there else AWAY_S)))
            there = not there
        phones[f"phone-{n}"] = {"messages": "\n".join(lines)}
    (folder / "states.json").write_text(json.dumps(phones))
    loopback = {"down_u": 1e6, "down_sigma": 0, "up_u": 1e6, "up_sigma": 0}
    (folder / "links.json").write_text(json.dumps({"loopback": loopback}))


def write_profile(folder: Path) -> Path:
    """This machine's profile, slowed."""
    profile: dict[str, Any] = measured_profile("here", "cpu", folder / "profiled")
    speed = profile["speed"]
    slowed = {name: speed[name] / SLOWER for name in ("flops", "written_bytes")}
    slowed["operation_s"] = speed["operation_s"] * SLOWER
    file = folder / "here.yaml"
    file.write_text(yaml.safe_dump({"name": "here", "speed": slowed, "torch_device": "cpu"}))
    return file


def fields(folder: Path, agents: int, asked: int, rounds: int, seed: int) -> dict[str, Any]:
    """The run."""
    there = THERE_S / (THERE_S + AWAY_S)
    return {
        "name": "validation",
        "seed": seed,
        "recipe": "end_to_end",
        "slots": {"select": {"random": {"share": min(1.0, asked / (there * agents))}}},
        "data": {
            "source": str(folder / "train.npz"),
            "test": str(folder / "test.npz"),
            "partition": {"drawn": {"each": EACH}},
        },
        "model": {
            "stages": 1,
            "encoders": {"sensor": {"kind": "sensor", "width": 32, "depth": 2, "heads": 2, "patch": 4}},
            "head": {"width": 32, "out": 16, "dropout": 0.0},
            "fusion_width": 16,
        },
        "training": {"rounds": [rounds], "batch_size": 10},
        "round": {"devices": int(0.5 * there * agents), "join_s": 20, "quorum": 0.5, "deadline_s": 60},
        "evaluate": "stage",
    }


def outcome(report: RunReport, at: list[float], begin: float, seconds: float) -> Outcome:
    """Of a finished run; ``at``: when each of its rounds opened."""
    begun = [event for event in report.events if event.kind == "round_started"]
    closed = [float(event.data["seconds"]) for event in report.events if event.kind == "round_closed"]
    names = ("payload_down_bytes", "payload_up_bytes")
    moved = [
        (row.status, sum(row.measured[name].value or 0.0 for name in names if name in row.measured))
        for row in report.assignments
    ]
    counted = [size for status, size in moved if status == "done"]
    return Outcome(
        seconds,
        at[0] - begin,
        closed,
        sum(size for _, size in moved),
        sum(counted) / max(1, len(counted)),
        [list(event.data["participants"]) for event in begun],
        forecast(report).ends,
    )


def simulated(folder: Path, run: dict[str, Any], agents: int, profile: Path) -> Outcome:
    """The forecast."""
    trace = {"states": str(folder / "states.json"), "links": str(folder / "links.json")}
    whole = {**run, "fleet": drawn_fleet(agents, [DeviceKind(str(profile))], trace)}
    made = edgefl.run(whole, directory=folder / "simulated", in_process=True, export=False, page=False)
    report = made.report.record
    times = [event.data["simulated_s"] for event in report.events if event.kind == "round_started"]
    return outcome(report, times, 0.0, forecast(report).seconds or 0.0)


@contextlib.contextmanager
def real_agents(folder: Path, run: dict[str, Any], agents: int, url: str) -> Iterator[Path]:
    """The agents' processes; the file in which they are told when the traces begin."""
    whole = {**run, "fleet": drawn_fleet(agents, [DeviceKind("cpu")])}
    config, _ = load_run(whole)
    names = list(config.device_names)
    shares_of(config, names, folder / "shares")
    every = [
        Options(
            broker=url,
            device=n,
            data=str(folder / f"shares/{n}.npz"),
            state=str(folder / "devices" / n),
            profile="here",
        )
        for n in names
    ]
    begin, children = folder / "begin", list[subprocess.Popen[bytes]]()
    for n in range(PROCESSES):
        fleet = Fleet(
            every[n::PROCESSES],
            names,
            str(folder / "states.json"),
            run["seed"],
            SLOWER,
            str(begin),
            str(folder / "logs"),
        )
        file = folder / f"agents-{n}.json"
        file.write_bytes(msgspec.json.encode(fleet))
        command = [sys.executable, "-m", "benchmarks.cost.validation_agents", str(file)]
        children.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    try:
        yield begin
    finally:
        end_all(children)


async def real(folder: Path, run: dict[str, Any], agents: int) -> Outcome:
    """The same with real agents. Raises SystemExit where the coordinator fails."""
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    place = folder / "runs" / "real"
    async with start_broker(folder / "broker", "mosquitto") as broker:
        with real_agents(folder, run, agents, broker.url) as begin:
            there = run["round"]["devices"]
            until = time.monotonic() + READY_S
            connected = 0
            while connected < there and time.monotonic() < until:  # the logs say of each when it has read its data
                logs = (folder / "logs").glob("device-*.log")
                connected = sum("trainer-ready" in log.read_text(encoding="utf-8") for log in logs)
                await asyncio.sleep(0.5)
            await asyncio.sleep(5.0)  # the last ones of those that are there at first
            command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events"]
            command += ["--run", "real", "--directory", str(place.parent)]
            environment = {**os.environ, "EDGEFL_BROKER": broker.url, "OMP_NUM_THREADS": "1"}
            with (folder / "coordinator.log").open("wb") as log:
                coordinator = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            while not (events := place / "events.jsonl").exists() or b"run_started" not in events.read_bytes():
                if coordinator.poll() is not None:
                    raise SystemExit(f"the coordinator has ended; see {folder / 'coordinator.log'}")
                await asyncio.sleep(0.02)
            started = time.time()
            begin.with_suffix(".new").write_text(str(started))
            begin.with_suffix(".new").rename(begin)
            if await asyncio.to_thread(coordinator.wait):
                raise SystemExit(
                    f"the coordinator ended with {coordinator.returncode}; see {folder / 'coordinator.log'}"
                )
    with Ledger(place / "ledger.sqlite", create=False) as ledger:
        report = ledger.report("real")
    rows = [msgspec.json.decode(line, type=EventRow) for line in events.read_bytes().splitlines()]
    at = [row.at for row in rows if row.kind == "round_started"]
    end = next(row.at for row in reversed(rows) if row.kind == "run_finished")
    return outcome(report, at, started, end - started)


def page(predicted: Outcome, measured: Outcome) -> str:
    """A table."""

    def line(what: str, a: float, b: float, form: str = ",.1f") -> str:
        return f"| {what} | {a:{form}} | {b:{form}} | {f'{100 * (a / b - 1):+.1f} %' if a and b else ''} |"

    same = sum(a == b for a, b in zip(predicted.asked, measured.asked, strict=False))
    count = [sum(map(len, one.asked)) for one in (predicted, measured)]
    ends = sorted({*predicted.ends, *measured.ends})
    lines = [
        "| figure | predicted | measured | error |",
        "|---|---|---|---|",
        line("wall time, s", predicted.seconds, measured.seconds),
        line("first round opens, s", predicted.first_s, measured.first_s),
        line("rounds, s together", sum(predicted.round_s), sum(measured.round_s)),
        line("parts, MB", predicted.payload_bytes / 1e6, measured.payload_bytes / 1e6, ",.2f"),
        line("parts of a device round that counts, KB", predicted.update_bytes / 1e3, measured.update_bytes / 1e3),
        line("devices asked", count[0], count[1], ",.0f"),
        *(line(end, predicted.ends.get(end, 0), measured.ends.get(end, 0), ",.0f") for end in ends),
    ]
    rounds = ", ".join(f"{a:.1f} / {b:.1f}" for a, b in zip(predicted.round_s, measured.round_s, strict=False))
    told = f"The same devices were asked in {same} of {len(predicted.asked)} attempts. Each round, s: {rounds}."
    return "\n".join(lines) + f"\n\n{told}\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--asked", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--keep", type=Path, help="folder to keep everything in")
    parser.add_argument("--write", type=Path, help="folder of simulating.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgefl-validation-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, options.agents, 1)
        run = fields(folder, options.agents, options.asked, options.rounds, 1)
        predicted = simulated(folder, run, options.agents, write_profile(folder))
        sys.stderr.write(f"{predicted}\n")
        measured = asyncio.run(real(folder, run, options.agents))
        sys.stderr.write(f"{measured}\n")
    text = page(predicted, measured)
    sys.stdout.write(text)
    if options.write is not None:
        what = f"{options.agents} devices, of which a round asks about {options.asked}, there for {THERE_S:.0f} s "
        what += f"and away for {AWAY_S:.0f} s in the mean, {SLOWER:.0f} times slower than this machine."
        busy = f"Load average at the end: {os.getloadavg()[0]:.0f}, on {os.cpu_count()} processors."
        how = f"--agents {options.agents} --asked {options.asked} --rounds {options.rounds}"
        body = f"`python -m benchmarks.cost.fleet_validation {how}`\n\n{what} {busy}\n\n{text}"
        put(options.write / "simulating.md", TITLE, body, head=HEAD)


if __name__ == "__main__":
    main()
