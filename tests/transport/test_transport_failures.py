"""What a person reads when TLS fails: the clock, a revoked device, options that exist, and the reason again later."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import ipaddress
import logging
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from identity_fixture import HOST, a_fleet, enrolled
from transport_fixtures import mosquitto_wanted, run, until

from edgefl.errors import BrokerError
from edgefl.identity.fleet import fleet_broker
from edgefl.identity.membership import revoke
from edgefl.log_lines import LineHandler, line_writer
from edgefl.transport import failures, link, mqtt
from edgefl.transport.address import parse_url
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

ADDRESS = parse_url("mqtts://broker.example:8883")


def a_certificate(path: Path, begins_in: dt.timedelta, host: str = HOST) -> Path:
    """A broker's certificate of its own authority, valid for a day from then."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    begins = dt.datetime.now(dt.timezone.utc) + begins_in
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*form))
    return path


def told_by_a_broker_with(certificate: Path) -> BrokerError:
    """What a client that trusts it says of a broker with this certificate."""

    async def scene() -> BrokerError:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate)
        listening = await asyncio.start_server(lambda reader, writer: None, HOST, 0, ssl=server)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            with pytest.raises(BrokerError) as error:
                await MqttTransport(f"mqtts://{HOST}:{port}", "cam", tls=TlsFiles(str(certificate))).connect()
        return error.value

    return run(scene())


def test_a_clock_that_is_behind_is_told_with_its_time_and_how_to_set_it(tmp_path: Path) -> None:
    error = told_by_a_broker_with(a_certificate(tmp_path / "broker.pem", dt.timedelta(days=3)))
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert f"this device's clock says {today}" in error.message
    assert "before the certificate begins" in error.message
    assert "timedatectl" in error.remedy
    assert "--ca" not in error.remedy


def test_a_certificate_that_has_expired_may_be_the_clock_or_the_certificate(tmp_path: Path) -> None:
    error = told_by_a_broker_with(a_certificate(tmp_path / "broker.pem", dt.timedelta(days=-3)))
    assert "has expired: this device's clock says" in error.message
    assert "renew the broker's certificate" in error.remedy


def test_an_unknown_authority_and_another_host_have_remedies_of_their_own(tmp_path: Path) -> None:
    other = told_by_a_broker_with(a_certificate(tmp_path / "a.pem", dt.timedelta(), "192.0.2.7"))
    assert "not trusted" in other.message
    assert "a name or address that its certificate was made for" in other.remedy


@pytest.mark.parametrize("reason", ["WRONG_VERSION_NUMBER", "CERTIFICATE_VERIFY_FAILED", "SOMETHING_NEW"])
def test_remedies_name_only_options_that_exist(reason: str) -> None:
    from typer.main import get_command

    from device_agent.cli import app

    raised = ssl.SSLError(1, reason)
    if "VERIFY" in reason:
        raised = ssl.SSLCertVerificationError(1, reason)
        raised.verify_code, raised.verify_message = 19, "self-signed certificate in certificate chain"
    error = failures.unreachable(ADDRESS, raised)
    options = {name for option in get_command(app).commands["run"].params for name in option.opts}  # type: ignore[attr-defined]
    named = set(re.findall(r"--[a-z-]+", error.remedy))
    assert named
    assert named <= options
    assert "broker." not in error.remedy


def test_a_broker_that_ends_tls_without_a_word_may_have_turned_the_device_away() -> None:
    assert "revoked" in failures.silent(ADDRESS).remedy
    assert "revoked" not in failures.silent(parse_url("mqtt://h")).remedy


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the agent logs of libraries' warnings, as ``device_agent.runtime.connect`` sets it up."""
    root = logging.getLogger()
    before, out = (list(root.handlers), root.level), io.StringIO()
    logging.basicConfig(handlers=[LineHandler(line_writer("text", out))], level=logging.WARNING, force=True)
    yield out
    root.handlers[:], root.level = before


@pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed")
def test_a_revoked_device_is_told_so_and_told_again(
    tmp_path: Path, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt, "REMIND_S", 0.0)
    fleet = a_fleet(tmp_path / "fleet")
    own, waits = enrolled(fleet, "stolen", tmp_path / "state"), list[float]()
    client = MqttTransport(fleet.url, own.record.client_id, tls=TlsFiles(str(own.authority), str(own.certificate)))
    again = MqttTransport(fleet.url, own.record.client_id, tls=TlsFiles(str(own.authority), str(own.certificate)))

    async def scene() -> BrokerError:
        broker = fleet_broker(fleet)
        await broker.start()
        try:
            await client.connect()
            assert client._link is not None
            wait = client._link._stopping.wait
            monkeypatch.setattr(client._link._stopping, "wait", lambda s: (waits.append(s), wait(min(s, 0.1)))[1])
            await revoke(fleet, "stolen", time.time())
            await until(lambda: lines.getvalue().count("was revoked") >= 2)
            with pytest.raises(BrokerError) as error:
                await again.connect()
            return error.value
        finally:
            await client.close()
            await broker.stop()

    error = run(scene())
    assert max(waits) >= link.REVOKED_S / 2
    assert "this device's certificate was revoked" in error.message
    assert "--replace" in error.remedy


def test_the_level_and_source_of_a_warning_are_not_in_its_text_too(lines: io.StringIO) -> None:
    logging.getLogger("edgefl.transport.mqtt").warning("lost the broker")
    assert 'source=edgefl.transport.mqtt text="lost the broker"' in lines.getvalue()
