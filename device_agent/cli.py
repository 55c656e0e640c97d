"""``edgefl-agent``: lets this device take part (``run``), says what it lacks (``doctor``), or measures it."""

from __future__ import annotations

import os
import re
import socket
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

app = typer.Typer(
    help="The agent of one device: receives parts of a model, trains them on local data, sends them back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Format(str, Enum):
    """Format of the log lines."""

    text = "text"
    json = "json"


class BadSamples(str, Enum):
    """What to do with samples that cannot be read."""

    error = "error"
    skip = "skip"


BROKER = typer.Option(help="mqtt://[user:password@]host[:port], or mqtts:// for TLS.", envvar="EDGEFL_BROKER")
PROFILE = typer.Option(help="Device profile: a shipped name, such as jetson-nano, or a YAML file.")
SET = typer.Option("--set", help="Override a field of the profile, such as budget.memory_bytes='3 GiB'. Repeatable.")
STATE = typer.Option(help="Directory for identity, objects and unsent work. Default: in ~/.local/state/edgefl.")
DATA = typer.Option(help="Local data: a folder with manifest.jsonl, or an .npz file. It never leaves this machine.")
FORMAT = typer.Option("--format", help="text, or json: one object a line.")
DEBUG = typer.Option(help="Show the traceback of an error.")
CA = typer.Option(help="PEM file of the authority that signed the broker's certificate.")
CERT = typer.Option(help="PEM file of this device's certificate.")
KEY = typer.Option(help="PEM file of this device's private key.")
INSECURE = typer.Option("--insecure", help="Accept a broker on another machine without TLS.", envvar="EDGEFL_INSECURE")


@app.command()
def run(
    data: Annotated[str, DATA],
    broker: Annotated[str, BROKER] = "",
    device: Annotated[
        str, typer.Option(help="This device's name in the fleet. Default: as it was enrolled, else the host name.")
    ] = "",
    fleet: Annotated[
        str, typer.Option(help="The fleet's name, the same at the coordinator. Default: as enrolled, else default.")
    ] = "",
    profile: Annotated[str, PROFILE] = "cpu",
    overrides: Annotated[list[str] | None, SET] = None,
    state: Annotated[Path | None, STATE] = None,
    bad_samples: Annotated[BadSamples, typer.Option(help="error: stop; skip: leave out and count.")] = BadSamples.error,
    ca: Annotated[str, CA] = "",
    cert: Annotated[str, CERT] = "",
    key: Annotated[str, KEY] = "",
    insecure: Annotated[bool, INSECURE] = False,
    form: Annotated[Format, FORMAT] = Format.text,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Take part in training until stopped (Ctrl-C or SIGTERM).

    An enrolled device needs --data alone: broker, names and certificates are in its identity.

    Exit codes: 0 stopped, 10 profile, 11 data, 14 broker refuses, 15 disk, 19 no torch, 20 trainer, 21 identity.
    """
    from edgefl.console import guarded

    with guarded(debug):
        from device_agent.runtime.connect import Options, become
        from edgefl.config.profiles import load_device

        where = whose(state, fleet, device)
        if not (broker or where.broker):
            raise typer.BadParameter("is needed by a device that is not enrolled", param_hint="--broker")
        found = load_device(profile, overrides or [])
        become(
            Options(
                broker=broker or where.broker,
                fleet=where.fleet,
                device=where.device,
                data=data,
                state=str(where.state),
                profile=found.name,
                budget=found.budget.record(),
                speed=found.speed.record(),
                heartbeat_s=found.heartbeat_s,
                torch_device=found.torch_device,
                bad_samples=bad_samples.value,
                ca=ca,
                cert=cert,
                key=key,
                form=form.value,
                debug=debug,
                insecure=insecure,
            )
        )


@app.command()
def enroll(
    text: Annotated[str, typer.Argument(metavar="TOKEN", help="The token, or - to read it from standard input.")] = "-",
    file: Annotated[Path | None, typer.Option(help="Read the token from this file.")] = None,
    state: Annotated[Path | None, STATE] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the coordinator.")] = 60.0,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Exchange a one-time token of `edgefl-coordinator enroll` for an identity of this device.

    The private key is made here and never leaves this device. Where others can see the list of processes, give the
    token on standard input or by --file. Afterwards: edgefl-agent run --data PATH
    """
    from edgefl.console import guarded

    with guarded(debug):
        import asyncio

        from device_agent.tools.enroll import enroll as exchange

        given = file.read_text(encoding="utf-8") if file else sys.stdin.read() if text == "-" else text
        where = asyncio.run(exchange(given, state, default_state(), wait, lambda line: typer.echo(line, err=True)))
        more = f" --state {state}" if state is not None else ""
        typer.echo(f"enrolled; the identity is in {where}\nNow start it: edgefl-agent run --data PATH{more}")


@app.command()
def doctor(
    broker: Annotated[
        str, typer.Option(help="Also try this broker. Default: an enrolled device's own.", envvar="EDGEFL_BROKER")
    ] = "",
    device: Annotated[str, typer.Option(help="Which device, where several are enrolled here.")] = "",
    fleet: Annotated[str, typer.Option(help="Which fleet, where several are enrolled here.")] = "",
    profile: Annotated[str, PROFILE] = "cpu",
    state: Annotated[Path | None, STATE] = None,
    data: Annotated[str, typer.Option(help="Also read this local data.")] = "",
    ca: Annotated[str, CA] = "",
    cert: Annotated[str, CERT] = "",
    key: Annotated[str, KEY] = "",
    form: Annotated[Format, FORMAT] = Format.text,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Check this device before it takes part; exit code 1 when a check fails.

    Its identity, clock and broker, Python, torch with a training step, memory, disk, local data if named, sensors.
    """
    from edgefl.console import guarded

    with guarded(debug):
        import msgspec

        from device_agent.tools.doctor import examine
        from edgefl.config.profiles import load_device

        torch_device = load_device(profile).torch_device
        checks = examine(
            broker=broker,
            directory=whose(state, fleet, device).state,
            torch_device=torch_device,
            data=data,
            files={option: value for option, value in (("ca", ca), ("cert", cert), ("key", key)) if value},
        )
        if form is Format.json:
            sys.stdout.write(msgspec.json.encode(checks).decode() + "\n")
        else:
            for check in checks:
                sys.stdout.write(f"{check.status:<5} {check.name:<14} {check.detail}\n")
                if check.remedy and check.status != "ok":
                    sys.stdout.write(f"{'':<20} -> {check.remedy}\n")
        if any(check.status == "fail" for check in checks):
            raise typer.Exit(1)


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("device.yaml"),
    name: Annotated[str, typer.Option(help="The profile's name. Default: the host name.")] = "",
    broker: Annotated[str, typer.Option(help="Also measure the link to this broker.", envvar="EDGEFL_BROKER")] = "",
    fleet: Annotated[str, typer.Option(help="The fleet's name, the same at the coordinator.")] = "default",
    torch_device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    state: Annotated[Path | None, STATE] = None,
    ca: Annotated[str, CA] = "",
    cert: Annotated[str, CERT] = "",
    key: Annotated[str, KEY] = "",
    force: Annotated[bool, typer.Option(help="Replace a file that is there already.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Measure this device (training speed, matrix products, disk, link, sensors); write a profile to plan with.

    Takes about half a minute. Set a budget in the file; then: edgefl-agent run --profile device.yaml
    """
    from edgefl.console import guarded

    with guarded(debug):
        from device_agent.tools.profile import measured_profile
        from edgefl.config.yaml_files import yaml_text
        from edgefl.errors import ConfigError, Problem

        if out.exists() and not force:
            raise ConfigError(str(out), [Problem("--out", "is there already; give --force to replace it")])
        called = name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]
        given = {option: value for option, value in (("ca", ca), ("cert", cert), ("key", key)) if value}
        found = measured_profile(called, torch_device, state or default_state(), broker, fleet, **given)
        out.write_text(yaml_text(found, width=110))
        sys.stdout.write(f"{out}\n{out.read_text()}")


class Whose(NamedTuple):
    """Which device an agent is, and where its state lies. ``broker``: as enrolled, "" for one that is not."""

    fleet: str
    device: str
    state: Path
    broker: str = ""


def whose(state: Path | None, fleet: str, device: str) -> Whose:
    """A command's identity: that in ``state``, or the one under the default directory that fits; else by name."""
    from edgefl.identity import device as own

    root = default_state()
    if state is not None:
        places = [state]
    else:
        pattern = f"{fleet or '*'}/{device or '*'}/{own.DIRECTORY}/device.json"
        places = [path.parent.parent for path in sorted(root.glob(pattern))]
    if len(places) > 1:
        from edgefl.errors import IdentityError

        there = ", ".join(str(place.relative_to(root)) for place in places)
        raise IdentityError(f"several devices are enrolled here: {there}", remedy="Say which by --fleet and --device.")
    found = own.find(places[0]) if places else None
    if found is not None:
        record = found.record
        return Whose(fleet or record.fleet, device or record.device, places[0], record.broker)
    name = device or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]
    fleet = fleet or "default"
    return Whose(fleet, name, state or root / fleet / name)


def default_state() -> Path:
    """Default directory of agents' state."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "edgefl" / "agents"


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
