"""docs/tours.md: a tour has at most 250 words, and its commands run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from desk_fixture import PATIENCE_S, Desk, desk, free_port, until

__all__ = ["desk"]

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tours.md").read_text(encoding="utf-8")
TOURS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", TEXT, re.MULTILINE))
SERVER, DEVICE, BILLS, OWNER = TOURS


def commands(tour: str) -> list[str]:
    """The lines of a tour's code blocks, in order."""
    return [
        line
        for block in re.findall(r"^```\n(.*?)^```", TOURS[tour], re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


@pytest.mark.parametrize("tour", TOURS)
def test_a_tour_has_at_most_250_words(tour: str) -> None:
    assert len(TOURS) == 4
    assert commands(tour)
    assert len(TOURS[tour].split()) <= 250


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
