"""Screenshots of the live page in docs/images, taken of a run of the demo: ``python docs/web_screenshots.py``.

The run is this machine's own, with its broker and four devices; one window is shot in each size, light and dark. Needs
chromium on the PATH and the extra ``dev``.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright
from screenshots import told

IMAGES = Path(__file__).parent / "images"
#: Width and height of the window, in CSS pixels.
SIZES = ((1280, 1500), (390, 2200))
#: Fewer give two curves one colour.
COLOURS = 256


def begin(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The demo's process, and the one-time link to its page."""
    command = [sys.executable, "-m", "edgefl.cli.main", "run", "demo", "--web-at", "127.0.0.1:0", "--web-control"]
    said = folder / "said.txt"
    with said.open("wb") as out:
        run = subprocess.Popen([*command, "--runs", str(folder)], stdout=out)
    while run.poll() is None:
        if found := re.search(r"live page: (\S+)", said.read_text(encoding="utf-8")):
            return run, found[1]
        time.sleep(0.2)
    raise SystemExit(f"the demo ended with {run.returncode} before it had a page")


def save(page: Page, name: str) -> None:
    """The window as a PNG with a palette, and the name of its recipe."""
    picture = Image.open(io.BytesIO(page.screenshot()))
    few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(IMAGES / name, optimize=True, pnginfo=told(page.locator("body").inner_text()))
    sys.stderr.write(f"{name}: {(IMAGES / name).stat().st_size / 1e3:.0f} KB\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="Shoot once so many of its twelve are done.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgefl-shots-") as folder, sync_playwright() as playwright:
        run, link = begin(Path(folder))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            page = browser.new_page()
            page.goto(link)
            page.wait_for_url(re.compile(r":\d+/$"))  # the link leads on to the page
            while int(page.locator(".rounds p").inner_text().split()[0]) < asked.rounds:
                page.wait_for_timeout(200)
            for width, height in SIZES:
                page.set_viewport_size(ViewportSize(width=width, height=height))
                for dark in (False, True):
                    page.emulate_media(color_scheme="dark" if dark else "light")
                    page.wait_for_timeout(500)  # the curves are drawn anew
                    while not re.search("[1-9] of 4 devices train", page.locator("h1").inner_text()):
                        page.wait_for_timeout(100)
                    save(page, f"web-{width}-{'dark' if dark else 'light'}.png")
        finally:
            browser.close()
            run.send_signal(signal.SIGTERM)
            run.wait()


if __name__ == "__main__":
    main()
