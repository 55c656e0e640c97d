"""Tables as values, with columns as functions of a row. HTML and the terminal draw the same grids.

With rich, a grid too wide for the terminal is cut between column groups, its key columns repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgefl.console import safe_lines
from edgefl.records import Figure
from edgefl.report import units

Row = TypeVar("Row")
#: Fields by name, as an event, a round's record or a file has them.
Record = Mapping[str, Any]
Tone = Literal["", "good", "warn", "bad", "dim"]
#: Tone -> rich style. The terminal's own colours, so that both dark and light themes stay readable.
STYLES: dict[str, str] = {"": "", "good": "green", "warn": "yellow", "bad": "red", "dim": "dim"}
#: Columns between two cells: rich's padding of one on each side.
_GAP = 2
#: Words are wrapped rather than let one column push a table over the edge.
_MAX_WORDS = 44
#: Narrower than this, words become unreadable; then the table may exceed the terminal.
_MIN_WORDS = 14
#: Characters of a table's columns on a page, which is as wide as a screen of 1280 pixels and a printed sheet.
_PAGE = 132
#: Texts of a cell that holds nothing.
EMPTY = frozenset({"", units.NOTHING})


@dataclass(frozen=True)
class Cell:
    """A table cell. ``why``: footnote of a missing or partial number; ``tip``: tooltip."""

    text: str = ""
    why: str = ""
    tip: str = ""
    tone: Tone = ""


#: What a column may get of a row: words, a whole number, nothing, or a cell.
Content = Cell | str | int | None


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column: heading, and function from row to cell.

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

    @property
    def label(self) -> str:
        """Group and name in one line: "step memory: measured"."""
        return f"{self.group}: {self.name}" if self.group else self.name

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

    def parts(self) -> list[list[int]]:
        """Column indices of each table, as few tables as fit a page."""
        return split(self, _PAGE)

    def filled(self) -> Grid:
        """The grid without empty columns; a note names them, with the reasons."""
        every = range(len(self.columns))
        kept = [index for index in every if not self.rows or any(row[index].text not in EMPTY for row in self.rows)]
        left = [
            f"{self.columns[index].label}{f' ({why})' if why else ''}"
            for index in every
            if index not in kept and (why := "; ".join(dict.fromkeys(row[index].why for row in self.rows))) is not None
        ]
        notes = (*self.notes, f"Not known of any row: {', '.join(left)}.") if left else self.notes
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[index] for index in kept), rows=rows, notes=notes)


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
    """The non-empty grids."""
    return [grid for grid in grids if grid.rows]


def measure(name: str, get: Callable[[Row], float | None], unit: str, group: str = "", *, why: str = "") -> Column[Row]:
    """A column of numbers in ``unit`` (B, FLOP, s, …), printed in its printed unit; ``why``: the reason of a None."""

    def cell(row: Row) -> Cell:
        value = get(row)
        return amount(value, unit, why=why if value is None else "")

    return Column(name, cell, units.printed_unit(unit), group)


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

    A total that leaves out some rounds has both a value and a reason; it is printed as ≥. A doubtful one has a ? and
    says why.
    """
    if value.value is None:
        return amount(None, unit, why=value.reason or "not recorded")
    origin = " · ".join(part for part in (value.kind, value.source) if part)
    cell = amount(value.value, unit, why=value.reason, tip=origin)
    if value.kind == "doubtful":
        why = "; ".join(filter(None, (origin, value.reason)))
        return Cell(f"{'≥ ' if value.reason else ''}{cell.text} ?", why=why, tip=why, tone="warn")
    return Cell(f"≥ {cell.text}", why=cell.why, tip=f"{origin}; {value.reason}") if value.reason else cell


def ratio_cell(measured: Figure, predicted: Figure) -> Cell:
    """measured / predicted, highlighted where the plan was more than a quarter too low; empty when one is missing."""
    if measured.value is None or not predicted.value or measured.reason:
        return Cell()
    tone: Tone = "warn" if measured.value > 1.25 * predicted.value else ""
    return Cell(f"{measured.value / predicted.value:.2f}×", tone=tone)


def print_grids(grids: Iterable[Grid], console: Console, *, brief: bool = False) -> None:
    """Each grid with its footnotes and notes; a note that several have is printed once.

    ``brief``: without notes and footnotes, and of a grid that is too wide the first columns alone.
    """
    printed: set[str] = set()
    for grid in grids:
        if brief:
            first = split(grid, console.width)[0] if grid.rows else []
            columns = tuple(grid.columns[n] for n in first)
            rows = tuple(tuple(replace(row[n], why="") for n in first) for row in grid.rows)
            print_grid(replace(grid, columns=columns, rows=rows, notes=()), console)
            continue
        print_grid(grid, console, printed)
        printed.update(grid.notes if grid.rows else ())


def print_grid(grid: Grid, console: Console, printed: Collection[str] = ()) -> None:
    """One grid with its footnotes and notes, without the notes already ``printed``."""
    console.print()
    console.print(_safe(grid.title, "bold"))
    if not grid.rows:
        console.print(Padding(_safe(grid.empty, "dim"), (0, 0, 0, 1)))
        return
    for part in split(grid, console.width):
        groups = group_line(grid, part, console.width)
        if groups.plain:
            console.print(groups)
        console.print(rich_table(grid, part, console.width))
    for index, reason in enumerate(grid.footnotes):
        console.print(_hanging(f"{letters(index)}  ", reason))
    for note in grid.notes:
        if note not in printed:
            console.print(_hanging("", note))


def rich_table(grid: Grid, columns: Sequence[int], width: int) -> Table:
    """Some columns of the grid as a rich table of at most ``width``; words wrap, numbers never do."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), show_edge=False)
    with_unit = any(grid.columns[index].unit for index in columns)
    for index, size in zip(columns, _widths(grid, columns, width), strict=True):
        column = grid.columns[index]
        heading = _safe(column.name)
        table.add_column(
            heading.append(f"\n{column.unit}", style="dim not bold") if with_unit else heading,
            justify="left" if column.text else "right",
            no_wrap=not column.text or column.whole,
            overflow="fold",
            width=size,
        )
    for row in grid.rows:
        table.add_row(*(_text(grid, row[index]) for index in columns))
    return table


def group_line(grid: Grid, columns: Sequence[int], width: int) -> Text:
    """The line above a table that names the column groups: ``─ step memory ──── FLOPs ─``; empty without groups."""
    line = Text()
    position = 0
    widths = dict(zip(columns, _widths(grid, columns, width), strict=True))
    for group, members in grid.groups(columns):
        space = _joined([widths[index] for index in members])
        if group:
            line.append(" " * (position - len(line.plain)))
            name = f" {group} ".center(space, "─") if space >= len(group) + 4 else group.rjust(space)
            line.append(safe_lines(name), style="cyan")
        position += space + _GAP
    return line


def split(grid: Grid, width: int) -> list[list[int]]:
    """Column indices of as few tables as fit ``width``; groups stay whole, key columns open every table."""
    keys = [index for index, column in enumerate(grid.columns) if column.key]
    tables: list[list[int]] = []
    current: list[int] = []
    for _, members in grid.groups([index for index, column in enumerate(grid.columns) if not column.key]):
        if current and _joined(_widths(grid, keys + current + members, width)) > width:
            tables.append(keys + current)
            current = []
        current = current + members
    return [*tables, keys + current]


def _joined(widths: Sequence[int]) -> int:
    """Width of neighbouring columns with the gaps between them."""
    return sum(widths) + _GAP * (len(widths) - 1)


def _widths(grid: Grid, columns: Sequence[int], limit: int) -> list[int]:
    """Width of each column: its header and cells, wide enough for the group's name, words cut down to ``limit``."""
    sizes = {index: _column_width(grid, index) for index in columns}
    for group, members in grid.groups(columns):
        sizes[members[0]] += max(0, len(group) - _joined([sizes[index] for index in members]))
    texts = [index for index in columns if grid.columns[index].text and not grid.columns[index].whole]
    while texts and _joined(list(sizes.values())) > limit:
        widest = max(texts, key=lambda index: sizes[index])
        if sizes[widest] <= _MIN_WORDS:
            break
        sizes[widest] -= 1
    return list(sizes.values())


def _column_width(grid: Grid, index: int) -> int:
    column = grid.columns[index]
    header = max(len(column.name), len(column.unit))
    cells = max((len(_text(grid, row[index]).plain) for row in grid.rows), default=0)
    return max(header, min(cells, _MAX_WORDS) if column.text and not column.whole else cells)


def _text(grid: Grid, cell: Cell) -> Text:
    text = _safe(cell.text, STYLES[cell.tone])
    return text.append(f" {grid.mark(cell)}", style="cyan") if cell.why else text


def _hanging(mark: str, text: str) -> Padding:
    return Padding(Text(mark, style="cyan").append(_safe(text, "dim")), (0, 0, 0, 1))


def _safe(text: str, style: str = "") -> Text:
    """Text from files, runs or devices without terminal control sequences."""
    return Text(safe_lines(text), style=style)
