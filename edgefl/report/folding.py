"""Folding of tables: rows equal but for stage or device are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgefl.report import units
from edgefl.report.grid import Cell, Grid

#: More names than these are counted.
_NAMED = 3


def fold(grid: Grid, *names: str) -> Grid:
    """The grid with rows joined if they differ in only one of these columns; their order stays."""
    for index in (i for name in names for i, column in enumerate(grid.columns) if column.name == name):
        grid = _fold(grid, index)
    return grid


def _fold(grid: Grid, index: int) -> Grid:
    groups: dict[tuple[Cell, ...], list[Cell]] = {}
    for row in grid.rows:
        groups.setdefault((*row[:index], *row[index + 1 :]), []).append(row[index])
    rows = [(*rest[:index], _joined(cells), *rest[index:]) for rest, cells in groups.items()]
    return replace(grid, rows=tuple(rows))


def _joined(cells: Sequence[Cell]) -> Cell:
    if len(cells) == 1:
        return cells[0]
    texts = [cell.text for cell in cells]
    join: Callable[[list[str]], str] = _numbers if all(text.isdecimal() for text in texts) else listed
    return replace(cells[0], text=join(texts), tip=", ".join(texts))


def _numbers(texts: list[str]) -> str:
    return units.spans(map(int, texts))


def listed(texts: Sequence[str]) -> str:
    """The names as a list; of many the first, and the number of the rest."""
    return ", ".join(texts) if len(texts) <= _NAMED else f"{texts[0]} and {len(texts) - 1} more"
