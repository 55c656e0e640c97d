"""Runs of two training devices under mixed faults, drawn by seed: done, with the weights of the undisturbed run?

Real broker (mosquitto, no persistence), coordinator and agents as processes, started again when they end, as a service
would. Two to four faults a run at random moments: kill -9 of the coordinator, an agent, its trainer, the evaluator or
the broker; one of them stopped for some seconds with all its children; an agent's link cut; a byte flipped in every
object of an agent's store; its disk full for some seconds (a small file system of its own: as root). A seed holds
where the run ends as done, with the weights of the undisturbed run or, where a device declined a round, with the reason
on its row.

    python -m benchmarks.crash.mixed_faults [--seeds 30] [--first 1] [--write docs/results]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml

from benchmarks.common import sections
from benchmarks.crash.crash_child import BALLAST
from benchmarks.crash.crash_faults import SIZE_MIB
from benchmarks.crash.crash_fleet import end_all
from coordinator.ledger.ledger import Ledger
from edgefl.data.dataset import Dataset
from edgefl.records import Manifest
from edgefl.transport.broker import Broker, start_broker

AGENTS = ("left", "right")
#: The device with a disk of its own that can be full.
SMALL = "right"
RUN = "mixed"
ROUNDS = (3, 3)
#: Longest that a run may take, faults and starts of processes included.
PATIENCE_S = 300.0
#: Ends of one process before its supervisor gives up.
MOST_STARTS = 8
LEAST_FAULTS, MOST_FAULTS = 2, 4
PAUSE_S = (3.0, 12.0)
SAMPLES, CLASSES = 60, ("down", "up")


class Fault(NamedTuple):
    """``kind`` at ``at_s`` seconds after the first round began, on ``target``, for ``lasts_s`` where it lasts."""

    at_s: float
    kind: str
    target: str
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


class Verdict(NamedTuple):
    """What came of a seed. ``wrong``: why it does not hold; ``declined``: by which the weights may differ."""

    seed: int
    faults: tuple[str, ...]
    seconds: float
    same: bool
    declined: tuple[str, ...]
    wrong: tuple[str, ...]


#: Kind of fault -> its targets.
KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("coordinator", "evaluator", "broker", *AGENTS, *(f"trainer of {name}" for name in AGENTS)),
    "stop": ("coordinator", "broker", *AGENTS),
    "cut": AGENTS,
    "flip": AGENTS,
    "full": (SMALL,),
}


def drawn(seed: int, within_s: float) -> list[Fault]:
    """The faults of a seed, in order."""
    draw = random.Random(seed)
    found = []
    for _ in range(draw.randint(LEAST_FAULTS, MOST_FAULTS)):
        kind = draw.choice(sorted(KINDS))
        found.append(Fault(draw.uniform(0, within_s), kind, draw.choice(KINDS[kind]), draw.uniform(*PAUSE_S)))
    return sorted(found)


def share(seed: int) -> Dataset:
    """Two sensors whose mean says the class."""
    draw = np.random.default_rng(seed)
    labels = np.arange(SAMPLES) % len(CLASSES)
    inputs = {
        name: (draw.normal(size=(SAMPLES, 16, 2)) + 0.5 * labels[:, None, None]).astype(np.float32) for name in "ab"
    }
    present = {name: np.ones(SAMPLES, dtype=bool) for name in inputs}
    return Dataset(inputs, present, labels, CLASSES, [f"{seed}-{row}" for row in range(SAMPLES)])


def run_file(test: Path) -> dict[str, Any]:
    """Layer by layer, two stages, every device in every round."""
    encoder = {"kind": "sensor", "width": 16, "depth": 2, "heads": 2, "patch": 4}
    return {
        "name": RUN,
        "seed": 1,
        "recipe": "lw-zeros",
        "data": {"test": str(test)},
        "model": {
            "stages": len(ROUNDS),
            "encoders": {"a": encoder, "b": encoder},
            "head": {"width": 16, "out": 8, "dropout": 0.0},
            "fusion_width": 8,
        },
        "training": {"rounds": list(ROUNDS), "epochs": 4, "batch_size": 10},
        "round": {"devices": len(AGENTS), "join_s": 120, "quorum": 1.0},
        "evaluate": "round",
    }


#: Seconds that a link waits for its port.
TRIES = 20


class Link:
    """A TCP relay to the broker that can be cut: connections end, and no more are taken."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def join(self) -> None:
        """Take connections, as at first on a port of its own.

        While it was cut, another connection may have been given the port: that one's end is waited for.
        """
        for left in reversed(range(TRIES)):
            try:
                self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
                break
            except OSError:
                if not left:
                    raise
                await asyncio.sleep(1)
        assert self._server is not None
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """End all connections, and take no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            self._open |= {writer, back}
            try:
                await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
            finally:
                self._open -= {writer, back}
                back.transport.abort()
        writer.transport.abort()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(2**16):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


class Fleet:
    """Broker, coordinator and agents of one run, and what is done to them."""

    def __init__(self, folder: Path, broker: Broker, links: dict[str, Link]) -> None:
        self.folder = folder
        self.broker = broker
        self.links = links
        self.done: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = {}

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.folder / "runs" / RUN

    def start(self) -> None:
        """Everybody, for the first time."""
        share(0).save_npz(self.folder / "test.npz")
        (self.folder / "run.yaml").write_text(yaml.safe_dump(run_file(self.folder / "test.npz")))
        for number, name in enumerate(AGENTS, 1):
            share(number).save_npz(self.folder / f"{name}.npz")
            self._start(name)
        self._start("coordinator")

    def _start(self, name: str) -> None:
        self._starts[name] = self._starts.get(name, 0) + 1
        if name == "coordinator":
            resume = (self.run / "ledger.sqlite").exists()
            what = ["--resume", RUN] if resume else [str(self.folder / "run.yaml"), "--run", RUN]
            command = ["coordinator.cli", "run", "--directory", str(self.run.parent), *what]
            url = self.broker.url
        else:
            command = ["device_agent.cli", "run", "--device", name, "--data", str(self.folder / f"{name}.npz")]
            command += ["--state", str(self.folder / name)]
            url = self.broker.url.replace(f":{self.broker.address.port}", f":{self.links[name].port}")
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**os.environ, "EDGEFL_BROKER": url, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def begun(self, until: float) -> None:
        """When the first round has."""
        while not self._told("round_started"):
            await asyncio.sleep(0.05)
            self._look(until)

    async def ended(self, until: float) -> None:
        """When the coordinator has."""
        while not self._look(until):
            await asyncio.sleep(0.05)

    def _told(self, kind: str) -> bool:
        file = self.run / "events.jsonl"
        return file.exists() and f'"{kind}"'.encode() in file.read_bytes()

    def _look(self, until: float) -> bool:
        """Start again whoever ended; whether the run is over. Raises TimeoutError, RuntimeError."""
        if time.monotonic() > until:
            raise TimeoutError(f"not finished after {PATIENCE_S:.0f} s")
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            if name == "coordinator" and code == 0:
                return True
            if self._starts[name] >= MOST_STARTS:
                raise RuntimeError(f"{name} ended {MOST_STARTS} times, the last time with {code}")
            if code != -signal.SIGKILL:
                self.done.append(f"{name} ended with {code}")
            time.sleep(0.3)
            self._start(name)
        return False

    async def suffer(self, fault: Fault) -> None:
        """One fault, until it is over."""
        of_kind: dict[str, Callable[[Fault], Coroutine[Any, Any, bool]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "cut": self._cut,
            "flip": self._flip,
            "full": self._fill,
        }
        found = await of_kind[fault.kind](fault)
        self.done.append(str(fault) if found else f"({fault}: not there)")

    def _pids(self, target: str) -> list[psutil.Process]:
        """The target's process, and after it its children."""
        with contextlib.suppress(psutil.Error):
            if target == "broker":
                return [psutil.Process(self.broker.pid)]
            owner = {"evaluator": "coordinator"}.get(target, target.removeprefix("trainer of "))
            whole = psutil.Process(self._processes[owner].pid)
            children = whole.children(recursive=True)
            if owner == target:
                return [whole, *children]
            module = "coordinator.runtime.evaluator" if target == "evaluator" else "device_agent.trainer.process"
            return [child for child in children if module in child.cmdline()]
        return []

    async def _kill(self, fault: Fault) -> bool:
        if fault.target == "broker":
            await self.broker.kill()
            await self.broker.start()
            return True
        found = self._pids(fault.target)[:1]
        for process in found:
            process.kill()
        return bool(found)

    async def _stop(self, fault: Fault) -> bool:
        found = self._pids(fault.target)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(fault.lasts_s)
        return bool(found)

    async def _cut(self, fault: Fault) -> bool:
        await self.links[fault.target].cut()
        await asyncio.sleep(fault.lasts_s)
        await self.links[fault.target].join()
        return True

    async def _flip(self, fault: Fault) -> bool:
        files = [file for file in (self.folder / fault.target / "objects").glob("*") if len(file.name) == 64]
        for file in files:
            with contextlib.suppress(OSError), file.open("r+b") as damaged:
                damaged.seek(file.stat().st_size // 2)
                byte = damaged.read(1)
                damaged.seek(-len(byte), os.SEEK_CUR)
                damaged.write(bytes(value ^ 1 for value in byte))
        return bool(files)

    async def _fill(self, fault: Fault) -> bool:
        ballast = self.folder / fault.target / BALLAST
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(2**16)):
                pass
        await asyncio.sleep(fault.lasts_s)
        ballast.unlink()
        return True

    def end(self) -> None:
        """End what still runs."""
        end_all(self._processes.values())


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of its own for ``directory``."""
    directory.mkdir()
    options = f"size={SIZE_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "edgefl-mixed", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


async def played(folder: Path, faults: Sequence[Fault]) -> tuple[Fleet, float, str]:
    """One run: the fleet, seconds from the first round to the end, and what went wrong ("": nothing)."""
    async with start_broker(folder / "broker", "mosquitto") as broker:
        links = {name: Link(broker.address.port) for name in AGENTS}
        for link in links.values():
            await link.join()
        fleet = Fleet(folder, broker, links)
        until, began, tasks = time.monotonic() + PATIENCE_S, 0.0, list[asyncio.Task[None]]()
        try:
            fleet.start()
            await fleet.begun(until)
            began = time.monotonic()
            tasks = [asyncio.create_task(later(fleet, fault)) for fault in faults]
            await fleet.ended(until)
            seconds = time.monotonic() - began
            for task in tasks:  # a fault that came too late is none
                task.cancel()
            for broken in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(broken, Exception):
                    raise broken
        except (TimeoutError, RuntimeError) as error:
            return fleet, time.monotonic() - began, str(error)
        finally:
            for task in tasks:
                task.cancel()
            fleet.end()
            for link in links.values():
                await link.cut()
    return fleet, seconds, ""


async def later(fleet: Fleet, fault: Fault) -> None:
    """A fault at its time."""
    await asyncio.sleep(fault.at_s)
    await fleet.suffer(fault)


def result(fleet: Fleet) -> tuple[Manifest, tuple[str, ...], tuple[str, ...]]:
    """The last state, who declined a round and why, and what is wrong with the record."""
    with Ledger(fleet.run / "ledger.sqlite", create=False) as ledger:
        report, manifest = ledger.report(RUN), ledger.position(RUN).manifest
    wrong = [] if report.status == "done" else [f"the run is {report.status}"]
    missing = {
        (row.stage, row.round, name)
        for row in report.rounds
        if row.status == "done"
        for name in set(AGENTS) - set(row.participants)
    }
    declined = []
    for row in report.assignments:
        if row.status == "done":
            continue
        place = f"{row.device} {row.status} in stage {row.stage}, round {row.round}"
        if row.refusal is None and (row.stage, row.round, row.device) in missing:
            wrong.append(f"{place}, without a reason")
        elif row.refusal is not None:
            declined.append(f"{place}: {row.refusal.reason}")
    return manifest, tuple(declined), tuple(wrong)


def judged(seed: int, folder: Path, within_s: float, reference: Manifest | None) -> tuple[Verdict, Manifest]:
    """One seed; no faults without a reference."""
    folder.mkdir(parents=True)
    faults = drawn(seed, within_s) if reference is not None else []
    with small_disk(folder / SMALL):
        fleet, seconds, trouble = asyncio.run(played(folder, faults))
    if trouble:
        return Verdict(seed, tuple(fleet.done), seconds, False, (), (trouble,)), {}
    manifest, declined, wrong = result(fleet)
    same = reference is None or manifest == reference
    if not same and not declined:
        wrong = (*wrong, "the weights differ, and no device declined")
    return Verdict(seed, tuple(fleet.done), seconds, same, declined, wrong), manifest


def page(verdicts: Sequence[Verdict], undisturbed_s: float) -> str:
    """Markdown: a row a seed."""
    good = sum(not one.wrong for one in verdicts)
    equal = sum(one.same for one in verdicts)
    lines = [
        (
            f"{good} of {len(verdicts)} runs hold, {equal} with the weights of the undisturbed run, "
            f"which takes {undisturbed_s:.0f} s from its first round."
        ),
        "",
        "| seed | what happened | s | weights | holds |",
        "|---|---|---|---|---|",
    ]
    for one in verdicts:
        weights = "same" if one.same else "; ".join(one.declined) or "differ"
        told = "; ".join(one.wrong) or "holds"
        lines.append(f"| {one.seed} | {', '.join(one.faults)} | {one.seconds:.0f} | {weights} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="new folder to keep every run in")
    parser.add_argument("--write", type=Path, help="folder of transport.md, whose section is written")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("it mounts a small file system: run it as root")
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="edgefl-mixed-") as temporary:
        place = options.keep or Path(temporary)
        clean, reference = judged(0, place / "undisturbed", 0.0, None)
        if clean.wrong or clean.declined:
            raise SystemExit(f"the undisturbed run is not clean: {'; '.join(clean.wrong + clean.declined)}")
        sys.stderr.write(f"undisturbed: {clean.seconds:.1f} s\n")
        for seed in range(options.first, options.first + options.seeds):
            one, _ = judged(seed, place / str(seed), clean.seconds, reference)
            verdicts.append(one)
            told = "; ".join(one.wrong) or ("holds" if one.same else f"holds: {'; '.join(one.declined)}")
            sys.stderr.write(f"{seed}: {', '.join(one.faults)}: {told} ({one.seconds:.1f} s)\n")
    table = page(verdicts, clean.seconds)
    sys.stdout.write(table)
    if options.write is not None:
        sections.transport(options.write, "Mixed faults", "python -m benchmarks.crash.mixed_faults", table)
    if any(one.wrong for one in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
