"""Rows of a benchmark's results in a file, one JSON object a line, written when it is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import msgspec

Row = TypeVar("Row", bound=msgspec.Struct)


def show(text: str, page: Path | None) -> None:
    """Print a page, and write it where a path is given."""
    if page is not None:
        page.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def rows_in(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [msgspec.json.decode(line, type=kind) for line in lines if line.strip()]


def add_row(path: Path, row: msgspec.Struct) -> None:
    """Append a row; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")
