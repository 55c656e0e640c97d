"""Options that several commands share."""

from __future__ import annotations

import typer

IDENTITY = typer.Option(
    envvar="EDGEFL_IDENTITY", help="Directory of the fleet's identity: TLS, signed messages, only enrolled devices."
)
DEBUG = typer.Option("--debug", help="Show tracebacks.")
