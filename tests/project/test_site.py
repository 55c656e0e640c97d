"""`make site` builds docs/ as web pages that ask no other host for anything, and refuses a page without a place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What a browser fetches by itself when it opens a page; a link that someone follows is none of it.
FETCHED = re.compile(r"""<(?:link|script|img|iframe|source)\b[^>]*?(?:src|href|srcset)=["']?\s*(?:https?:)?//[^>]*>""")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(root / "mkdocs.yml"),
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = build(ROOT, place)
    assert done.returncode == 0, done.stderr[-3000:]
    return place


def test_every_page_of_docs_is_there_and_asks_no_other_host(site: Path) -> None:
    sources = [*(ROOT / "docs").rglob("*.md")]
    assert len(sources) > 80
    for path in sources:
        name = "index.html" if path.name == "README.md" else f"{path.stem}.html"
        assert (site / path.relative_to(ROOT / "docs")).with_name(name).is_file()
    for page in site.rglob("*.html"):
        assert FETCHED.findall(page.read_text(encoding="utf-8")) == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", style.read_text(encoding="utf-8")), style


def test_what_is_outside_docs_is_named_by_its_path_in_the_repository(site: Path) -> None:
    first, own = ((site / name).read_text(encoding="utf-8") for name in ("index.html", "methods.html"))
    assert "<code>SECURITY.md</code>" in first
    assert 'href="decisions/index.html"' in first
    assert 'src="images/web-1280-light.png"' in first
    assert 'href="example_package.html"' in own


@pytest.mark.slow
def test_a_page_without_a_place_and_a_broken_link_are_refused(tmp_path: Path) -> None:
    for name in ("README.md", "mkdocs.yml", "examples/edgefl_extra/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs/lost.md").write_text("# Lost\n\n[there](../no/such/file.md)\n")
    with (tmp_path / "docs/start.md").open("a") as start:
        start.write("\n[gone](data.md#no-such-heading)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for complaint in ("- lost.md", "'../no/such/file.md'", "'data.md#no-such-heading'"):
        assert complaint in done.stderr
