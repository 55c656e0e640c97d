"""``edgefl-agent``: lets this device take part (``run``), says what it lacks (``doctor``), or measures it."""

from __future__ import annotations

import inspect
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, get_type_hints

import typer

from edgefl.console import guarded

T = TypeVar("T")
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
    """Policy for samples that cannot be read."""

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


def command(options: Callable[..., T]) -> Callable[[Callable[[T], None]], Callable[[T], None]]:
    """Registers a command that takes its options as one dataclass; its errors end the program with their exit codes."""

    def register(function: Callable[[T], None]) -> Callable[[T], None]:
        def call(debug: bool, **values: object) -> None:
            with guarded(debug):
                function(options(debug=debug, **values))

        hints = get_type_hints(options, include_extras=True)
        call.__name__, call.__doc__, call.__annotations__ = function.__name__, function.__doc__, hints
        call.__dict__["__signature__"] = inspect.signature(options, eval_str=True)  # typer reads it
        app.command()(call)
        return function

    return register


@dataclass(frozen=True)
class RunOptions:
    """Options of ``run``."""

    data: Annotated[str, DATA]
    broker: Annotated[str, BROKER] = ""
    device: Annotated[
        str, typer.Option(help="This device's name in the fleet. Default: as it was enrolled, else the host name.")
    ] = ""
    fleet: Annotated[
        str, typer.Option(help="The fleet's name, the same at the coordinator. Default: as enrolled, else default.")
    ] = ""
    profile: Annotated[str, PROFILE] = "cpu"
    overrides: Annotated[list[str] | None, SET] = None
    state: Annotated[Path | None, STATE] = None
    bad_samples: Annotated[BadSamples, typer.Option(help="error: stop; skip: leave out and count.")] = BadSamples.error
    ca: Annotated[str, CA] = ""
    cert: Annotated[str, CERT] = ""
    key: Annotated[str, KEY] = ""
    insecure: Annotated[bool, INSECURE] = False
    form: Annotated[Format, FORMAT] = Format.text
    debug: Annotated[bool, DEBUG] = False


@command(RunOptions)
def run(given: RunOptions) -> None:
    """Take part in training until stopped (Ctrl-C or SIGTERM).

    An enrolled device needs --data alone: broker, names and certificates are in its identity.

    Exit codes: 0 stopped, 10 profile, 11 data, 14 broker refuses, 15 disk, 19 no torch, 20 trainer, 21 identity.
    """
    from device_agent.runtime.connect import Options, become
    from edgefl.config.profiles import load_device

    where = whose(given.state, given.fleet, given.device)
    if not (given.broker or where.broker):
        raise typer.BadParameter("is needed by a device that is not enrolled", param_hint="--broker")
    found = load_device(given.profile, given.overrides or [])
    become(
        Options(
            broker=given.broker or where.broker,
            fleet=where.fleet,
            device=where.device,
            data=given.data,
            state=str(where.state),
            profile=found.name,
            budget=found.budget.record(),
            speed=found.speed.record(),
            heartbeat_s=found.heartbeat_s,
            torch_device=found.torch_device,
            bad_samples=given.bad_samples.value,
            ca=given.ca,
            cert=given.cert,
            key=given.key,
            form=given.form.value,
            debug=given.debug,
            insecure=given.insecure,
        )
    )


@dataclass(frozen=True)
class EnrollOptions:
    """Options of ``enroll``."""

    text: Annotated[str, typer.Argument(metavar="TOKEN", help="The token, or - to read it from standard input.")] = "-"
    file: Annotated[Path | None, typer.Option(help="Read the token from this file.")] = None
    state: Annotated[Path | None, STATE] = None
    wait: Annotated[float, typer.Option(help="Seconds to wait for the coordinator.")] = 60.0
    debug: Annotated[bool, DEBUG] = False


@command(EnrollOptions)
def enroll(given: EnrollOptions) -> None:
    """Exchange a one-time token of `edgefl-coordinator enroll` for an identity of this device.

    The private key is made here and never leaves this device. Where others can see the list of processes, give the
    token on standard input or by --file. Afterwards: edgefl-agent run --data PATH
    """
    import asyncio

    from device_agent.enroll import enroll as exchange

    state, text = given.state, given.text
    if given.file or text == "-":
        text = given.file.read_text(encoding="utf-8") if given.file else sys.stdin.read()
    where = asyncio.run(exchange(text, state, default_state(), given.wait, lambda line: typer.echo(line, err=True)))
    more = f" --state {state}" if state is not None else ""
    typer.echo(f"enrolled; the identity is in {where}\nNow start it: edgefl-agent run --data PATH{more}")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``doctor``."""

    broker: Annotated[
        str, typer.Option(help="Also try this broker. Default: an enrolled device's own.", envvar="EDGEFL_BROKER")
    ] = ""
    device: Annotated[str, typer.Option(help="Which device, where several are enrolled here.")] = ""
    fleet: Annotated[str, typer.Option(help="Which fleet, where several are enrolled here.")] = ""
    profile: Annotated[str, PROFILE] = "cpu"
    state: Annotated[Path | None, STATE] = None
    data: Annotated[str, typer.Option(help="Also read this local data.")] = ""
    ca: Annotated[str, CA] = ""
    cert: Annotated[str, CERT] = ""
    key: Annotated[str, KEY] = ""
    form: Annotated[Format, FORMAT] = Format.text
    debug: Annotated[bool, DEBUG] = False


@command(DoctorOptions)
def doctor(given: DoctorOptions) -> None:
    """Check this device before it takes part; exit code 1 when a check fails.

    Its identity, clock and broker, Python, torch with a training step, memory, disk, local data if named, sensors.
    """
    import msgspec

    from device_agent.device_checks import examine
    from edgefl.config.profiles import load_device
    from edgefl.transport.link import TlsFiles

    checks = examine(
        broker=given.broker,
        directory=whose(given.state, given.fleet, given.device).state,
        torch_device=load_device(given.profile).torch_device,
        data=given.data,
        files=TlsFiles(given.ca or None, given.cert or None, given.key or None),
    )
    if given.form is Format.json:
        sys.stdout.write(msgspec.json.encode(checks).decode() + "\n")
    else:
        for check in checks:
            sys.stdout.write(f"{check.status:<5} {check.name:<14} {check.detail}\n")
            if check.remedy and check.status != "ok":
                sys.stdout.write(f"{'':<20} -> {check.remedy}\n")
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of ``profile``."""

    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("device.yaml")
    name: Annotated[str, typer.Option(help="The profile's name. Default: the host name.")] = ""
    broker: Annotated[str, typer.Option(help="Also measure the link to this broker.", envvar="EDGEFL_BROKER")] = ""
    fleet: Annotated[str, typer.Option(help="The fleet's name, the same at the coordinator.")] = "default"
    torch_device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    state: Annotated[Path | None, STATE] = None
    ca: Annotated[str, CA] = ""
    cert: Annotated[str, CERT] = ""
    key: Annotated[str, KEY] = ""
    force: Annotated[bool, typer.Option(help="Replace a file that is there already.")] = False
    debug: Annotated[bool, DEBUG] = False


@command(ProfileOptions)
def profile(given: ProfileOptions) -> None:
    """Measure this device (training speed, matrix products, disk, link, sensors); write a profile to plan with.

    Takes about half a minute. Set a budget in the file; then: edgefl-agent run --profile device.yaml
    """
    from edgefl.config.yaml_files import yaml_text
    from edgefl.errors import ConfigError, Problem
    from edgefl.transport.link import TlsFiles

    out = given.out
    if out.exists() and not given.force:
        raise ConfigError(str(out), [Problem("--out", "is there already; give --force to replace it")])
    from device_agent.measured_profile import Link, measured_profile  # with torch

    name = given.name or host_name()
    files = TlsFiles(given.ca or None, given.cert or None, given.key or None)
    link = Link(given.broker, given.fleet, name, files) if given.broker else None
    found = measured_profile(name, given.torch_device, given.state or default_state(), link)
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
    name, fleet = device or host_name(), fleet or "default"
    return Whose(fleet, name, state or root / fleet / name)


def host_name() -> str:
    """This machine's name as a device may be called."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]


def default_state() -> Path:
    """Default directory of agents' state."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "edgefl" / "agents"


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
