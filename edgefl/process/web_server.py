"""The web servers of the project: HTTP/1.1 on a listening socket, bounded, with idle connections cut."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds between two looks at a connection: one on which nothing has happened between them is cut.
IDLE_S = 20
#: Connections at a time, streams among them; more are turned away. Each costs some 100 kB.
MAX_CONNECTIONS = 128


class Connection(H11Protocol):
    """A connection that is cut when nothing happens on it: no request begins, or nothing of an answer is taken.

    uvicorn closes one between two requests, but neither one whose head never ends nor one whose client does not read.
    """

    _look: asyncio.TimerHandle
    since: float

    def connection_made(self, transport: Any) -> None:
        """A client is there. Where all connections are taken, the oldest without a request makes room."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self._watch(None)
        if len(self.connections) >= MAX_CONNECTIONS:
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


def web_server(app: Any, goodbye_s: int) -> uvicorn.Server:
    """A server of the ASGI application ``app``; ``goodbye_s``: seconds for answers on their way when it is to stop."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=goodbye_s,
    )
    return uvicorn.Server(config)
