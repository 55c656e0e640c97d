"""A link sleeps until a ping is due, and wakes for whatever happens before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.enums import MQTTErrorCode
from transport_fixtures import TLS_PEM, Recorder, broker_kinds, run, until

from edgefl.errors import BrokerError
from edgefl.transport.broker import Broker, start_broker
from edgefl.transport.link import TlsFiles
from edgefl.transport.metered_client import LOOK_S, MeteredClient
from edgefl.transport.mqtt import MqttTransport


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = start_broker(tmp_path_factory.mktemp("broker"), broker_kinds()[0])
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


def test_an_idle_link_does_not_wake(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        steps: list[float] = []
        step = MeteredClient._step

        def counted(client: MeteredClient, wait_s: float) -> MQTTErrorCode:
            steps.append(wait_s)
            return step(client, wait_s)

        monkeypatch.setattr(MeteredClient, "_step", counted)
        transport = MqttTransport(broker.url, "idle")
        await transport.connect()
        await transport.publish("idle/x", b"1")
        await asyncio.sleep(0.2)
        before = len(steps)
        await asyncio.sleep(2.5 * LOOK_S)
        assert len(steps) == before
        assert steps[-1] > 20
        client = transport._client
        assert client is not None
        sockets = (client._sock, client._sockpairR, client._sockpairW)
        assert not any(os.get_inheritable(one.fileno()) for one in sockets if one is not None)
        await transport.close()

    run(scene())


def test_a_message_wakes_a_link_whenever_it_comes(broker: Broker) -> None:
    async def scene() -> None:
        transport = MqttTransport(broker.url, "woken")
        received = Recorder(transport)
        await transport.connect()
        await transport.subscribe(["woken/x"])
        for number in range(500):  # each as the link goes to sleep after the one before: one missed lasts 30 s
            await transport.publish("woken/x", b"%d" % number)
            if number % 7 == 0:
                await asyncio.sleep(0.0002 * (number % 5))
        await received.arrived(500)
        await transport.close()

    run(scene())


def test_a_link_ends_that_sleeps_before_a_broker_that_reads_nothing(broker: Broker) -> None:
    async def scene() -> None:
        transport = MqttTransport(broker.url, "ended")
        await transport.connect()
        os.kill(broker.pid or 0, signal.SIGSTOP)
        try:
            sending = [asyncio.ensure_future(transport.publish("ended/x", bytes(900_000))) for _ in range(20)]
            await asyncio.sleep(0.3)
            await transport.close()
            assert transport._link is not None
            transport._link._thread.join(10)
            assert not transport._link._thread.is_alive(), "30 s are left until its ping"
            await asyncio.gather(*sending, return_exceptions=True)
        finally:
            os.kill(broker.pid or 0, signal.SIGCONT)

    run(scene())


def test_descriptors_above_those_of_select_are_served(broker: Broker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1400:
        pytest.skip("the limit of open files is too low here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))

    async def scene() -> None:
        transport = MqttTransport(broker.url, "high")
        await transport.connect()
        assert transport._client is not None
        assert transport._client._sock is not None
        assert transport._client._sock.fileno() > 1024
        await transport.publish("high/x", b"1")
        await transport.close()

    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(Path(os.devnull).open())
        run(scene())


def test_what_tls_holds_back_is_read_before_the_link_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 3000
    monkeypatch.setattr("edgefl.transport.metered_client.READ_BYTES", 100)  # of a record of 16 KiB: TLS keeps the rest

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        body = b"\x00\x01x" + b"some payload"  # MQTT 3.1.1, QoS 0
        writer.write(b"\x20\x02\x00\x00")
        writer.write((struct.pack("!BB", 0x30, len(body)) + body) * told)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async def scene() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS_PEM)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        heard: list[Any] = []
        transport = MqttTransport(f"mqtts://localhost:{port}?version=3", "held", tls=TlsFiles(ca=str(TLS_PEM)))
        transport.on_message = lambda topic, payload: heard.append(payload)
        await transport.connect()
        await until(lambda: len(heard) == told)
        await transport.close()
        server.close()
        await server.wait_closed()

    run(scene())


def test_an_event_loop_moves_packets_without_a_thread_that_wakes(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        own, threads = threading.get_ident(), list[int]()
        for name in ("_sock_send", "_sock_recv"):
            moves = getattr(MeteredClient, name)

            def moved(client: MeteredClient, what: Any, moves: Any = moves) -> Any:
                threads.append(threading.get_ident())
                return moves(client, what)

            monkeypatch.setattr(MeteredClient, name, moved)
        transport = MqttTransport(broker.url, "looped", in_loop=True)
        received = Recorder(transport)
        await transport.connect()
        await transport.subscribe(["looped/x"])
        threads.clear()
        for number in range(40):  # more than goes into the sockets of both sides at once
            await transport.publish("looped/x", bytes([number]) * 900_000)
        await received.arrived(40)
        assert set(threads) == {own}
        threads.clear()
        await asyncio.sleep(2.5 * LOOK_S)
        assert threads == [], "nothing is due"
        await transport.close()
        assert set(threads) - {own}, "its thread says goodbye"

    run(scene())


def test_a_malformed_packet_ends_a_connection_that_an_event_loop_serves(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        transport, seen = MqttTransport(broker.url, "malformed", in_loop=True), list[bool]()
        transport.on_connection = seen.append
        await transport.connect()
        client = transport._client
        assert client is not None
        with monkeypatch.context() as patch:
            patch.setattr(client, "loop_read", lambda *_: struct.unpack("!H", b"x"))
            with contextlib.suppress(BrokerError, asyncio.TimeoutError):
                await asyncio.wait_for(transport.publish("malformed/x", b"1"), 1)
            await until(lambda: False in seen or seen[-1:] == [False])
        await until(lambda: seen[-1])
        await transport.publish("malformed/x", b"2")
        await transport.close()

    run(scene())
