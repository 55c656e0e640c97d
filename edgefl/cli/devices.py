"""``edgefl devices``: the devices of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.find_run import RUNS, RunsOption, find_run, read_run
from edgefl.cli.options import Format, print_json
from edgefl.run_records import RunReport


def command(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN|revoke", help="A run's id, the beginning of one, or `latest`; or the word revoke."),
    ] = "latest",
    name: Annotated[str, typer.Argument(help="revoke: the device to shut out of its fleet.")] = "",
    runs: RunsOption = RUNS,
    identity: Annotated[
        Path, typer.Option(envvar="EDGEFL_IDENTITY", help="revoke: directory of the fleet's identity.")
    ] = Path("fleet"),
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Show each device of a run: what it is, what it may spend, when it was last heard of, what it spent.

    `edgefl devices revoke NAME` shuts a device out of its fleet, at once and for good: its certificate goes on the list
    of revoked ones, the broker reads it, the connection is cut, and coordinators drop whatever comes from it.

    Example: edgefl devices latest --format json
    """
    if run == "revoke":
        _revoke(name, identity, format)
        return
    if name:
        raise typer.BadParameter(f"{name!r} is one word too many", param_hint="NAME")
    report = read_run(find_run(run, runs))
    if format == "json":
        body = {"run": report.run, "devices": [_as_json(report, device.device) for device in report.devices]}
        print_json(body)
        return
    from rich.console import Console

    from edgefl.report import inventory, resources
    from edgefl.report.terminal import print_grid

    console = Console()
    print_grid(inventory.devices(report), console)
    print_grid(resources.device_bill(report), console)


def _revoke(name: str, identity: Path, form: str) -> None:
    if not name:
        raise typer.BadParameter("which device?", param_hint="NAME")
    import asyncio
    import time

    from edgefl.identity.fleet import Fleet
    from edgefl.identity.revocation import revoke

    done = asyncio.run(revoke(Fleet(identity), name, time.time()))
    if form == "json":
        print_json(done._asdict())
        return
    typer.echo(f"{name} is revoked; coordinators take nothing from it any more")
    if done.dropped:
        typer.echo("the broker has read the list and its connection is cut")
    elif done.reloaded:
        typer.echo(f"the broker has read the list, and gives it no topic any more; {done.trouble}")
    else:
        typer.echo(done.trouble or f"no broker runs here: take {identity / 'broker'} to it, and have it read its files")


def _as_json(report: RunReport, name: str) -> dict[str, object]:
    """The device as it introduced itself, when it was last heard of, and its totals in base units."""
    import msgspec

    from edgefl.records import FIGURES
    from edgefl.report import inventory, totals

    rows = totals.by_device(report)[name]
    return {
        **msgspec.to_builtins(totals.device_row(report, name)),
        "last_seen": inventory.last_seen(report, name),
        "totals": {figure: msgspec.to_builtins(totals.measured(figure, rows)) for figure in FIGURES},
    }
