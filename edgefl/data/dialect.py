"""How a delimited text is written: its lines above the head, its separator, how it writes numbers, odd cells.

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
#: Numbers that may have separators of thousands, and those that can have nothing else.
_COMMAS, _POINTS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+"), re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_SURE_COMMAS = re.compile(r"[+-]?[1-9]\d{0,2}((,\d{3})+\.\d+|(,\d{3}){2,})")
_SURE_POINTS = re.compile(r"[+-]?[1-9]\d{0,2}((\.\d{3})+,\d+|(\.\d{3}){2,})")
_BLANKS = re.compile(r"[+-]?[1-9]\d{0,2}([ \u00a0\u2009\u202f'’]\d{3})+([.,]\d+)?")
#: A whole number is not written so: 0126 stands behind a comma.
_FRACTION = re.compile(r"0\d+")


class Dialect(NamedTuple):
    """The head line's cells, and what is odd. ``ends``: each row ends with a separator; ``numbered``: begins with a
    cell that the head does not name; ``thousands``: what numbers are grouped by, "" nothing.
    """

    separator: str = ","
    head: tuple[str, ...] = ()
    width: int = 0  # cells of most rows below the head
    decimal_comma: bool = False
    thousands: str = ""
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
    last = {row[-1].strip() for row in body if len(row) == width}
    ends = width > 1 and last == {""}
    return Dialect(
        separator,
        tuple(cell.strip() for cell in head),
        width,
        *_marks([_ungrouped(cell.strip()) for row in body for cell in row], separator),
        ends,
        not ends and width == len(head) + 1,
    )


def _marks(cells: Sequence[str], separator: str) -> tuple[bool, str]:
    """Whether numbers have a decimal comma, and what groups their thousands.

    1,234 alone may be either: it is grouped in cells that commas separate, and beside 1.5; 1.234 is, beside 1,5.
    """

    def some(pattern: re.Pattern[str], but: re.Pattern[str] | None = None) -> bool:
        return any(pattern.fullmatch(cell) and not (but and but.fullmatch(cell)) for cell in cells)

    point, fractions = some(_DECIMAL_POINT, _POINTS), some(DECIMAL_COMMA, _COMMAS)
    if some(_SURE_COMMAS) or (some(_COMMAS) and not fractions and (point or separator == ",")):
        return False, ","
    comma = some(DECIMAL_COMMA) and not (point and separator == ",")
    return comma, "." if (comma or some(_SURE_POINTS)) and not point else ""


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


def plain(cell: str, dialect: Dialect) -> str:
    """A number of a dialect as Python writes it; other cells as they are."""
    text = _ungrouped(cell.strip())
    if dialect.thousands == "," and (_COMMAS.fullmatch(text) or _SURE_COMMAS.fullmatch(text)):
        return text.replace(",", "")
    if dialect.thousands == "." and _POINTS.fullmatch(text):
        return text.replace(".", "")
    behind = not dialect.thousands and dialect.separator != ","  # the lines that were looked at may have none
    return with_point(text) if dialect.decimal_comma or behind else text


def _ungrouped(text: str) -> str:
    """A number without blanks or apostrophes between thousands, and with a hyphen as its minus."""
    if text.startswith("\u2212") and text[1:2].isdigit():
        text = "-" + text[1:]
    return re.sub(r"[^\d.,+-]", "", text) if _BLANKS.fullmatch(text) else text
