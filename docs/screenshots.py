"""Pictures of a run's report for docs/report.md: ``python docs/screenshots.py runs/ID/report.html``.

Writes docs/images/report-WIDTH-THEME.png, as Chromium on the PATH shows the page; each holds the name of its recipe.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Literal

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).resolve().parent / "images"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
#: Width of the window -> height, in pixels.
SIZES = {1280: 1560, 390: 1700}


def told(text: str) -> PngInfo:
    """PNG metadata of a screenshot: the recipe of the run that it shows."""
    found = re.search(r"recipe (\S+)", text)
    if found is None:
        raise SystemExit("the page does not name its recipe")
    facts = PngInfo()
    facts.add_text("recipe", found[1])
    return facts


def shoot(browser: Browser, page: Path, width: int, theme: Literal["light", "dark"]) -> Path:
    """One picture of the top of the page, its charts as a reader without a script has them."""
    view = browser.new_page(
        viewport={"width": width, "height": SIZES[width]}, color_scheme=theme, java_script_enabled=False
    )
    view.goto(page.resolve().as_uri())
    path = IMAGES / f"report-{width}-{theme}.png"
    facts = told(view.locator("body").inner_text())
    Image.open(io.BytesIO(view.screenshot())).convert("RGB").save(path, optimize=True, pnginfo=facts)
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
