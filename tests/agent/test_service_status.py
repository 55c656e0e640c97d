"""What the agent tells of itself while it runs: to systemd over a real socket, and in a file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from agent_fixtures import FACTS, job
from msgspec.structs import replace

import edgefl
from device_agent.core import state as v
from device_agent.core.machine import step
from device_agent.core.state import State, Task, TaskPhase, TrainerPhase
from device_agent.runtime import service_status
from device_agent.runtime.service_status import describe, read_status, reporting
from edgefl.errors import DataError
from edgefl.process.notify import Notify
from edgefl.process.worker import WorkerFailedError
from edgefl.protocol.messages import Drain, Offer, Update
from edgefl.records import Attempt

ATTEMPT = Attempt("r1", 2, 3, 1)
IDLE = State(connected=True, trainer=TrainerPhase.IDLE, facts=FACTS)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (State(), "broker away, loading torch and the data"),
        (IDLE, "connected, waiting for the next run"),
        (replace(IDLE, trainer=TrainerPhase.DOWN), "connected, waiting for the next run"),  # its memory is given back
        (replace(IDLE, run="r1"), "connected, waiting for work in run r1"),
        (
            replace(IDLE, run="r1", closed=ATTEMPT),
            "connected, waiting for work; the last was run r1, stage 2, round 3, attempt 1",
        ),
        (
            replace(IDLE, task=Task(Offer(ATTEMPT, 60.0, job()))),
            "connected, fetching run r1, stage 2, round 3, attempt 1",
        ),
        (
            replace(IDLE, connected=False, task=Task(Offer(ATTEMPT, 60.0, job()), TaskPhase.TRAINING)),
            "broker away, training run r1, stage 2, round 3, attempt 1",
        ),
        (
            replace(IDLE, update=Update(attempt=ATTEMPT)),
            "connected, sending the update of run r1, stage 2, round 3, attempt 1",
        ),
    ],
)
def test_one_line_says_what_the_agent_is_doing(state, text):
    assert describe(state) == text


def test_a_runs_name_is_no_command_to_a_terminal_nor_to_systemd():
    hostile = replace(IDLE, update=Update(attempt=replace(ATTEMPT, run="\x1b[2J\nMAINPID=1" + "x" * 999)))
    text = describe(hostile)
    assert text.isprintable()
    assert len(text) == 200


def test_an_agent_without_its_broker_is_ready_alive_and_says_so(tmp_path: Path):
    """Health is not connectivity: systemd must not start an agent again because a broker is away."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.jsonl").write_text('{"acc": [[1, 2, 3], [4, 5, 6]], "label": "rest"}\n' * 3)
    with socket.socket() as nobody, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        command = [sys.executable, "-m", "device_agent.cli", "run", "--device", "d1", "--data", str(tmp_path / "data")]
        command += ["--state", str(tmp_path / "state"), "--broker", f"mqtt://127.0.0.1:{nobody.getsockname()[1]}"]
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env={**os.environ, **told}, stderr=subprocess.DEVNULL)
        try:
            assert manager.recv(999) == b"READY=1\nSTATUS=broker away, loading torch and the data"
            for _ in range(3):
                assert manager.recv(999).startswith(b"WATCHDOG=1\nSTATUS=broker away")
            (trainer,) = psutil.Process(process.pid).children()
            assert "NOTIFY_SOCKET" not in trainer.environ()
            seen = read_status(tmp_path / "state")
            assert (seen.connected, seen.heard_at, seen.version) == (False, 0.0, edgefl.__version__)
            process.send_signal(signal.SIGTERM)
            while (last := manager.recv(999)).startswith(b"WATCHDOG=1"):
                pass
            assert last == b"STOPPING=1"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    assert read_status(tmp_path / "state").text == "stopped"
    assert json.loads((tmp_path / "state" / "status.json").read_text())["broker"].startswith("mqtt://127.0.0.1:")


def test_a_status_that_was_torn_counts_as_none(tmp_path: Path):
    assert read_status(tmp_path) is None
    (tmp_path / "status.json").write_text('{"at": 17')
    assert read_status(tmp_path) is None


class OneAgent:
    """What the status is made of, without the rest of an agent."""

    def __init__(self, directory: Path, state: State) -> None:
        self.store = SimpleNamespace(directory=directory)
        self.state, self.heard_at = state, 0.0


def ended_by(error: Exception, directory: Path) -> str:
    async def scene() -> None:
        async with reporting(OneAgent(directory, IDLE), Notify({}), "mqtt://b", "data"):
            raise error

    with pytest.raises(type(error)):
        asyncio.run(scene())
    return read_status(directory).text


def test_an_agent_that_ends_in_error_notes_it_with_its_exit_code(tmp_path: Path):
    log = tmp_path / "trainer.log"
    text = ended_by(WorkerFailedError("AssertionError: no\nCUDA", log=log), tmp_path)
    assert text == f"ended in error: AssertionError: no CUDA (exit code 20), see {log}"
    assert ended_by(DataError("a.npz: bad"), tmp_path) == "ended in error: a.npz: bad (exit code 11)"
    assert ended_by(RuntimeError("odd"), tmp_path) == "ended in error: RuntimeError: odd (exit code 1)"
    hostile = ended_by(DataError("\x1b[2J" + "x" * 999), tmp_path)
    assert hostile.isprintable()
    assert hostile.endswith(" (exit code 11)")


def test_when_a_run_ended_stays_as_it_was_noted_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(service_status, "LOOK_S", 0.01)
    now = [1000.0]
    monkeypatch.setattr(service_status.time, "time", lambda: now[0])
    ended = replace(IDLE, ended=Attempt("r1", made_ms=7))

    async def scene() -> None:
        agent = OneAgent(tmp_path, IDLE)
        async with reporting(agent, Notify({}), "mqtt://b", "data"):
            for connected in (True, False, True):  # the broker goes and comes again
                agent.state = replace(ended, connected=connected)
                while (seen := read_status(tmp_path)) is None or not seen.ended_at or seen.connected != connected:
                    await asyncio.sleep(0.01)
                now[0] += 1000.0

    asyncio.run(scene())
    asyncio.run(scene())
    seen = read_status(tmp_path)
    assert (seen.ended.run, seen.ended_at, seen.text) == ("r1", 1000.0, "stopped")


def test_a_change_is_noted_at_the_next_look_and_the_end_of_a_run_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(service_status, "LOOK_S", 0.01)
    run = replace(IDLE, run="r1", made_ms=7, task=Task(Offer(replace(ATTEMPT, made_ms=7), 60.0, job())))

    async def noted(first: State, *later: State) -> list[str]:
        agent, texts = OneAgent(tmp_path, first), []
        async with reporting(agent, Notify({}), "mqtt://b", "data"):
            for state in (first, *later):
                agent.state = state
                while (seen := read_status(tmp_path)) is None or seen.text != describe(state):
                    await asyncio.sleep(0.01)
                texts.append(seen.text)
        return texts

    ended, _ = step(run, v.Received(Drain("r1", "finished", 7, final=True)), 1.0)
    assert asyncio.run(noted(IDLE, run, ended)) == [
        describe(IDLE),
        describe(run),
        "connected, waiting for the next run",
    ]
    first = read_status(tmp_path)
    assert (first.ended.run, first.ended_at > 0) == ("r1", True)
    asyncio.run(noted(IDLE))
    assert read_status(tmp_path).ended_at == first.ended_at  # it outlives the process
