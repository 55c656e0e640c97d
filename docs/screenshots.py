"""Pictures of a run's report for docs/report.md: ``python docs/screenshots.py runs/ID/report.html``.

Writes docs/images/report-WIDTH-THEME.png, as Chromium on the PATH shows the page.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).resolve().parent / "images"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
#: Width of the window -> height, in pixels.
SIZES = {1280: 1560, 390: 1700}


def shoot(browser: Browser, page: Path, width: int, theme: Literal["light", "dark"]) -> Path:
    """One picture of the top of the page, its charts as a reader without a script has them."""
    view = browser.new_page(
        viewport={"width": width, "height": SIZES[width]}, color_scheme=theme, java_script_enabled=False
    )
    view.goto(page.resolve().as_uri())
    path = IMAGES / f"report-{width}-{theme}.png"
    Image.open(io.BytesIO(view.screenshot())).convert("RGB").save(path, optimize=True)
    view.close()
    return path


def main() -> None:
    """Every width in every theme."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width in SIZES:
            for theme in THEMES:
                path = shoot(browser, Path(sys.argv[1]), width, theme)
                print(f"{path.name}: {path.stat().st_size:,} B")  # noqa: T201
        browser.close()


if __name__ == "__main__":
    main()
