"""Several labels a row: cells such as "cat;dog", or a column of yes and no for each label."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from edgefl.data.label_sets import NONE, SEPARATOR, in_words
from edgefl.errors import DataError
from edgefl.records import MAX_CELL_NAME

Rows = list[dict[str, str]]
#: What stands between the labels of a cell. A comma stands in sentences too: it counts where labels are asked for.
SEPARATORS = (SEPARATOR, "|", ",")
#: Names of columns that hold several labels.
NAMED = re.compile(r"(tags|labels|classes|categories|genres|topics|keywords)", re.IGNORECASE)
#: Most labels, most words of one, and rows of each in the mean, of a column that is not said to hold several.
_MOST, _WORDS, _ROWS = 50, 3, 3
#: Share of the rows that have two labels at least.
_SHARE = 0.05
_YES, _NO = frozenset({"1", "1.0", "true", "yes", "y", "t"}), frozenset({"0", "0.0", "false", "no", "n", "f", ""})


def separator_of(values: Sequence[str], *, asked: bool) -> str:
    """The separator of the labels in these cells; "": they hold one each. ``asked``: the user says that of several."""
    for separator in SEPARATORS if asked else SEPARATORS[:2]:
        rows = [parts(value, separator) for value in values]
        several = sum(len(row) > 1 for row in rows)
        names = {name for row in rows for name in row}
        if not several or (separator == "," and max(len(name.split()) for name in names) > _WORDS):
            continue
        enough = sum(map(len, rows)) >= _ROWS * len(names) and several >= _SHARE * len(values)
        short = all(len(name.split()) <= _WORDS for name in names)
        if asked or (enough and short and 2 <= len(names) <= _MOST and len(names) < len(set(values))):
            return separator
    return ""


def parts(cell: str, separator: str) -> list[str]:
    """The labels of a cell, each once; [] of one that says none."""
    pieces = cell.split(separator) if separator else [cell]
    return [name for name in dict.fromkeys(piece.strip() for piece in pieces) if name and name != NONE]


def joined(names: Collection[str]) -> str:
    """The labels of a sample as a text, which ``parts`` takes apart."""
    return SEPARATOR.join(names) or NONE


def known_parts(cell: str, known: Collection[str]) -> tuple[list[str], list[str]]:
    """The labels of a cell that a model knows, and the others, by the separator that leaves the fewest of these."""
    if cell in known:
        return [cell], []
    split = [parts(cell, separator) for separator in SEPARATORS]
    best = min(split, key=lambda names: sum(name not in known for name in names))
    return [name for name in best if name in known], [name for name in best if name not in known]


def merged(rows: Rows, columns: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The columns with ``chosen``, which hold yes and no, as one of several labels, the last; changes ``rows``.

    Raises DataError for a cell that is neither, or names that are too long together.
    """
    name = SEPARATOR.join(chosen)
    if len(name) > MAX_CELL_NAME:
        raise DataError(
            f"the columns {', '.join(chosen)[:60]}… have more than {MAX_CELL_NAME} letters in their names",
            remedy=f"Shorten them, or write one column of labels such as {SEPARATOR.join(chosen[:2])}.",
        )
    for row in rows:
        cells = [row.pop(column, "").strip().lower() for column in chosen]
        if odd := next((cell for cell in cells if cell not in _YES | _NO), ""):
            column = chosen[cells.index(odd)]
            raise DataError(
                f"the column {column} holds {odd!r:.40}, and of several labels each is 0 or 1",
                remedy="Name one column by --label, or columns of 0 and 1.",
            )
        row[name] = in_words([cell in _YES for cell in cells], chosen) if any(cells) else ""
    return [column for column in columns if column not in chosen] + [name]


def columns_in(name: str, columns: Collection[str]) -> list[str]:
    """The columns that a name such as "cat;dog" stands for; []: it is one column's own name, or not all are there."""
    pieces = name.split(SEPARATOR)
    return pieces if len(pieces) > 1 and name not in columns and set(pieces) <= set(columns) else []
