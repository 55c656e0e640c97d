"""Tables as values: columns that say how a row's cell is got. Terminal and HTML draw the same grids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from edgefl.records import Figure
from edgefl.report import units

Row = TypeVar("Row")
#: Fields by name, as an event, a round's record or a file has them.
Record = Mapping[str, Any]
Tone = Literal["", "good", "warn", "bad", "dim"]


@dataclass(frozen=True)
class Cell:
    """A printed text. ``why``: footnote of a missing or partial number; ``tip``: shown when pointed at."""

    text: str = ""
    why: str = ""
    tip: str = ""
    tone: Tone = ""


#: What a column may get of a row: words, a whole number, nothing, or a cell.
Content = Cell | str | int | None


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A heading, and how the cell of a row is got.

    ``group`` stands over neighbouring columns that belong together; ``key`` columns name the row; ``text`` columns hold
    left-aligned words instead of right-aligned numbers, ``whole`` ones ids and paths, never broken over lines.
    """

    name: str
    get: Callable[[Row], Content]
    unit: str = ""
    group: str = ""
    key: bool = False
    text: bool = False
    tip: str = ""
    whole: bool = False

    def cell(self, row: Row) -> Cell:
        """The cell of ``row``: whole numbers with thousands separators, empty for None."""
        content = self.get(row)
        if isinstance(content, Cell):
            return content
        return Cell(f"{content:,}" if isinstance(content, int) else content or "")


@dataclass(frozen=True)
class Grid:
    """A table. ``notes`` say how to read it; ``empty`` is printed when there is no row."""

    title: str
    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    empty: str = "Nothing on record."

    @cached_property
    def footnotes(self) -> tuple[str, ...]:
        """The distinct reasons of its cells, in order."""
        return tuple(dict.fromkeys(cell.why for row in self.rows for cell in row if cell.why))

    def mark(self, cell: Cell) -> str:
        """The cell's footnote mark (a, b, … z, aa, …), empty when it needs none."""
        return letters(self.footnotes.index(cell.why)) if cell.why else ""

    def groups(self, columns: Iterable[int] | None = None) -> list[tuple[str, list[int]]]:
        """Runs of neighbouring columns of one group, as (group, indices); columns without a group stand alone."""
        runs: list[tuple[str, list[int]]] = []
        for index in range(len(self.columns)) if columns is None else columns:
            name = self.columns[index].group
            if runs and name and runs[-1][0] == name:
                runs[-1][1].append(index)
            else:
                runs.append((name, [index]))
        return runs

    def select(self, columns: Sequence[int]) -> Grid:
        """The same rows with some of the columns."""
        rows = tuple(tuple(row[index] for index in columns) for row in self.rows)
        return replace(self, columns=tuple(self.columns[index] for index in columns), rows=rows)


def table(
    title: str,
    columns: Sequence[Column[Row]],
    rows: Iterable[Row],
    notes: Iterable[str] = (),
    empty: str = "Nothing on record.",
) -> Grid:
    """The grid of ``rows`` under ``columns``."""
    cells = tuple(tuple(column.cell(row) for column in columns) for row in rows)
    return Grid(title, tuple(columns), cells, tuple(notes), empty)


def with_rows(*grids: Grid) -> list[Grid]:
    """Those of the grids that have rows."""
    return [grid for grid in grids if grid.rows]


def measure(
    name: str, get: Callable[[Row], float | None], unit: str, group: str = "", *, why: str = "", tip: str = ""
) -> Column[Row]:
    """A column of numbers in ``unit`` (B, FLOP, s, …), printed in its printed unit; ``why``: the reason of a None."""

    def cell(row: Row) -> Cell:
        value = get(row)
        return amount(value, unit, why=why if value is None else "")

    return Column(name, cell, units.printed_unit(unit), group, tip=tip)


def limit_column(name: str, get: Callable[[Row], float | None], unit: str, group: str = "") -> Column[Row]:
    """A column of budgets: the number, or "no limit"."""

    def cell(row: Row) -> Cell:
        value = get(row)
        return Cell("no limit", tone="dim") if value is None else amount(value, unit)

    return Column(name, cell, units.printed_unit(unit), group)


def letters(index: int) -> str:
    """0 -> a, 25 -> z, 26 -> aa."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("a") + rest) + text
    return text


def amount(value: float | None, unit: str, *, why: str = "", tip: str = "") -> Cell:
    """A number in its printed unit (which the column's header names)."""
    if value is None:
        return Cell(units.NOTHING, why=why, tip=why or tip, tone="dim")
    return Cell(units.number(units.scaled(value, unit)), why=why, tip=tip or why)


def measurement_cell(value: Figure, unit: str) -> Cell:
    """A ledger figure: the number with kind and source as tip, or a dash with the reason.

    A total that leaves out some rounds has both a value and a reason; it is printed as ≥.
    """
    if value.value is None:
        return amount(None, unit, why=value.reason or "not recorded")
    origin = " · ".join(part for part in (value.kind, value.source) if part)
    cell = amount(value.value, unit, why=value.reason, tip=origin)
    return Cell(f"≥ {cell.text}", why=cell.why, tip=f"{origin}; {value.reason}") if value.reason else cell


def ratio_cell(measured: Figure, predicted: Figure) -> Cell:
    """measured / predicted, highlighted where the plan was more than a quarter too low; empty when one is missing."""
    if measured.value is None or not predicted.value or measured.reason:
        return Cell()
    tone: Tone = "warn" if measured.value > 1.25 * predicted.value else ""
    return Cell(f"{measured.value / predicted.value:.2f}×", tone=tone)
