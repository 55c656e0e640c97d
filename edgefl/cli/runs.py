"""``edgefl runs``: the runs there are."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from edgefl.cli.locate import RUNS, RunsOption, read_runs


def command(
    runs: RunsOption = RUNS,
    format: Annotated[Literal["terminal", "json"], typer.Option("--format", help="How to print.")] = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """List the runs, newest first: id, name, recipe, status, when, how long.

    Example: edgefl runs --format json
    """
    found, unreadable = read_runs(runs)
    for sentence in unreadable:
        sys.stderr.write(f"warning: {sentence}\n")
    if format == "json":
        import msgspec

        keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
        body = [{key: getattr(report, key) for key in keys} for report in found]
        typer.echo(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
        return
    from rich.console import Console

    from edgefl.report import inventory
    from edgefl.report.tables import print_grid

    print_grid(inventory.runs(found, str(runs)), Console())
