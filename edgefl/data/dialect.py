"""Dialect of a delimited text: title lines, separator, number format, surplus cells.

Of , ; tab and | the one is taken by which most rows have as many cells as the head line. None fits: runs of blanks, by
which even more have to and each row has a number; else the head line's.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Characters of a file that show its dialect.
SAMPLE = 64 * 1024
#: Lines that are looked at, and of these most above the head line.
_LINES, _MOST_ABOVE = 200, 50
#: Share of the rows below a title that have as many cells.
_EVEN = 0.9
#: The line by which spreadsheets are told the separator.
_SAID = re.compile(r"\"?sep=([^\w\s\"]|\t)\"?\W*", re.IGNORECASE)
_SEPARATORS = ",;\t|"
#: Separates by runs of blanks.
BLANKS = " "
#: Separates nothing: stands where a line is one cell.
ONE_COLUMN = "\x1f"
DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)?,\d+([eE][+-]?\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")
#: Numbers that may have separators of thousands, and those that can have nothing else.
_COMMAS, _POINTS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+"), re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_SURE_COMMAS = re.compile(r"[+-]?[1-9]\d{0,2}((,\d{3})+\.\d+|(,\d{3}){2,})")
_SURE_POINTS = re.compile(r"[+-]?[1-9]\d{0,2}((\.\d{3})+,\d+|(\.\d{3}){2,})")
_BLANKS = re.compile(r"[+-]?[1-9]\d{0,2}([ \u00a0\u2009\u202f'’]\d{3})+([.,]\d+)?")
#: A number before its unit, or behind a currency: 12 km, 45 %, $1,000.50.
_WITH_UNIT = re.compile(
    r"([$\u20ac\u00a3\u00a5]?) ?([+\u2212-]?(?:\d[\d.,'\u2019\u00a0\u2009\u202f ]*)?\d(?:[eE][+-]?\d+)?)"
    r"[ \u00a0\u202f]?([^\W\d_][^\d,;]{0,9}|[%\u2030\u00b0$\u20ac\u00a3\u00a5][^\d,;]{0,4})?"
)
_NUMBER = re.compile(r"[+-]?[\d.,]*\d([eE][+-]?\d+)?")
#: A whole number is not written so: 0126 stands behind a comma.
_FRACTION = re.compile(r"0\d+")

#: Marks for a cell that is not there, in small letters; those of spreadsheets in English and German.
MISSING = frozenset({
    "", "#bezug!", "#div/0!", "#n/a", "#n/v", "#na", "#name?", "#num!", "#nv", "#ref!", "#value!", "#wert!",
    "#zahl!", "-", "--", "-nan", ".", "<na>", "?", "k. a.", "k.a.", "missing", "n. a.", "n.a.", "n.v.", "n/a",
    "na", "nan", "nil", "none", "null", "\u2013", "\u2014",
})  # fmt: skip


class Dialect(NamedTuple):
    """The head line's cells, and what is odd. ``ends``: each row ends with a separator; ``numbered``: begins with a
    cell that the head does not name; ``thousands``: what numbers are grouped by, "" nothing; ``above``: lines above
    the head line; ``first``: first cells below it.
    """

    separator: str = ","
    head: tuple[str, ...] = ()
    width: int = 0  # cells of most rows below the head
    decimal_comma: bool = False
    thousands: str = ""
    ends: bool = False
    numbered: bool = False
    above: int = 0
    first: tuple[str, ...] = ()


class _Row(NamedTuple):
    cells: list[str]
    line: int  # lines above it


def dialect_of(text: str, *, whole: bool) -> Dialect:
    """The dialect of a text's beginning. ``whole``: its last line is complete."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    lines = (lines if whole or len(lines) < 2 else lines[:-1])[: _LINES + _MOST_ABOVE]
    said = _SAID.fullmatch(lines[0])
    lines[:1] = [""] if said else lines[:1]
    options = {one: _below_title(_rows(lines, one)) for one in ([said[1]] if said else _SEPARATORS)}
    separator = max(options, key=lambda one: _score(options[one]))
    blank = _below_title(_rows(lines, BLANKS)) if not said and _score(options[separator]) <= 0 else []
    if _score(blank) >= _EVEN and blank[1:] and all(map(_has_number, blank[1:])):
        separator, options[BLANKS] = BLANKS, blank
    elif not said and _score(options[separator]) <= 0:  # rows that differ in length, or one column
        first = next((line for line in lines if line.strip()), "")
        separator = max(_SEPARATORS, key=first.count) if set(_SEPARATORS) & set(first) else ONE_COLUMN
    found = options[separator] if separator in options else _rows(lines, ONE_COLUMN)
    decimals = [row.cells[1] for row in found if len(row.cells) == 2]
    if separator == "," and len(decimals) == len(found) and any(map(_FRACTION.fullmatch, decimals)):
        separator, found = ONE_COLUMN, _rows(lines, ONE_COLUMN)  # one column of decimal commas, without a head line
    if not found:
        return Dialect()
    head, body = found[0].cells, [row.cells for row in found[1:] or found]
    width = Counter(map(len, body)).most_common(1)[0][0]
    ends = width > 1 and {row[-1].strip() for row in body if len(row) == width} == {""}
    return Dialect(
        separator,
        tuple(cell.strip().removeprefix("#").strip() for cell in head),
        width,
        *_marks([_ungrouped(apart(cell)[0]) for row in body for cell in row], separator),
        ends,
        not ends and width == len(head) + 1,
        found[0].line,
        tuple(row[0].strip() for row in body),
    )


def _below_title(rows: list[_Row]) -> list[_Row]:
    """The rows from the head line on: above it are comments, and titles of at most half as many cells.

    A comment with a cell a column, above a row with a number, is the head line. A row with a number is none below a
    title; prose is no title either: only some of its lines have a comma.
    """
    width = Counter(len(row.cells) for row in rows).most_common(1)[0][0] if rows else 0
    titles = False
    for at, (row, below) in enumerate(itertools.pairwise(rows)):
        cells = [cell.strip() for cell in row.cells]
        comment = cells[0].startswith("#")
        title = not comment and 2 * sum(map(bool, cells)) <= width and bool(cells[0] or not any(cells))
        if width < 2 or not (comment or title) or (comment and len(cells) == width and _has_number(below)):
            even = sum(len(one.cells) == width for one in rows[at:]) >= _EVEN * len(rows[at:])
            return rows if titles and (_has_number(row) or not even) else rows[at:]
        titles |= title
    return rows


def _has_number(row: _Row) -> bool:
    return any(_NUMBER.fullmatch(cell.strip()) for cell in row.cells)


def _marks(cells: Sequence[str], separator: str) -> tuple[bool, str]:
    """Decimal comma (True or False) and thousands separator of the numbers.

    1,234 alone may be either: it is grouped in cells that commas separate, and beside 1.5; 1.234 is, beside 1,5.
    """

    def some(pattern: re.Pattern[str], but: re.Pattern[str] | None = None) -> bool:
        return any(pattern.fullmatch(cell) and not (but and but.fullmatch(cell)) for cell in cells)

    point, fractions = some(_DECIMAL_POINT, _POINTS), some(DECIMAL_COMMA, _COMMAS)
    if some(_SURE_COMMAS) or (some(_COMMAS) and not fractions and (point or separator == ",")):
        return False, ","
    comma = some(DECIMAL_COMMA) and not (point and separator == ",")
    return comma, "." if (comma or some(_SURE_POINTS)) and not point else ""


def _rows(lines: Sequence[str], separator: str) -> list[_Row]:
    if separator == BLANKS:
        return [_Row(_by_blanks(line), at) for at, line in enumerate(lines) if line.strip()]
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    rows, line = [], 0
    try:
        for cells in reader:
            rows += [_Row(cells, line)] if cells else []
            line = reader.line_num
    except csv.Error:
        return [_Row([line], at) for at, line in enumerate(lines) if line.strip()]
    return rows


def _score(rows: Sequence[_Row]) -> float:
    """How well a separator fits: the share of rows of the usual width, and the width; 0: not at all."""
    head, body = rows[0].cells if rows else [], rows[1:] or rows
    width, count = Counter(len(row.cells) for row in body).most_common(1)[0] if rows else (0, 0)
    named = width == len(head) or (width == len(head) + 1 and len(head) > 1)
    if width < 2 or not (named or (len(head) == width + 1 and not head[-1])):
        return 0.0
    share = count / len(body)
    return share * (1 + width / 1000) if share > 0.5 else 0.0


def split(line: str, dialect: Dialect) -> list[str]:
    """The cells of one line."""
    if dialect.separator == BLANKS:
        return _by_blanks(line)
    if '"' in line:
        cells = next(csv.reader([line], delimiter=dialect.separator, skipinitialspace=True), [])
    else:
        cells = line.split(dialect.separator)
    if dialect.ends and len(cells) >= dialect.width and not cells[-1].strip():
        cells = cells[:-1]
    return cells


def _by_blanks(line: str) -> list[str]:
    return [cell.strip('"') for cell in re.findall(r'"[^"]*"|#\s*\S+|\S+', line)]


def is_missing(cell: object) -> bool:
    """True for a missing value: an empty cell, NaN, NA and the like."""
    return cell is None or cell != cell or (isinstance(cell, str) and cell.strip().lower() in MISSING)


def with_point(cell: str) -> str:
    """A number with a decimal comma as one with a point; other cells as they are."""
    return cell.replace(".", "").replace(",", ".") if DECIMAL_COMMA.fullmatch(cell.strip()) else cell


def apart(cell: str) -> tuple[str, str]:
    """A cell's number and the unit beside it; other cells and ""."""
    text = cell.strip()
    if (match := _WITH_UNIT.fullmatch(text)) is None:
        return text, ""
    return match[2], match[1] + (match[3] or "").strip()


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
