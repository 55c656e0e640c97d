"""How a delimited text is written: its separator, decimal commas, and cells that only its rows have.

Of , ; tab and | the one is taken by which most rows have as many cells as the head line; none fits: the head line's.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Characters of a file that show its dialect.
SAMPLE = 64 * 1024
#: Lines that are looked at.
_LINES = 200
_SEPARATORS = ",;\t|"
#: Separates nothing: stands where a line is one cell.
ONE_COLUMN = "\x1f"
DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)?,\d+([eE][+-]?\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")
#: A whole number is not written so: 0126 stands behind a comma.
_FRACTION = re.compile(r"0\d+")


class Dialect(NamedTuple):
    """The first line's cells, and what is odd. ``ends``: each row ends with a separator; ``numbered``: begins with a
    cell that the head does not name.
    """

    separator: str = ","
    head: tuple[str, ...] = ()
    width: int = 0  # cells of most rows below the head
    decimal_comma: bool = False
    ends: bool = False
    numbered: bool = False


def dialect_of(text: str, *, whole: bool) -> Dialect:
    """The dialect of a text's beginning. ``whole``: its last line is complete."""
    lines = [line for line in text.splitlines() if line.strip()][: _LINES + 1]
    lines = lines if whole or len(lines) < 2 else lines[:-1]
    if not lines:
        return Dialect()
    scored = {separator: _rows(lines, separator) for separator in _SEPARATORS}
    separator = max(_SEPARATORS, key=lambda one: _score(scored[one]))
    if _score(scored[separator]) <= 0:  # rows that differ in length, or one column
        separator = max(_SEPARATORS, key=lines[0].count) if set(_SEPARATORS) & set(lines[0]) else ONE_COLUMN
    rows = scored.get(separator) or _rows(lines, separator)
    head, body = rows[0], rows[1:] or rows
    if separator == "," and all(len(row) == 2 for row in rows) and any(_FRACTION.fullmatch(row[1]) for row in rows):
        separator, rows = ONE_COLUMN, _rows(lines, ONE_COLUMN)  # one column of decimal commas, without a head line
        head, body = rows[0], rows
    width = Counter(map(len, body)).most_common(1)[0][0]
    cells = [cell.strip() for row in body for cell in row]
    commas = any(DECIMAL_COMMA.fullmatch(cell) for cell in cells)
    last = {row[-1].strip() for row in body if len(row) == width}
    ends = width > 1 and last == {""}
    return Dialect(
        separator,
        tuple(cell.strip() for cell in head),
        width,
        commas and not any(_DECIMAL_POINT.fullmatch(cell) for cell in cells),
        ends,
        not ends and width == len(head) + 1,
    )


def _rows(lines: Sequence[str], separator: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(lines, delimiter=separator, skipinitialspace=True) if row]
    except csv.Error:
        return [[line] for line in lines]


def _score(rows: Sequence[Sequence[str]]) -> float:
    """How well a separator fits: the share of rows of the usual width, and the width; 0: not at all."""
    width, count = Counter(len(row) for row in rows[1:] or rows).most_common(1)[0]
    head = len(rows[0])
    if width < 2 or not (width == head or (width == head + 1 and head > 1) or (head == width + 1 and not rows[0][-1])):
        return 0.0
    share = count / len(rows[1:] or rows)
    return share * (1 + width / 1000) if share > 0.5 else 0.0


def split(line: str, dialect: Dialect) -> list[str]:
    """The cells of one line."""
    if '"' in line:
        cells = next(csv.reader([line], delimiter=dialect.separator, skipinitialspace=True), [])
    else:
        cells = line.split(dialect.separator)
    if dialect.ends and len(cells) >= dialect.width and not cells[-1].strip():
        cells = cells[:-1]
    return cells


def with_point(cell: str) -> str:
    """A number with a decimal comma as one with a point; other cells as they are."""
    return cell.replace(".", "").replace(",", ".") if DECIMAL_COMMA.fullmatch(cell.strip()) else cell
