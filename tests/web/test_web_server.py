"""The page's thread: it serves while a run goes on, bounds those who follow, and ends at once with streams open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from page_fixture import Page

from coordinator.runtime import start
from coordinator.runtime.environment import Watch
from coordinator.runtime.observers import logged
from coordinator.web import app
from coordinator.web.server import Served, serving
from edgefl.run_records import EventRow


class Follower(threading.Thread):
    """Reads the stream as a browser does, to its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._url = url
        self.start()

    def run(self) -> None:
        with httpx.stream("GET", f"{self._url}/live", timeout=30) as stream:
            for text in stream.iter_text():
                self.text += text

    def waits_for(self, words: str) -> None:
        until = time.monotonic() + 20
        while words not in self.text:
            assert time.monotonic() < until, self.text[-500:]
            time.sleep(0.05)


def test_an_open_stream_gets_the_end_and_does_not_hold_it_up(tmp_path: Path) -> None:
    links: list[str] = []
    before = threading.active_count()
    with serving("127.0.0.1:0", Served("r1", tmp_path, {}), links.append) as feed:
        feed.put(EventRow(1.0, "run_started", data={"name": "wave", "stages": 1, "rounds_total": 1}))
        follower = Follower(links[0])
        follower.waits_for("wave")
        feed.put(EventRow(2.0, "device_joined", device="cam-1"))
        follower.waits_for("cam-1")
        feed.put(EventRow(3.0, "run_finished", data={"status": "done"}))
    follower.join(5)
    assert not follower.is_alive()
    assert "The run is done" in follower.text
    assert "event: over" in follower.text
    assert threading.active_count() <= before  # one that hangs is left behind
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{links[0]}/")


def test_an_interrupted_run_leaves_its_browsers_trying_again(tmp_path: Path) -> None:
    links: list[str] = []
    with serving("127.0.0.1:0", Served("r1", tmp_path, {}), links.append) as feed:
        feed.put(EventRow(1.0, "run_started", data={"name": "wave"}))
        follower = Follower(links[0])
        follower.waits_for("wave")
    follower.join(5)
    assert "event: over" not in follower.text


def test_browsers_beyond_the_limit_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_STREAMS", 0)
    answer = Page(tmp_path).client.get("/live")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")


def test_browsers_that_ask_at_the_same_time_are_counted_before_they_are_answered(tmp_path: Path) -> None:
    page = Page(tmp_path)
    statuses: list[int] = []
    host = (b"host", b"127.0.0.1:8480")
    scope = {"type": "http", "method": "GET", "path": "/live", "query_string": b"", "headers": [host]}

    async def ask(gone: asyncio.Event) -> None:
        async def receive() -> dict[str, object]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        await page.app({**scope}, receive, send)

    async def all_at_once() -> None:
        gone = asyncio.Event()
        asked = [asyncio.ensure_future(ask(gone)) for _ in range(40)]
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if len(statuses) == len(asked):
                break
        assert page.feed.followers == app.MOST_STREAMS
        gone.set()
        await asyncio.gather(*asked)

    asyncio.run(all_at_once())
    assert sorted(statuses) == [200] * app.MOST_STREAMS + [503] * (40 - app.MOST_STREAMS)
    assert page.feed.followers == 0


def test_a_stream_sends_what_changed_and_nothing_else(tmp_path: Path) -> None:
    page = Page(tmp_path, [EventRow(1.0, "device_joined", device="cam-1")])

    async def follow() -> Iterator[str]:
        stream = page.site._stream(app.View())
        first = (await stream.__anext__())["data"]
        page.feed.put(EventRow(2.0, "warning", data={"text": "hot"}))
        page.feed.take()
        page.board.turn()
        second = (await stream.__anext__())["data"]
        await stream.aclose()
        return iter((first, second))

    first, second = asyncio.run(follow())
    assert first.count("<hx-partial") == 7
    assert 'hx-target="#log"' in second
    assert 'hx-target="#curves"' not in second
    assert "hot" in second


def test_bundles_come_to_an_open_page_once_they_are_exported(tmp_path: Path) -> None:
    links: list[str] = []
    with serving("127.0.0.1:0", Served("r1", tmp_path, {}), links.append):
        follower = Follower(links[0])
        follower.waits_for("report.html")
        assert "acc.zip" not in follower.text
        (tmp_path / "bundles" / "acc").mkdir(parents=True)
        (tmp_path / "bundles" / "acc" / "model.onnx").write_bytes(b"onnx")
        follower.waits_for('href="/download/bundles/acc.zip"')
        assert b"onnx" in httpx.get(f"{links[0]}/download/bundles/acc.zip").content


def test_the_page_of_a_finished_run_stays_while_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "RELOAD_S", 0.3)
    counts = iter([1, 1, 1, 0])
    watch, left = Watch(), list[int]()

    def followers() -> int:
        left.append(next(counts, 0))
        return left[-1]

    watch.followers = followers
    asyncio.run(start._stay(watch))
    assert left[:4] == [1, 1, 1, 0]
    monkeypatch.setattr(start, "STAY_S", 0.0)  # not for ever
    watch.followers = lambda: 1
    asyncio.run(start._stay(watch))


def test_the_page_of_a_finished_run_without_a_browser_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    watch = Watch()
    watch.followers = lambda: asked.append(0) or 0
    asyncio.run(start._stay(watch))
    assert asked == [0]


def test_a_one_time_link_is_not_in_a_log(tmp_path: Path) -> None:
    lines: list[str] = []

    def line(event: str, **fields: object) -> None:
        lines.append(f"{event} {fields}")

    async def shown() -> None:
        options = start.RunOptions(directory=tmp_path, web="127.0.0.1:0", web_control=True, log=line)
        with start._shown(options, "r1", logged(lambda row: None, line, run="r1", fleet="f")):
            while not lines:
                await asyncio.sleep(0.01)

    (tmp_path / "r1").mkdir()
    asyncio.run(shown())
    file = tmp_path / "r1" / "web-link"
    place, token = file.read_text(encoding="utf-8").strip().split("/open/")
    assert file.stat().st_mode & 0o777 == 0o600
    assert place in lines[0]
    assert str(file) in lines[0]
    assert not any(token in text or "/open/" in text for text in lines)


def test_a_fault_of_the_page_does_not_touch_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.Pieces, "__init__", lambda *_, **__: 1 / 0)
    with serving("127.0.0.1:0", Served("r1", tmp_path, {}), lambda url: None) as feed:
        feed.put(EventRow(1.0, "run_started"))
    assert "the live page has ended" in caplog.text
