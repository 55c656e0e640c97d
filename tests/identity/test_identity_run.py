"""A whole run with an identity: real broker, real supervisors in processes of their own, trainers that echo.

What it leaves behind is searched for secrets, and a device is revoked in the middle of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coordinator_fixture import FakeWorker, a_plan
from identity_fixture import FLEET, Asked, a_fleet, enrolled
from test_imports_agent import LIMIT_BYTES, resident_bytes
from transport_fixtures import mosquitto_wanted

from benchmarks.network.echo_agents import CLASSES, MODALITY, SHAPE
from coordinator.core.timeouts import Timeouts
from coordinator.runtime.environment import Environment
from coordinator.runtime.fleet_auth import Guard
from coordinator.runtime.runner import run
from device_agent.runtime.connect import Options
from edgefl.errors import BrokerError
from edgefl.identity.device import find
from edgefl.identity.fleet import Fleet, fleet_broker
from edgefl.identity.issued_tokens import issue_token
from edgefl.identity.membership import revoke
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.job import RoundPolicy
from edgefl.report.decisions import sentences
from edgefl.run_records import EventRow

pytestmark = pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed")

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSpec({MODALITY: EncoderSpec(input_shape=SHAPE, depth=2)}, stages=2, classes=3, label_names=CLASSES)
FAST = Timeouts(tick_s=0.05, grace_s=0.3, introduce_s=0.2, drain_s=1.0)


class Device:
    """An agent process with an identity."""

    def __init__(self, fleet: Fleet, name: str, place: Path, machine: str = "") -> None:
        self.name, self.state = name, place / (machine or name)
        credentials = find(self.state)
        self.own = enrolled(fleet, name, self.state) if credentials is None else credentials
        options = Options(fleet=FLEET, device=name, data=str(place / "no-data.npz"), state=str(self.state))
        file = place / f"{machine or name}.json"
        file.write_bytes(msgspec.json.encode([options]))
        environment = {**os.environ, "EDGEFL_BROKER": fleet.url, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.network.echo_agents", str(file)]
        self.log = place / f"{machine or name}.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=place)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(10)


class Scene:
    def __init__(self, place: Path, **fleet: Any) -> None:
        self.place = place
        self.fleet = a_fleet(place / "fleet", **fleet)
        self.broker = fleet_broker(self.fleet)
        self.events: list[EventRow] = []
        self.devices: list[Device] = []

    def device(self, name: str, machine: str = "") -> Device:
        self.devices.append(Device(self.fleet, name, self.place, machine))
        return self.devices[-1]

    def enroll(self, token: str, state: str) -> None:
        """As a person does, the token on standard input."""
        command = [sys.executable, "-m", "device_agent.cli", "enroll", "--state", str(self.place / state)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, input=token, env=environment, capture_output=True, text=True, timeout=30)
        (self.place / "enroll.out").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr

    def left_behind(self) -> Iterator[Path]:
        """Every file but those that are there to hold keys."""
        keys = [self.fleet.directory, *(device.own.directory for device in self.devices)]
        for path in self.place.rglob("*"):
            if path.is_file() and (path.suffix == ".log" or not any(path.is_relative_to(place) for place in keys)):
                yield path

    def coordinator(self, devices: int, rounds: int = 2) -> Any:
        """``rounds``: of the last stage."""
        policy = RoundPolicy(devices=devices, join_s=30.0, quorum=0.5, deadline_s=20.0)
        plan = a_plan(model=MODEL, policy=policy)
        last = msgspec.structs.replace(plan.stages[-1], rounds=rounds)
        plan = msgspec.structs.replace(plan, stages=(*plan.stages[:-1], last))
        return run(
            plan,
            Environment(
                directory=self.place / "runs" / plan.run,
                transport=self.fleet.transport(),
                fleet=FLEET,
                emit=self.events.append,
                worker=FakeWorker(),
                timeouts=FAST,
                broker=self.fleet.url,
                guard=Guard(self.fleet),
            ),
            resume=False,
        )


@contextlib.contextmanager
def begun(place: Path, **fleet: Any) -> Iterator[Scene]:
    made = Scene(place, **fleet)
    asyncio.run(made.broker.start())
    try:
        yield made
    finally:
        for device in made.devices:
            device.end()
        asyncio.run(made.broker.stop())


def secrets_of(fleet: Fleet, devices: list[Device], token: str) -> dict[str, bytes]:
    """What nobody else may ever read, each as it would stand in a text."""
    asked = Asked(token)
    found = {
        "token": token.encode(),
        "token's secret": asked.token.secret,
        "token's secret, hexadecimal": asked.token.secret.hex().encode(),
        "proof key": asked.proof_key,
        "signing key": (fleet.directory / "signing.key").read_bytes().strip(),
        "client id": fleet.record.client_id.encode(),
    }
    keys = [fleet.directory / "ca.key", fleet.directory / "coordinator.pem", fleet.directory / "broker" / "server.key"]
    for path in [*keys, *(device.own.certificate for device in devices)]:
        body = path.read_bytes().partition(b"-----BEGIN PRIVATE KEY-----\n")[2]
        found[str(path)] = body.splitlines()[1]  # the second line of the key's base64: nothing else begins so
    return found


def command_lines() -> Iterator[tuple[str, bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield str(path), path.read_bytes()
        except OSError:
            continue  # it has ended


def test_a_device_enrols_into_a_run_over_tls_and_no_secret_is_left_anywhere(tmp_path: Path) -> None:
    """Certificates live for two minutes here, and were backdated by a day: every agent renews as soon as it starts."""
    with begun(tmp_path, life_s=120.0) as scene:
        token = issue_token(scene.fleet, "cam-3", time.time())
        for name in ("cam-1", "cam-2"):
            scene.device(name)
        hidden = secrets_of(scene.fleet, scene.devices, token)
        seen: list[tuple[str, bytes]] = []

        async def look() -> None:
            while True:
                seen.extend(command_lines())
                await asyncio.sleep(0.2)

        async def play() -> Any:
            looking = asyncio.ensure_future(look())
            going = asyncio.ensure_future(scene.coordinator(3))  # it waits for the third
            try:
                await asyncio.to_thread(scene.enroll, token, "cam-3")
                scene.device("cam-3")
                report = await asyncio.wait_for(going, 40)
                renewed = [scene.place / f"{device.name}.log" for device in scene.devices]
                while not all('"renewed"' in log.read_text() for log in renewed):
                    await asyncio.sleep(0.05)
                return report, [resident_bytes(device.process.pid) for device in scene.devices]
            finally:
                looking.cancel()

        report, resident = asyncio.run(asyncio.wait_for(play(), 60))
        assert report.status == "done"
        assert [row.participants for row in report.rounds] == [("cam-1", "cam-2", "cam-3")] * 3
        assert [event.device for event in scene.events if event.kind == "enrolled"] == ["cam-3"]
        assert not any("has enrolled" in str(event.data) for event in scene.events)  # as a warning
        print("supervisors over TLS, VmRSS:", [f"{size / 2**20:.1f} MiB" for size in resident])  # noqa: T201 - by -rP
        assert max(resident) < LIMIT_BYTES
        for device in scene.devices:
            device.end()
            assert len(scene.fleet.devices()[device.name].serials) == 2
        hidden |= secrets_of(scene.fleet, scene.devices, token)
        told = [(str(path), path.read_bytes()) for path in scene.left_behind()]
        names = {Path(name).name for name, _ in told}
        assert {"events.jsonl", "ledger.sqlite", "cam-3.out", "cam-3.log", "enroll.out", "mosquitto.log"} <= names
        told += [("the events", msgspec.json.encode(scene.events)), ("the report", msgspec.json.encode(report))]
        assert len(seen) > 20
        for what, secret in hidden.items():
            where = [place for place, text in [*told, *seen] if secret in text]
            if what == "client id":  # mosquitto tells its own log who connects; the log is its owner's
                where = [place for place in where if not place.endswith("mosquitto.log")]
            assert where == [], what


@pytest.mark.slow
def test_a_machine_that_is_replaced_in_a_run_is_out_and_its_successor_goes_on_under_the_name(tmp_path: Path) -> None:
    with begun(tmp_path) as scene:
        old, _ = scene.device("cam"), scene.device("other")

        async def closed(rounds: int) -> None:
            while sum(event.kind == "round_closed" for event in scene.events) < rounds:
                assert not going.done(), scene.events
                await asyncio.sleep(0.01)

        async def play() -> Any:
            await closed(1)
            token = issue_token(scene.fleet, "cam", time.time(), replace=True)
            await asyncio.to_thread(scene.enroll, token, "cam-new")
            scene.device("cam", "cam-new")
            return await asyncio.wait_for(going, 60)

        async def start() -> Any:
            nonlocal going
            going = asyncio.ensure_future(scene.coordinator(2, rounds=40))
            return await play()

        going: asyncio.Future[Any]
        report = asyncio.run(start())
        assert report.status == "done"
        assert report.rounds[-1].participants == ("cam", "other")
        kinds = [(event.kind, event.device, event.data.get("reason")) for event in scene.events]
        gone = kinds.index(("device_left", "cam", "replaced"))
        assert ("device_joined", "cam", None) in kinds[gone:]
        assert [row.device for row in report.devices] == ["cam", "other"], "one history under one name"
        assert [line for line in sentences(report) if line.startswith("cam: replaced by another machine at ")]
        # It was cut off, or published in the moment between the broker's new rules and the cut.
        assert old.process.poll() in {None, BrokerError.exit_code}


@pytest.mark.slow
def test_a_device_that_is_revoked_in_a_run_is_out_and_the_run_goes_on(tmp_path: Path) -> None:
    with begun(tmp_path) as scene:
        revoked_in(scene)


def revoked_in(scene: Scene) -> None:
    thief, honest = scene.device("thief"), scene.device("honest")

    async def play() -> Any:
        going = asyncio.ensure_future(scene.coordinator(2))
        while not any(event.kind == "round_closed" for event in scene.events):
            assert not going.done(), scene.events
            await asyncio.sleep(0.01)
        done = await revoke(scene.fleet, "thief", time.time())
        assert (done.reloaded, done.dropped) == (True, True)
        return await asyncio.wait_for(going, 40)

    report = asyncio.run(play())
    assert report.status == "done"
    assert report.rounds[0].participants == ("honest", "thief")
    assert report.rounds[-1].participants == ("honest",)
    kinds = [(event.kind, event.data.get("reason")) for event in scene.events]
    gone = kinds.index(("device_left", "revoked"))
    opened = next(n for n, (kind, _) in enumerate(kinds) if kind == "round_started" and n > gone)
    before = max(e.at for e in scene.events[:opened] if e.kind in {"round_closed", "evaluated", "device_left"})
    assert scene.events[opened].at - before < 2.0, "no round waits for it"
    assert honest.process.poll() is None
    assert thief.process.poll() is None  # it tries to come back; the broker does not let it in
