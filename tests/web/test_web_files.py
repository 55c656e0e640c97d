"""The page's files: those of others are what their packages hold; ours are small and name no other host."""

from __future__ import annotations

import hashlib
import json
import re

from coordinator.web.app import HERE

STATIC = HERE / "static"
OURS = {"page.js", "page.css", "icon.svg", "lock.json"}
#: What our own scripts and styles may grow to: the page stays small enough to be read.
MOST_BYTES = 24_900


def test_shipped_files_of_others_are_those_of_the_lock_file() -> None:
    lock = json.loads((STATIC / "lock.json").read_text())
    assert {path.name for path in STATIC.iterdir()} == OURS | set(lock)
    for name, entry in lock.items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert entry["package"] in {"htmx.org", "uplot"}
        assert re.fullmatch(r"\d+\.\d+\.\d+", entry["version"])


def test_licences_are_shipped_with_the_files() -> None:
    assert "Zero-Clause BSD" in (STATIC / "htmx-LICENSE.txt").read_text()
    assert "MIT License" in (STATIC / "uplot-LICENSE.txt").read_text()


def test_no_file_of_ours_names_another_host() -> None:
    ours = [STATIC / "page.js", STATIC / "page.css", *(HERE / "templates").iterdir()]
    found = {
        path.name: re.findall(r"""(?:https?:)?//[\w.]+\.\w+|\burl\((?!#)|@import""", path.read_text()) for path in ours
    }
    assert {name: hits for name, hits in found.items() if hits} == {}
    assert sum(path.stat().st_size for path in ours) < MOST_BYTES
