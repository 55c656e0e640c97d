"""Objects by HTTP, past the broker: a device fetches what it is offered, and puts what it is asked for.

``GET /objects/<id>`` with a range, ``PUT /objects/<id>`` with a content range that begins with a chunk; the URL says
who may do it and is signed (``object_urls``). What is put goes to the same receiver as chunks do. One request a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from coordinator.runtime.object_urls import Method, Permit, permit_of, urls_of
from edgefl.errors import ConfigError, Problem, ProtocolError, StoreError
from edgefl.process.listening import Listener, listen, read_place
from edgefl.process.web_server import IDLE_S, Connection, answering
from edgefl.protocol.chunks import Chunk
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.disk_driver import DiskReceiver, DiskSender

if TYPE_CHECKING:
    from edgefl.identity.fleet import Fleet

#: Beside the broker's ports, 8883 and 8884.
PORT = 8885
_LISTENER = Listener("the endpoint of large objects", "--objects-at")
#: Connections at a time: a request of each of some hundred devices; with a descriptor and up to 0.3 MB each.
MAX_CONNECTIONS = 512
#: Read and sent at once: what a slow link has waiting in memory is two of them.
PIECE_BYTES = 64 * 1024
#: Seconds for answers on their way when the run ends.
GOODBYE_S = 2
_RANGE = re.compile(rb"bytes=(\d{1,15})-(\d{1,15})")
_CONTENT_RANGE = re.compile(rb"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_LENGTH = re.compile(rb"\d{1,15}")


@contextlib.contextmanager
def opened(where: str, fleet: Fleet | None, *, insecure: bool) -> Iterator[ObjectEndpoint]:
    """An endpoint that listens until the block ends, at ``where``: HOST:PORT of this server as devices dial it.

    Raises ConfigError where it cannot listen, is not named in the server's certificate, or would be without TLS.
    """
    names = fleet.record.served() if fleet is not None else []
    place = read_place(where, (names[0] if names else "127.0.0.1", PORT), _LISTENER)
    text = remedy = ""
    if fleet is not None and place.host not in names:
        text = f"{place.host} is no name of this server: its certificate has {', '.join(names)}"
        remedy = "Name one of them, or add it: `edgefl-coordinator host add NAME`."
    elif fleet is None and not (place.is_loopback or insecure):
        text = "objects would go to other machines without TLS"
        remedy = "Give the fleet an identity (`edgefl-coordinator init`), or --insecure."
    if text:
        raise ConfigError(_LISTENER.what, [Problem(_LISTENER.option, text)], remedy=remedy)
    tls, anywhere = None, "::" if ":" in place.host else "0.0.0.0"  # noqa: S104 - as the broker
    if fleet is not None:
        tls, anywhere = fleet.server_tls(), fleet.record.bind or anywhere
    with listen(place if place.is_loopback else place._replace(host=anywhere), _LISTENER) as listener:
        host = f"[{place.host}]" if ":" in place.host else place.host
        yield ObjectEndpoint(listener, f"http{'s' if tls else ''}://{host}:{listener.getsockname()[1]}", tls)


class Uploads(Protocol):
    """The part of ``coordinator.runtime.uploads.Uploads`` that takes objects."""

    def receiver(self, device: str, transfer: str) -> DiskReceiver[Any] | None:
        """The receiver of the upload in progress."""
        ...

    def take(self, device: str, transfer: str, chunks: list[Chunk]) -> None:
        """Chunks came."""
        ...


class Served(NamedTuple):
    """The run whose objects move.

    ``download`` gives the sender of a transfer, if it is under way. ``shown``: name at the broker -> in the run.
    ``admits`` tells whether a certificate's user is a device's present machine. ``heard`` notes a sign of life;
    ``report`` takes what ends the run.
    """

    store: ObjectStore
    download: Callable[[str], DiskSender | None]
    uploads: Uploads
    shown: Mapping[str, str]
    admits: Callable[[str, str], bool]
    heard: Callable[[str], None]
    report: Callable[[BaseException], None]


class _Refused(Exception):  # noqa: N818 - no error: an answer
    """An answer other than the object. ``status``: of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ObjectEndpoint:
    """The endpoint at a listening socket. ``base``: its URL as devices dial it, https where there is ``tls``.

    Its key is of this process: after a restart devices get other URLs.
    """

    def __init__(self, listener: socket.socket, base: str, tls: ssl.SSLContext | None = None) -> None:
        self.base = base
        self._listener, self._tls = listener, tls
        self._key = secrets.token_bytes(32)
        self._run: Served | None = None
        self._working: dict[tuple[str, str], Connection] = {}  # by device and method

    def urls(self, method: Method, device: str, transfer: str, sizes: Mapping[str, int]) -> dict[str, str]:
        """Object id -> URL by which a device (its name at the broker) may fetch or put it; none of small objects."""
        return urls_of(self.base, self._key, method, device, transfer, sizes, time.time())

    @contextlib.asynccontextmanager
    async def serving(self, run: Served) -> AsyncIterator[None]:
        """Answer requests until the block ends."""
        self._run = run
        async with answering(self, self._listener, self._tls, GOODBYE_S, MAX_CONNECTIONS):
            yield

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        """Answer one request (ASGI)."""
        connection: Connection = scope["state"]["connection"]
        try:
            await self._answer(scope, connection, receive, send)
        except _Refused as refused:
            if connection.cycle.response_started:
                connection.transport.abort()  # the object is cut short: its length says so
            else:
                await _answer(send, refused.status, str(refused))

    async def _answer(self, scope: Any, connection: Connection, receive: Any, send: Any) -> None:
        method, run = scope["method"], self._run
        if method not in {"GET", "PUT"} or run is None:
            raise _Refused(405, "objects are fetched with GET and put with PUT")
        try:
            permit = permit_of(self._key, method, scope["path"], scope["query_string"], time.time())
        except ProtocolError as error:
            raise _Refused(403, error.message) from error
        if not run.admits(connection.user, permit.device):
            raise _Refused(403, "this URL is another device's")
        # Of one device and method there is one request: what is left of a lost link looks like a slow one.
        if (before := self._working.get((permit.device, method))) is not None and before is not connection:
            before.transport.abort()
        self._working[permit.device, method] = connection
        try:
            headers = dict(scope["headers"])
            if method == "GET":
                await self._get(run, permit, headers, connection, receive, send)
            else:
                await self._put(run, permit, headers, receive)
                await _answer(send, 200, "it is here")
        except StoreError as error:
            run.report(error)  # as where a chunk cannot be read or written
            raise _Refused(500, "the store is out of order") from error
        finally:
            if self._working.get((permit.device, method)) is connection:
                del self._working[permit.device, method]

    async def _get(
        self,
        run: Served,
        permit: Permit,
        headers: Mapping[bytes, bytes],
        connection: Connection,
        receive: Any,
        send: Any,
    ) -> None:
        sender, device = run.download(permit.transfer), run.shown.get(permit.device, permit.device)
        if sender is None or not sender.serves(permit.object_id):
            raise _Refused(404, "the transfer is over")
        name, size = permit.object_id, permit.size
        begin, end = _range(_RANGE.fullmatch(headers.get(b"range", f"bytes=0-{size - 1}".encode())), size)
        sender.on_asked(device, name, end - begin)
        first, last = begin // PIECE_BYTES, -(-end // PIECE_BYTES)
        data = run.store.read_chunk(name, PIECE_BYTES, first)  # what cannot be read is no answer begun
        head = {"content-range": f"bytes {begin}-{end - 1}/{size}", "etag": f'"{name}"', "accept-ranges": "bytes"}
        await _start(send, 206, end - begin, "application/octet-stream", head)
        for index in range(first, last):
            data = data if index == first else run.store.read_chunk(name, PIECE_BYTES, index)
            offset = index * PIECE_BYTES
            piece = data[max(0, begin - offset) : end - offset]
            await send({"type": "http.response.body", "body": piece, "more_body": index + 1 < last})
            if connection.transport.is_closing():
                await _gone(receive)
                return
            sender.on_passed(device, name, max(begin, offset), max(begin, offset) + len(piece))
            await asyncio.sleep(0)  # a link that takes everything would hold up all others

    async def _put(self, run: Served, permit: Permit, headers: Mapping[bytes, bytes], receive: Any) -> None:
        device, name, size = run.shown.get(permit.device, permit.device), permit.object_id, permit.size
        begin, end = _range(_CONTENT_RANGE.fullmatch(headers.get(b"content-range", b"")), size)
        length = headers.get(b"content-length", b"")
        if not _LENGTH.fullmatch(length):
            raise _Refused(411, "say the content's length")
        if int(length) != end - begin:
            raise _Refused(413, f"{int(length)} bytes where {end - begin} should be")
        receiver = run.uploads.receiver(device, permit.transfer)
        chunk_bytes = receiver.chunk_bytes if receiver is not None else 0
        if receiver is None or name not in receiver.partials:
            raise _Refused(409, "nothing is missing of this object now")
        if begin % chunk_bytes:
            raise _Refused(416, f"a range begins with a chunk of {chunk_bytes} bytes")
        receiver.set_aside([name])
        try:
            index = begin // chunk_bytes
            async for piece in _pieces(receive, end - begin, chunk_bytes):
                if run.uploads.receiver(device, permit.transfer) is not receiver or receiver.chunk_bytes != chunk_bytes:
                    raise _Refused(409, "the upload has ended, or goes on in other chunks")
                run.heard(device)
                run.uploads.take(device, permit.transfer, [Chunk(name, index, piece)])
                index += 1
        finally:
            receiver.set_aside(())


def _range(match: re.Match[bytes] | None, size: int) -> tuple[int, int]:
    """Bytes, from and to, that a header names. Raises _Refused where it makes no sense for an object of this size."""
    if match is None:
        raise _Refused(416, "name one range of bytes, with both ends")
    begin, last, *whole = (int(group) for group in match.groups())
    if not begin <= last < size or whole not in ([], [size]):
        raise _Refused(416, f"no such range in {size} bytes")
    return begin, last + 1


async def _pieces(receive: Any, left: int, most: int) -> AsyncIterator[bytes]:
    """A request's body in pieces of ``most`` bytes; the last may be shorter. Raises _Refused where it does not come."""
    held = bytearray()
    while left:
        try:
            message = await asyncio.wait_for(receive(), IDLE_S)
        except asyncio.TimeoutError:
            raise _Refused(408, f"nothing came for {IDLE_S} s") from None
        if message["type"] != "http.request" or not (message["body"] or message["more_body"]):
            raise _Refused(400, "the content is shorter than its length")
        held += message["body"]
        left -= len(message["body"])
        while len(held) >= most or (held and not left):
            yield bytes(held[:most])
            del held[:most]


async def _gone(receive: Any) -> None:
    """Wait for the end of a connection that is closing."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Any, status: int, length: int, kind: str, more: Mapping[str, str]) -> None:
    head = {"content-type": kind, "content-length": str(length), "cache-control": "no-store", **more}
    headers = [(name.encode(), value.encode()) for name, value in head.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Any, status: int, text: str) -> None:
    """A line of text; where it is a refusal, what is still to come is not read."""
    body = f"{text}\n".encode()
    await _start(send, status, len(body), "text/plain; charset=utf-8", {"connection": "close"} if status >= 400 else {})
    await send({"type": "http.response.body", "body": body})
