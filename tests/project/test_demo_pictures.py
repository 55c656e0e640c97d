"""Pictures of the demo in README and docs show the demo that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from edgefl.config.profiles import load_run

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.png"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_shows_todays_recipe_of_the_demo(picture: Path) -> None:
    _, recipe = load_run("demo")
    with Image.open(picture) as shown:
        kept = shown.info.get("recipe")
    script = "web_screenshots" if picture.stem.startswith("web") else "screenshots"
    assert kept == recipe.name, f"take {picture.name} again by docs/{script}.py"


def test_every_picture_on_a_page_is_there_and_every_one_is_on_a_page() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in PAGES
        for name in re.findall(r"\]\(([^)]*images/[^)]*\.png)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == set(PICTURES)
