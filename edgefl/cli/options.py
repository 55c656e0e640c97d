"""Shared by the verbs: their common options, and how they print."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from edgefl.api.runs import BUNDLES, RUNS, find_run, run_directories, write_file
from edgefl.console import write_data
from edgefl.errors import ExportError, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from edgefl.report.grid import Grid

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="Run file, or the name of a shipped one: demo, har.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the run file, as a.b=c; repeatable."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every event, table and note.")]
Format = Annotated[Literal["terminal", "json"], typer.Option("--format", help="How to print.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `latest`.")]
BundleArgument = Annotated[
    str,
    typer.Argument(
        metavar="BUNDLE",
        help="A bundle's folder, the folder of all bundles, or a run: its id, the beginning of one, or `latest`.",
    ),
]
Html = Annotated[
    str | None,
    typer.Option("--html", metavar="[FILE.html]", help="Also write a page of one file; `-`: to stdout, alone."),
]
JointSteps = Annotated[
    bool,
    typer.Option("--joint-steps", help="In one process: train a round's devices together where it pays; to rounding."),
]
RunsOption = Annotated[Path, typer.Option("--runs", envvar="EDGEFL_RUNS", help="Directory that holds the runs.")]


def show(form: str, body: object, *grids: Grid) -> None:
    """``body`` (anything msgspec knows) as indented JSON on stdout, or the tables."""
    from rich.console import Console

    if form == "json":
        write_data(msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n")
    else:
        from edgefl.report.grid import print_grids

        print_grids(grids, Console())


def bundle_folder(text: str, runs: Path) -> Path:
    """Folder of BUNDLE: a path, of a run's folder its bundles; or a run's name. Raises ExportError."""
    path = Path(text)
    if path.exists() or len(path.parts) > 1:
        return path / BUNDLES if (path / BUNDLES).is_dir() else path
    try:
        run = find_run(text, runs)
    except RunError as error:
        raise ExportError(f"there is no bundle {text}: {error.message}", remedy=error.remedy) from None
    if text == "latest" and not (run / BUNDLES).exists():
        newest = next((path for path in run_directories(runs) if (path / BUNDLES).exists()), run)
        if newest != run:
            sys.stderr.write(f"{run.name} has no bundles; these are of {newest.name}, the newest run that has\n")
        run = newest
    if not (run / BUNDLES).exists():
        there = "" if runs == RUNS else f" --runs {shlex.quote(str(runs))}"
        raise ExportError(f"the run {run.name} has no bundles", remedy=f"Write them: edgefl export {run.name}{there}")
    return run / BUNDLES


def drawn(draw: Callable[[Console], None], *, to_terminal: bool) -> str:
    """Text that ``draw`` prints; with colours only where it goes to a terminal."""
    from rich.console import Console

    console = Console(force_terminal=None if to_terminal else False)
    with console.capture() as captured:
        draw(console)
    return captured.get()


def wrote_page(html: str | None, default: Path, page: Callable[[], str]) -> bool:
    """Write the page that ``--html`` asks for. True where it took stdout."""
    if html is not None:
        write_out(Path(html or default), page())
    return html == "-"


def write_out(path: Path, content: str | bytes, *, to_read: bool = False) -> None:
    """Write a file and report it on stderr; ``-`` is stdout.

    ``to_read``: text for a person, not for a program.
    """
    if str(path) == "-":
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            sys.stdout.write(content) if to_read else write_data(content)
        return
    write_file(path, content)
    sys.stderr.write(f"wrote {path}\n")
