"""Options that several verbs share, so that they are spelt and explained alike; and how verbs print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.errors import StoreError

if TYPE_CHECKING:
    from edgefl.report.grid import Grid

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="Run file, or the name of a shipped one: demo, har.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the run file, as a.b=c; repeatable."),
]
Format = Annotated[Literal["terminal", "json"], typer.Option("--format", help="How to print.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `latest`.")]
RunsOption = Annotated[Path, typer.Option("--runs", envvar="EDGEFL_RUNS", help="Directory that holds the runs.")]
RUNS = Path("runs")


def show(form: str, body: object, *grids: Grid) -> None:
    """``body`` (anything msgspec knows) as indented JSON on stdout, or the tables."""
    import msgspec
    from rich.console import Console

    if form == "json":
        typer.echo(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
    else:
        from edgefl.report.terminal import print_grids

        print_grids(grids, Console())


def write_text(path: Path, text: str) -> None:
    """Write a file the user asked for. Raises StoreError that names it and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(f"cannot write {path}: {reason}", remedy="Name another file with -o FILE.") from error
