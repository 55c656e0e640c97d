"""Large objects past the broker: HTTP/1.1 requests to URLs that offers and grants name.

Nothing depends on them: what does not come or go this way does so in chunks. Hashes are checked where chunks' are.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from device_agent.runtime.effects import Effects, Emit
from device_agent.runtime.memory_store import Objects
from edgefl.errors import BrokerError, ProtocolError
from edgefl.protocol.messages import Grant, Update
from edgefl.transfer.receiver import ChunkIndex
from edgefl.transport.address import Address
from edgefl.transport.link import TlsFiles, tls_context
from edgefl.transport.metered_client import link_bytes

#: A host that does not answer by then is behind a firewall: an answer takes some round trips of a bad mobile link.
CONNECT_S = 5.0
#: A connection on which nothing moves for so long is lost.
IDLE_S = 20.0
#: Failures in a row, without a byte between them, after which the broker takes over: 1, 2 and 4 s are waited between.
TRIES = 4
RETRY_S = 1.0
#: For so long no URL is tried then.
AVOID_S = 300.0
#: Read at once, and held at most twice before the connection waits.
READ_BYTES = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,15}) *\r\n", re.IGNORECASE)
#: Whatever a host may do to a request.
_FAILURES = (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError, ValueError, BrokerError)


class Trust(NamedTuple):
    """Hosts that URLs may name. ``files``: of TLS; ``tls``: https alone, else http alone.

    ``host``: the broker's alone, where offers are not signed; "": any host, by its certificate.
    """

    files: TlsFiles
    tls: bool
    host: str = ""

    def admits(self, url: str) -> bool:
        """True for the URL of a trusted host."""
        try:
            parts = urlsplit(url)
            named = bool(parts.hostname) and (parts.port or 0) >= 0
        except ValueError:
            return False
        plain = url.isascii() and url.isprintable() and " " not in url and parts.username is None
        return plain and named and parts.scheme == ("https" if self.tls else "http") and self._knows(parts.hostname)

    def _knows(self, host: str | None) -> bool:
        return not self.host or host == self.host


class ByUrl:
    """A device's traffic by URL: bytes of all requests, and whether the endpoint can be relied on."""

    def __init__(self, trust: Trust, emit: Emit) -> None:
        self.trust = trust
        self.sent = self.received = 0  # bytes, within TLS
        self.link_bytes = 0  # on the link, of connections that are closed
        self._emit = emit
        self._failures = 0
        self._avoid_until = 0.0

    def usable(self, urls: Mapping[str, str], names: Container[str]) -> dict[str, str]:
        """Those of the URLs that are worth a try, of the objects ``names``."""
        if time.monotonic() < self._avoid_until:
            return {}
        return {name: url for name, url in urls.items() if name in names and self.trust.admits(url)}

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """A connection for some requests, one after the other."""
        opened = Exchange(self)
        try:
            yield opened
        finally:
            opened.close()

    def worked(self) -> None:
        """A request was answered as it should be."""
        self._failures = 0

    def failed(self, url: str, error: BaseException, *, moved: bool) -> float:
        """Seconds until another try after a failed request; 0: there is none, the broker takes over."""
        unreached = isinstance(error, _UnreachedError)
        self._failures = TRIES if unreached else 1 if moved else self._failures + 1
        if self._failures < TRIES:
            return RETRY_S * (1 << self._failures - 1)
        self._failures = TRIES - 1
        self._avoid_until = time.monotonic() + AVOID_S
        text = f"{urlsplit(url).netloc} fails, so large objects go through the broker: {error or type(error).__name__}"
        self._emit("warning", text=text)
        return 0.0


class _UnreachedError(OSError):
    """The host does not answer at all."""


class _RefusedError(OSError):
    """The URL is good no more: its transfer is over, or the coordinator was started again."""


class Exchange:
    """One connection, opened when it is needed and again after a failure."""

    def __init__(self, of: ByUrl) -> None:
        self._of = of
        self._place = ("", "")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(
        self, url: str, gap: Callable[[], tuple[int, int] | None], take: Callable[[int, bytes], None], piece_bytes: int
    ) -> bool:
        """Fetch an object's ``gap``s (bytes, from and to) until there is none; False where it fails for good.

        ``take`` gets pieces of ``piece_bytes`` and where each begins.
        """
        while (span := gap()) is not None:
            before = self._of.received
            try:
                await self._get(url, *span, take, piece_bytes)
            except _RefusedError:
                self.close()
                return False
            except _FAILURES as error:
                self.close()
                pause_s = self._of.failed(url, error, moved=self._of.received - before > piece_bytes)
                if not pause_s:
                    return False
                await asyncio.sleep(pause_s)
            else:
                self._of.worked()
                if gap() == span:  # it was not what it should be
                    return False
        return True

    async def put(
        self, url: str, begin: int, end: int, size: int, pieces: Iterable[bytes | memoryview]
    ) -> float | None:
        """Send bytes of an object: None where they have arrived, else seconds until another try, 0 for none."""
        before, refused = self._of.sent, False
        try:
            head = f"content-range: bytes {begin}-{end - 1}/{size}\r\ncontent-length: {end - begin}\r\n"
            reader, status, length = await self._request("PUT", url, head, pieces)
            if refused := status != 200:
                raise OSError(f"answered {status}")
            await self._body(reader, length)
        except _FAILURES as error:
            self.close()
            moved = self._of.sent - before > READ_BYTES and not refused  # what was refused did not arrive
            return self._of.failed(url, error, moved=moved)
        self._of.worked()
        return None

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._streams is not None:
            _, writer = self._streams
            self._of.link_bytes += link_bytes(writer.get_extra_info("socket")) or 0
            writer.transport.abort()
        self._streams = None

    async def _get(self, url: str, begin: int, end: int, take: Callable[[int, bytes], None], piece_bytes: int) -> None:
        reader, status, left = await self._request("GET", url, f"range: bytes={begin}-{end - 1}\r\n")
        if status in {403, 404}:
            raise _RefusedError(f"answered {status}")
        if (status, left) != (206, end - begin):
            raise OSError(f"answered {status} with {left} bytes where {end - begin} should be")
        held = bytearray()
        while left:
            held += (data := await self._body(reader, min(left, READ_BYTES)))
            left -= len(data)
            while len(held) >= piece_bytes or (held and not left):
                take(begin, bytes(held[:piece_bytes]))
                begin += len(held[:piece_bytes])
                del held[:piece_bytes]

    async def _request(
        self, method: str, url: str, head: str, pieces: Iterable[bytes | memoryview] = ()
    ) -> tuple[asyncio.StreamReader, int, int]:
        """Status and length of the answer, and what its body is read from."""
        parts = urlsplit(url)
        reader, writer = await self._opened(parts)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        await self._write(writer, f"{method} {target} HTTP/1.1\r\nhost: {parts.netloc}\r\n{head}\r\n".encode("ascii"))
        for piece in pieces:
            await self._write(writer, piece)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_S)
        self._of.received += len(answer)
        status, length = _STATUS.match(answer), _LENGTH.search(answer)
        if status is None or length is None:
            raise ValueError("no answer of HTTP with a length")
        return reader, int(status[1]), int(length[1])

    async def _write(self, writer: asyncio.StreamWriter, data: bytes | memoryview) -> None:
        writer.write(data)
        self._of.sent += len(data)
        await asyncio.wait_for(writer.drain(), IDLE_S)

    async def _body(self, reader: asyncio.StreamReader, most: int) -> bytes:
        """Some bytes of a body, of ``most`` (> 0) that are still to come."""
        data = await asyncio.wait_for(reader.read(most), IDLE_S)
        if not data:
            raise EOFError("the connection ended within an object")
        self._of.received += len(data)
        return data

    async def _opened(self, parts: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = (parts.scheme, parts.netloc)
        if self._streams is not None and place == self._place:
            return self._streams
        self.close()
        tls = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port or (443 if tls else 80)
        context = tls_context(Address(host, port, tls=tls), self._of.trust.files)
        try:
            opening = asyncio.open_connection(host, port, ssl=context, limit=READ_BYTES)
            self._streams = await asyncio.wait_for(opening, CONNECT_S)
        except asyncio.TimeoutError:
            raise _UnreachedError(f"no answer within {CONNECT_S:g} s") from None
        self._place = place
        return self._streams


class _Put(NamedTuple):
    """Missing bytes, from and to, of an object, and where they are put; in chunks of a size."""

    url: str
    size: int
    runs: list[tuple[int, int]]
    chunk_bytes: int


class Puts:
    """Objects of an update on their way past the broker, one after the other."""

    def __init__(self, by_url: ByUrl, objects: Objects, effects: Effects) -> None:
        self._by_url, self._objects, self._effects = by_url, objects, effects
        self._waiting: dict[str, _Put] = {}
        self._task: asyncio.Task[None] | None = None

    def take(self, update: Update, grant: Grant) -> Collection[str]:
        """Put what a grant has URLs for; the ids of these objects, which are not sent in chunks."""
        sizes = {ref.id: ref.size for ref in update.manifest.values() if ref.id in grant.missing}
        urls = self._by_url.usable(grant.urls, sizes)
        if not urls:
            return ()
        try:
            index = ChunkIndex(sizes, grant.chunk_bytes)
            lacking = index.pack({name: grant.missing[name] for name in urls})
        except ProtocolError:
            return ()  # the sender of chunks counts it
        for name, url in urls.items():
            self._waiting[name] = _Put(url, sizes[name], list(index.runs(name, lacking)), grant.chunk_bytes)
        if self._task is None or self._task.done():
            self._task = self._effects.spawn(self._work(update))
        return urls

    def stop(self) -> None:
        """Put no more of the update."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _work(self, update: Update) -> None:
        """Put all objects; after a failure announce the update again: the answer says what is missing then."""
        sent = Counter[str]()
        try:
            async with self._by_url.exchange() as exchange:
                while self._waiting:
                    name, put = next(iter(self._waiting.items()))
                    for begin, end in put.runs:
                        pieces = self._pieces(name, begin, end, put.chunk_bytes, sent)
                        pause_s = await exchange.put(put.url, begin, end, put.size, pieces)
                        if pause_s is not None:
                            await asyncio.sleep(pause_s)
                            self._waiting.clear()
                            self._effects.send(update)
                            return
                    if self._waiting.get(name) is put:
                        del self._waiting[name]
        finally:
            self._effects.emit("by-url", put_bytes=sent.total())

    def _pieces(
        self, name: str, begin: int, end: int, chunk_bytes: int, sent: Counter[str]
    ) -> Iterator[bytes | memoryview]:
        for number in range(begin // chunk_bytes, -(-end // chunk_bytes)):
            piece = self._objects.read_chunk(name, chunk_bytes, number)
            sent[name] += len(piece)
            yield piece
