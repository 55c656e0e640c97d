"""Commands of the agent as a service: ``install``, ``uninstall``, ``status``, ``upgrade``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from device_agent.command import DEBUG, FORMAT, STATE, Format, RunOptions, Whose, not_enrolled, whose
from device_agent.service_steps import Place, booted, carry_out, place_of, run, shown
from edgefl.console import say, write_data

if TYPE_CHECKING:
    from edgefl.config.settings import DeviceProfile

NAME = typer.Option(help="The service's name, where several devices are on this machine.")
USER = typer.Option("--user", help="A service of your own, without root.")
DRY = typer.Option("--dry-run", help="Print the files and commands, and do nothing.")
INSTALL_DRY = typer.Option("--dry-run", help="Print the files and commands, and what is missing; do nothing.")
#: Of Debian 12: the unit of a dry run is for it where there is no systemd.
SYSTEMD = 252
WHEEL = typer.Argument(metavar="WHEEL", help="The wheel, or a folder with it and what it needs (make wheels).")
SERVICE = "edgefl-agent"


@dataclass(frozen=True)
class InstallOptions(RunOptions):
    """Options of ``install``: those that the service runs with, and its own."""

    name: Annotated[str, NAME] = SERVICE
    user: Annotated[bool, USER] = False
    dry_run: Annotated[bool, INSTALL_DRY] = False


def install(given: InstallOptions) -> None:
    """Start the agent at boot, by systemd, with these options of `run`; again to change them.

    Enrol the device first: sudo edgefl-agent enroll - --state /var/lib/edgefl-agent (with --user: as for run). It
    needs root, unless with --user; the agent itself runs under the account edgefl.
    """
    from device_agent.device_checks import profile as profile_faults
    from device_agent.service_install import check_lasting, install_steps, systemd_version
    from edgefl.config.profiles import load_device
    from edgefl.data.sources import check_source
    from edgefl.transport.address import check_protected, parse_url

    place = place_of(given.name, not given.user)
    if place.state and given.state not in {None, place.state}:
        text = f"the machine's service keeps its state in {place.state}: leave it out, or give --user"
        raise typer.BadParameter(text, param_hint="--state")
    missing: list[str] | None = [] if given.dry_run else None
    profile = load_device(given.profile, given.overrides or [])
    trainer = given.trainer or profile.trainer
    with _needed(missing):
        if not (given.data or trainer):
            raise typer.BadParameter("which data does this device train on?", param_hint="--data")
        if not trainer:
            check_source(given.data)
    given = given if given.data or trainer else dataclasses.replace(given, data="DATA")
    where = whose(place.state or given.state, given.fleet, given.device)
    with _needed(missing):
        if not (given.broker or where.broker):
            raise not_enrolled(place.state or given.state)
        check_protected(given.broker or where.broker, insecure=given.insecure)
    for fault in profile_faults(profile.plan_only):
        say(f"warning: {profile.name}: {fault.detail} [{fault.id}]\nwhat to do: {fault.remedy}")
    version = SYSTEMD
    with _needed(missing):
        version = systemd_version()
    if profile.torch_device == "cuda" or (profile.unified and profile.torch_device == "auto"):
        warn_of_torch(profile)
    broker = parse_url(given.broker).masked_url() if given.broker and given.dry_run else given.broker
    with _needed(missing):
        check_lasting(place, run_words(given))
    steps = install_steps(place, run_words(given), broker, profile, version)
    if missing is not None:
        typer.echo(shown(steps))
        for text in missing:
            say(f"missing: {text}")
        return
    needs(place)
    carry_out(steps, say)
    typer.echo(f"{place.name} is installed and runs; see edgefl-agent status, and its log: {log_command(place)}")


@contextlib.contextmanager
def _needed(missing: list[str] | None) -> Iterator[None]:
    """Errors inside go to ``missing``; None: they are raised."""
    from edgefl.errors import ConfigError, EdgeFLError

    try:
        yield
    except EdgeFLError as error:
        if missing is None:
            raise
        faults = error.problems if isinstance(error, ConfigError) else [error.message]
        missing += [f"{fault}\nwhat to do: {error.remedy}" for fault in faults]
    except typer.BadParameter as error:
        if missing is None:
            raise
        missing.append(f"{error.param_hint}: {error.message}")


def warn_of_torch(profile: DeviceProfile) -> None:
    """Warn if torch cannot train on the profile's GPU."""
    from device_agent.library_checks import torch

    check = torch(profile.torch_device, unified=profile.unified)
    if check.status == "fail":
        on_cpu = profile.torch_device == "auto" and check.id == "torch-cpu-build"
        what = "will train on the processor" if on_cpu else "will not train"
        say(f"warning: the agent {what}: {check.detail} [{check.id}]\nwhat to do: {check.remedy}")


_PATHS = {"data", "trainer", "profile", "ca", "cert", "key", "state"}


def run_words(given: RunOptions) -> list[str]:
    """Options as command-line words, without defaults and the broker's URL; paths absolute."""
    words: list[str] = []
    for field in dataclasses.fields(RunOptions):
        value = getattr(given, field.name)
        option = {"overrides": "--set", "form": "--format"}.get(field.name, f"--{field.name.replace('_', '-')}")
        if field.name == "broker" or value == field.default:
            continue
        for one in value if isinstance(value, list) else [value]:
            text = str(one.value if isinstance(one, Enum) else one)
            path, _, function = text.rpartition(":") if field.name == "trainer" else (text, "", "")
            is_code = field.name == "trainer" and not path.endswith(".py")
            is_path = Path(path).exists() or "/" in path or Path(path).suffix  # else a name, as of a data set
            if field.name in _PATHS and not is_code and is_path:
                text = ":".join(filter(None, (str(Path(path).absolute()), function)))
            words += [option] if one is True else [option, text]
    return words


def needs(place: Place) -> None:
    """Raise ServiceError without systemd, or without root for a service of the machine."""
    from edgefl.errors import ServiceError

    if not booted():
        raise ServiceError(
            "systemd does not run this machine (a container?)",
            remedy="Start `edgefl-agent run` by what starts its programs; docs/install.md has a container.",
        )
    if place.system and os.geteuid() != 0:
        raise ServiceError("the machine's services need root", remedy="Use sudo, or --user for a service of your own.")


def log_command(place: Place) -> str:
    """Command to read the service's log."""
    return f"journalctl {'' if place.system else '--user '}-fu {place.name}"


@dataclass(frozen=True)
class UninstallOptions:
    """Options of ``uninstall``."""

    name: Annotated[str, NAME] = SERVICE
    user: Annotated[bool, USER] = False
    purge: Annotated[bool, typer.Option("--purge", help="Also delete its options, its identity and all its state.")] = (
        False
    )
    state: Annotated[Path | None, STATE] = None
    dry_run: Annotated[bool, DRY] = False
    debug: Annotated[bool, DEBUG] = False


def uninstall(given: UninstallOptions) -> None:
    """Stop the service and remove it. Identity, unsent work and options stay, unless --purge is given."""
    from device_agent.service_install import uninstall_steps

    place = place_of(given.name, not given.user)
    where = whose(place.state or given.state, "", "")
    steps = uninstall_steps(place, where.state, given.purge)
    if given.dry_run:
        typer.echo(shown(steps))
        return
    needs(place)
    carry_out(steps, say)
    kept = "" if given.purge else f"; {where.state} and {place.environment} are kept"
    typer.echo(f"{place.name} is {'removed' if steps else 'not installed'}{kept}")


@dataclass(frozen=True)
class StatusOptions:
    """Options of ``status``."""

    name: Annotated[str, NAME] = SERVICE
    state: Annotated[Path | None, STATE] = None
    device: Annotated[str, typer.Option(help="Which device, where several are enrolled here.")] = ""
    fleet: Annotated[str, typer.Option(help="Which fleet, where several are enrolled here.")] = ""
    form: Annotated[Format, FORMAT] = Format.text
    debug: Annotated[bool, DEBUG] = False


def status(given: StatusOptions) -> None:
    """Show the agent: service, broker, last contact, data, identity, versions; exit code 1 unless it runs.

    Works without systemd, too. A broker that is away is no reason for exit code 1.
    """
    import msgspec

    from device_agent.service_report import lines, report_of
    from edgefl.errors import StoreError

    place, where = service_here(given.name, given.state, given.fleet, given.device)
    if given.state is not None and not given.state.exists():
        raise StoreError(f"there is no such folder: {given.state.absolute()}", remedy="Give the --state of the agent.")
    now = time.time()
    report = report_of(place, where.fleet, where.device, where.state, now)
    if given.form is Format.json:
        write_data(msgspec.json.encode(report).decode() + "\n")
    else:
        for subject, text in lines(report, now):
            sys.stdout.write(f"{subject:<13} {text}\n")
        if given.state is None and not where.state.exists():
            say("nothing is there; where the agent runs with another --state, give it here, too")
    if not report.running or report.hangs:
        raise typer.Exit(1)


def service_here(name: str, state: Path | None, fleet: str = "", device: str = "") -> tuple[Place, Whose]:
    """(place, identity) of the service of this name, the machine's before the user's."""
    both = [place_of(name, system) for system in (True, False)]
    place = next((one for one in both if one.unit.exists()), both[1])
    return place, whose(state or place.state, fleet, device)


@dataclass(frozen=True)
class UpgradeOptions:
    """Options of ``upgrade``."""

    wheel: Annotated[Path, WHEEL]
    online: Annotated[bool, typer.Option("--online", help="Fetch what is missing; else from the folder alone.")] = False
    name: Annotated[str, NAME] = SERVICE
    state: Annotated[Path | None, STATE] = None
    debug: Annotated[bool, DEBUG] = False


def upgrade(given: UpgradeOptions) -> None:
    """Install another release here and start the service again; go back if it fails its checks or does not start.

    The checks are --version and doctor, as the service's account: what failed before does not count.
    """
    from device_agent.upgrade import Upgrade, find_wheel

    place, where = service_here(given.name, given.state)
    doctor = [sys.executable, "-m", "device_agent.cli", "doctor", "--state", str(where.state)]
    installed = booted() and place.unit.exists()
    if installed:
        needs(place)
        doctor = list(place.as_account(*doctor))
    wheel = find_wheel(given.wheel)
    restart = place.systemctl("restart", place.name)
    Upgrade(doctor, lambda: run(restart) if installed else "", say).install(wheel, given.online)
    typer.echo(f"{wheel.name} is installed" + ("" if installed else "; start the agent again: no service is"))
