"""The processes of one run of the crash matrix: whoever dies is started again with the same command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import msgspec
import yaml

from benchmarks.crash.crash_child import MARK, PLACE, VARIABLE, Point
from benchmarks.crash.crash_faults import Trouble
from benchmarks.network import echo, echo_agents
from device_agent.runtime.connect import Options
from edgefl.run_records import EventRow
from edgefl.transport.broker import Broker, start_broker

AGENTS = ("left", "right")
ROUNDS = 3
#: Longest that a run may take: ten times an undisturbed one.
PATIENCE_S = 120.0
CASE = echo.Case("crash", 96, 2, agents=len(AGENTS), rounds=ROUNDS - 1)


class Fleet:
    """The processes of one run, started again when they were killed."""

    def __init__(self, folder: Path, broker: Broker, at: Point | None, ledger: str) -> None:
        self.folder = folder
        self.broker = broker
        self.ledger = ledger  # URL of a database of this run's own, "": a file
        self.mark = folder / "killed"
        self._environment = {
            **os.environ,
            "EDGEFL_BROKER": broker.url,
            "OMP_NUM_THREADS": "1",
            VARIABLE: str(at or ""),
            MARK: str(self.mark),
            PLACE: str(place_of(folder, at)),
            echo_agents.TRAINER: "benchmarks.crash.crash_child",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._trouble = Trouble(at, place_of(folder, at)) if at is not None else None
        self._disturbed = disturbed(at)

    @property
    def _log(self) -> Path:
        """What the disturbed process says, as JSON lines."""
        return self.folder / ("coordinator.out" if self._disturbed == "coordinator" else f"{self._disturbed}.log")

    def start(self) -> None:
        """Everybody, for the first time."""
        echo.test_set().save_npz(self.folder / "test.npz")
        run_file = self.folder / "run.yaml"
        run_file.write_text(yaml.safe_dump(echo.run_file(CASE, self.folder / "test.npz")))
        for name in AGENTS:
            options = Options(device=name, data=str(self.folder / "test.npz"), state=str(self.folder / name))
            (self.folder / f"{name}.json").write_bytes(msgspec.json.encode([options]))
            self._start(name)
        self._start("coordinator")

    def _start(self, name: str, *, again: bool = False) -> None:
        environment = dict(self._environment)
        if name == AGENTS[1]:
            environment[VARIABLE] = ""  # one device is disturbed, the other is not
        if name == "coordinator":
            command = ["coordinator.cli", "run", "--events", "--directory", str(self.folder / "runs")]
            command += ["--ledger", self.ledger] if self.ledger else []
            command += ["--resume", "echo"] if again else [str(self.folder / "run.yaml"), "--run", "echo"]
        else:
            command = ["benchmarks.network.echo_agents", str(self.folder / f"{name}.json")]
        log = (self.folder / f"{name}.out").open("ab")
        whole = [sys.executable, "-m", "benchmarks.crash.crash_child", *command]
        self._processes[name] = subprocess.Popen(whole, env=environment, stdout=log, stderr=log)
        log.close()

    async def run(self, at: Point | None) -> None:
        """Until the coordinator has finished. Raises TimeoutError, or RuntimeError when a process fails."""
        until, broken = time.monotonic() + PATIENCE_S, False
        while True:
            await asyncio.sleep(0.02)
            if time.monotonic() > until:
                raise TimeoutError(f"not finished after {PATIENCE_S:.0f} s")
            if at is not None and at.role == "broker" and not broken and self._told(at.name):
                broken = True
                self.mark.touch()
                await self.broker.kill()
                await self.broker.start()
            for name, process in list(self._processes.items()):
                code = process.poll()
                if code is None:
                    continue
                mine = self._trouble if name == self._disturbed and self.mark.exists() else None
                if mine is not None and code != 0 and mine.ended(code, code == -signal.SIGKILL):
                    self._start(name, again=True)
                elif code == 0 and name == "coordinator":
                    if self._trouble is not None and (lacking := self._trouble.lacking(self._log)):
                        raise RuntimeError(lacking)
                    return
                else:
                    raise RuntimeError(f"{name} ended with {code}")

    def _told(self, kind: str) -> bool:
        file = self.folder / "runs" / "echo" / "events.jsonl"
        if not file.exists():
            return False
        for line in file.read_bytes().splitlines():
            row = msgspec.json.decode(line, type=EventRow)
            if (row.kind, row.round) == (kind, 2):
                return True
        return False

    def stop(self) -> None:
        """End what still runs, the agents in order."""
        end_all(self._processes.values())


def end_all(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """End processes by SIGTERM, stopped ones too, and by SIGKILL after 20 s."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def disturbed(at: Point | None) -> str:
    """The process that a point is about; "" for the broker."""
    if at is None or at.role == "broker":
        return ""
    return "coordinator" if at.role == "coordinator" else AGENTS[0]


def place_of(folder: Path, at: Point | None) -> Path:
    """The directory of the process that a point is about."""
    name = disturbed(at)
    return folder / ("runs" if name == "coordinator" else name)


async def play(folder: Path, at: Point | None, ledger: str = "") -> tuple[Fleet, str]:
    """One run in a folder that is empty but for what is mounted there; what went wrong, "" for nothing."""
    async with start_broker(folder / "broker", "mosquitto") as broker:
        fleet = Fleet(folder, broker, at, ledger)
        try:
            fleet.start()
            await fleet.run(at)
            await asyncio.sleep(0.5)  # the agents hear that it is over
        except (TimeoutError, RuntimeError) as error:
            return fleet, str(error)
        finally:
            fleet.stop()
    return fleet, ""
