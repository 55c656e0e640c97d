"""What the transport tests share: which brokers to test, a recorder, and worlds that hide where the bytes travel.

mosquitto's parameters are left out where it is not installed, and the header of the test report says so; with
EDGEFL_REQUIRE_MOSQUITTO=1 they stay, and fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from faulty_broker import FaultyBroker

from edgefl.transport.broker import broker_program
from edgefl.transport.interface import Transport, Will
from edgefl.transport.memory_broker import MemoryTransport
from edgefl.transport.mqtt import MqttTransport

#: Self-signed for localhost and 127.0.0.1, with its key: nothing outside these tests trusts it.
TLS_PEM = Path(__file__).with_name("transport_tls.pem")

T = TypeVar("T")
_NUMBERS = itertools.count()


def mosquitto_wanted() -> bool:
    """Whether the tests run against mosquitto: it is installed, or must be."""
    return broker_program("mosquitto") is not None or os.environ.get("EDGEFL_REQUIRE_MOSQUITTO") == "1"


def broker_kinds() -> list[str]:
    """The brokers to test here."""
    return ["mosquitto", "amqtt"] if mosquitto_wanted() else ["amqtt"]


def pytest_report_header() -> str:
    """A line of the test report's header, for conftest to pass on."""
    where = broker_program("mosquitto")
    if where:
        return f"brokers: mosquitto ({where}), amqtt"
    if mosquitto_wanted():
        return "brokers: mosquitto is NOT INSTALLED but EDGEFL_REQUIRE_MOSQUITTO=1, so its tests will fail; amqtt"
    return (
        "brokers: amqtt only: mosquitto is not installed, its tests are left out (EDGEFL_REQUIRE_MOSQUITTO=1 forbids)"
    )


def run(scenario: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
    """Run a scenario in a fresh event loop; it fails when it takes longer than ``seconds``.

    What it leaves running is cancelled until nothing is: a task that ends may begin another, as an answer to a message,
    and asyncio.run would leave that one in a closed loop.
    """

    async def limited() -> T:
        try:
            return await asyncio.wait_for(scenario, seconds)
        finally:
            while left := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    return asyncio.run(limited())


async def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    """Return when the condition holds; fails after ``seconds``."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


class Recorder:
    """Keeps what a transport reports. ``under``: only messages below this prefix."""

    def __init__(self, transport: Transport, under: str = "") -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.connections: list[bool] = []
        self._under = under
        transport.on_message = self._message
        transport.on_connection = self.connections.append

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.messages]

    def _message(self, topic: str, payload: bytes) -> None:
        if topic.startswith(self._under):
            self.messages.append((topic, payload))

    async def arrived(self, count: int) -> None:
        await until(lambda: len(self.messages) >= count)


class World:
    """Makes transports that can talk to each other; every test gets ids and topics nobody else uses."""

    def __init__(self) -> None:
        self.name = f"t{os.getpid()}-{next(_NUMBERS)}"
        self._open: list[Transport] = []

    def topic(self, rest: str) -> str:
        return f"{self.name}/{rest}"

    def client(self, name: str, will: Will | None = None) -> tuple[Any, Recorder]:
        transport = self._make(f"{self.name}-{name}", will)
        self._open.append(transport)
        return transport, Recorder(transport, self.name)

    async def connected(self, name: str, *patterns: str, will: Will | None = None) -> tuple[Any, Recorder]:
        transport, recorder = self.client(name, will)
        await transport.connect()
        await transport.subscribe([self.topic(pattern) for pattern in patterns])
        return transport, recorder

    async def close(self) -> None:
        for transport in self._open:
            await transport.close()

    def cut(self, transport: Any) -> None:
        raise NotImplementedError

    def _make(self, client_id: str, will: Will | None) -> Transport:
        raise NotImplementedError


class MemoryWorld(World):
    def __init__(self, broker: FaultyBroker | None = None) -> None:
        super().__init__()
        self.broker = broker or FaultyBroker()

    def cut(self, transport: MemoryTransport) -> None:
        self.broker.cut(transport._client_id)

    def _make(self, client_id: str, will: Will | None) -> Transport:
        return MemoryTransport(self.broker, client_id, will)


class MqttWorld(World):
    def __init__(self, url: str, *, in_loop: bool = False) -> None:
        super().__init__()
        self.url, self.in_loop = url, in_loop

    def cut(self, transport: MqttTransport) -> None:
        """End the connection under the client's feet, as a dying link does: no goodbye reaches the broker."""
        opened = transport._client.socket()
        opened.shutdown(socket.SHUT_RDWR)

    def _make(self, client_id: str, will: Will | None) -> Transport:
        return MqttTransport(self.url, client_id, will, in_loop=self.in_loop)


class CountingProxy:
    """Passes a TCP connection on and counts its bytes: an independent measurement.

    ``rate``: bytes a second each way, with little held in buffers, as over a slow link; 0: as fast as it can.
    """

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate
        self.up = 0
        self.down = 0
        self.port = 0

    @contextlib.asynccontextmanager
    async def to(self, port: int, tls: Any = None) -> AsyncIterator[CountingProxy]:
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.current_task())
            sock = socket.create_connection(("127.0.0.1", port))
            if self.rate:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
            there, back = await asyncio.open_connection(sock=sock)
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(self._pass(reader, back, "up"), self._pass(there, writer, "down"))

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await asyncio.gather(*tasks)
            await server.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        try:
            while data := await reader.read(4096 if self.rate else 65536):
                await asyncio.sleep(len(data) / self.rate if self.rate else 0)
                setattr(self, way, getattr(self, way) + len(data))
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


async def fails(call: Awaitable[object]) -> BaseException:
    """The exception a call ends with; fails when there is none."""
    try:
        await call
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")
