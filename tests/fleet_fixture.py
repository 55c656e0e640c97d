"""A fleet of real processes on this machine: a broker, agents and coordinators, started as a person would by hand.

Whatever a test waits for is a line that a program prints. Every program is ended by its process id, and on a leash, so
that none outlives the tests even when these are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ledger_fixture import ledger_at

from edgefl.api.runs import read_run
from edgefl.data.dataset import Dataset
from edgefl.process.parent_death import leashed
from edgefl.run_records import RunReport
from edgefl.storage.disk import LEDGER
from edgefl.transport.broker import Broker, start_broker

#: A machine that is busy with other tests needs many times what an idle one does (3 s for a trainer to get ready).
PATIENCE_S = 120.0
#: How long a program may take to end after SIGTERM.
GOODBYE_S = 15.0

#: Lets a trainer take more memory than was predicted, makes an agent one of another release, or ends a coordinator.
OVERRUN, RELEASES, KILLED = (Path(__file__).parent / name for name in ("overrun", "releases", "killed"))
ACTIVITIES = ("rest", "walk", "run")
SHAPES = {"acc": (16, 3), "gyro": (16, 3), "lidar": (8, 2)}

RUN = """
name: fleet
seed: 3
recipe: lw-prototypes
data: {test: test.npz}
model:
  stages: 2
  encoders:
    acc: {kind: sensor, width: 16, depth: 2, heads: 2, patch: 4}
    gyro: {kind: sensor, width: 16, depth: 2, heads: 2, patch: 4}
  head: {width: 16, out: 8, dropout: 0.0}
  fusion_width: 16
training: {rounds: [1, 1], batch_size: 8}
transfer: {chunk_bytes: 2048, credit: 4}
evaluate: stage
"""

Line = dict[str, Any]


def share(rows: int, *modalities: str, seed: int = 0) -> Dataset:
    """Noise around one wave an activity, as easy to learn as a wrist's movements."""
    draw = np.random.default_rng(seed)
    labels = np.arange(rows, dtype=np.int64) % len(ACTIVITIES)

    def waves(steps: int, axes: int) -> Any:
        time_ = np.arange(steps)[None, :, None]
        clean = np.sin(time_ * (1 + labels)[:, None, None] / 2 + np.arange(axes))
        return (clean + 0.3 * draw.normal(size=clean.shape)).astype(np.float32)

    return Dataset(
        modalities={name: waves(*SHAPES[name]) for name in modalities},
        present={name: np.ones(rows, dtype=bool) for name in modalities},
        labels=labels,
        label_names=ACTIVITIES,
        ids=[str(row) for row in range(rows)],
    )


class Program:
    """A child process whose JSON lines can be awaited. ``lines``: the stream they come on; the other goes to a log."""

    def __init__(
        self, arguments: list[str], log: Path, *, lines: str, cwd: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self.lines: list[Line] = []
        self._news = threading.Condition()
        self._over = False
        with log.open("ab") as other:
            streams = {"stdout": other, "stderr": other, lines: subprocess.PIPE}
            command = leashed([sys.executable, "-m", *arguments])
            told = {**os.environ, **(variables or {})}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=cwd, env=told, **streams)
        self._stream = getattr(self.process, lines)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def expect(self, event: str, seconds: float = PATIENCE_S, **fields: Any) -> Line:
        """The first line of this event with these fields, printed or still to come; fails when the program ends."""

        def fits(line: Line) -> bool:
            return line.get("kind", line.get("event")) == event and fields.items() <= line.items()

        return self.until(fits, f"{event} {fields or ''}", seconds)

    def until(self, fits: Callable[[Line], bool], what: str, seconds: float = PATIENCE_S) -> Line:
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                found = next((line for line in self.lines if fits(line)), None)
                if found is not None:
                    return found
                left = deadline - time.monotonic()
                assert not self._over, f"the program ended without {what}:\n{self.story()}"
                assert left > 0, f"waited {seconds:g} s for {what}:\n{self.story()}"
                self._news.wait(left)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.wait()

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit status, when the program has ended by itself and everything it said is read."""
        status = self.process.wait(seconds)
        self._reader.join(seconds)
        self._stream.close()
        return status

    def stop(self) -> None:
        """SIGTERM; SIGKILL when that does not help."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(GOODBYE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()

    def story(self) -> str:
        """The last lines and the log, for whoever must find out what went wrong."""
        text = "\n".join(json.dumps(line)[:300] for line in self.lines[-25:])
        return f"{text}\n{self.log}:\n{self.log.read_text(errors='replace')[-3000:]}"

    def _read(self) -> None:
        for raw in self._stream:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"event": "text", "text": raw.decode(errors="replace")}
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


class Fleet:
    """A broker, and whatever is started beside it. Use it as ``with Fleet(directory, kind) as fleet``."""

    def __init__(self, directory: Path, kind: str = "auto") -> None:
        self.directory = directory
        self.runs = directory / "runs"
        self.broker: Broker = start_broker(directory / "broker", kind)
        self._programs: list[Program] = []

    def __enter__(self) -> Fleet:
        asyncio.run(self.broker.start())
        share(30, "acc", "gyro", seed=99).save_npz(self.directory / "test.npz")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # each is tried, whatever happens to the others
            stack.callback(lambda: asyncio.run(self.broker.stop()))
            for program in self._programs:
                stack.callback(program.stop)
            for program in self._programs:  # all at once: they take their time together
                if program.alive:
                    program.process.send_signal(signal.SIGTERM)

    def restart_broker(self) -> None:
        """SIGKILL, and a new one under the same URL."""
        asyncio.run(self.broker.kill())
        asyncio.run(self.broker.start())

    def agent(
        self,
        name: str,
        data: Dataset | None = None,
        folder: Path | None = None,
        overrun: str = "",
        release: str = "",
        broker: str = "",
        trainer: str = "",
        **budget: object,
    ) -> Program:
        """``edgefl-agent run``; started again without ``data``, it finds its share and its state.

        ``overrun``: what its steps take beyond the prediction, as ``tests/overrun`` has it; ``release``: of another
        release and protocol, as ``tests/releases`` has it; ``broker``: another way to the fleet's. ``trainer``: its
        owner's own training code.
        """
        path = folder or self.directory / f"{name}.npz"
        if data is not None:
            data.save_npz(path)
        arguments = ["device_agent.cli", "run", "--device", name, "--data", str(path), "--format", "json"]
        arguments += ["--broker", broker or self.broker.url, "--state", str(self.state_of(name))]
        arguments += ["--trainer", trainer] if trainer else []
        for field, value in budget.items():
            arguments += ["--set", f"budget.{field}={value}"]
        path = os.pathsep.join([str(RELEASES if release else OVERRUN), os.environ.get("PYTHONPATH", "")])
        variables = {"EDGEFL_TEST_OVERRUN": overrun, "EDGEFL_TEST_RELEASE": release, "PYTHONPATH": path.rstrip(":")}
        variables = variables if overrun or release else {}
        return self._start(arguments, f"{name}.log", lines="stderr", variables=variables)

    def coordinator(
        self,
        run: str,
        settings: Mapping[str, object] | None = None,
        file: Path | None = None,
        options: Sequence[str] = (),
        killed: int = 0,
    ) -> Program:
        """``edgefl-coordinator run`` with ``file``, else ``RUN``, and the ``settings`` that differ.

        ``killed``: in the middle of aggregating which round inside a period, as ``tests/killed`` has it; 0: it is not.
        """
        if file is None:
            file = self.directory / f"{run}.yaml"
            file.write_text(RUN)
        arguments = ["coordinator.cli", "run", str(file), "--run", run, *options]
        if isinstance(place := ledger_at(self.runs / run / LEDGER), str):
            arguments += ["--ledger", place]
        for field, value in (settings or {}).items():
            arguments += ["--set", f"{field}={value}"]
        path = os.pathsep.join([str(KILLED), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        return self._coordinator(arguments, {"EDGEFL_TEST_KILLED": str(killed), "PYTHONPATH": path} if killed else {})

    def resume(self, run: str, options: Sequence[str] = ()) -> Program:
        """``edgefl-coordinator run --resume``."""
        return self._coordinator(["coordinator.cli", "run", "--resume", run, *options])

    def state_of(self, name: str) -> Path:
        """An agent's state directory."""
        return self.directory / "devices" / name

    def report(self, run: str) -> RunReport:
        """What the ledger holds."""
        return read_run(self.runs / run)

    def _coordinator(self, arguments: list[str], variables: Mapping[str, str] | None = None) -> Program:
        options = ["--events", "--broker", self.broker.url, "--directory", str(self.runs)]
        return self._start([*arguments, *options], "coordinator.log", lines="stdout", variables=variables)

    def _start(
        self, arguments: list[str], log: str, *, lines: str, variables: Mapping[str, str] | None = None
    ) -> Program:
        program = Program(arguments, self.directory / log, lines=lines, cwd=self.directory, variables=variables)
        self._programs.append(program)
        return program


def finish(coordinator: Program) -> None:
    """Wait for a coordinator's good end."""
    coordinator.expect("run_finished")
    assert coordinator.wait() == 0, coordinator.story()


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return when the condition holds, for programs that print nothing; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def of_kind(program: Program, kind: str, **fields: object) -> Iterator[Line]:
    """The lines of one event with these fields."""
    return (line for line in program.lines if line.get("kind") == kind and fields.items() <= line.items())
