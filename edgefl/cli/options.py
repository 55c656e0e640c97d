"""Options that several verbs share, so that they are spelt and explained alike."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="Run file, or the name of a shipped one: demo, har.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the run file, as a.b=c; repeatable."),
]
Format = Annotated[Literal["terminal", "json"], typer.Option("--format", help="How to print.")]


def print_json(value: object) -> None:
    """``value`` (anything msgspec knows) as indented JSON on stdout."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
