"""The live page as a web application: the page, its stream, downloads from a closed list, and acting on the run."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, quote

import msgspec
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from coordinator.web.access import Access, Gate
from coordinator.web.pieces import Pieces, View
from coordinator.web.snapshot import Feed, Snapshot
from edgefl.errors import EdgeFLError

HERE = Path(__file__).parent
#: Browsers that follow a run at a time: each holds a connection, and what is made for it is made in this process.
MOST_STREAMS = 32
#: A report is made by a process of its own, whose memory is not the coordinator's.
REPORTS = {
    "report.html": (("--html", "-"), "text/html"),
    "bill.csv": (("--format", "csv", "-o", "-"), "text/csv"),
    "report.json": (("--format", "json", "-o", "-"), "application/json"),
}
REPORT_S = 120.0
#: Bytes of a form that are read; the longest has a device's name in it.
LONGEST_FORM = 1024
#: Bytes of a bundle that are read at a time.
PIECE = 2**18


#: Acts on the run: an action of the whole run alone, or one of a device with its name. Raises EdgeFLError.
Act = Callable[..., Awaitable[None]]
OF_THE_RUN, OF_A_DEVICE = ("pause", "resume", "stop"), ("leave_out", "take_in")


#: Goes on to the page from here, so that the cookie counts as this site's own.
OPENED = (
    '<!doctype html><title>EdgeFL</title><link rel="icon" href="/static/icon.svg">'
    '<meta http-equiv="refresh" content="0;url=/"><a href="/">Go on</a>'
)


def _zipped(bundle: Path) -> IO[bytes]:
    """The bundle's folder as a zip in a file without a name; a link in it is left out."""
    archive = tempfile.TemporaryFile()  # noqa: SIM115 - it is sent, and goes with its last reader
    with zipfile.ZipFile(archive, "w") as packed:  # weights do not compress
        for file in sorted(bundle.iterdir()):
            if file.is_file() and not file.is_symlink():
                packed.write(file, f"{bundle.name}/{file.name}")
    return archive


def _read(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        file.seek(0)
        while piece := file.read(PIECE):
            yield piece


class Board:
    """The latest snapshot and its waiting readers; all in the page's event loop."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.is_over = False
        self._next = asyncio.Event()

    @property
    def latest(self) -> Snapshot:
        """The feed's latest snapshot."""
        return self.feed.latest

    def turn(self) -> None:
        """Wake the readers: there is a new snapshot, or the run is over."""
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, seen: Snapshot) -> None:
        """Wait for a snapshot newer than ``seen``, or for the end."""
        while self.latest is seen and not self.is_over:
            await self._next.wait()


class Followed(EventSourceResponse):
    """A browser's event stream; its end lowers the feed's count of followers."""

    def __init__(self, feed: Feed, pieces: AsyncIterator[dict[str, str]], **options: Any) -> None:
        super().__init__(pieces, **options)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.followers -= 1


class Site:
    """Answers requests about the run in ``directory``."""

    def __init__(self, board: Board, access: Access, directory: Path, act: Act | None) -> None:
        self.board, self._access = board, access
        self._directory, self._act = directory, act
        self._pieces = Pieces(control=access.control, downloads=lambda: [*REPORTS, *self._bundles()])
        self._reporting = asyncio.Lock()

    def app(self, *more: Route) -> Gate:
        """The application. ``more``: routes of others, such as metrics."""
        routes = [
            Route("/", self.page),
            Route("/live", self.live),
            Route("/snapshot.json", self.snapshot),
            Route("/open/{link}", self.open),
            Route("/download/{name:path}", self.download),
            Route("/control/{action}", self.control, methods=["POST"]),
            Mount("/static", StaticFiles(directory=HERE / "static")),
            *more,
        ]
        return Gate(Starlette(routes=routes), self._access)

    async def page(self, request: Request) -> Response:
        """The page of the run's present state, updated by the stream afterwards."""
        acts = self._access.control and self._access.is_known(request)
        return HTMLResponse(self._pieces.page(self.board.latest, View.of(request.query_params), acts=acts))

    async def live(self, request: Request) -> Response:
        """Changed pieces of the page, as server-sent events."""
        if self.board.feed.followers >= MOST_STREAMS:
            return PlainTextResponse("Too many browsers follow this run.\n", 503, {"retry-after": "30"})
        self.board.feed.followers += 1  # here, not when it begins to send: many may ask at once
        return Followed(self.board.feed, self._stream(View.of(request.query_params)), ping=15, send_timeout=30)

    async def _stream(self, view: View) -> AsyncIterator[dict[str, str]]:
        sent: dict[str, str] = {}
        while True:
            latest, over = self.board.latest, self.board.is_over
            made = self._pieces.all(latest, view)
            news = [name for name in made if sent.get(name) != made[name]]
            if news:
                parts = (
                    f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{made[name]}</hx-partial>' for name in news
                )
                yield {"data": "".join(parts)}
                sent = made
            if over:
                if latest.ended:
                    yield {"event": "over", "data": latest.ended}
                return
            await self.board.after(latest)

    async def snapshot(self, request: Request) -> Response:
        """The snapshot, for programs."""
        return Response(msgspec.json.encode(self.board.latest), media_type="application/json")

    async def open(self, request: Request) -> Response:
        """Trade a one-time link for a cookie."""
        found = self._access.redeem(request.path_params["link"])
        if found is None:
            text = (
                "This link was used before, or is another coordinator's. The newest is in the coordinator's output.\n"
            )
            return PlainTextResponse(text, 403)
        answer = HTMLResponse(OPENED)
        answer.set_cookie(*found, httponly=True, samesite="strict", path="/")
        return answer

    async def download(self, request: Request) -> Response:
        """A report as the run stands, or an exported file: names on a closed list, never a path."""
        name = request.path_params["name"]
        if name in REPORTS:
            return await self._report(name)
        folder = self._bundles().get(name)
        if folder is None:
            return PlainTextResponse("There is no such download.\n", 404)
        archive = await asyncio.to_thread(_zipped, folder)
        headers = {
            "content-length": str(archive.seek(0, os.SEEK_END)),
            "content-disposition": f"attachment; filename*=utf-8''{quote(f'{folder.name}.zip')}",
        }
        return StreamingResponse(_read(archive), headers=headers, media_type="application/zip")

    def _bundles(self) -> dict[str, Path]:
        """Folders of exported bundles by the name they are downloaded by; a link is not followed."""
        folders = [one for one in sorted(self._directory.glob("bundles*")) if one.is_dir() and not one.is_symlink()]
        found = [one for folder in folders for one in sorted(folder.iterdir())]
        return {f"{one.parent.name}/{one.name}.zip": one for one in found if one.is_dir() and not one.is_symlink()}

    async def _report(self, name: str) -> Response:
        form, media = REPORTS[name]
        command = [sys.executable, "-m", "edgefl.cli.main", "report", f"{self._directory}/", *form]
        async with self._reporting:  # one at a time: it takes a core
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                out, problem = await asyncio.wait_for(process.communicate(), REPORT_S)
            except asyncio.TimeoutError:
                return PlainTextResponse("The report takes too long; try again later.\n", 503)
            finally:
                if process.returncode is None:
                    process.kill()
        if process.returncode:
            return PlainTextResponse(problem.decode(errors="replace"), 503)
        return Response(out, media_type=media, headers={"content-disposition": f'attachment; filename="{name}"'})

    async def control(self, request: Request) -> Response:
        """Act on the run; who may was decided at the gate."""
        body = parse_qs((await request.body())[:LONGEST_FORM].decode(errors="replace"))
        action, device = request.path_params["action"], body.get("device", [])[:1]
        if self._act is None or action not in (OF_A_DEVICE if device else OF_THE_RUN):
            return PlainTextResponse("There is no such action.\n", 404)
        try:
            await self._act(action, *device)
        except EdgeFLError as error:
            return PlainTextResponse(f"{error.message} {error.remedy}\n", 409)
        return Response(status_code=204)
