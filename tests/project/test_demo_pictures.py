"""Pictures of the demo in README and docs show the demo that there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

from edgefl.config.profiles import load_run

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.png"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SPEC = importlib.util.spec_from_file_location("first_picture", ROOT / "docs" / "first_picture.py")
assert SPEC is not None
assert SPEC.loader is not None
first_picture = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(first_picture)


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
        for name in re.findall(r"\]\(([^)]*images/[^)]*\.(?:png|svg))\)", page.read_text(encoding="utf-8"))
    }
    assert shown == {*PICTURES, first_picture.PICTURE}


def test_the_first_picture_has_todays_figures(tmp_path: Path) -> None:
    first_picture.draw(tmp_path / "memory.svg")
    assert first_picture.texts(tmp_path / "memory.svg") == first_picture.texts(first_picture.PICTURE)
    assert len(first_picture.figures()) == 5
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"{mib:,}" in readme for mib in list(first_picture.figures().values())[:2])
