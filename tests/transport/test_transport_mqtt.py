"""What only a network has: addresses, refusals, protocol versions, broken connections, and bytes on the wire."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from paho.mqtt.client import Client
from transport_fixtures import (
    TLS_PEM,
    CountingProxy,
    MqttWorld,
    Recorder,
    broker_kinds,
    fails,
    mosquitto_wanted,
    run,
    until,
)

from edgefl.errors import BrokerError
from edgefl.transport.address import parse_url
from edgefl.transport.broker import Broker, start_broker
from edgefl.transport.link import BACKOFF_BASE_S, BACKOFF_CAP_S, KEEPALIVE_S, Link, Settings, TlsFiles, backoff_s
from edgefl.transport.metered_client import Meter, MeteredClient
from edgefl.transport.mosquitto import write_configuration
from edgefl.transport.mqtt import MqttTransport


@pytest.fixture(scope="module", params=broker_kinds())
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = start_broker(tmp_path_factory.mktemp("broker"), request.param)
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


def _refusal(url: str, tls: TlsFiles | None = None) -> BrokerError:
    """How connecting fails. No password may be in what the user sees."""
    error = run(fails(MqttTransport(url, "one", tls=tls).connect()))
    assert isinstance(error, BrokerError)
    assert "s3cret" not in f"{error.message} {error.remedy}"
    return error


# Addresses


def test_a_url_says_where_and_as_whom() -> None:
    address = parse_url("mqtts://node%201:s3%2Fcret@broker.example:1234")
    assert (address.host, address.port, address.tls) == ("broker.example", 1234, True)
    assert (address.username, address.password) == ("node 1", "s3/cret")
    assert parse_url(address.secret_url()) == address
    assert str(address) == "mqtts://node%201@broker.example:1234"
    assert "s3" not in repr(address)


@pytest.mark.parametrize(
    ("url", "port"), [("mqtt://h", 1883), ("mqtts://h", 8883), ("mqtt://[::1]", 1883), ("mqtt://h:1", 1)]
)
def test_ports_have_their_usual_defaults(url: str, port: int) -> None:
    assert parse_url(url).port == port
    assert parse_url(parse_url(url).secret_url()) == parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "broker:1883",
        "http://h",
        "mqtt://",
        "mqtt://u:s3cret@h:port",
        "mqtt://u:s3cret/x@h",
        "mqtt://[::1",
        "mqtt://h?version=4",
        "mqtt://h:0",
        "mqtt://a..b",
    ],
)
def test_a_malformed_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(BrokerError) as caught:
        MqttTransport(url, "one")
    assert "s3cret" not in f"{caught.value.message} {caught.value.remedy}"


# Refusals


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        error = _refusal(f"mqtt://me:s3cret@127.0.0.1:{port}")
    assert f"nothing listens on 127.0.0.1:{port}" in error.message
    assert "Start the broker" in error.remedy


def test_the_host_is_unknown() -> None:
    assert "'no-such-host.invalid' cannot be resolved" in _refusal("mqtt://me:s3cret@no-such-host.invalid").message


@pytest.mark.parametrize("who", ["edgefl:s3cret@", "stranger:s3cret@", ""])
def test_the_broker_does_not_admit_us(broker: Broker, who: str) -> None:
    version = "?version=3" if broker.kind == "amqtt" else ""
    error = _refusal(f"mqtt://{who}127.0.0.1:{broker.address.port}{version}")
    assert "does not admit" in error.message
    assert (f"user '{who.partition(':')[0]}'" if who else "anonymous clients") in error.message


def test_the_peer_is_no_broker() -> None:
    async def scenario() -> BaseException:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        error = await fails(MqttTransport(f"mqtt://127.0.0.1:{port}", "one").connect())
        server.close()
        await server.wait_closed()
        return error

    error = run(scenario())
    assert isinstance(error, BrokerError)
    assert "mqtts://" in error.remedy or "malformed" in error.message


# TLS, by a proxy that ends it in front of the broker


def test_tls_is_checked_and_carries(broker: Broker) -> None:
    async def scenario() -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(TLS_PEM)
        async with CountingProxy().to(broker.address.port, tls) as proxy:
            url = broker.url.replace("mqtt://", "mqtts://").replace(str(broker.address.port), str(proxy.port))
            untrusted = await fails(MqttTransport(url, "one").connect())
            assert isinstance(untrusted, BrokerError)
            assert "certificate is not trusted" in untrusted.message
            assert "--ca" in untrusted.remedy
            transport = MqttTransport(url, "one", tls=TlsFiles(str(TLS_PEM)))
            received = Recorder(transport)
            await transport.connect()
            await transport.subscribe(["tls/x"])
            await transport.publish("tls/x", bytes(100_000))
            await received.arrived(1)
            await transport.close()
            assert (transport.bytes_sent, transport.bytes_received) == (proxy.up, proxy.down)  # inside the TLS session

    run(scenario())


def test_tls_against_a_plain_port_is_explained(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.transport.link.CONNECT_TIMEOUT_S", 0.3)  # amqtt waits for more
    error = _refusal(f"mqtts://me:s3cret@127.0.0.1:{broker.address.port}")
    assert "cannot reach the broker mqtts://" in error.message
    assert "mqtt://" in error.remedy


def test_certificates_that_can_not_be_loaded_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    for files, name in [
        (TlsFiles(str(tmp_path / "absent.pem")), "absent.pem"),
        (TlsFiles(str(broken)), "broken.pem"),
        (TlsFiles(cert=str(broken)), "broken.pem"),
    ]:
        assert name in _refusal("mqtts://me:s3cret@127.0.0.1:1", files).message


@pytest.mark.skipif(not mosquitto_wanted(), reason="only MQTT 5 names refusals; mosquitto is not installed here")
def test_a_topic_the_access_list_denies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: Path, *details: Any) -> Path:
        path = write_configuration(directory, *details)
        (directory / "acl").write_text("user edgefl\ntopic readwrite open/#\n")
        (directory / "acl").chmod(0o600)
        path.write_text(f"{path.read_text()}acl_file {directory / 'acl'}\n")
        return path

    async def scenario() -> None:
        async with start_broker(tmp_path, "mosquitto") as broker:
            transport = MqttTransport(broker.url, "one")
            received = Recorder(transport)
            await transport.connect()
            await transport.subscribe(["open/x"])
            error = await fails(transport.publish("shut/x", b""))
            assert isinstance(error, BrokerError)
            assert "does not let 'edgefl' publish to shut/x" in error.message
            await transport.publish("open/x", b"still here")
            await received.arrived(1)
            await transport.close()

    monkeypatch.setattr("edgefl.transport.broker.write_configuration", write)
    run(scenario())


def test_a_denied_subscription_is_an_error_before_and_after_connecting() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A broker that accepts everybody and denies every subscription (mosquitto's own lists never do)."""
        while header := await reader.read(1):
            body = await reader.readexactly((await reader.readexactly(1))[0])
            if header[0] == 0x10:  # CONNECT
                writer.write(b"\x20\x02\x00\x00")
            elif header[0] == 0x82:  # SUBSCRIBE
                writer.write(b"\x90\x03" + body[:2] + b"\x80")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"mqtt://me:s3cret@127.0.0.1:{server.sockets[0].getsockname()[1]}?version=3"
        early = MqttTransport(url, "early")
        await early.subscribe(["x"])
        late = MqttTransport(url, "late")
        await late.connect()
        for call in (early.connect(), late.subscribe(["x"])):
            error = await fails(call)
            assert isinstance(error, BrokerError)
            assert "does not let 'me' subscribe to x" in error.message
        await late.close()
        server.close()
        await server.wait_closed()

    run(scenario())


# Bytes


def test_small_packets_do_not_wait_for_each_other(broker: Broker) -> None:
    async def scenario() -> int:
        transport = MqttTransport(broker.url, "nodelay")
        await transport.connect()
        option = transport._client.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await transport.close()
        return option

    assert run(scenario()) != 0


def test_wire_bytes_are_those_a_proxy_counts(broker: Broker) -> None:
    async def scenario() -> None:
        async with CountingProxy().to(broker.address.port) as proxy:
            transport = MqttTransport(broker.url.replace(str(broker.address.port), str(proxy.port)), "counted")
            received = Recorder(transport)
            await transport.connect()
            await transport.subscribe(["bytes/#"])
            await asyncio.gather(
                *(transport.publish("bytes/x", bytes(size)) for size in (0, 1, 127, 128, 20_000, 200_000))
            )
            await received.arrived(6)
            await transport.close()
        assert transport.bytes_sent == proxy.up > 220_256
        assert transport.bytes_received == proxy.down > 220_256

    run(scenario())


# Versions


def test_mosquitto_is_spoken_to_in_mqtt_5_and_names_its_limit(broker: Broker) -> None:
    async def scenario() -> int:
        transport = MqttTransport(broker.url, "limits")
        await transport.connect()
        await transport.close()
        return transport.max_payload

    expected = {"mosquitto": 2 * 2**20 - 1024, "amqtt": 255 * 1024}  # MQTT 3.1.1 has no way to name one
    assert run(scenario()) == expected[broker.kind]


@pytest.mark.parametrize("version", ["", "?version=3"])
def test_either_version_is_found_whatever_the_url_says(
    broker: Broker, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.transport.link.FIRST_ANSWER_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        transport = MqttTransport(broker.url.partition("?")[0] + version, "version")
        await transport.connect()  # amqtt never answers MQTT 5: without the hint that time-out passes
        await transport.publish("version/x", b"")
        await transport.close()

    run(scenario())


# Broken connections


def test_back_off_is_full_jitter_under_a_cap() -> None:
    assert backoff_s(0, 0.0) == 0.0
    assert backoff_s(0, 1.0) == BACKOFF_BASE_S
    assert backoff_s(3, 0.5) == 0.5 * 8 * BACKOFF_BASE_S
    assert backoff_s(100, 1.0) == BACKOFF_CAP_S


def test_clients_that_lost_the_broker_together_do_not_knock_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two hundred links draws its own pauses, which grow, and none is longer than its cap."""
    pauses: list[list[float]] = []

    class Ended:
        """In place of the event that ends the thread: notes each pause, and ends after twelve of them."""

        def __init__(self) -> None:
            self.waits: list[float] = []

        def is_set(self) -> bool:
            return len(self.waits) == 12

        def wait(self, seconds: float) -> None:
            self.waits.append(seconds)

    def away(_: Link) -> None:
        raise BrokerError("nobody answers")

    random.seed(5)
    for number in range(200):
        link = Link(Settings(parse_url("mqtt://localhost"), f"client-{number}"), Mock(), Meter())
        monkeypatch.setattr(link, "_serve", lambda client: None)
        monkeypatch.setattr(link, "_open", lambda link=link: setattr(link, "_open", lambda: away(link)))
        link._stopping = ended = Ended()  # type: ignore[assignment]
        link._run()
        pauses.append(ended.waits)
    for attempt in range(12):
        drawn = sorted(waits[attempt] for waits in pauses)
        most = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2**attempt)
        assert 0 <= drawn[0] <= drawn[-1] <= most
        # Spread over the whole range: a quarter of them in each quarter, with a wide margin (10 to 40 %).
        quarters = [sum(most * q / 4 <= one < most * (q + 1) / 4 for one in drawn) for q in range(4)]
        assert all(20 <= count <= 80 for count in quarters), quarters


def test_messages_sent_through_many_breaks_all_arrive(broker: Broker) -> None:
    async def scenario() -> None:
        world = MqttWorld(broker.url)
        sender, seen = await world.connected("sender")
        _, received = await world.connected("receiver", "x")
        numbers = [b"%03d" % i for i in range(150)]  # of one size: see Sizes.lost
        sending = asyncio.gather(*(sender.publish(world.topic("x"), number + bytes(5000)) for number in numbers))
        for breaks in (1, 2, 3):
            await until(lambda n=breaks: len(received.messages) >= 25 * n and seen.connections[-1])
            world.cut(sender)
            await until(lambda n=breaks: seen.connections.count(False) == n)
        await sending
        await until(lambda: len(set(received.payloads)) == len(numbers))
        await world.close()

    run(scenario())


def test_a_broker_killed_and_started_again_is_found_again(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = MqttWorld(broker.url)
        sender, seen = await world.connected("sender")
        _, received = await world.connected("receiver", "x")
        pid = broker.pid
        await broker.kill()
        await until(lambda: seen.connections == received.connections == [True, False])
        waiting = asyncio.ensure_future(sender.publish(world.topic("x"), b"held"))
        await broker.start()
        assert broker.pid != pid
        await waiting
        await until(lambda: received.connections[-1])  # subscriptions are renewed, even if the broker forgot them
        await sender.publish(world.topic("x"), b"after")
        await until(lambda: b"after" in received.payloads)
        assert broker.url == world.url
        await world.close()

    with caplog.at_level(logging.DEBUG):
        run(scenario())
    assert broker.address.password not in caplog.text
    assert "lost the broker" in caplog.text


def test_a_subscription_made_while_the_broker_is_away_holds_when_it_is_back(broker: Broker) -> None:
    async def scenario() -> None:
        world = MqttWorld(broker.url)
        transport, received = await world.connected("one")
        world.cut(transport)
        await until(lambda: False in received.connections)
        await transport.subscribe([world.topic("x")])
        await transport.publish(world.topic("x"), b"1")
        await received.arrived(1)
        await world.close()

    run(scenario())


def test_a_broker_that_falls_silent_counts_as_lost(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.transport.link.KEEPALIVE_S", 1)

    async def scenario() -> None:
        transport = MqttTransport(broker.url, "keepalive")
        seen = Recorder(transport)
        await transport.connect()
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            await until(lambda: False in seen.connections)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        await transport.publish("keepalive/x", b"back")
        assert seen.connections == [True, False, True]
        await transport.close()

    run(scenario())


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not tell")
def test_bytes_on_the_link_are_the_kernels_over_all_connections(broker: Broker) -> None:
    async def scenario() -> None:
        transport = MqttTransport(broker.url, "on-link")
        assert transport.bytes_on_link is None
        seen = Recorder(transport)
        await transport.connect()
        for _ in range(10):
            await transport.publish("on-link/x", bytes(100_000))
        inside, on_link = transport.bytes_sent + transport.bytes_received, transport.bytes_on_link
        assert on_link is not None
        headers = on_link - inside
        assert headers % 52 == 0, "plain TCP, and nothing sent again on loopback"
        assert 10 <= headers / 52 < 1000
        assert transport._client is not None
        transport._client._sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: seen.connections == [True, False, True])
        assert transport.bytes_on_link >= on_link + 4 * 52
        await transport.close()
        assert transport.bytes_on_link is None

    run(scenario())


def test_pings_go_out_twice_as_often_while_messages_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("edgefl.transport.metered_client.time.monotonic", lambda: clock[0])
    paces: list[int] = []
    monkeypatch.setattr(Client, "loop_misc", lambda client: paces.append(client._keepalive))
    for method in ("publish", "_handle_publish"):
        monkeypatch.setattr(Client, method, lambda client, *arguments: None)
    client = MeteredClient(Meter(), client_id="pace")
    client.keepalive = KEEPALIVE_S
    for moves in (client.publish, client._handle_publish):
        moves(*([] if moves == client._handle_publish else ["x"]))
        for after in (0.0, 59.0, 61.0):
            clock[0] += after
            client.loop_misc()
            clock[0] -= after
    assert paces == [30, 30, 60, 30, 30, 60]
    assert client.keepalive == 60, "what the broker is told at the next connection"


def test_giving_up_does_not_wait_for_a_deaf_broker() -> None:
    async def scenario() -> float:
        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1000):
                pass  # never answers
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        transport = MqttTransport(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}", "one")
        connecting = asyncio.create_task(transport.connect())
        await asyncio.sleep(0.05)
        connecting.cancel()
        began = asyncio.get_running_loop().time()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        took = asyncio.get_running_loop().time() - began
        server.close()
        await server.wait_closed()
        return took

    assert run(scenario()) < 2.0


def test_what_a_busy_link_reports_arrives_whole_and_in_its_order() -> None:
    async def scene() -> None:
        transport, heard, told = MqttTransport("mqtt://127.0.0.1", "one"), list[str](), 20_000
        transport.on_message = lambda topic, payload: heard.append(topic)
        transport._loop = asyncio.get_running_loop()

        def report() -> None:
            for number in range(told):
                transport.post(partial(transport.message, str(number), b""))
                if number % 50 == 0:
                    time.sleep(0.0001)

        await asyncio.to_thread(report)
        await until(lambda: len(heard) == told)
        assert heard == [str(number) for number in range(told)]

    run(scene())


def test_a_busy_loop_is_woken_once_for_what_comes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        transport, heard, loop = MqttTransport("mqtt://127.0.0.1", "one"), list[str](), asyncio.get_running_loop()
        transport.on_message = lambda topic, payload: heard.append(topic)
        transport._loop, woken, wake = loop, list[Any](), loop.call_soon_threadsafe
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", lambda *call: (woken.append(call), wake(*call)))
            reports = [partial(transport.message, str(number), b"") for number in range(9)]
            reporting = threading.Thread(target=lambda: [transport.post(report) for report in reports])
            reporting.start()
            reporting.join()  # the loop does nothing else meanwhile
        assert len(woken) == 1
        await until(lambda: len(heard) == 9)

    run(scene())


@pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed here")
def test_a_client_knows_whether_the_broker_still_knew_its_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = start_broker(tmp_path, "mosquitto")
        await broker.start()
        world = MqttWorld(broker.url)
        transport, seen = await world.connected("one", "x")
        assert not transport.session_kept  # it is new
        world.cut(transport)
        await until(lambda: seen.connections == [True, False, True])
        assert transport.session_kept
        await broker.kill()
        (tmp_path / "sessions.db").unlink(missing_ok=True)
        await broker.start()
        await until(lambda: seen.connections == [True, False, True, False, True])
        assert not transport.session_kept
        await world.close()
        await broker.stop()

    run(scenario())
