"""Comparing with a golden file, and writing it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WRITING = os.environ.get("EDGEFL_WRITE_PINS") == "1"


def pinned(file: str) -> dict[str, Any]:
    """What the golden file holds; empty where there is none yet."""
    path = HERE / file
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def check(file: str, key: str, found: Any) -> None:
    """``found``, as JSON, is what ``file`` holds under ``key``; with EDGEFL_WRITE_PINS=1 it is written there."""
    found = json.loads(json.dumps(found))
    held = pinned(file)
    if WRITING:
        assert "PYTEST_XDIST_WORKER" not in os.environ, "write the golden files without -n"
        text = json.dumps({**held, key: found}, indent=1, sort_keys=True, ensure_ascii=False)
        (HERE / file).write_text(text + "\n", encoding="utf-8")
        return
    assert key in held, f"tests/pins/{file} has no {key!r}; write it with EDGEFL_WRITE_PINS=1"
    changed = differing(found, held[key])
    assert not changed, f"{key!r} of tests/pins/{file} has changed: {', '.join(changed[:20])}"


def differing(found: Any, held: Any, path: str = "") -> list[str]:
    """Where two JSON values differ; "" where they do as a whole."""
    if isinstance(found, dict) and isinstance(held, dict):
        both = [differing(found[k], held[k], f"{path} > {k}".removeprefix(" > ")) for k in found if k in held]
        return [*(one for some in both for one in some), *sorted(f"{path} > {k}" for k in found.keys() ^ held.keys())]
    return [] if found == held else [path]


def check_keys(file: str, keys: set[str]) -> None:
    """The golden file holds these keys and no other: nothing is left of a pin that is not taken any more."""
    held = pinned(file)
    if WRITING:
        kept = {key: value for key, value in held.items() if key in keys}
        text = json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False)
        (HERE / file).write_text(text + "\n", encoding="utf-8")
        return
    assert held.keys() == keys
