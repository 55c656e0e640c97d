"""Grids as rich tables. A grid too wide for the terminal is cut between column groups, its key columns repeated."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgefl.report import absences, decisions, inventory, quality, repairs
from edgefl.report import accuracy as outcome
from edgefl.report import late_updates as staleness
from edgefl.report import resources as bills
from edgefl.report.grid import Cell, Column, Grid, letters
from edgefl.report.run_warnings import warnings
from edgefl.run_records import RunReport

#: Tone -> rich style. The terminal's own colours, so that both dark and light themes stay readable.
STYLES: dict[str, str] = {"": "", "good": "green", "warn": "yellow", "bad": "red", "dim": "dim"}
#: Columns between two cells: rich's padding of one on each side.
_GAP = 2
#: Words are wrapped rather than let one column push a table over the edge.
_MAX_WORDS = 44
#: Narrower than this, words become unreadable; then the table may exceed the terminal.
_MIN_WORDS = 14


def print_report(report: RunReport, console: Console) -> None:
    """The whole report on a terminal: accuracy, bills, refusals, rounds."""
    grids = (
        outcome.evaluation(report),
        *(grid for grid in quality.grids(report) if grid.rows),
        bills.device_bill(report),
        bills.stage_bill(report, brief=True),
        decisions.refusals(report),
        *(grid for grid in (absences.table(report),) if grid.rows),
        *(grid for grid in (staleness.by_device(report), repairs.substitutions(report)) if grid.rows),
        outcome.rounds(report),
        inventory.bundles(report),
    )
    told: set[str] = set()
    if stood := outcome.standing(report):
        console.print(Text(stood, style="red" if report.status == "failed" else "yellow"))
    for text in warnings(report):
        console.print(Text(f"Warning: {text}.", style="yellow"))
    for grid in grids:
        print_grid(grid, console, told=told)


def print_grid(grid: Grid, console: Console, *, told: set[str] | None = None) -> None:
    """One grid with its footnotes and notes; notes already in ``told`` are not repeated."""
    console.print()
    console.print(Text(grid.title, style="bold"))
    if not grid.rows:
        console.print(Padding(Text(grid.empty, style="dim"), (0, 0, 0, 1)))
        return
    for part in split(grid, console.width):
        groups = group_line(grid, part, console.width)
        if groups.plain:
            console.print(groups)
        console.print(rich_table(grid, part, console.width))
    for index, reason in enumerate(grid.footnotes):
        console.print(_hanging(f"{letters(index)}  ", reason))
    told = set() if told is None else told
    for note in grid.notes:
        if note not in told:
            console.print(_hanging("", note))
            told.add(note)


def rich_table(grid: Grid, columns: list[int] | None = None, width: int = 140) -> Table:
    """The grid (or some of its columns) as a rich table of at most ``width``; words wrap, numbers never do."""
    chosen = list(range(len(grid.columns))) if columns is None else columns
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), show_edge=False)
    with_unit = any(grid.columns[index].unit for index in chosen)
    for index, size in zip(chosen, _widths(grid, chosen, width), strict=True):
        column = grid.columns[index]
        table.add_column(
            _header(column, with_unit=with_unit),
            justify="left" if column.text else "right",
            no_wrap=not column.text or column.whole,
            overflow="fold",
            width=size,
        )
    for row in grid.rows:
        table.add_row(*(_text(grid, row[index]) for index in chosen))
    return table


def group_line(grid: Grid, columns: list[int], width: int) -> Text:
    """The line above a table that names the column groups: ``─ step memory ──── FLOPs ─``; empty without groups."""
    line = Text()
    position = 0
    widths = _widths(grid, columns, width)
    spans: list[tuple[str, int, int]] = []  # group, first cell, end cell
    for index, size in zip(columns, widths, strict=True):
        group = grid.columns[index].group
        if group and spans and spans[-1][0] == group and spans[-1][2] + _GAP == position:
            spans[-1] = (group, spans[-1][1], position + size)
        elif group:
            spans.append((group, position, position + size))
        position += size + _GAP
    for group, first, end in spans:
        line.append(" " * (first - len(line.plain)))
        space = end - first
        line.append(f" {group} ".center(space, "─") if space >= len(group) + 4 else group.rjust(space), style="cyan")
    return line


def split(grid: Grid, width: int) -> list[list[int]]:
    """Column indices of as few tables as fit ``width``; groups stay whole, key columns open every table."""
    keys = [index for index, column in enumerate(grid.columns) if column.key]
    groups: list[list[int]] = []
    for index, column in enumerate(grid.columns):
        if column.key:
            continue
        last = grid.columns[groups[-1][-1]] if groups else None
        if last is not None and column.group and column.group == last.group:
            groups[-1].append(index)
        else:
            groups.append([index])
    tables: list[list[int]] = []
    current: list[int] = []
    for group in groups:
        if current and _width(grid, keys + current + group, width) > width:
            tables.append(keys + current)
            current = []
        current = current + group
    return [*tables, keys + current]


def _width(grid: Grid, columns: list[int], limit: int) -> int:
    return sum(size + _GAP for size in _widths(grid, columns, limit)) - _GAP


def _widths(grid: Grid, columns: list[int], limit: int | None = None) -> list[int]:
    """Width of each column: its header and cells, wide enough for the group's name, words cut down to ``limit``."""
    widths = [_column_width(grid, index) for index in columns]
    for group in dict.fromkeys(grid.columns[index].group for index in columns):
        members = [at for at, index in enumerate(columns) if grid.columns[index].group == group]
        space = sum(widths[at] for at in members) + _GAP * (len(members) - 1)
        if group and space < len(group):
            widths[members[0]] += len(group) - space
    texts = [at for at, index in enumerate(columns) if grid.columns[index].text and not grid.columns[index].whole]
    while limit is not None and texts and sum(widths) + _GAP * (len(widths) - 1) > limit:
        widest = max(texts, key=lambda at: widths[at])
        if widths[widest] <= _MIN_WORDS:
            break
        widths[widest] -= 1
    return widths


def _column_width(grid: Grid, index: int) -> int:
    column = grid.columns[index]
    header = max(len(column.name), len(column.unit))
    cells = max((len(_text(grid, row[index]).plain) for row in grid.rows), default=0)
    return max(header, min(cells, _MAX_WORDS) if column.text and not column.whole else cells)


def _header(column: Column, *, with_unit: bool) -> Text:
    header = Text(column.name)
    if with_unit:
        header.append(f"\n{column.unit}", style="dim not bold")
    return header


def _text(grid: Grid, cell: Cell) -> Text:
    text = Text(cell.text, style=STYLES[cell.tone])
    if cell.why:
        text.append(f" {grid.mark(cell)}", style="cyan")
    return text


def _hanging(mark: str, text: str) -> Padding:
    line = Text(mark, style="cyan")
    line.append(text, style="dim")
    return Padding(line, (0, 0, 0, 1))
