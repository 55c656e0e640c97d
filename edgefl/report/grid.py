"""A table as a value: columns with units, cells with their reasons. Terminal and HTML draw the same grids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgefl.records import Figure
from edgefl.report import units

Tone = Literal["", "good", "warn", "bad", "dim"]


@dataclass(frozen=True)
class Column:
    """``group`` stands over neighbouring columns that belong together; ``key`` columns name the row.

    ``whole``: ids and paths, which are copied and so are never broken over two lines.
    """

    name: str
    unit: str = ""
    group: str = ""
    key: bool = False
    text: bool = False  # left-aligned words instead of right-aligned numbers
    tip: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Cell:
    """What is printed. ``why`` is told in a footnote (a missing or partial number), ``tip`` only when pointed at."""

    text: str = ""
    why: str = ""
    tip: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Grid:
    """A table. ``notes`` say how to read it; ``empty`` is printed when there is no row."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()
    empty: str = "Nothing on record."
    footnotes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row of {len(row)} cells under {len(self.columns)} columns")
        reasons = dict.fromkeys(cell.why for row in self.rows for cell in row if cell.why)
        object.__setattr__(self, "footnotes", tuple(reasons))

    def mark(self, cell: Cell) -> str:
        """The cell's footnote mark (a, b, … z, aa, …), empty when it needs none."""
        return letters(self.footnotes.index(cell.why)) if cell.why else ""

    def select(self, columns: list[int]) -> Grid:
        """The same rows with some of the columns."""
        rows = tuple(tuple(row[index] for index in columns) for row in self.rows)
        return Grid(self.title, tuple(self.columns[index] for index in columns), rows, self.notes, self.empty)


#: Where no number can be: unlike a dash it needs no reason.
NOT_APPLICABLE = Cell()


def letters(index: int) -> str:
    """0 -> a, 25 -> z, 26 -> aa."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("a") + rest) + text
    return text


def words(text: str, *, tip: str = "", tone: Tone = "") -> Cell:
    """A cell of plain words; empty when there are none."""
    return Cell(text, tip=tip, tone=tone)


def count(value: int | None) -> Cell:
    """A whole number; empty when there is none."""
    return NOT_APPLICABLE if value is None else Cell(f"{value:,}")


def amount(value: float | None, unit: str, *, why: str = "", tip: str = "", tone: Tone = "") -> Cell:
    """A number in its printed unit (which the column's header names)."""
    if value is None:
        return Cell(units.NOTHING, why=why, tip=why or tip, tone="dim")
    return Cell(units.number(units.scaled(value, unit)), why=why, tip=tip or why, tone=tone)


def figure(value: Figure, unit: str) -> Cell:
    """A ledger figure: the number with kind and source as tip, or a dash with the reason.

    A total that leaves out some rounds has both a value and a reason; it is printed as ≥.
    """
    if value.value is None:
        return amount(None, unit, why=value.reason or "not recorded")
    origin = " · ".join(part for part in (value.kind, value.source) if part)
    cell = amount(value.value, unit, why=value.reason, tip=origin)
    return Cell(f"≥ {cell.text}", why=cell.why, tip=f"{origin}; {value.reason}") if value.reason else cell


def compared(measured: Figure, predicted: Figure) -> Cell:
    """measured / predicted, pointed out where the plan was more than a quarter too low; empty when one is missing."""
    if measured.value is None or not predicted.value or measured.reason:
        return NOT_APPLICABLE
    tone: Tone = "warn" if measured.value > 1.25 * predicted.value else ""
    return Cell(units.ratio(measured.value, predicted.value), tone=tone)
