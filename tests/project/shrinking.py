"""Lists of known breaches that may only shrink: a file of lines ``path: word word``, compared with what is found.

A new breach fails, and so does a listed one that is gone. ``EDGEFL_SHRINK=1`` takes what is gone out of the list;
nothing adds to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

Breaches = Mapping[str, Iterable[str]]


def check(listed: Path, found: Breaches, rule: str) -> None:
    """Fail unless ``found`` is what ``listed`` says."""
    now = {(path, word) for path, words in found.items() for word in words}
    known = _read(listed)
    if os.environ.get("EDGEFL_SHRINK"):
        known &= now
        _write(listed, known)
    new, gone = _shown(now - known), _shown(known - now)
    assert not new, f"{rule}:\n{new}"
    assert not gone, f"gone from the code, so take it off {listed.name} (EDGEFL_SHRINK=1 does):\n{gone}"


def _read(listed: Path) -> set[tuple[str, str]]:
    text = [line for line in listed.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    lines = [line.partition(":") for line in text]
    return {(path, word) for path, _, words in lines for word in words.split()}


def _write(listed: Path, known: set[tuple[str, str]]) -> None:
    head = [line for line in listed.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    listed.write_text("\n".join([*head, *_shown(known).splitlines()]) + "\n", encoding="utf-8")


def _shown(breaches: set[tuple[str, str]]) -> str:
    paths = sorted({path for path, _ in breaches})
    return "\n".join(f"{path}: {' '.join(sorted(word for of, word in breaches if of == path))}" for path in paths)
