"""Grids as rich tables. A grid too wide for the terminal is cut between column groups, its key columns repeated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgefl.report import decisions, inventory, quality, resources, rounds
from edgefl.report.grid import Cell, Grid, letters, with_rows
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
    if standing := rounds.standing(report):
        console.print(Text(standing, style="red" if report.status == "failed" else "yellow"))
    for text in rounds.warnings(report):
        console.print(Text(f"Warning: {text}.", style="yellow"))
    grids = [
        quality.evaluation(report),
        *with_rows(*quality.grids(report)),
        resources.device_bill(report),
        resources.stage_bill(report, brief=True),
        decisions.refusals(report),
        *with_rows(decisions.not_offered(report), rounds.late_updates(report), rounds.repairs(report)),
        rounds.rounds(report),
        inventory.bundles(report),
    ]
    print_grids(grids, console)


def print_grids(grids: Iterable[Grid], console: Console) -> None:
    """Each grid with its footnotes and notes; a note that several have is printed once."""
    printed: set[str] = set()
    for grid in grids:
        print_grid(grid, console, printed)
        printed.update(grid.notes if grid.rows else ())


def print_grid(grid: Grid, console: Console, printed: Collection[str] = ()) -> None:
    """One grid with its footnotes and notes, without the notes already ``printed``."""
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
    for note in grid.notes:
        if note not in printed:
            console.print(_hanging("", note))


def rich_table(grid: Grid, columns: Sequence[int], width: int) -> Table:
    """Some columns of the grid as a rich table of at most ``width``; words wrap, numbers never do."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), show_edge=False)
    with_unit = any(grid.columns[index].unit for index in columns)
    for index, size in zip(columns, _widths(grid, columns, width), strict=True):
        column = grid.columns[index]
        heading = Text(column.name)
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
            line.append(name, style="cyan")
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
    text = Text(cell.text, style=STYLES[cell.tone])
    return text.append(f" {grid.mark(cell)}", style="cyan") if cell.why else text


def _hanging(mark: str, text: str) -> Padding:
    return Padding(Text(mark, style="cyan").append(text, style="dim"), (0, 0, 0, 1))
