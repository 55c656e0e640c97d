"""Options that several commands share, and lines for the person who looks on."""

from __future__ import annotations

import typer

IDENTITY = typer.Option(
    envvar="EDGEFL_IDENTITY", help="Directory of the fleet's identity: TLS, signed messages, only enrolled devices."
)
DEBUG = typer.Option("--debug", help="Show tracebacks.")


def say(text: str) -> None:
    """A line for the person who looks on; standard output is for what a program may read."""
    typer.echo(text, err=True)
