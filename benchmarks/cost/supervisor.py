"""Memory of an agent's supervisor in a run: over plain MQTT on loopback, and with an identity (TLS, signed messages).

The programs as they are: broker, coordinator, and one agent whose trainer, a process of its own, sends back what it was
sent. The supervisor is looked at ten times a second; printed is the most that was seen. RSS counts shared libraries in
full, PSS shares them out, USS is what would be free if it ended.

    python -m benchmarks.cost.supervisor [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import yaml

from benchmarks.common import sections
from benchmarks.cost.resource_table import MIB
from benchmarks.network.echo import Case, run_file, test_set
from coordinator.runtime.fleet_auth import serve
from device_agent.enroll import enroll
from device_agent.runtime.connect import Options
from edgefl.identity.fleet import Record, create_fleet, fleet_broker
from edgefl.identity.issued_tokens import issue_token
from edgefl.transport.broker import start_broker

#: What a supervisor may weigh, bytes.
LIMIT_BYTES = 45_000_000
NAME, FLEET, HOST = "box", "default", "127.0.0.1"
CASE = Case("1MB", 96, 2, agents=1, rounds=5)


class Seen(NamedTuple):
    """Bytes."""

    rss: int = 0
    pss: int = 0
    uss: int = 0


async def plain(folder: Path) -> Seen:
    """A user and a password on loopback."""
    async with start_broker(folder / "broker", "mosquitto") as broker:
        return await in_a_run(folder, broker.url, [])


async def identified(folder: Path) -> Seen:
    """Enrolled as a user would, over the broker."""
    port, enroll_port = _free_port(), _free_port()
    fleet = create_fleet(folder / "fleet", Record(FLEET, (HOST,), port, enroll_port, HOST))
    async with fleet_broker(fleet):
        serving = asyncio.ensure_future(serve(fleet, lambda line: None, until=(NAME,), limit_s=60))
        await enroll(issue_token(fleet, NAME, time.time()), folder / NAME, folder, 60, lambda line: None)
        await serving
        return await in_a_run(folder, fleet.url, ["--identity", str(fleet.directory)])


async def in_a_run(folder: Path, url: str, more: list[str]) -> Seen:
    """Start the agent and the coordinator; the most that the agent's supervisor held until the run was over."""
    test = folder / "test.npz"
    test_set().save_npz(test)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(CASE, test)))
    environment = {**os.environ, "EDGEFL_BROKER": url, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events", "--run", "r1"]
    command += ["--directory", str(folder / "runs"), *more]
    with _agent(folder, environment) as agent:
        coordinator = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        seen = Seen()
        while coordinator.poll() is None:
            seen = Seen(*map(max, seen, _memory(agent)))
            await asyncio.sleep(0.1)
    if coordinator.returncode:
        raise SystemExit(f"the coordinator ended with {coordinator.returncode}")
    return seen


@contextlib.contextmanager
def _agent(folder: Path, environment: dict[str, str]) -> Iterator[psutil.Process]:
    options = Options(fleet=FLEET, device=NAME, data=str(folder / "test.npz"), state=str(folder / NAME))
    file = folder / "agent.json"
    file.write_bytes(msgspec.json.encode([options]))
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.network.echo_agents", str(file)], env=environment)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _memory(process: psutil.Process) -> Seen:
    found = process.memory_full_info()
    return Seen(found.rss, found.pss, found.uss)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def page(rows: dict[str, Seen]) -> str:
    """A table."""
    lines = [
        "The most that an agent's supervisor held in a run of five rounds with a model of 1 MB, MiB; its trainer is a",
        f"process of its own. The limit is {LIMIT_BYTES / 1e6:.0f} MB ({LIMIT_BYTES / MIB:.1f} MiB) resident.",
        "",
        "| connection | RSS | PSS | USS |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(f'{value / MIB:.1f}' for value in seen)} |" for name, seen in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    chosen = parser.parse_args()
    rows = {}
    for name, measure in (("loopback, no TLS", plain), ("identity: TLS, signed messages", identified)):
        with tempfile.TemporaryDirectory(prefix="edgefl-supervisor-") as folder:
            rows[name] = asyncio.run(measure(Path(folder)))
    text = page(rows)
    if chosen.write is not None:
        sections.transport(chosen.write, "What a supervisor weighs", "python -m benchmarks.cost.supervisor", text)
    sys.stdout.write(text)
    worst = max(seen.rss for seen in rows.values())
    if worst > LIMIT_BYTES:
        raise SystemExit(f"{worst} bytes are more than {LIMIT_BYTES}")


if __name__ == "__main__":
    main()
