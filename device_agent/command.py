"""Registration, shared options and the look-up of a device's state, for the agent's commands."""

from __future__ import annotations

import inspect
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, get_type_hints

import typer

from edgefl.console import guarded, show_version
from edgefl.errors import some_of

T = TypeVar("T")
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Format(str, Enum):
    """Format of the log lines."""

    text = "text"
    json = "json"


VERSION = typer.Option("--version", callback=show_version("edgefl-agent"), is_eager=True, help="Show the version.")
BROKER = typer.Option(
    help="mqtt://host[:port], mqtt://user:password@host, or mqtts:// for TLS.", envvar="EDGEFL_BROKER"
)
PROFILE = typer.Option(help="Device profile: a shipped name, such as jetson-orin-nano-8gb, or a YAML file.")
SET = typer.Option("--set", help="Override a field of the profile, such as budget.memory_bytes='3 GiB'. Repeatable.")
STATE = typer.Option(
    readable=False,  # whose directory it is, and what to do about it, typer does not say
    help="Directory for identity, objects and unsent work. Default: in ~/.local/state/edgefl; the machine's service "
    "has /var/lib/edgefl-agent and no other.",
)
DATA = typer.Option(help="Local data: a folder with manifest.jsonl, or an .npz file. It never leaves this machine.")
TRAINER = typer.Option(
    envvar="EDGEFL_TRAINER",
    help="Own training code in place of EdgeFL's: FILE.py:FUNCTION or MODULE:FUNCTION. It gets --data as it is given.",
)
FORMAT = typer.Option("--format", help="text, or json: one object a line.")
LOG_FORMAT = typer.Option("--log-format", "--format", help="Of the log lines: text, or json: one object a line.")
DEBUG = typer.Option("--debug", help="Show the traceback of an error.")
CA = typer.Option(help="PEM file of the authority that signed the broker's certificate.")
CERT = typer.Option(help="PEM file of this device's certificate.")
KEY = typer.Option(help="PEM file of this device's private key.")
INSECURE = typer.Option("--insecure", help="Accept a broker on another machine without TLS.", envvar="EDGEFL_INSECURE")


class BadSamples(str, Enum):
    """Policy for samples that cannot be read."""

    error = "error"
    skip = "skip"


@dataclass(frozen=True)
class RunOptions:
    """Options of ``run``."""

    data: Annotated[str, DATA] = ""
    trainer: Annotated[str, TRAINER] = ""
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
    no_logs: Annotated[
        bool, typer.Option("--no-logs", envvar="EDGEFL_NO_LOGS", help="Refuse to send log lines to the coordinator.")
    ] = False
    no_moments: Annotated[
        bool,
        typer.Option(
            "--no-moments",
            envvar="EDGEFL_NO_MOMENTS",
            help="Refuse to send means and variances of sensor data, by which a run may standardise it, and sketches, "
            "by which it may cluster devices, on joining.",
        ),
    ] = False
    form: Annotated[Format, LOG_FORMAT] = Format.text
    debug: Annotated[bool, DEBUG] = False


@app.callback()
def about(version: Annotated[bool, VERSION] = False) -> None:
    """The agent of one device: receives parts of a model, trains them on local data, sends them back."""


def command(options: Callable[..., T]) -> Callable[[Callable[[T], None]], Callable[[T], None]]:
    """Registers a command that takes its options as one dataclass; its errors end the program with their exit codes."""

    def register(function: Callable[[T], None]) -> Callable[[T], None]:
        def call(debug: bool, **values: object) -> None:
            with guarded(debug):
                function(options(debug=debug, **values))

        hints = get_type_hints(options, include_extras=True)
        call.__name__, call.__doc__, call.__annotations__ = function.__name__, function.__doc__, hints
        given = inspect.signature(options)
        typed = [one.replace(annotation=hints[name]) for name, one in given.parameters.items()]
        call.__dict__["__signature__"] = given.replace(parameters=typed)  # typer reads it
        app.command()(call)
        return function

    return register


class Whose(NamedTuple):
    """Identity of an agent: fleet, device, state directory. ``broker``: as enrolled, else ""."""

    fleet: str
    device: str
    state: Path
    broker: str = ""


def whose(state: Path | None, fleet: str, device: str) -> Whose:
    """Identity for a command: enrolled in ``state`` or in the default directory, else by the names given."""
    from edgefl.identity import device as own

    place = state_of(state, fleet, device)
    found = own.find(place)
    if found is not None:
        record = found.record
        return Whose(fleet or record.fleet, device or record.device, place, record.broker)
    return Whose(fleet or "default", device or host_name(), place)


def state_of(state: Path | None, fleet: str, device: str) -> Path:
    """State directory for a command: ``state``, else the matching enrolled one, else the default by name."""
    from edgefl.errors import IdentityError

    if state is not None:
        return state
    root = default_state()
    places = enrolled_places(fleet, device)
    if len(places) > 1:
        there = ", ".join(str(place.relative_to(root)) for place in places)
        raise IdentityError(f"several devices are enrolled here: {there}", remedy="Say which by --fleet and --device.")
    return places[0] if places else root / (fleet or "default") / (device or host_name())


def enrolled_places(fleet: str = "", device: str = "") -> list[Path]:
    """State directories of identities below the default one; of this fleet and device alone, where they are named."""
    from edgefl.identity.device import DIRECTORY

    found = default_state().glob(f"{fleet or '*'}/{device or '*'}/{DIRECTORY}/device.json")
    return [path.parent.parent for path in sorted(found)]


def not_enrolled(state: Path | None) -> typer.BadParameter:
    """Error of a device without identity and broker: the identities that there are, and how to enrol it."""
    there = [f"{place.parent.name}/{place.name}" for place in enrolled_places()] if state is None else []
    known = f" (enrolled here: {some_of(there)})" if there else ""
    place = f" --state {state}" if state is not None else ""
    text = f"is needed by a device that is not enrolled{known}; to enrol it: edgefl-agent enroll -{place}"
    return typer.BadParameter(text, param_hint="--broker")


def host_name() -> str:
    """This machine's host name as a valid device name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]


def default_state() -> Path:
    """Default directory of agents' state."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "edgefl" / "agents"
