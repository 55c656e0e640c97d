"""Room for the bodies of requests: one for HTTP and MQTT, taken as bytes come and given back with the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serve_fixture import Server, arrays, bundles, json_inputs, post, running, until

from edgefl.serve import mqtt
from edgefl.serve.catalogue import load_catalogue
from edgefl.serve.engine import Engine
from edgefl.serve.limits import Limits, Refused
from edgefl.serve.metrics import Metrics
from edgefl.transport.interface import ReplyTo

MIB = 2**20
REQUEST = json.dumps({"inputs": json_inputs({"acc": arrays()["acc"]})}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-body-mib", 1) as started:  # and 4 of all
        yield started


@contextlib.contextmanager
def uploads(server: Server, count: int, sent: int) -> Iterator[None]:
    """So many bodies of 1 MiB are announced, and of each so much is sent."""
    with contextlib.ExitStack() as open_lines:
        place = urlsplit(server.url)
        for _ in range(count):
            line = open_lines.enter_context(socket.create_connection((place.hostname, place.port), 10))
            head = f"POST /v2/models/demo/infer HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {MIB}\r\n\r\n"
            line.sendall(head.encode() + b"x" * sent)
        yield


def room_used(server: Server) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    return int(float(text.split("\nedgefl_serve_body_bytes ")[1].split()[0]))


def test_bodies_that_are_only_announced_take_no_room(server: Server):
    with uploads(server, 8, sent=1):
        until(lambda: room_used(server) == 8)
        assert post(server.url, json.loads(REQUEST)).status_code == 200
    until(lambda: room_used(server) == 0)


def test_bodies_that_have_come_take_room_and_others_try_again_later(server: Server):
    with uploads(server, 4, sent=MIB - 1):
        until(lambda: room_used(server) == 4 * (MIB - 1))
        refused = post(server.url, json.loads(REQUEST))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    until(lambda: room_used(server) == 0)
    assert post(server.url, json.loads(REQUEST)).status_code == 200


class Transport:
    """A broker that takes answers when ``open`` is set."""

    def __init__(self, *_: object, **__: object) -> None:
        self.open = asyncio.Event()
        self.sending = 0
        self.sent: list[Any] = []
        self.on_request: Any = None

    async def subscribe(self, _patterns: list[str]) -> None:
        pass

    async def connect(self) -> None:
        pass

    async def publish(self, _topic: str, body: bytes, **_: object) -> None:
        self.sending += 1
        await self.open.wait()
        self.sent.append(json.loads(body))

    async def close(self) -> None:
        pass


async def soon(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited in vain")


def test_requests_by_mqtt_share_the_room_and_leave_it_before_their_answers_are_taken(monkeypatch: pytest.MonkeyPatch):
    made: list[Transport] = []
    monkeypatch.setattr(mqtt, "MqttTransport", lambda *_, **__: made.append(Transport()) or made[-1])

    async def body() -> None:
        limits = Limits(body_bytes=len(REQUEST), room_bytes=2 * len(REQUEST))
        engine = Engine(load_catalogue(bundles(), device="cpu", threads=1), limits, Metrics())
        way = asyncio.ensure_future(mqtt.Way(mqtt.Broker("mqtt://127.0.0.1:1"), engine).run())
        await soon(lambda: made)
        (broker,) = made
        payload = bytes(bytearray(REQUEST))
        referred = sys.getrefcount(payload)

        def ask() -> None:
            broker.on_request("edgefl-serve/demo/infer", payload, ReplyTo("w/answers"))

        with engine.room.lease() as http:
            http.take(len(REQUEST))
            ask()
            assert engine.room.used == 2 * len(REQUEST)
            with engine.room.lease() as another, pytest.raises(Refused, match="requests in progress"):
                another.take(1)
            ask()  # no room: refused, and its payload is not kept
            await soon(lambda: broker.sending == 2)
        assert engine.room.used == 0
        assert sys.getrefcount(payload) == referred
        broker.open.set()
        await soon(lambda: len(broker.sent) == 2)
        refused, answered = sorted(broker.sent, key=len)
        assert "requests in progress" in refused["error"]
        assert answered["parameters"]["given"] == "acc"
        assert 'edgefl_serve_requests_total{by="mqtt",code="503",model="demo"} 1.0' in engine.metrics.text().decode()
        way.cancel()
        await asyncio.gather(way, return_exceptions=True)
        await engine.close()

    asyncio.run(body())


def test_bodies_that_stop_give_their_room_back_soon(server: Server):
    with uploads(server, 4, sent=MIB - 1):
        until(lambda: room_used(server) == 4 * (MIB - 1))
        until(lambda: room_used(server) == 0, seconds=15)  # of the 30 that a whole body may take
