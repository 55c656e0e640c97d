"""The web servers of the project: HTTP/1.1 on a listening socket, bounded, with idle connections cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds between two looks at a connection: one on which nothing has happened between them is cut.
IDLE_S = 20
#: Connections at a time, streams among them; more are turned away. Each costs some 100 kB.
MAX_CONNECTIONS = 128
#: TLS handshakes at a time, and how long each may take: what has not come so far counts for no limit of uvicorn's.
MAX_HANDSHAKES = 64
HANDSHAKE_S = 10.0
#: Pause where no more descriptors are to be had.
_FULL_S = 0.5
#: A handshake that failed keeps its place for so long: each costs the loop a millisecond, and strangers cost no more
#: than 64 of them a second.
FAILED_S = 1.0


class Connection(H11Protocol):
    """A connection that is cut when nothing happens on it: no request begins, or nothing of an answer is taken.

    uvicorn closes one between two requests, but neither one whose head never ends nor one whose client does not read.
    Requests have it in their state. ``user``: the common name of the client's certificate, "" without one.
    """

    _look: asyncio.TimerHandle
    since: float
    user: str

    def connection_made(self, transport: Any) -> None:
        """A client is there. Where all connections are taken, the oldest without a request makes room."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self.user = _common_name(transport.get_extra_info("peercert") or {})
        self.app_state = {**self.app_state, "connection": self}
        self._watch(None)
        if len(self.connections) >= (self.limit_concurrency or MAX_CONNECTIONS):
            others = (
                one for one in self.connections if one is not self and isinstance(one, Connection) and one.is_idle
            )
            if (oldest := min(others, key=lambda one: one.since, default=None)) is not None:
                oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress; its head may be on its way."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._look.cancel()
        super().connection_lost(exc)

    def _watch(self, seen: tuple[object, bool, int] | None) -> None:
        """Look once in a while; ``seen``: request, whether it is answered, and bytes not sent, at the last look."""
        cycle, unsent = self.cycle, self.transport.get_write_buffer_size()
        idle = cycle is None or cycle.response_complete
        if seen == (cycle, idle, unsent) and (idle or unsent):
            self.transport.abort()  # to close it would wait until the client has taken what is not sent
        else:
            self._look = self.loop.call_later(IDLE_S, self._watch, (cycle, idle, unsent))


def _common_name(certificate: dict[str, Any]) -> str:
    names = (pair[1] for group in certificate.get("subject", ()) for pair in group if pair[0] == "commonName")
    return str(next(names, ""))


class _Server(uvicorn.Server):
    """A server in the loop of a program that heeds signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them as they are."""
        yield


@contextlib.asynccontextmanager
async def answering(
    app: Any, listener: socket.socket, tls: ssl.SSLContext | None, goodbye_s: int, connections: int
) -> AsyncIterator[None]:
    """Serve ``app`` at a listening socket, in the running loop, until the block ends; the socket stays open.

    ``goodbye_s``: as of ``web_server``; ``connections``: most at a time.
    """
    server = _Server(_config(app, goodbye_s, connections))
    loop, handshakes = asyncio.get_running_loop(), asyncio.Semaphore(MAX_HANDSHAKES)
    under_way: set[asyncio.Task[None]] = set()
    seconds = HANDSHAKE_S if tls is not None else None

    def protocol() -> asyncio.Protocol:
        return Connection(server.config, server.server_state, {}, loop)

    async def shake(opened: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(protocol, opened, ssl=tls, ssl_handshake_timeout=seconds)
        except OSError:  # a stranger, or a link that was lost
            await asyncio.sleep(FAILED_S)
        finally:
            handshakes.release()

    async def accept() -> None:
        while True:
            await handshakes.acquire()
            try:
                opened, _ = await loop.sock_accept(listener)
            except OSError:
                handshakes.release()
                await asyncio.sleep(_FULL_S)
                continue
            task = loop.create_task(shake(opened))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    listener.setblocking(False)
    server.config.load()
    serve, knocks = loop.create_task(server.serve(sockets=[])), loop.create_task(accept())
    try:
        yield
    finally:
        for task in (knocks, *under_way):
            task.cancel()
        await asyncio.gather(knocks, *under_way, return_exceptions=True)
        server.should_exit = True
        await serve


def web_server(app: Any, goodbye_s: int) -> uvicorn.Server:
    """A server of the ASGI application ``app``; ``goodbye_s``: seconds for answers on their way when it is to stop."""
    return uvicorn.Server(_config(app, goodbye_s, MAX_CONNECTIONS))


def _config(app: Any, goodbye_s: int, connections: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",  # a stranger's malformed request is no line in a log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=connections,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=goodbye_s,
    )
