"""The verb ``study``: a run file under a grid of overrides and seeds, several cells at once."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from edgefl.cli.options import drawn, write_out

if TYPE_CHECKING:
    from edgefl.api.study import Study
    from edgefl.api.study_pool import Ended, Told
    from edgefl.report.grid import Grid

Row = Mapping[str, object]


def command(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="run, grid and seeds: docs/studies.md.")],
    directory: Annotated[Path, typer.Option(help="Where its runs are kept; what is done there is kept.")] = Path(
        "studies"
    ),
    workers: Annotated[int, typer.Option(metavar="N", min=0, help="Cells at once; 0: one for each core.")] = 0,
    in_process: Annotated[
        bool, typer.Option("--in-process/--processes", help="Each cell in one process, or as a fleet of processes.")
    ] = True,
    engine: Annotated[
        Literal["processes", "ray"],
        typer.Option(help="processes of this machine, or a Ray cluster's: RAY_ADDRESS, else one on this machine."),
    ] = "processes",
    memory_mib: Annotated[
        float, typer.Option("--memory-mib", min=0, help="Memory for all cells; 0: four fifths of what is free.")
    ] = 0.0,
    export: Annotated[bool, typer.Option(help="Write ONNX bundles of each cell.")] = False,
    format: Annotated[  # noqa: A002 - the option's own name
        Literal["terminal", "csv", "json"], typer.Option("--format", help="How to show the table of all cells.")
    ] = "terminal",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the table; `-` is stdout.")] = None,
) -> None:
    """Train every cell of a grid with every seed, several at once, and show them as one table.

    Called again, it keeps the cells that are done and goes on with those that were cut off. A cell whose process is
    killed is taken up again, twice at most; one that fails is in the table with its error, and the others go on. How
    many run at once is bounded by memory: a cell's need is measured and predicted first, and shown.

    Example: edgefl study study.yaml --workers 4 --format csv -o cells.csv
    """
    from edgefl.api.study import at_once
    from edgefl.api.study_cells import Work, planned, read_study

    given = read_study(study)
    common = Work(given.run, given.overrides, "", str(directory), in_process=in_process, export=export)
    cells = [planned(common, cell) for cell in given.cells()]
    with _progress(len({cell.run for cell in cells})) as told:
        found = at_once(cells, directory, workers, int(memory_mib * 2**20), told, engine)
    content = _content(found, format, to_terminal=output is None)
    write_out(output or Path("-"), content, to_read=format == "terminal")
    if failed := [cell for cell in found.cells if cell.error]:
        typer.echo(f"{len(failed)} of {len(found.cells)} cells failed; call it again to try them again", err=True)
        raise typer.Exit(17)


@contextmanager
def _progress(total: int) -> Iterator[Told]:
    """A bar with the time left, on a terminal; else a line for each cell; both on stderr, as the table is on stdout."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from edgefl.api.study_pool import Told

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("cells", total=total)

        def say(text: str) -> None:
            bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

        line = _lines(total, say)

        def ended(one: Ended) -> None:
            if one.error or not console.is_terminal:
                line(one)
            bar.advance(task)

        yield Told(say, ended)


def _lines(total: int, say: Callable[[str], None]) -> Callable[[Ended], None]:
    """Takes each cell that has ended, and says how many have, and how long the others take if they are like them."""
    from edgefl.report.units import whole_seconds

    began, done, ran = time.monotonic(), 0, 0

    def ended(one: Ended) -> None:
        nonlocal done, ran
        done, ran = done + 1, ran + (not one.kept)
        left = f", {whole_seconds((time.monotonic() - began) / ran * (total - done))} left" if ran else ""
        how = f" failed: {one.error}" if one.error else " was done before" * one.kept
        say(f"{done} of {total} cells{left}: {one.run}{how}")

    return ended


def _content(found: Study, form: str, *, to_terminal: bool) -> str:
    """The table of all cells in the wanted format."""
    import msgspec

    rows = found.rows()
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n"
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    from edgefl.report.grid import print_grids

    return drawn(lambda console: print_grids([_grid(rows)], console), to_terminal=to_terminal)


def _grid(rows: Sequence[Row]) -> Grid:
    """The table of all cells with the columns that a terminal has room for; csv and json have all of them."""
    from edgefl.report import units
    from edgefl.report.grid import Column, table

    def figure(name: str, unit: str) -> Callable[[Row], str]:
        return lambda row: units.quantity(cast("float | None", row[name]), unit)

    def text(name: str) -> Callable[[Row], str]:
        return lambda row: str(row[name])

    first = list(rows[0])
    fields = first[: first.index("run")]
    columns: list[Column[Row]] = [
        Column("run", text("run"), key=True, text=True, whole=True),
        *(Column(name, text(name), text=True) for name in fields),
        Column("status", text("status"), text=True),
        Column("accuracy", lambda row: units.percent(a) if isinstance(a := row["accuracy"], float) else units.NOTHING),
        Column("compute", figure("compute_s", "s")),
        Column("sent", figure("payload_up_bytes", "B")),
        Column("error", text("error"), text=True),
    ]
    return table("Cells", columns, rows)
