"""Commands for the names and addresses that devices dial a fleet's server by."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.options import DEBUG, IDENTITY
from edgefl.console import guarded

if TYPE_CHECKING:
    from edgefl.identity.hosts import Changed

app = typer.Typer(no_args_is_help=True, help="Names and addresses that devices dial the fleet's server by.")
HOST = typer.Argument(metavar="NAME|ADDRESS", help="Such as broker.example or 192.0.2.7.")


@app.command("add")
def add_command(
    host: Annotated[str, HOST],
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Serve another name: the certificate gets it, the broker reads that, and devices hear of it by signed messages.

    A run in progress sends it to the devices that are connected, and so does `edgefl-coordinator enrollments`. Each
    keeps the new name beside the old one and dials the next where one fails.

    Example: edgefl-coordinator host add new.example
    """
    with guarded(debug):
        from edgefl.identity.fleet import Fleet
        from edgefl.identity.hosts import add_host

        _show(add_host(Fleet(identity), host, time.time()))
        typer.echo("leave a run or `enrollments` running until each device has been there;")
        typer.echo("each is told then, and the other names must stay up until that")


@app.command("remove")
def remove_command(
    host: Annotated[str, HOST],
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    force: Annotated[bool, typer.Option("--force", help="Also where devices would be cut off.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Serve a name no longer. Refused while a device knows no other one: it would have to be enrolled again.

    What a device knows is its own word, by its last hello: a hint for you, that no other device suffers from.
    """
    with guarded(debug):
        from edgefl.identity.fleet import Fleet
        from edgefl.identity.hosts import remove_host

        _show(remove_host(Fleet(identity), host, time.time(), force=force))


@app.command("list")
def list_command(
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Show the names, that of new devices first, and how many devices say that they know each."""
    with guarded(debug):
        from edgefl.identity.fleet import Fleet
        from edgefl.identity.hosts import knowing

        fleet, now = Fleet(identity), time.time()
        if fleet.record.broker:
            typer.echo(f"{fleet.record.broker}: all devices dial this one")
            return
        of = sum(one.is_valid(now) for one in fleet.devices().values())
        for host, devices in knowing(fleet, now).items():
            typer.echo(f"{host}: known to {len(devices)} of {of} devices")


def _show(done: Changed) -> None:
    typer.echo(f"the server's certificate is for {', '.join(done.hosts)}")
    typer.echo("the broker shows it, no restart is needed" if done.shown else done.trouble)
