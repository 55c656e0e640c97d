"""Names that come and go: devices are told by signed messages, and go on by the next where one fails."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from identity_fixture import FLEET, HOST, Attackers, a_fleet, enrolled
from msgspec.structs import replace
from transport_fixtures import mosquitto_wanted, run, until
from typer.testing import CliRunner

from benchmarks.network.echo_agents import InlineEcho
from coordinator.cli import app
from coordinator.runtime.fleet_auth import Guard, serve
from device_agent.device_checks import reach
from device_agent.runtime.connect import Options, make_agent
from edgefl.errors import BrokerError, IdentityError, ProtocolError, StoreError
from edgefl.identity.device import Credentials, learn_addresses
from edgefl.identity.fleet import Fleet, fleet_broker
from edgefl.identity.hosts import add_host, cut_off, knowing, note_hosts, remove_host
from edgefl.identity.issued_tokens import issue_token
from edgefl.identity.keys import Signer
from edgefl.identity.token import decode_token
from edgefl.protocol import topics
from edgefl.protocol.messages import Addresses, Hello, encode
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")
DOWN = topics.build("down", FLEET, "cam")
OLD, NEW = "old.example", "new.example"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Host names that lead to this machine; others of ``.example`` are not resolved."""
    known, real = {OLD}, socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **more: Any) -> Any:
        if str(host).endswith(".example"):
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = HOST
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path / "fleet", hosts=(OLD,))


class Told:
    """An agent's log."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.lines if event == kind]


def an_agent(fleet: Fleet, state: Path, told: Told) -> Any:
    file = state / "data.npz"
    file.touch()
    own = Credentials(state)
    given = Options(broker=own.record.broker, fleet=FLEET, device="cam", data=str(file), state=str(state))
    return make_agent(given, told, trainer=InlineEcho)


def saved(state: Path) -> dict[str, Any]:
    return json.loads((state / "credentials" / "device.json").read_text())


def url(fleet: Fleet, host: str) -> str:
    return f"mqtts://{host}:{fleet.record.port}"


@needs_mosquitto
def test_a_device_goes_on_by_a_new_name_when_the_old_one_is_gone(fleet: Fleet, tmp_path: Path, names: set[str]) -> None:
    """Nobody touches the device: it was told while both names were up, and its agent is not started again."""
    enrolled(fleet, "cam", tmp_path / "cam")

    async def scene() -> None:
        told, said = Told(), list[str]()
        broker = fleet_broker(fleet)
        await broker.start()
        serving = asyncio.ensure_future(serve(fleet, said.append))
        agent = an_agent(fleet, tmp_path / "cam", told)
        running = asyncio.ensure_future(agent.run())
        try:
            await until(lambda: told.of("connected"))
            names.add(NEW)
            done = await asyncio.to_thread(add_host, Fleet(fleet.directory), NEW, time.time())
            assert (done.hosts, done.shown, done.trouble) == ((OLD, NEW), True, "")
            await until(lambda: told.of("addresses"), 15)
            assert told.of("addresses") == [{"broker": url(fleet, OLD), "others": (url(fleet, NEW),)}]
            assert saved(tmp_path / "cam")["broker"] == url(fleet, OLD)
            await until(lambda: knowing(fleet, time.time()) == {OLD: ["cam"], NEW: ["cam"]}, 15)
            names.discard(OLD)
            await broker.stop()
            await until(lambda: told.of("disconnected"))
            await broker.start()
            await until(lambda: len(told.of("connected")) == 2, 30)
            assert agent.transport.address.host == NEW
            names.discard(OLD)
        finally:
            agent.stop()
            await asyncio.gather(running, return_exceptions=True)
        after = Told()  # a device that is switched on again, with the old name gone
        again = an_agent(fleet, tmp_path / "cam", after)
        running = asyncio.ensure_future(again.run())
        try:
            await until(lambda: after.of("connected"), 15)
            assert again.transport.address.host == NEW
            assert not after.of("unreachable")
            gone = await asyncio.to_thread(remove_host, Fleet(fleet.directory), OLD, time.time())
            assert (gone.hosts, gone.shown) == ((NEW,), True)
            await until(lambda: after.of("addresses"), 15)
            assert saved(tmp_path / "cam")["broker"] == url(fleet, NEW)
            assert saved(tmp_path / "cam")["others"] == []
        finally:
            again.stop()
            await asyncio.gather(running, return_exceptions=True)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await broker.stop()

    run(scene(), 90)


@needs_mosquitto
def test_addresses_that_the_fleet_has_not_signed_are_refused(fleet: Fleet, tmp_path: Path, names: set[str]) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    before = saved(tmp_path / "cam")
    bad = encode(Addresses(("mqtts://thief.example:8883",), 9))
    good = encode(Addresses((url(fleet, OLD), url(fleet, NEW)), 1))

    async def scene() -> None:
        told = Told()
        async with fleet_broker(fleet), Attackers(fleet) as at:
            agent = an_agent(fleet, tmp_path / "cam", told)
            running = asyncio.ensure_future(agent.run())
            await until(lambda: told.of("connected"))
            coordinator, _ = await at.coordinator()
            await coordinator.publish(DOWN, bad)
            await coordinator.publish(DOWN, Signer(bytes(32)).seal(DOWN, bad))
            other = topics.build("down", FLEET, "other")
            await coordinator.publish(DOWN, fleet.signer.seal(other, bad))  # to another device
            await until(lambda: len(told.of("ignored")) == 3)
            assert saved(tmp_path / "cam") == before
            await coordinator.publish(DOWN, fleet.signer.seal(DOWN, good))
            await until(lambda: told.of("addresses"))
            assert saved(tmp_path / "cam")["others"] == [url(fleet, NEW)]
            agent.stop()
            await running

    run(scene(), 30)


def test_of_signed_addresses_only_newer_ones_of_a_fleet_are_kept(fleet: Fleet, tmp_path: Path) -> None:
    own = enrolled(fleet, "cam", tmp_path / "cam")
    assert learn_addresses(own, [url(fleet, NEW)], 2)
    assert (own.record.broker, own.record.others, own.record.revision) == (url(fleet, NEW), (), 2)
    for revision in (1, 2):
        assert not learn_addresses(own, [url(fleet, OLD)], revision), "a recorded message, sent once more"
    wrong: list[list[str]] = [[], ["mqtt://plain.example"], ["https://x"], ["mqtts://a"] * 9, ["mqtts://" + "a" * 300]]
    for urls in wrong:
        with pytest.raises(ProtocolError):
            learn_addresses(own, urls, 3)
    assert Credentials(tmp_path / "cam").record == own.record


@needs_mosquitto
def test_a_client_dials_the_next_address_at_its_first_connection_too(
    fleet: Fleet, tmp_path: Path, names: set[str]
) -> None:
    own = enrolled(fleet, "cam", tmp_path / "cam")
    files = TlsFiles(str(own.authority), str(own.certificate))

    async def scene() -> None:
        async with fleet_broker(fleet):
            others = ("mqtts://gone.example", url(fleet, OLD))
            transport = MqttTransport(url(fleet, NEW), own.record.client_id, tls=files, others=others)
            await transport.connect()
            assert transport.address.host == OLD
            await transport.close()
            lost = MqttTransport(url(fleet, NEW), own.record.client_id, tls=files, others=("mqtts://gone.example",))
            with pytest.raises(BrokerError, match=r"gone\.example"):
                await lost.connect()

    run(scene())


def test_addresses_that_cannot_be_written_are_told_and_tried_again(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    told, message = Told(), Addresses((url(fleet, OLD), url(fleet, NEW)), 1)

    def full(path: Path, data: bytes) -> None:
        raise StoreError(f"cannot write {path}: No space left on device")

    async def scene() -> None:
        agent = an_agent(fleet, tmp_path / "cam", told)
        with monkeypatch.context() as disk:
            disk.setattr("edgefl.identity.device.write_private", full)
            agent._learn(message)
        (warning,) = told.of("warning")
        assert "No space left" in warning["text"]
        assert not told.of("addresses")
        agent._learn(message)
        assert told.of("addresses")

    run(scene())
    assert saved(tmp_path / "cam")["others"] == [url(fleet, NEW)]


def test_a_fleet_from_a_backup_is_believed_by_its_devices(fleet: Fleet, tmp_path: Path) -> None:
    """Changes that the backup does not know of must not make its next one older than theirs."""
    own, copy = enrolled(fleet, "cam", tmp_path / "cam"), tmp_path / "copy"
    shutil.copytree(fleet.directory, copy)
    for count, host in enumerate(("a.example", "b.example")):
        add_host(fleet, host, 1e9 + count)
    assert learn_addresses(own, fleet.urls, fleet.record.revision)
    restored = Fleet(copy)
    add_host(restored, NEW, 1e9 + 60)
    assert learn_addresses(own, restored.urls, restored.record.revision)
    for _ in range(2):  # the clock stands, or was set back: still newer
        before = restored.record.revision
        (remove_host if NEW in restored.record.hosts else add_host)(restored, NEW, 5.0)
        assert restored.record.revision > before


def test_names_of_the_start_are_told_as_well(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path / "two", hosts=(OLD, NEW))
    own = enrolled(fleet, "cam", tmp_path / "cam")
    guard, posts, cam = Guard(fleet), list[Any](), topics.Topic("up", "cam", "")
    guard.start(lambda name, message: posts.append(message))
    guard.takes(cam)
    guard.takes(cam)
    (message,) = posts
    assert learn_addresses(own, message.urls, message.revision)
    assert own.record.others == (url(fleet, NEW),)


@needs_mosquitto
def test_a_name_that_was_taken_away_is_refused_by_its_devices(fleet: Fleet, tmp_path: Path, names: set[str]) -> None:
    own = enrolled(fleet, "cam", tmp_path / "cam")
    files = TlsFiles(str(own.authority), str(own.certificate))
    names.add(NEW)

    async def scene() -> None:
        async with fleet_broker(fleet):
            for change, ids in ((add_host, ["broker-ok"] * 2), (remove_host, ["broker-ok", "broker-other-host"])):
                done = await asyncio.to_thread(change, Fleet(fleet.directory), NEW, time.time())
                assert done.shown
                found = [await asyncio.to_thread(reach, url(fleet, name), files, FLEET, "cam") for name in (OLD, NEW)]
                assert [one.id for one in found] == ids

    run(scene(), 40)


def test_names_that_cannot_be_added_or_taken_are_told_with_the_way_out(fleet: Fleet, tmp_path: Path) -> None:
    before = (fleet.directory / "fleet.json").read_bytes(), (fleet.directory / "broker" / "server.pem").read_bytes()
    wrong: list[tuple[Callable[..., Any], str, str]] = [
        (add_host, OLD, "already"),
        (add_host, "mqtts://new.example", "neither a host name nor"),
        (add_host, "new.example:8883", "neither a host name nor"),
        (add_host, "", "neither a host name nor"),
        (add_host, "a b", "neither a host name nor"),
        (add_host, "a..b", "neither a host name nor"),
        (add_host, "x" * 70 + ".example", "neither a host name nor"),
        (add_host, "999.1.1.1", "neither a host name nor"),
        (add_host, "fe80::1%eth0", "neither a host name nor"),
        (add_host, "Old.Example", "already"),
        (remove_host, NEW, "none of the server's names"),
        (remove_host, OLD, "the only name"),
    ]
    for change, host, words in wrong:
        with pytest.raises(IdentityError, match=words):
            change(fleet, host, time.time())
    assert before == (
        (fleet.directory / "fleet.json").read_bytes(),
        (fleet.directory / "broker" / "server.pem").read_bytes(),
    )
    with pytest.raises(IdentityError, match="8 names and addresses at most"):
        a_fleet(tmp_path / "ten", hosts=tuple(f"h{number}.example" for number in range(10)))
    with pytest.raises(IdentityError, match="neither a host name nor"):
        a_fleet(tmp_path / "odd", hosts=(OLD, "a..b"))
    assert not (tmp_path / "ten").exists()
    far = a_fleet(tmp_path / "far", broker="mqtts://broker.example:8883")
    with pytest.raises(IdentityError, match="know no other address"):
        add_host(far, NEW, time.time())
    both = a_fleet(tmp_path / "both", broker="mqtts://broker.example:8883", hosts=(OLD, NEW))
    with pytest.raises(IdentityError, match="know no other address"):
        remove_host(both, NEW, time.time())


def test_the_commands_show_what_they_did(fleet: Fleet) -> None:
    def call(*words: str) -> str:
        done = CliRunner().invoke(app, ["host", *words, "--identity", str(fleet.directory)])
        assert done.exit_code == 0, done.output
        assert all(len(line) <= 80 for line in done.output.splitlines()), done.output
        return done.output

    assert call("list") == "old.example: known to 0 of 0 devices\n"
    out = call("add", "192.0.2.7")
    assert "certificate is for old.example, 192.0.2.7\n" in out
    assert "no broker runs here" in out
    assert call("list") == "old.example: known to 0 of 0 devices\n192.0.2.7: known to 0 of 0 devices\n"
    call("remove", OLD)
    assert Fleet(fleet.directory).urls == (url(fleet, "192.0.2.7"),)
    token = decode_token(issue_token(Fleet(fleet.directory), "cam", time.time()))
    assert token.url == f"mqtts://192.0.2.7:{fleet.record.enroll_port}"


def test_a_name_is_not_taken_away_from_devices_that_know_no_other(fleet: Fleet, tmp_path: Path) -> None:
    for name in ("cam-a", "cam-b", "gone"):
        enrolled(fleet, name, tmp_path / name)
    with fleet.changing() as devices:
        devices["gone"] = replace(devices["gone"], revoked_at=1.0)
    add_host(fleet, NEW, now := time.time())
    assert knowing(fleet, now) == {OLD: ["cam-a", "cam-b"], NEW: []}, "each knows the name that it enrolled by"
    note_hosts(fleet, {"cam-a": fleet.record.hosts})
    with pytest.raises(IdentityError, match="1 device would be cut off, which may know no other name: cam-b") as caught:
        remove_host(fleet, OLD, now)
    assert "--force" in caught.value.remedy
    assert fleet.record.hosts == (OLD, NEW)
    with pytest.raises(IdentityError, match="would be cut off"):
        remove_host(fleet, OLD.upper(), now)
    assert cut_off(fleet, [OLD], now) == [], "nobody needs the other one"
    listed = CliRunner().invoke(app, ["host", "list", "--identity", str(fleet.directory)]).stdout
    assert listed == f"{OLD}: known to 2 of 2 devices\n{NEW}: known to 1 of 2 devices\n"
    assert remove_host(fleet, OLD, now, force=True).hosts == (NEW,)
    later = fleet.devices()["cam-b"].not_after + 1
    assert cut_off(fleet, [], later) == [], "who has to enrol again anyhow is not waited for"


def test_what_a_device_says_it_knows_counts_for_the_newest_revision_alone(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    add_host(fleet, NEW, time.time())

    async def said(revision: int) -> tuple[str, ...]:
        guard = Guard(Fleet(fleet.directory))
        guard.heard("cam", Hello("cam", addresses=revision))
        guard.heard("stranger", Hello("stranger", addresses=revision))
        guard.look()
        await guard.answered()
        await guard.close()
        assert list(fleet.devices()) == ["cam"]
        return fleet.devices()["cam"].hosts

    newest = Fleet(fleet.directory).record.revision
    for revision, hosts in ((0, (OLD,)), (newest + 1, (OLD,)), (newest, (OLD, NEW))):
        assert run(said(revision)) == hosts


def test_where_the_broker_is_elsewhere_the_way_out_is_said(tmp_path: Path) -> None:
    far = a_fleet(tmp_path / "far", broker="mqtts://broker.example:8883")
    with pytest.raises(IdentityError, match="know no other address") as caught:
        add_host(far, NEW, time.time())
    assert "DNS" in caught.value.remedy
    listed = CliRunner().invoke(app, ["host", "list", "--identity", str(far.directory)]).stdout
    assert listed == "mqtts://broker.example:8883: all devices dial this one\n"
