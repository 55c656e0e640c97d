"""Doctor on brokers, identities and clocks: each broken set-up with a real listener, and `run` in the same words."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from identity_fixture import HOST, a_fleet, enrolled, free_ports
from transport.test_transport_failures import a_certificate
from transport_fixtures import mosquitto_wanted, run

from device_agent import device_checks as doctor
from device_agent.device_checks import Device
from edgefl.findings import Check
from edgefl.identity.fleet import Fleet, fleet_broker
from edgefl.identity.membership import revoke
from edgefl.transport import failures, link
from edgefl.transport.address import parse_url
from edgefl.transport.broker import start_broker
from edgefl.transport.link import TlsFiles
from edgefl.transport.mosquitto import write_configuration

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="the broker here is mosquitto; it is not installed")
DAY = 86_400.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners that say nothing are not waited for as long as brokers over a bad link."""
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(link, "FIRST_ANSWER_TIMEOUT_S", 0.5)


def agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "device_agent.cli", *arguments]
    known = {name: value for name, value in os.environ.items() if name != "EDGEFL_BROKER"}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=known)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with its real mosquitto running; TLS, a certificate for everybody, a list of revoked ones."""
    made = a_fleet(tmp_path_factory.mktemp("broker") / "fleet")
    broker = fleet_broker(made)
    asyncio.run(broker.start())
    yield made
    asyncio.run(broker.stop())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL, with its password, of a real mosquitto without TLS."""
    broker = start_broker(tmp_path_factory.mktemp("plain"), "mosquitto")
    asyncio.run(broker.start())
    yield broker.url
    asyncio.run(broker.stop())


def authority(of: Fleet) -> str:
    return str(of.directory / "ca.pem")


# Where the broker is, and what its port speaks


def test_a_wrong_port_a_wrong_name_and_a_bad_url_differ() -> None:
    (port,) = free_ports(1)
    urls = {
        f"mqtt://{HOST}:{port}": ("broker-absent", f"nothing listens on {HOST}:{port}"),
        "mqtt://no-such-host.invalid": ("broker-name", "'no-such-host.invalid' cannot be resolved"),
        "http://127.0.0.1": ("broker-url", "not 'http'"),
    }
    for url, (finding, words) in urls.items():
        check = doctor.reach(url)
        assert (check.id, check.status, words in check.detail) == (finding, "fail", True), check


@needs_mosquitto
def test_a_plain_port_where_tls_is_asked_for_and_the_other_way_round(plain: str, fleet: Fleet) -> None:
    where = plain.rpartition("@")[2]
    plaintext = doctor.reach(f"mqtts://{where}", TlsFiles(authority(fleet)))
    assert (plaintext.id, "speaks plain MQTT" in plaintext.detail) == ("broker-plain", True)
    assert plaintext.remedy.startswith("Write mqtt://")
    encrypted = doctor.reach(fleet.url.replace("mqtts://", "mqtt://"))
    assert (encrypted.id, "speaks TLS" in encrypted.detail) == ("broker-tls", True)
    assert encrypted.remedy == "Write mqtts:// instead of mqtt://."


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A listener that takes connections and never says a word."""
    with socket.create_server((HOST, 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_that_never_answers_is_no_broker() -> None:
    with deaf() as port:
        check = doctor.reach(f"mqtt://{HOST}:{port}")
    assert (check.id, check.status) == ("broker-silent", "fail")


def test_a_broker_on_another_machine_without_tls_is_told_before_it_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "reach", lambda *_: doctor.well("broker", "reached"))
    first, second = doctor.dial(Device("mqtt://192.0.2.7"), None)
    assert (first.id, first.status, second.id) == ("broker-unprotected", "warn", "broker-ok")
    monkeypatch.setenv("EDGEFL_INSECURE", "1")
    assert [check.id for check in doctor.dial(Device("mqtt://192.0.2.7"), None)] == ["broker-ok"]
    (bad,) = doctor.dial(Device("mqtt://"), None)
    assert bad.id == "broker-url"


@needs_mosquitto
def test_a_wrong_password_is_told_without_it(plain: str) -> None:
    check = doctor.reach("mqtt://edgefl:guessed-secret@" + plain.rpartition("@")[2])
    assert check.id == "broker-login"
    assert "guessed-secret" not in f"{check.detail}{check.remedy}"


@needs_mosquitto
@pytest.mark.parametrize(
    ("limit", "finding", "status"), [(50_000, "broker-chunks", "warn"), (4_000, "broker-messages", "fail")]
)
def test_limits_that_are_too_small_are_found(
    limit: int, finding: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(directory: Path, *details: Any) -> Path:
        path = write_configuration(directory, *details)
        path.write_text(f"{path.read_text()}message_size_limit {limit}\n")
        return path

    monkeypatch.setattr("edgefl.transport.broker.write_configuration", write)
    broker = start_broker(tmp_path, "mosquitto")
    asyncio.run(broker.start())
    check = doctor.reach(broker.url)
    asyncio.run(broker.stop())
    assert (check.id, check.status) == (finding, status), check
    assert "message_size_limit" in check.remedy


def test_what_only_a_network_a_broker_or_its_access_list_can_answer() -> None:
    """Errors of a connection as the transport tells them to doctor and to `run` alike."""
    address = parse_url("mqtts://broker.example")
    found = {
        "broker-away": failures.unreachable(address, TimeoutError()),
        "broker-handshake": failures.unreachable(address, ssl.SSLError(1, "SOMETHING_NEW")),
        "identity-expired": failures.unreachable(address, alert("SSLV3_ALERT_CERTIFICATE_EXPIRED")),
        "broker-client-id": failures.refused(address, "cam", "Client identifier not valid"),
        "broker-refuses": failures.refused(address, "cam", "Server busy"),
        "broker-topics": failures.denied(address, "edgefl/1/x", "subscribe to", "Not authorized"),
    }
    assert {finding: error.finding for finding, error in found.items()} == {finding: finding for finding in found}
    assert all(error.remedy for error in found.values())


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


# The broker's certificate


@contextlib.asynccontextmanager
async def showing(certificate: Path) -> AsyncIterator[str]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    listening = await asyncio.start_server(lambda reader, writer: None, HOST, 0, ssl=server)
    async with listening:
        yield f"mqtts://{HOST}:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("begins", "host", "known", "finding"),
    [
        (dt.timedelta(days=3), HOST, True, "clock-behind"),
        (dt.timedelta(days=-3), HOST, True, "broker-expired"),
        (dt.timedelta(), "192.0.2.7", True, "broker-other-host"),
        (dt.timedelta(), HOST, False, "broker-distrusted"),
    ],
)
def test_each_fault_of_the_brokers_certificate(
    begins: dt.timedelta, host: str, known: bool, finding: str, tmp_path: Path
) -> None:
    shown = a_certificate(tmp_path / "broker.pem", begins, host)
    trusted = shown if known else a_certificate(tmp_path / "other.pem", dt.timedelta())

    async def scene() -> Check:
        async with showing(shown) as url:
            return await asyncio.to_thread(doctor.reach, url, TlsFiles(str(trusted)))

    check = run(scene(), 30)
    assert (check.id, check.status) == (finding, "fail"), check


# The device's identity


@needs_mosquitto
def test_no_certificate_another_fleets_and_one_that_does_not_load_differ(fleet: Fleet, tmp_path: Path) -> None:
    other = enrolled(a_fleet(tmp_path / "other"), "cam-01", tmp_path / "state")
    (tmp_path / "no.pem").write_text("nothing")
    missing = doctor.reach(fleet.url, TlsFiles(authority(fleet)))
    foreign = doctor.reach(fleet.url, TlsFiles(authority(fleet), str(other.certificate)))
    unreadable = doctor.reach(fleet.url, TlsFiles(authority(fleet), str(tmp_path / "no.pem")))
    assert [check.id for check in (missing, foreign, unreadable)] == [
        *("identity-missing", "identity-foreign", "broker-files")
    ]


@needs_mosquitto
def test_a_revoked_device_is_told_so_by_doctor_and_by_run_in_the_same_words(fleet: Fleet, tmp_path: Path) -> None:
    state = tmp_path / "state"
    own = enrolled(fleet, "stolen", state)
    (fine,) = doctor.dial(Device(directory=state), own)
    assert fine.id == "broker-ok"
    asyncio.run(revoke(fleet, "stolen", time.time()))
    (check,) = doctor.dial(Device(directory=state), own)
    assert (check.id, "was revoked" in check.detail) == ("identity-revoked", True)
    lines = lines_of_run(state, tmp_path, lambda line: line["event"] == "unreachable")
    assert (lines[-1]["finding"], lines[-1]["text"], lines[-1]["remedy"]) == (check.id, check.detail, check.remedy)


def test_a_fleets_broker_that_is_not_up_is_no_fault_of_an_enrolled_device(at_home: Any, tmp_path: Path) -> None:
    """It ends with the run, or with the enrolment, that started it."""
    (check,) = doctor.dial(Device(directory=tmp_path / "state"), at_home)
    assert (check.id, check.status) == ("broker-idle", "warn")
    assert "nothing listens on" in check.detail
    for words in ("who keeps the server", "a run or `edgefl-coordinator enrollments`", "a service of its own"):
        assert words in check.remedy
    (other,) = doctor.dial(Device("mqtts://127.0.0.1:9", tmp_path / "state"), at_home)
    assert (other.id, other.status) == ("broker-absent", "fail")  # an address that somebody typed
    lines = lines_of_run(tmp_path / "state", tmp_path, lambda line: line["event"] == "unreachable")
    assert (lines[-1]["finding"], lines[-1]["remedy"]) == ("broker-idle", check.remedy)


def lines_of_run(state: Path, place: Path, enough: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """What `run` logs, until it is enough; then it is ended."""
    np.savez(place / "data.npz", acc=np.ones((8, 4, 2), np.float32), label=np.arange(8) % 2)
    command = [sys.executable, "-m", "device_agent.cli", "run", "--data", str(place / "data.npz")]
    command += ["--state", str(state), "--format", "json"]
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        try:
            for text in program.stderr:
                lines += [json.loads(text)] if text.startswith("{") else []
                if lines and enough(lines[-1]):
                    break
        finally:
            program.terminate()
            program.stderr.read()
    assert lines
    assert enough(lines[-1]), lines
    return lines


@pytest.fixture
def at_home(tmp_path: Path) -> Any:
    """A device of a fleet whose broker does not run."""
    return enrolled(a_fleet(tmp_path / "fleet"), "cam-01", tmp_path / "state")


def test_an_identity_is_told_with_name_fleet_broker_and_dates(at_home: Any, tmp_path: Path) -> None:
    credentials, (check,) = doctor.identity(tmp_path / "state")
    assert credentials is not None
    assert check.id == "identity-ok"
    end = time.strftime("%Y-%m-%d", time.gmtime(at_home.valid()[1]))
    for words in ("'cam-01'", "'default'", at_home.record.broker, end):
        assert words in check.detail
    assert doctor.identity(tmp_path / "other") == (None, [])


@pytest.mark.parametrize(
    ("share", "finding"), [(0.5, "identity-ok"), (0.8, "identity-unrenewed"), (1.1, "identity-expired")]
)
def test_an_identity_grows_old_and_expires(
    share: float, finding: str, at_home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end = at_home.valid()
    monkeypatch.setattr(doctor.time, "time", lambda: begin + share * (end - begin))
    (check,) = doctor.identity(tmp_path / "state")[1]
    assert check.id == finding
    if share > 1:
        assert "edgefl-agent enroll TOKEN" in check.remedy
        assert [fault.id for fault in doctor.before_run(tmp_path / "state")] == ["identity-expired"]


def test_an_identity_that_others_can_read_or_that_is_damaged(at_home: Any, tmp_path: Path) -> None:
    at_home.certificate.chmod(0o644)
    credentials, (check,) = doctor.identity(tmp_path / "state")
    assert (credentials, check.id, "chmod 600" in check.remedy) == (None, "identity-unusable", True)
    at_home.certificate.chmod(0o600)
    (at_home.directory / "device.json").write_text("{")
    assert doctor.identity(tmp_path / "state")[1][0].id == "identity-unusable"


# The clock


def test_a_clock_before_the_certificate_or_before_this_program() -> None:
    now = time.time()
    assert doctor.clock(now).id == doctor.clock(now, now - DAY).id == "clock-ok"
    behind = doctor.clock(now - 3 * DAY, now)
    assert (behind.id, "before this device's certificate begins" in behind.detail) == ("clock-behind", True)
    assert "timedatectl" in behind.remedy
    assert doctor.clock(0.0).id == "clock-behind"


def test_a_clock_that_is_behind_is_told_by_doctor_and_before_run_connects(
    at_home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "clock"))
    monkeypatch.setenv("EDGEFL_TEST_CLOCK", str(-3 * DAY))
    done = agent("doctor", "--state", str(tmp_path / "state"), "--format", "json")
    (check,) = (one for one in json.loads(done.stdout) if one["name"] == "clock")
    assert (done.returncode, check["id"]) == (1, "clock-behind")
    lines = lines_of_run(tmp_path / "state", tmp_path, lambda line: line["event"] == "starting")
    told = [line for line in lines if line.get("finding") == "clock-behind"]
    assert [(line["text"][-10:], line["remedy"]) for line in told] == [(check["detail"][-10:], check["remedy"])]


@needs_mosquitto
def test_an_enrolled_device_is_examined_with_its_identity_by_the_command(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam-02", tmp_path / "state")
    done = agent("doctor", "--state", str(tmp_path / "state"), "--format", "json")
    said = {check["name"]: check["id"] for check in json.loads(done.stdout)}
    assert (said["identity"], said["broker"]) == ("identity-ok", "broker-ok"), done.stdout
