"""Commands typed in one folder, as a person does at a desk."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATIENCE_S = 180


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Desk:
    """Commands in one folder: ``do`` waits for the end, ``start`` does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
        self.running: list[subprocess.Popen[bytes]] = []

    def do(self, line: str, given: str = "") -> str:
        command = ["bash", "-c", line]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str) -> Callable[[], str]:
        """Begin a command; the result reads its output so far."""
        place = self.folder / f"terminal-{len(self.running)}.log"
        with place.open("wb") as log:
            self.running.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            )
        return lambda: place.read_text(encoding="utf-8")

    def close(self) -> None:
        for process in reversed(self.running):
            process.send_signal(signal.SIGINT)
            process.wait(30)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "no answer"
        time.sleep(0.2)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()
