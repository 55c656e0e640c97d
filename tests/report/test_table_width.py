"""The tables of a report in a browser: on a screen of 1280 pixels and in print no column is out of sight."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_fixture import chromium
from report_fixture import run_report

from edgefl.report.writers import to_html

TOO_WIDE = """() => [...document.querySelectorAll('.table')]
    .filter(box => box.querySelector("table").scrollWidth > Math.min(box.clientWidth, innerWidth))
    .map(box => box.getAttribute('aria-label'))"""


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("print", 1032)])
def test_every_column_of_every_table_is_in_sight(tmp_path: Path, media: str, width: int) -> None:
    (tmp_path / "report.html").write_text(to_html(run_report(), interactive=False))
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.emulate_media(media=media)
        page.goto((tmp_path / "report.html").as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.locator(".table[aria-label='What each device spent']").count() >= 1
        assert page.evaluate(TOO_WIDE) == []
