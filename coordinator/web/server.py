"""Serves the live page beside a run: a thread with an event loop of its own, and a snapshot a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from coordinator.web.access import Access, listening, place_of
from coordinator.web.app import Act, Board, Site
from coordinator.web.metrics import metrics
from coordinator.web.snapshot import Feed
from edgefl.process.web_server import web_server
from edgefl.run_records import Reference
from edgefl.storage.disk import EVENTS, REFERENCE

_LOG = logging.getLogger(__name__)
#: A person sees no more; what comes within it is shown together.
BEAT_S = 1.0
#: Seconds for answers on their way when the run is over, and until a thread that hangs is left behind.
GOODBYE_S = 2
PATIENCE_S = 5.0


class Door(NamedTuple):
    """The page's open address, and who is let in."""

    listener: socket.socket
    access: Access


class Served(NamedTuple):
    """A run to show. ``signs``, ``phase``, ``waiting``: see :class:`Feed`. ``act``: acts on it, if allowed."""

    run: str
    directory: Path
    signs: dict[str, tuple[float, str, bool]]
    act: Act | None = None
    phase: Callable[[], str] = str
    waiting: Callable[[], tuple[str, ...]] = tuple


@contextlib.contextmanager
def opened(where: str, *, control: bool) -> Iterator[Door]:
    """Listen at this HOST:PORT ("" for the usual one) until the block ends; who asks while no run is shown waits.

    Raises ConfigError where nothing can listen.
    """
    place = place_of(where)
    with listening(place) as listener:
        place = place._replace(port=listener.getsockname()[1])
        if not place.is_loopback:
            text = "the live page at %s can be reached from elsewhere, without encryption: see docs/web.md"
            _LOG.warning(text, place.url)
        yield Door(listener, Access(place, control=control, announce=lambda _: None))


@contextlib.contextmanager
def serving(where: str | Door, served: Served, announce: Callable[[str], None]) -> Iterator[Feed]:
    """Show the run at an address until the block ends; put its events into what this yields.

    ``where``: HOST:PORT, "" for the usual one, or an open door, whose cookies stay good from run to run. ``announce``
    is given the page's address from the page's thread too. Raises ConfigError where nothing can listen.
    """
    own = opened(where, control=served.act is not None) if isinstance(where, str) else contextlib.nullcontext(where)
    with own as door, door.listener.dup() as listener:
        door.access.announce = announce
        reference = served.directory / REFERENCE
        feed = Feed(served.run, served.signs, served.phase, lambda: _reference(reference), served.waiting)
        log = served.directory / EVENTS
        page = _Page(feed, door.access, served, log.stat().st_size if log.is_file() else 0)
        thread = threading.Thread(target=page.run, args=(listener,), name="edgefl-web", daemon=True)
        thread.start()
        door.access.invite()
        try:
            yield feed
        finally:
            page.over.set()
            thread.join(PATIENCE_S)


def _reference(kept: Path) -> Reference:
    """Scores of the baseline models in the file ``kept``; empty without the file."""
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Reference)
    except (OSError, msgspec.DecodeError):
        return Reference()


class _Page:
    """The page's thread. ``over`` ends it."""

    def __init__(self, feed: Feed, access: Access, served: Served, before: int) -> None:
        self.over = threading.Event()
        self._feed, self._access, self._served, self._before = feed, access, served, before

    def run(self, listener: socket.socket) -> None:
        """Serve until ``over``; faults are logged and do not affect the run."""
        try:
            asyncio.run(self._run(listener))
        except Exception:
            _LOG.warning("the live page has ended", exc_info=True)

    async def _run(self, listener: socket.socket) -> None:
        if self._before:
            await asyncio.to_thread(self._feed.replay, self._served.directory / EVENTS, self._before)
        board = Board(self._feed)
        app = Site(board, self._access, self._served.directory, self._served.act).app(metrics(lambda: board.latest))
        server = web_server(app, GOODBYE_S)
        serve = asyncio.create_task(server.serve(sockets=[listener]))
        while not board.is_over and not serve.done():
            board.is_over = await asyncio.to_thread(self.over.wait, BEAT_S)
            self._feed.take()
            board.turn()
        server.should_exit = True
        await serve
