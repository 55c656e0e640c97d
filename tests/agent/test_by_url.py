"""An agent's requests by URL, to servers that answer as they should not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from device_agent.runtime import by_url
from device_agent.runtime.by_url import TRIES, ByUrl, Trust
from edgefl.transport.link import TlsFiles

DATA = bytes(range(256)) * 400
SIZE = len(DATA)
PLAIN = Trust(TlsFiles(), tls=False, host="127.0.0.1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_url, "RETRY_S", 0.01)
    monkeypatch.setattr(by_url, "IDLE_S", 0.3)


@contextlib.asynccontextmanager
async def server(*answers: bytes, hang: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Each connection gets the next answer, the last one again and again; what it was asked."""
    asked: list[bytes] = []
    open_: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_.append(writer)
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[min(len(asked), len(answers)) - 1])
        with contextlib.suppress(OSError):
            await writer.drain()
            if not hang:
                writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}/objects/x?sign=1", asked
    finally:
        made.close()
        for writer in open_:
            writer.transport.abort()


def answer(begin: int, end: int, sent: int | None = None, status: int = 206) -> bytes:
    body = DATA[begin : end if sent is None else begin + sent]
    return f"HTTP/1.1 {status} X\r\nContent-Length: {end - begin}\r\n\r\n".encode() + body


class Got:
    """What arrived in pieces of 1,000 bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.by_url = ByUrl(PLAIN, lambda event, **fields: self.lines.append((event, fields)))

    def gap(self) -> tuple[int, int] | None:
        return (len(self.data), SIZE) if len(self.data) < SIZE else None

    def take(self, begin: int, data: bytes) -> None:
        assert begin == len(self.data)
        self.data += data

    async def fetch(self, url: str) -> bool:
        async with self.by_url.exchange() as exchange:
            return await exchange.get(url, self.gap, self.take, 1000)


def test_what_ends_early_is_gone_on_with_from_its_last_piece() -> None:
    async def scene() -> None:
        got = Got()
        async with server(answer(0, SIZE, 50_700), answer(50_000, SIZE)) as (url, asked):
            assert await got.fetch(url)
        assert got.data == DATA
        assert [b"range: bytes=0-102399" in asked[0], b"range: bytes=50000-102399" in asked[1]] == [True, True]
        assert got.by_url.received > SIZE + 700
        assert got.by_url.usable({"a": url}, {"a"})
        assert got.lines == []

    asyncio.run(scene())


@pytest.mark.parametrize(
    "bad",
    [
        answer(0, 0, status=503),
        answer(0, SIZE, status=200),  # another range than asked for
        answer(0, SIZE - 1),
        answer(0, 10**12, 0),
        b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 X\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"x" * 200_000,
        b"",
    ],
)
def test_an_answer_that_is_none_is_tried_again_and_then_left_to_the_broker(bad: bytes) -> None:
    async def scene() -> None:
        got = Got()
        async with server(bad) as (url, asked):
            assert not await got.fetch(url)
            assert (len(asked), got.data) == (TRIES, b"")
            assert got.by_url.usable({"a": url}, {"a"}) == {}
        ((event, fields),) = got.lines
        assert event == "warning"
        assert "sign=" not in fields["text"]  # whoever has it may fetch the object

    asyncio.run(scene())


def test_a_url_that_is_good_no_more_is_left_to_the_broker_at_once() -> None:
    async def scene() -> None:
        got = Got()
        async with server(answer(0, 0, status=403)) as (url, asked):
            assert not await got.fetch(url)
            assert len(asked) == 1
            assert got.by_url.usable({"a": url}, {"a"})  # the next offer has another
        assert got.lines == []

    asyncio.run(scene())


def test_a_server_that_goes_silent_and_one_that_does_not_answer_cost_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        got = Got()
        async with server(answer(0, SIZE, 5000), answer(5000, SIZE, 0), hang=True) as (url, asked):
            assert not await got.fetch(url)
        assert (len(asked), got.data) == (TRIES, DATA[:5000])  # the first one brought something
        monkeypatch.setattr(by_url, "CONNECT_S", 0.2)
        monkeypatch.setattr(asyncio, "open_connection", lambda *_, **__: asyncio.sleep(9))  # a firewall that drops
        dropped = Got()
        assert not await dropped.fetch(url)
        assert "no answer within 0.2 s" in dropped.lines[0][1]["text"]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("trust", "url", "admitted"),
    [
        (PLAIN, "http://127.0.0.1:9/objects/x?a=b", True),
        (PLAIN, "http://169.254.169.254/latest", False),  # nobody has signed the offer
        (PLAIN, "https://127.0.0.1:9/objects/x", False),
        (Trust(TlsFiles(), tls=True), "https://any.example/objects/x", True),
        (Trust(TlsFiles(), tls=True), "http://any.example/objects/x", False),
        (PLAIN, "file:///etc/passwd", False),
        (PLAIN, "http://user@127.0.0.1:9/x", False),
        (PLAIN, "http://127.0.0.1:9/x\r\nx: y", False),
        (PLAIN, "http://127.0.0.1:99999/x", False),
        (PLAIN, "http://[::1/x", False),
        (PLAIN, "http:///x", False),
        (PLAIN, "", False),
    ],
)
def test_only_urls_of_trusted_hosts_are_used(trust: Trust, url: str, admitted: bool) -> None:
    assert trust.admits(url) == admitted
    usable = ByUrl(trust, lambda event, **fields: None).usable({"a": url, "b": url}, {"a"})
    assert usable == ({"a": url} if admitted else {})


def test_puts_that_are_refused_after_their_bytes_are_left_to_the_broker() -> None:
    """As by a proxy in front of the endpoint that takes no bodies of this size."""

    async def scene() -> None:
        warned: list[Any] = []
        async with server(b"HTTP/1.1 413 X\r\nContent-Length: 0\r\n\r\n", hang=True) as (url, asked):
            by = ByUrl(PLAIN, lambda *what, **more: warned.append((what, more)))
            async with by.exchange() as exchange:
                pauses = [await exchange.put(url, 0, SIZE, SIZE, [DATA]) for _ in range(TRIES)]
            assert len(asked) == TRIES
            assert [pause is not None and pause > 0 for pause in pauses] == [True] * (TRIES - 1) + [False]
            assert len(warned) == 1
            assert not by.usable({"x": url}, {"x"})

    asyncio.run(scene())
