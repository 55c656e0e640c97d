"""Fleets of real processes whose large objects go past the broker: the same states, whatever happens to the way."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import fleet_fixture
import pytest
from fleet_fixture import Fleet, Program, finish, share
from identity_fixture import a_fleet, enrolled
from transport_fixtures import mosquitto_wanted

from benchmarks.network.network_links import Namespace, unavailable
from coordinator.ledger.ledger import Ledger
from edgefl.storage.disk import ledger_of

pytestmark = [
    pytest.mark.slow,  # 15 s each
    pytest.mark.timeout(300),
    pytest.mark.skipif(not mosquitto_wanted(), reason="a broker fast enough for this"),
]
NAMES = ("one", "two")
#: 3 MB of parts, of which those of 1 MiB and more have URLs.
RUN = (
    fleet_fixture.RUN.replace("width: 16, depth: 2", "width: 128, depth: 4")
    .replace("rounds: [1, 1]", "rounds: [2, 1]")
    .replace("chunk_bytes: 2048, credit: 4", "chunk_bytes: 16384")
)
PAST = ("--objects-at", "127.0.0.1:0")


def states(fleet: Fleet, run: str) -> list[Any]:
    with Ledger(ledger_of(fleet.runs / run), create=False) as ledger:
        every = ledger.states(run)
    return [(key, sorted((part, ref.id) for part, ref in state.items())) for key, state in sorted(every.items())]


def moved(agent: Program, field: str) -> int:
    return sum(line.get(field, 0) for line in agent.lines if line.get("event") == "by-url")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The states of a run whose objects all go through the broker."""
    directory = tmp_path_factory.mktemp("plain")
    (directory / "run.yaml").write_text(RUN)
    with Fleet(directory, "mosquitto") as fleet:
        agents = started(fleet)
        finish(fleet.coordinator("r1", {"round.devices": 2}, directory / "run.yaml"))
        assert all(moved(agent, "put_bytes") == 0 for agent in agents)
        return states(fleet, "r1")


def started(fleet: Fleet) -> list[Program]:
    return [fleet.agent(name, share(40, "acc", "gyro", seed=seed)) for seed, name in enumerate(NAMES)]


def test_large_objects_go_past_the_broker(tmp_path: Path, plain: list[Any]) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with Fleet(tmp_path, "mosquitto") as fleet:
        agents = started(fleet)
        coordinator = fleet.coordinator("r1", {"round.devices": 2}, tmp_path / "run.yaml", PAST)
        assert coordinator.expect("run_started")["data"]["objects_at"].startswith("http://127.0.0.1:")
        finish(coordinator)
        assert states(fleet, "r1") == plain
        for agent in agents:
            assert min(moved(agent, "put_bytes"), moved(agent, "fetched_bytes")) > 2**20


def test_a_coordinator_killed_while_an_object_is_put_goes_on_with_what_it_has(tmp_path: Path, plain: list[Any]) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with Fleet(tmp_path, "mosquitto") as fleet:
        agents = started(fleet)
        coordinator = fleet.coordinator("r1", {"round.devices": 2}, tmp_path / "run.yaml", PAST)
        here = killed_in_a_put(coordinator, fleet.runs / "r1" / "objects" / "partial")
        assert here
        resumed = fleet.resume("r1", PAST)
        finish(resumed)
        assert states(fleet, "r1") == plain
        assert all(moved(agent, "put_bytes") > 2**20 for agent in agents)
        report = fleet.report("r1")
        assert {(row.status, row.attempt) for row in report.assignments} == {("done", 1)}


def killed_in_a_put(coordinator: Program, place: Path) -> int:
    """SIGKILL once some chunks of a large object have come, and not all; how many of the first one have."""
    here = in_a_put(coordinator, place)
    os.kill(coordinator.pid, signal.SIGKILL)
    coordinator.wait()
    return here


def in_a_put(coordinator: Program, place: Path) -> int:
    """Wait until some chunks of a large object have come, and not all; how many of the first one have."""
    deadline = time.monotonic() + fleet_fixture.PATIENCE_S
    while time.monotonic() < deadline:
        for name in place.iterdir() if place.is_dir() else ():
            here = b""
            with contextlib.suppress(FileNotFoundError):
                _, magic, rest = name.read_bytes().rpartition(b"EFM2")
                here = rest[4:] if magic else b""  # the map, behind the data until they are whole
            if 0 < here.count(1) < len(here) and len(here) > 64:
                return here.count(1)
    raise AssertionError(coordinator.story())


def test_a_fleet_with_an_identity_has_its_objects_by_tls(tmp_path: Path, plain: list[Any]) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with Fleet(tmp_path, "mosquitto") as fleet:
        own = a_fleet(tmp_path / "identity")
        options = ("--identity", str(own.directory), *PAST, "--set", "round.devices=2")
        arguments = ["coordinator.cli", "run", str(tmp_path / "run.yaml"), "--run", "r1", *options]
        arguments += ["--events", "--directory", str(fleet.runs)]
        coordinator = fleet._start(arguments, "coordinator.log", lines="stdout")
        agents = []
        for seed, name in enumerate(NAMES):
            data, state = tmp_path / f"{name}.npz", fleet.state_of(name)
            state.mkdir(parents=True, mode=0o700)
            enrolled(own, name, state)
            share(40, "acc", "gyro", seed=seed).save_npz(data)
            command = ["device_agent.cli", "run", "--data", str(data), "--state", str(state), "--format", "json"]
            agents.append(fleet._start(command, f"{name}.log", lines="stderr"))
        assert coordinator.expect("run_started")["data"]["objects_at"].startswith("https://127.0.0.1:")
        finish(coordinator)
        assert states(fleet, "r1") == plain
        for agent in agents:
            assert min(moved(agent, "put_bytes"), moved(agent, "fetched_bytes")) > 2**20


AWAY_S = 30.0
#: Rules by port come before the table of this machine's own addresses.
RULES_FIRST = ("add pref 100 table local", "delete pref 0")


def rules(*each: str) -> None:
    """Change the rules by which packets of this network are routed."""
    for one in each:
        subprocess.run(["ip", "rule", *one.split()], check=True)


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "network namespaces are here")
@pytest.mark.parametrize("way", ["upload", "download"])
def test_an_endpoint_that_is_away_for_half_a_minute_changes_no_state(
    tmp_path: Path, plain: list[Any], way: str
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with Namespace() as network, network.entered(), Fleet(tmp_path, "mosquitto") as fleet:
        rules(*RULES_FIRST)
        agents = started(fleet)
        coordinator = fleet.coordinator("r1", {"round.devices": 2}, tmp_path / "run.yaml", PAST)
        port = coordinator.expect("run_started")["data"]["objects_at"].rpartition(":")[2]
        if way == "upload":
            in_a_put(coordinator, fleet.runs / "r1" / "objects" / "partial")
        else:
            coordinator.expect("round_closed")  # devices fetch what it made
        cut = [f"pref {10 + n} ipproto tcp {end} {port} unreachable" for n, end in enumerate(("sport", "dport"))]
        rules(*(f"add {one}" for one in cut))
        with pytest.raises(OSError, match=r"unreachable|No route"):
            socket.create_connection(("127.0.0.1", int(port)), 5)
        time.sleep(AWAY_S)
        rules(*(f"delete {one}" for one in cut))
        finish(coordinator)
        assert states(fleet, "r1") == plain
        report = fleet.report("r1")
        assert {(row.status, row.attempt) for row in report.assignments} == {("done", 1)}
        for agent in agents:
            assert moved(agent, "put_bytes") + moved(agent, "fetched_bytes") > 0, "before the outage"
