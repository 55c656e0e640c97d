"""Commands for the groups of a fleet's devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.options import DEBUG, IDENTITY
from edgefl.console import guarded

app = typer.Typer(no_args_is_help=True, help="Groups of devices: run files and commands name one as group:NAME.")
GROUP = typer.Argument(metavar="GROUP", help="Such as night.")


@app.command("add")
def add_command(
    group: Annotated[str, GROUP],
    devices: Annotated[list[str], typer.Argument(metavar="DEVICE...", help="Enrolled, or with a token.")],
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Put devices into a group; a device may be in several. A run has the groups as they are when it is made.

    Example: edgefl-coordinator group add night cam-a cam-b
    """
    with guarded(debug):
        from edgefl.identity.fleet import Fleet
        from edgefl.identity.groups import add_to_group

        _show(group, add_to_group(Fleet(identity), group, devices).get(group, ()))


@app.command("remove")
def remove_command(
    group: Annotated[str, GROUP],
    devices: Annotated[list[str] | None, typer.Argument(metavar="[DEVICE...]", help="Default: all in it.")] = None,
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Take devices out of a group, or all. A group without devices is gone."""
    with guarded(debug):
        from edgefl.identity.fleet import Fleet
        from edgefl.identity.groups import remove_from_group

        _show(group, remove_from_group(Fleet(identity), group, devices or ()).get(group, ()))


@app.command("list")
def list_command(
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Show the groups and the devices in them."""
    with guarded(debug):
        from edgefl.identity.fleet import Fleet

        for group, devices in Fleet(identity).groups().items():
            _show(group, devices)


def _show(group: str, devices: tuple[str, ...]) -> None:
    typer.echo(f"{group}: {', '.join(devices) or 'no device'}")
