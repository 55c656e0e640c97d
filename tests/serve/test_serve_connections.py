"""Connections on which nothing happens are cut, and those of clients that are slow are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edgefl.process import web_server

#: Seconds between two looks at a connection here.
IDLE_S = 0.4
LARGE = 2**23
Client = Callable[[socket.socket], Awaitable[object]]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """At once: with many bytes at /large, with few elsewhere."""
    body = b"x" * (LARGE if scope["path"] == "/large" else 1000)
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


def served(client: Client, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> list[object]:
    """What so many of these clients return, and the server then holds no connection, though none was closed."""
    monkeypatch.setattr(web_server, "IDLE_S", IDLE_S)

    async def body() -> list[object]:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        running = web_server.web_server(answer, 10)
        serve = asyncio.ensure_future(running.serve(sockets=[listener]))
        lines = [socket.socket() for _ in range(count)]
        for line in lines:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            line.setblocking(False)
            await loop.sock_connect(line, listener.getsockname())
        found = list(await asyncio.gather(*(asyncio.wait_for(client(line), 20) for line in lines)))
        end = loop.time() + 10 * IDLE_S
        while running.server_state.connections and loop.time() < end:
            await asyncio.sleep(0.05)
        held = len(running.server_state.connections)
        running.should_exit = running.force_exit = True
        for line in lines:
            line.close()
        await serve
        assert held == 0
        return found

    return asyncio.run(body())


async def ask(line: socket.socket, path: str, times: int = 1) -> None:
    request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(line, request * times)


@pytest.mark.parametrize(("path", "times"), [("/", 20_000), ("/large", 1)])
def test_a_client_that_asks_and_does_not_read_is_cut(path: str, times: int, monkeypatch: pytest.MonkeyPatch):
    async def client(line: socket.socket) -> object:
        try:
            await ask(line, path, times)
        except ConnectionError as error:
            return error
        return None

    assert len(served(client, monkeypatch)) == 3


def test_a_client_that_says_nothing_or_half_a_head_is_cut(monkeypatch: pytest.MonkeyPatch):
    async def client(line: socket.socket) -> object:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(line, b"GET / HT")
        return await loop.sock_recv(line, 1)

    assert served(client, monkeypatch) == [b""] * 3


def test_a_client_that_reads_slowly_has_its_whole_answer(monkeypatch: pytest.MonkeyPatch):
    async def client(line: socket.socket) -> object:
        await ask(line, "/large")
        loop = asyncio.get_running_loop()
        begun, got = loop.time(), 0
        while got < LARGE:
            piece = await loop.sock_recv(line, 2**17)
            assert piece
            got += len(piece)
            await asyncio.sleep(0.03)
        return loop.time() - begun

    assert all(isinstance(took, float) and took > 3 * IDLE_S for took in served(client, monkeypatch))


def test_heads_that_never_end_keep_nobody_out(monkeypatch: pytest.MonkeyPatch):
    """The oldest connection on which nobody asks makes room; 5 is the most here, of 10 that come at once."""
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 5)
    said = 0

    async def client(line: socket.socket) -> object:
        nonlocal said
        loop, said = asyncio.get_running_loop(), said + 1
        if said < 10:
            await loop.sock_sendall(line, b"GET / HT")
            with contextlib.suppress(ConnectionError):
                await loop.sock_recv(line, 1)
            return b"HTTP/1.1 200"
        await ask(line, "/")
        return (await loop.sock_recv(line, 2**10))[:12]

    assert served(client, monkeypatch, count=10)[-1] == b"HTTP/1.1 200"
