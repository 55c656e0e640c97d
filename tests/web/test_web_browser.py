"""The live page in a real browser, beside a real fleet: watched, paused, resumed, a device left out, stopped."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from browser_fixture import chromium
from fleet_fixture import Fleet, share
from page_fixture import HOSTILE, Page
from playwright.sync_api import BrowserContext, Route, expect
from test_web_access import hostile_events

from coordinator.web.server import Served, opened, serving
from edgefl.run_records import EventRow

PATIENCE_MS = 60_000


class Witness:
    """Notes what a browser asked other hosts for, and what went wrong in it."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.foreign: list[str] = []
        self.faults: list[str] = []
        context.on("request", lambda one: None if one.url.startswith(f"{origin}/") else self.foreign.append(one.url))
        context.on("console", lambda one: self.faults.append(one.text) if one.type in ("error", "warning") else None)
        context.on("weberror", lambda one: self.faults.append(str(one.error)))


@pytest.mark.slow
@pytest.mark.timeout(300)  # two reports are made in it, by processes of their own
def test_a_run_is_watched_and_steered_from_a_browser(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet, chromium() as browser:
        for seed, name in enumerate(("left", "right", "third")):
            fleet.agent(name, share(24, "acc", "gyro", seed=seed))
        settings = {"training.rounds": "[30, 30]", "round.devices": 3, "evaluate": "stage"}
        run = fleet.coordinator("r1", settings, options=["--web-at", "127.0.0.1:0", "--web-control"])
        link = run.expect("page")["data"]["url"]
        origin = link.split("/open/")[0]
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        witness = Witness(context, origin)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        asked: list[str] = []
        page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
        page.goto(link)
        page.wait_for_url(f"{origin}/")
        standing, link_state = page.locator("h1"), page.locator("body")
        expect(link_state).to_have_attribute("data-link", "live", timeout=PATIENCE_MS)
        expect(standing).to_contain_text("of 3 devices", timeout=PATIENCE_MS)
        second = re.compile(r"\b([2-9]|[1-5]\d) of 60")  # or a later one, where the browser is slower than the run
        expect(page.locator(".rounds")).to_contain_text(second, timeout=PATIENCE_MS)
        expect(page.locator("article.device")).to_have_count(3)
        expect(page.locator(".plot canvas").first).to_be_visible(timeout=PATIENCE_MS)
        assert page.locator("#device-left .lane rect").count() > 2

        expect(page.get_by_role("button", name="Resume")).to_be_hidden()
        page.get_by_role("button", name="Pause").click()
        expect(standing).to_contain_text("Paus", timeout=PATIENCE_MS)
        run.expect("paused")
        expect(standing).to_contain_text("Paused after round", timeout=PATIENCE_MS)
        page.locator("#device-right").get_by_role("button", name="Leave out").click()
        expect(page.locator("#device-right .chip")).to_have_text("left out", timeout=PATIENCE_MS)
        expect(page.locator("#device-right").get_by_role("button")).to_have_text(["Take in"], timeout=PATIENCE_MS)
        expect(page.locator("#device-left").get_by_role("button")).to_have_text(["Leave out"])
        expect(page.get_by_role("button", name="Pause")).to_be_hidden()
        page.locator("button.pause").dispatch_event("click")  # of a page that has not heard of the pause yet
        expect(page.locator(".answer")).to_contain_text("is paused already", timeout=PATIENCE_MS)
        witness.faults = [text for text in witness.faults if "409" not in text]  # the browser notes the refusal

        for name, begin in (("bill.csv", b"run,device,stage"), ("report.html", b"<!doctype html>")):
            with page.expect_download() as download:
                page.get_by_role("link", name=name).click()
            assert download.value.path().read_bytes().startswith(begin)

        page.get_by_role("button", name="Resume").click()
        started = run.until(lambda line: line.get("kind") == "resumed", "the run goes on")
        later = run.until(lambda line: line.get("kind") == "round_started" and line["at"] > started["at"], "a round")
        assert "right" not in later["data"]["participants"]
        page.get_by_role("button", name="Stop").click()
        expect(link_state).to_have_attribute("data-link", "over", timeout=PATIENCE_MS)
        expect(standing).to_contain_text("The run is stopped")
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        expect(page.get_by_role("button", name="Leave out")).to_have_count(0)
        expect(page.locator("header")).to_contain_text("edgefl-coordinator run --resume r1", timeout=PATIENCE_MS)
        assert asked == ["Stop the run? --resume r1 goes on with it."]
        assert run.wait() is not None
        assert (witness.foreign, witness.faults) == ([], [])
        context.close()
    assert fleet.report("r1").status == "stopped"


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_texts_stay_texts_and_nothing_is_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    """A page as the application renders it, with its own files; a device's every text is code."""
    text = Page(tmp_path, [*hostile_events()]).client

    def answer(route: Route) -> None:
        path = route.request.url.removeprefix("http://localhost")
        if path.startswith("/live"):
            route.fulfill(content_type="text/event-stream", body="event: over\ndata: done\n\n")
            return
        if path.endswith("hx-sse.min.js"):
            time.sleep(0.5)  # however late it comes, the stream is opened
        got = text.get(path)
        route.fulfill(status=got.status_code, headers=dict(got.headers), body=got.content)

    with chromium() as browser:
        context = browser.new_context(viewport={"width": width, "height": 800})
        witness = Witness(context, "http://localhost")
        context.route("**/*", answer)
        page = context.new_page()
        page.goto("http://localhost/")
        page.wait_for_selector(".plot canvas")
        expect(page.locator("body")).to_have_attribute("data-link", "over", timeout=PATIENCE_MS)
        assert page.locator("img").count() == 0
        assert HOSTILE in page.locator("h3").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert (witness.foreign, witness.faults) == ([], [])
        context.close()


def test_a_browser_goes_on_with_the_next_run_of_the_queue(tmp_path: Path) -> None:
    """One address and one cookie for both runs: nobody opens a second link."""
    links: list[str] = []

    async def act(*_: str) -> None: ...

    with opened("127.0.0.1:0", control=True) as door, chromium() as browser:
        page = browser.new_context().new_page()
        with serving(door, Served("one", tmp_path, {}, act, waiting=lambda: ("two", HOSTILE)), links.append) as feed:
            feed.put(EventRow(1.0, "run_started", data={"name": "wave", "stages": 1, "rounds_total": 1}))
            page.goto(links[0])
            expect(page.locator(".next")).to_contain_text(f"Next in the queue: two, {HOSTILE}.", timeout=PATIENCE_MS)
            feed.put(EventRow(3.0, "run_finished", data={"status": "done"}))
            expect(page.locator(".next")).to_contain_text("This page goes on with it", timeout=PATIENCE_MS)
        expect(page.locator("body")).to_have_attribute("data-link", "over", timeout=PATIENCE_MS)
        with serving(door, Served("two", tmp_path, {}, act), links.append) as feed:
            feed.put(EventRow(5.0, "run_started", data={"name": "tide", "stages": 1, "rounds_total": 1}))
            expect(page.locator("#head")).to_contain_text("run two", timeout=PATIENCE_MS)
            expect(page.locator(".pause")).to_be_visible()
            expect(page.locator(".next")).to_have_count(0)
            feed.put(EventRow(6.0, "run_finished", data={"status": "done"}))
