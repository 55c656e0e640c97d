"""docs/tours.md: a tour has at most 250 words, and its commands run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tours.md").read_text(encoding="utf-8")
TOURS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", TEXT, re.MULTILINE))
SERVER, DEVICE, BILLS, OWNER = TOURS
PATIENCE_S = 180


def commands(tour: str) -> list[str]:
    """The lines of a tour's code blocks, in order."""
    return [
        line
        for block in re.findall(r"^```\n(.*?)^```", TOURS[tour], re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("tour", TOURS)
def test_a_tour_has_at_most_250_words(tour: str) -> None:
    assert len(TOURS) == 4
    assert commands(tour)
    assert len(TOURS[tour].split()) <= 250


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
            timeout=PATIENCE_S,
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


@pytest.mark.slow  # a fleet with a broker of its own trains for half a minute
@pytest.mark.timeout(3 * PATIENCE_S)
def test_the_tours_of_server_and_device_run_together(desk: Desk) -> None:
    init, shares, enroll, run, devices, pause, logs, resume, revoke = commands(SERVER)
    join, doctor, dry, train, status = commands(DEVICE)
    desk.do(f"{init} --port {free_port()} --enroll-port {free_port()}")
    desk.do(shares)
    token = desk.start(enroll)
    until(lambda: "edgefl-" in token() and "answering" in token())
    assert "enrolled" in desk.do(join, re.search(r"^edgefl-\S+", token(), re.MULTILINE)[0] + "\n")  # type: ignore[index]
    assert desk.running[0].wait(30) == 0
    assert "[broker-idle]" in desk.do(doctor)
    assert "/etc/systemd/system/edgefl-agent.service" in desk.do(dry)
    page = desk.start(f"{run} --web-at 127.0.0.1:{free_port()}")
    desk.start(train)
    until(lambda: "stage 1 round 2" in page())
    assert "connected" in desk.do(status)
    assert "cam-07" in desk.do(devices)
    desk.do(pause)
    assert desk.do(logs)
    until(lambda: "is paused" in page())
    desk.do(resume)
    assert desk.running[1].wait(PATIENCE_S) == 0, page()
    assert "revoked" in desk.do(revoke)


@pytest.mark.slow  # trains three runs
@pytest.mark.timeout(4 * PATIENCE_S)
def test_the_tours_of_owner_and_bills_run_one_after_the_other(desk: Desk) -> None:
    *before, serve, ask = commands(OWNER)
    said = "".join(desk.do(line) for line in before)
    accuracy = re.search(r"On the \d+ of its test set: Accuracy ([\d.]+) %", " ".join(said.split()))
    assert accuracy
    assert float(accuracy[1]) > 80
    port = free_port()
    server = desk.start(f"{serve} --host 127.0.0.1:{port}")
    until(lambda: "Serving" in server())
    assert "'ash'" in desk.do(ask.replace("8481", str(port)))
    layers, whole, *rest = commands(BILLS)
    desk.do(layers)
    first = desk.do("ls -t runs").splitlines()[0]
    desk.do(whole)
    told = "".join(desk.do(line.replace("ID", first)) for line in rest)
    assert "end_to_end" in told
    assert (desk.folder / "bill.csv").is_file()
    assert (desk.folder / "both.html").is_file()
