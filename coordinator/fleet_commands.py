"""Commands for a fleet's identity: its making and the enrolment of its devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from coordinator.options import DEBUG, IDENTITY
from edgefl.console import guarded, say


def init_command(
    host: Annotated[list[str], typer.Option(help="Name or address that devices dial the broker by. Repeatable.")],
    directory: Annotated[Path, typer.Option(help="Where the identity is kept.")] = Path("fleet"),
    fleet: Annotated[str, typer.Option(help="Name of the fleet.")] = "default",
    port: Annotated[int, typer.Option(help="The broker's port for enrolled devices.")] = 8883,
    enroll_port: Annotated[int, typer.Option(help="Its port for devices that enrol.")] = 8884,
    bind: Annotated[str, typer.Option(help="Address it listens on. Default: all.")] = "",
    days: Annotated[
        float, typer.Option(min=7, help="Life of a device's certificate; it is renewed at half of it.")
    ] = 90.0,
    broker: Annotated[str, typer.Option(help="mqtts:// URL of a broker elsewhere that enrolled devices use.")] = "",
    reload: Annotated[str, typer.Option(help="Command that makes the broker elsewhere read its files again.")] = "",
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Make a fleet's identity, once: certificate authority, signing key, and the files of its broker.

    Example: edgefl-coordinator init --host broker.example --host 192.0.2.7
    """
    with guarded(debug):
        import shlex

        from edgefl.identity.fleet import Record, create_fleet

        names, command = tuple(host), tuple(shlex.split(reload))
        asked = Record(fleet, names, port, enroll_port, bind, days * 86400, broker=broker, reload=command)
        create_fleet(directory, asked)
        typer.echo(f"fleet {fleet!r} is in {directory}; keep it secret, and keep a copy of all of it elsewhere")
        typer.echo(f"its broker's files are in {directory / 'broker'}; `run` and `enrollments` start it if none runs")
        typer.echo(f"next: edgefl-coordinator enroll --name cam-01 --identity {directory} --wait")


def enroll_command(
    name: Annotated[str, typer.Option(help="Name of the device.")] = "",
    names: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="List of names, one a line, in place of --name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="With --from: a file NAME.token for each name goes here.")
    ] = None,
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    hours: Annotated[float, typer.Option(help="How long the token can be used.")] = 24.0,
    replace: Annotated[
        bool, typer.Option("--replace", help="Another machine takes the name over from the one that has it.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Stay until all devices have come, and answer them.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Print a one-time token by which a device gets its identity.

    Carry it to the device as you would a password: there, `edgefl-agent enroll TOKEN`. A run in progress answers the
    device, and so do `edgefl-coordinator enrollments` and --wait.

    With --replace, a repaired or other machine gets the name of one that is enrolled or was revoked. The old machine
    goes on until the new one enrols, and is refused from then on; a token that is not used changes nothing. Was it
    stolen, revoke it first: `edgefl devices revoke NAME`.

    With --from, the first column of a CSV file, each name gets a token, or none does: lines at fault are named.

    Examples: edgefl-coordinator enroll --name cam-07 --wait · edgefl-coordinator enroll --from names.csv --out tokens
    """
    with guarded(debug):
        import asyncio

        from edgefl.identity.fleet import Fleet, id_of
        from edgefl.identity.issued_tokens import issue_token, issue_tokens

        if bool(name) == (names is not None):
            raise typer.BadParameter("name a device, or a list by --from", param_hint="--name")
        if (names is None) != (out is None):
            raise typer.BadParameter("goes with --out", param_hint="--from")
        fleet = Fleet(identity)
        if names is not None and out is not None:
            files = issue_tokens(fleet, names, out, time.time(), hours * 3600, replace=replace)
            typer.echo(f"tokens of {len(files)} devices are in {out}, a file each, for {hours:g} hours")
            awaited, who = [file.stem for file in files], "all have"
        else:
            typer.echo(issue_token(fleet, name, time.time(), hours * 3600, replace=replace))
            awaited, who = [name], f"{name} has"
        if not wait:
            say(f"leave `edgefl-coordinator enrollments --identity {identity}`, or a run, running until {who} come")
            return
        from coordinator.runtime.fleet_auth import serve

        devices = fleet.devices()
        own = [id_of(devices, one) for one in awaited]
        asyncio.run(serve(fleet, say, until=own, limit_s=hours * 3600))


def rename_command(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Its name now.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its name from now on.")],
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Give a device another name in runs, reports and commands; nothing is done on the device.

    Later runs have the new name; a run that goes on keeps the old one to its end. At the broker and in its own log the
    device keeps the name that it enrolled with.
    """
    with guarded(debug):
        from edgefl.identity.fleet import Fleet
        from edgefl.identity.names import rename

        rename(Fleet(identity), old, new)
        typer.echo(f"{old} is {new} from the next run on")


def enrollments_command(
    identity: Annotated[Path, IDENTITY] = Path("fleet"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Answer devices that enrol or renew their certificates, until stopped. Starts the fleet's broker if none runs."""
    with guarded(debug):
        import asyncio

        from coordinator.runtime.fleet_auth import serve
        from edgefl.identity.fleet import Fleet

        asyncio.run(serve(Fleet(identity), say))
