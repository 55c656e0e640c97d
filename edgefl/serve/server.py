"""The server's process: answers requests until a signal, then finishes those in progress."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from edgefl.process.listening import Place, listen, read_token
from edgefl.process.notify import Notify
from edgefl.process.web_server import web_server
from edgefl.serve.app import Site
from edgefl.serve.catalogue import Catalogue
from edgefl.serve.engine import Engine
from edgefl.serve.limits import LISTENER, TOKEN, Limits
from edgefl.serve.metrics import Metrics

#: Seconds for answers on their way when it is told to stop.
GOODBYE_S = 10


class Serving(NamedTuple):
    """Models and limits of a server. ``beside``: other transports such as MQTT, run until cancelled."""

    catalogue: Catalogue
    limits: Limits
    beside: tuple[Callable[[Engine], Awaitable[None]], ...] = ()


def serve(serving: Serving, place: Place, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; ``announce`` is given the address. Raises ConfigError where nothing can listen."""
    token = read_token(TOKEN, LISTENER.what)
    with listen(place, LISTENER) as listener, _quiet_stop():
        place = place._replace(port=listener.getsockname()[1])
        asyncio.run(_serve(serving, place, token, listener, announce))


async def _serve(
    serving: Serving, place: Place, token: str, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    engine = Engine(serving.catalogue, serving.limits, Metrics())
    site = Site(engine)
    server = web_server(site.app(place, token), GOODBYE_S)
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    others = [asyncio.ensure_future(way(engine)) for way in serving.beside]
    try:
        announce(place.url)
        with contextlib.suppress(OSError):  # it serves whether or not systemd hears of it
            Notify(os.environ).tell("READY=1")
        await asyncio.wait([running, *others], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await running
        for ended in others:
            if ended.done():
                ended.result()  # raises what ended it
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await engine.close()


@contextlib.contextmanager
def _quiet_stop() -> Iterator[None]:
    """Ignore stop signals in the block: uvicorn raises them again after its own stop."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda *_: None) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
