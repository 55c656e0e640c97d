"""A page without a run: its application over a feed of made-up events, as a browser's requests reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.testclient import TestClient

from coordinator.web.access import Access
from coordinator.web.app import Act, Board, Site
from coordinator.web.snapshot import Feed
from edgefl.errors import ControlError
from edgefl.process.listening import Place
from edgefl.run_records import EventRow, Reference

LOOPBACK = Place("127.0.0.1", 8480)
ELSEWHERE = Place("0.0.0.0", 8480)  # noqa: S104 - nothing listens
HOSTILE = "<img src=x onerror=alert(1)>'\"&{{7*7}}"


class Recorder:
    """Notes what the page asks of the run."""

    def __init__(self) -> None:
        self.acts: list[tuple[str, ...]] = []

    async def __call__(self, *words: str) -> None:
        if "gone" in words:
            raise ControlError("the run knows no device 'gone'", remedy="Devices it knows: cam-1.")
        self.acts.append(words)


class Page:
    """``client``: a browser on this machine. ``links``: what was announced."""

    def __init__(
        self,
        directory: Path,
        events: Iterable[EventRow] = (),
        place: Place = LOOPBACK,
        act: Act | None = None,
        reference: Callable[[], Reference] = Reference,
    ) -> None:
        self.links: list[str] = []
        self.feed = Feed("r1", {}, reference=reference)
        for event in events:
            self.feed.put(event)
        self.feed.take()
        self.access = access = Access(place, control=act is not None, announce=self.links.append)
        access.invite()
        self.board = Board(self.feed)
        self.site = Site(self.board, access, directory, act)
        self.app = self.site.app()
        self.client = self.browser()

    def browser(self, host: str = "127.0.0.1:8480") -> TestClient:
        return TestClient(self.app, base_url=f"http://{host}", follow_redirects=False)

    @property
    def link(self) -> str:
        """The newest link's path."""
        return "/" + self.links[-1].split("/", 3)[3]
