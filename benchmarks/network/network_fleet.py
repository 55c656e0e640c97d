"""A fleet over links of its own: three agents with trainers that echo in a network namespace each, one coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.network import echo
from benchmarks.network.network_links import Conditions, Counters, Link, Namespace
from coordinator.core.timeouts import Timeouts
from coordinator.ledger.ledger import Ledger
from device_agent.runtime.connect import Options
from edgefl.process.parent_death import leashed
from edgefl.records import Manifest
from edgefl.run_records import EventRow, RunReport
from edgefl.transport.broker import start_broker

DEVICES = ("far", "left", "right")
#: Its link is cut, or it is stopped; it is the first in every order that there is.
VICTIM = DEVICES[0]
#: Longest that a run may take.
PATIENCE_S = 400.0
#: When a device that says nothing is told away.
SILENCE_S = Timeouts().silence_s
#: What telling takes besides: a tick, and a machine that is busy.
TELLING_S = 3.0
#: About 400 KB: 4 s at 1 Mbit/s, 13 s at 256 kbit/s, each way.
MODEL = echo.Case("networks", 48, 3, agents=len(DEVICES))


class Mark(msgspec.Struct, frozen=True):
    """The counters when a round began."""

    at: float
    links: tuple[tuple[Counters, Counters], ...]
    segments: int


class Network:
    """The namespaces and their links; this thread is in that of broker and coordinator while it is open."""

    def __init__(self, seed: int = 1) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(Namespace())
        self.devices = {name: self._stack.enter_context(Namespace()) for name in DEVICES}
        self.links = {
            name: self._stack.enter_context(Link(self.server, namespace, number, seed + number))
            for number, (name, namespace) in enumerate(self.devices.items(), 1)
        }
        self._stack.enter_context(self.server.entered())

    def set(self, conditions: Conditions) -> None:
        """Of every link."""
        for link in self.links.values():
            link.conditions = conditions

    def mark(self) -> Mark:
        """All counters now."""
        links = tuple((link.to_near, link.to_far) for link in self.links.values())
        spaces = (self.server, *self.devices.values())
        return Mark(time.time(), links, sum(space.tcp()["RetransSegs"] for space in spaces))

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Fleet:
    """Coordinator and agents of one run, each where it belongs. ``heard``: what the coordinator has told."""

    def __init__(self, folder: Path, network: Network, url: str, rounds: int, policy: dict[str, Any]) -> None:
        self.folder = folder
        self.url = url
        self.events: list[EventRow] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.on_event: Callable[[EventRow], None] = lambda row: None
        test = folder / "test.npz"
        echo.test_set().save_npz(test)
        settings = echo.run_file(msgspec.structs.replace(MODEL, rounds=rounds - 1), test)
        settings["round"] = settings["round"] | policy
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for name in network.devices:
            options = Options(device=name, data=str(test), state=str(folder / name), insecure=True)
            (folder / f"{name}.json").write_bytes(msgspec.json.encode([options]))
            self.start_agent(network, name)
        command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events", "--insecure"]
        command += ["--run", "echo", "--directory", str(folder / "runs"), "--broker", url]
        with (folder / "coordinator.out").open("wb") as log:
            self._coordinator = subprocess.Popen(leashed(command), env=environment, stdout=subprocess.PIPE, stderr=log)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start_agent(self, network: Network, name: str) -> None:
        """Start a device's agent in its namespace; one that was killed goes on from its state."""
        address = self.url.replace("127.0.0.1", network.links[name].near_address)
        there = {**os.environ, "OMP_NUM_THREADS": "1", "EDGEFL_BROKER": address}
        with network.devices[name].entered(), (self.folder / f"{name}.out").open("ab") as log:
            command = leashed(
                [sys.executable, "-m", "benchmarks.network.echo_agents", str(self.folder / f"{name}.json")]
            )
            self.agents[name] = subprocess.Popen(command, env=there, stdout=log, stderr=log)

    def _read(self) -> None:
        for line in self._coordinator.stdout or ():
            row = msgspec.json.decode(line, type=EventRow)
            self.events.append(row)
            self.on_event(row)

    async def finish(self) -> str:
        """Wait for the end; what went wrong, "" for nothing."""
        until = time.monotonic() + PATIENCE_S
        while self._coordinator.poll() is None:
            if time.monotonic() > until:
                return f"not finished after {PATIENCE_S:.0f} s"
            await asyncio.sleep(0.05)
        self._reader.join()
        if self._coordinator.returncode:
            last = self.events[-1].data.get("text", "") if self.events else ""
            return f"the coordinator ended with {self._coordinator.returncode}: {last}"
        ended = [name for name, agent in self.agents.items() if agent.poll() is not None]
        return f"these agents ended by themselves: {', '.join(ended)}; see {self.folder}" if ended else ""

    def stop(self) -> None:
        """End what still runs."""
        for process in (self._coordinator, *self.agents.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for process in (self._coordinator, *self.agents.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._reader.join()
        if self._coordinator.stdout is not None:
            self._coordinator.stdout.close()

    def result(self) -> tuple[RunReport, Manifest]:
        """What the ledger holds, and the last state."""
        with Ledger(self.folder / "runs" / "echo" / "ledger.sqlite", create=False) as ledger:
            return ledger.report("echo"), ledger.position("echo").manifest


@contextlib.asynccontextmanager
async def fleet_over(network: Network, folder: Path, rounds: int, **policy: Any) -> AsyncIterator[Fleet]:
    """A broker, and a fleet on it, ended in order."""
    folder.mkdir(parents=True)
    async with start_broker(folder / "broker", "mosquitto", host="0.0.0.0") as broker:  # noqa: S104 - a namespace's own
        fleet = Fleet(folder, network, broker.url, rounds, policy)
        try:
            yield fleet
        finally:
            await asyncio.to_thread(fleet.stop)
