"""``edgefl data``: look at a data set, and share it out to devices for a run on separate machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.options import Format, Overrides, RunFile, print_json


def command(
    run: RunFile,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write <device>.npz and test.npz here.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Device names, instead of the run's fleet; repeatable.")
    ] = None,
    format: Format = "terminal",  # noqa: A002 - the option's own name
    set_: Overrides = None,
) -> None:
    """Show how a run's data is shared out to its devices; with --out, write the shares.

    Each device's share goes to that device and stays there; test.npz goes to the coordinator (data.test).

    Example: edgefl data demo --device left --device right --out shares
    """
    from tempfile import TemporaryDirectory

    from edgefl.cli.data_shares import shares_of
    from edgefl.config.profiles import load_run

    config, _ = load_run(run, set_ or [])
    names = device or [entry.name for entry in config.fleet]
    with TemporaryDirectory() as folder:
        prepared = shares_of(config, names, out or Path(folder))
    if format == "json":
        print_json(prepared)
        return
    from rich.console import Console

    from edgefl.report import inventory
    from edgefl.report.terminal import print_grid

    print_grid(inventory.shares(config.name, prepared), Console())
    if out is not None:
        typer.echo(f"\nWritten to {out}: one .npz a device, and test.npz for the coordinator.")
