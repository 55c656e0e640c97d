"""Names that change, over real networks: each machine has a namespace, programs are those that people start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from identity_fixture import FLEET
from transport_fixtures import mosquitto_wanted

from benchmarks.network.network_links import Link, Namespace, unavailable
from device_agent.enroll import enroll
from device_agent.runtime.connect import Options
from edgefl.cli.connected import connected
from edgefl.errors import BrokerError, IdentityError
from edgefl.identity.device import Credentials
from edgefl.identity.fleet import Fleet
from edgefl.identity.hosts import knowing
from edgefl.identity.token import decode_token
from edgefl.process.parent_death import leashed

REASON = unavailable()
if REASON and os.environ.get("EDGEFL_REQUIRE_NAMESPACES"):
    pytest.fail(f"EDGEFL_REQUIRE_NAMESPACES is set, but {REASON}", pytrace=False)
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "there are namespaces"),
    pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed"),
    pytest.mark.timeout(240),
]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
#: The server's addresses, before and after; of those that no network has (RFC 5737).
OLD, NEW = "192.0.2.1", "192.0.2.2"
IDENTITY = IdentityError.exit_code


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def wait(what: Callable[[], object], limit_s: float = 90.0) -> None:
    """Until it happened; a device that has lost its server knocks every 30 s at most, at each of its addresses."""
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


class World:
    """A server with one address, and two machines that have a link to it. This thread is on the server."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._stack = contextlib.ExitStack()
        self.server, *machines = (self._stack.enter_context(Namespace()) for _ in range(3))
        self.machines = dict(zip(("one", "two"), machines, strict=True))
        for number, machine in enumerate(machines, 1):
            self._stack.enter_context(Link(self.server, machine, number))
            with machine.entered():
                for address in (OLD, NEW):
                    ip("route", "add", address, "dev", f"link{number}")
        self._stack.enter_context(self.server.entered())
        self.serve_at(OLD)
        self.identity = place / "fleet"
        self.edgefl("init", "--host", OLD, "--directory", str(self.identity), identity=False)

    def serve_at(self, *addresses: str) -> None:
        """The server has these addresses, and no other."""
        ip("addr", "flush", "dev", "lo", "scope", "global")
        for address in addresses:
            ip("addr", "add", address, "dev", "lo")

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.identity)

    def words(self, *words: str, identity: bool = True) -> list[str]:
        where = ["--identity", str(self.identity)] if identity else []
        return [sys.executable, "-m", "coordinator.cli", *words, *where]

    def edgefl(self, *words: str, identity: bool = True, code: int = 0) -> str:
        """What a command on the server prints."""
        command = self.words(*words, identity=identity)
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout.strip()

    @contextlib.contextmanager
    def started(self, *words: str, on: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """A command on the server, or the agent on a machine, ended at the end."""
        command, space, environment = self.words(*words), self.server, dict(ENVIRONMENT)
        if on:
            own = Credentials(self.place / on).record
            options = Options(fleet=FLEET, device=own.device, data=os.devnull, state=str(self.place / on))
            (file := self.place / f"{on}.json").write_bytes(msgspec.json.encode([options]))
            command = [sys.executable, "-m", "benchmarks.network.echo_agents", str(file)]
            space, environment["EDGEFL_BROKER"] = self.machines[on], own.broker
        with space.entered(), (self.place / f"{on or words[0]}.out").open("ab") as out:
            process = subprocess.Popen(leashed(command), env=environment, stdout=out, stderr=out, cwd=self.place)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)

    def enroll(self, on: str, *texts: str) -> None:
        """As `edgefl-agent enroll TOKEN` does on a machine, ten at a time."""

        async def together(some: Sequence[str]) -> None:
            places = [self.place / on / decode_token(text).name if len(texts) > 1 else self.place / on for text in some]
            pairs = zip(some, places, strict=True)
            await asyncio.gather(*(enroll(text, place, self.place, 30.0, lambda line: None) for text, place in pairs))

        with self.machines[on].entered():
            for at in range(0, len(texts), 10):
                asyncio.run(together(texts[at : at + 10]))

    def there(self) -> list[str]:
        """Devices that answer a call."""
        try:
            return sorted(asyncio.run(connected(self.fleet)))
        except BrokerError:
            return []

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_the_server_gets_another_address_and_no_device_is_touched(world: World) -> None:
    """It is started again as after a move: under the new address alone, at the same place."""
    with contextlib.ExitStack() as stack:
        with world.started("enrollments"):
            wait((world.identity / "broker" / "newcomers.pid").exists)
            world.enroll("one", world.edgefl("enroll", "--name", "cam"))
            agent = stack.enter_context(world.started(on="one"))
            wait(lambda: world.there() == ["cam"])
            assert "is the only name" in world.edgefl("host", "remove", OLD, code=IDENTITY)
            world.serve_at(OLD, NEW)
            world.edgefl("host", "add", NEW)
            wait(lambda: knowing(world.fleet, time.time())[NEW] == ["cam"])
        world.serve_at(NEW)
        with world.started("enrollments"):
            wait(lambda: world.there() == ["cam"])
            world.edgefl("host", "remove", OLD)
            wait(lambda: f"//{NEW}:" in Credentials(world.place / "one").record.broker)
            assert agent.poll() is None


@pytest.mark.slow
def test_another_machine_has_the_name_and_the_old_one_is_shut_out(world: World) -> None:
    with world.started("enrollments"):
        wait((world.identity / "broker" / "newcomers.pid").exists)
        world.enroll("one", world.edgefl("enroll", "--name", "cam"))
        with world.started(on="one"):
            wait(lambda: world.there() == ["cam"])
            world.enroll("two", world.edgefl("enroll", "--name", "cam", "--replace"))
            wait(lambda: world.there() == [])
            with world.started(on="two"):
                wait(lambda: world.there() == ["cam"])
    assert world.fleet.devices()["cam"].generation == 2


@pytest.mark.slow
def test_the_fleets_directory_is_moved_and_devices_go_on(world: World) -> None:
    with contextlib.ExitStack() as stack:
        with world.started("enrollments"):
            wait((world.identity / "broker" / "newcomers.pid").exists)
            world.enroll("one", world.edgefl("enroll", "--name", "cam"))
            stack.enter_context(world.started(on="one"))
            wait(lambda: world.there() == ["cam"])
        world.edgefl("group", "add", "night", "cam")
        world.edgefl("rename", "cam", "door")
        moved = world.place / "elsewhere" / "identity"
        moved.parent.mkdir()
        shutil.move(world.identity, moved)
        world.identity = moved
        with world.started("enrollments"):
            wait(lambda: world.there() == ["cam"])
            world.enroll("two", world.edgefl("enroll", "--name", "gate"))
    assert world.fleet.groups() == {"night": ("door",)}
    assert world.fleet.shown() == {"cam": "door", "gate": "gate"}


def test_one_command_enrols_fifty_devices(world: World) -> None:
    names = [f"cam-{number:02d}" for number in range(50)]
    (world.place / "names.csv").write_text("\n".join(["name,groups", *(f"{name},night" for name in names)]))
    tokens = world.place / "tokens"
    with world.started("enroll", "--from", str(world.place / "names.csv"), "--out", str(tokens), "--wait") as command:
        wait((world.identity / "broker" / "newcomers.pid").exists)
        world.enroll("two", *(file.read_text() for file in sorted(tokens.iterdir())))
        assert command.wait(20) == 0
    assert sorted(world.fleet.devices()) == names
    assert world.fleet.groups() == {"night": tuple(names)}
