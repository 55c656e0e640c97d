"""Command line ``edgefl-agent``: ``run``, ``enroll``, ``doctor``, ``profile``, and the service's commands."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from device_agent import service_commands as service
from device_agent.command import (
    CA,
    CERT,
    DEBUG,
    FORMAT,
    KEY,
    PROFILE,
    SET,
    STATE,
    Format,
    RunOptions,
    app,
    command,
    default_state,
    enrolled_places,
    host_name,
    not_enrolled,
    state_of,
    whose,
)
from edgefl.console import fit_outputs, say, write_data

if TYPE_CHECKING:
    from edgefl.findings import Check


@command(RunOptions)
def run(given: RunOptions) -> None:
    """Take part in training until stopped (Ctrl-C or SIGTERM).

    An enrolled device needs --data alone: broker, names and certificates are in its identity.

    Exit codes: 0 stopped, 10 profile, 11 data, 14 broker refuses, 15 disk, 19 no torch, 20 trainer, 21 identity, 24 own
    training code.
    """
    from device_agent.device_checks import before_run, profile
    from device_agent.runtime.connect import Options, become
    from edgefl.config.profiles import load_device
    from edgefl.log_lines import line_writer

    where = whose(given.state, given.fleet, given.device)
    if not (given.broker or where.broker):
        raise not_enrolled(given.state)
    found = load_device(given.profile, given.overrides or [])
    trainer = given.trainer or found.trainer
    if not (given.data or trainer):
        raise typer.BadParameter("is needed, unless --trainer reads the data by itself", param_hint="--data")
    tell = line_writer(given.form.value, program="agent", fleet=where.fleet, device=where.device)
    for fault in [*profile(found.plan_only), *before_run(where.state)]:
        tell("warning", finding=fault.id, text=fault.detail, remedy=fault.remedy)
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
            trainer=trainer,
            ca=given.ca,
            cert=given.cert,
            key=given.key,
            form=given.form.value,
            debug=given.debug,
            insecure=given.insecure,
            no_logs=given.no_logs,
            no_moments=given.no_moments,
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
        text = given.file.read_text(encoding="utf-8") if given.file else _pasted()
    where = asyncio.run(exchange(text, state, default_state(), given.wait, say))
    more = f" --state {state}" if state is not None else ""
    if state is None and len(enrolled_places()) > 1:
        alike = len(enrolled_places(device=where.name)) > 1
        more = f" --device {where.name}" + f" --fleet {where.parent.name}" * alike
    typer.echo(f"enrolled; the identity is in {where}\nNow start it: edgefl-agent run --data PATH{more}")


def _pasted() -> str:
    """First non-empty line of standard input, for a token; the rest is not waited for."""
    from edgefl.identity.token import MAX_TEXT

    if sys.stdin.isatty():
        typer.echo("paste the token, then Enter", err=True)
    while (line := sys.stdin.readline(2 * MAX_TEXT)).isspace():
        pass
    return line


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``doctor``."""

    broker: Annotated[
        str, typer.Option(help="Also try this broker. Default: an enrolled device's own.", envvar="EDGEFL_BROKER")
    ] = ""
    device: Annotated[str, typer.Option(help="Which device, where several are enrolled here.")] = ""
    fleet: Annotated[str, typer.Option(help="Which fleet, where several are enrolled here.")] = ""
    profile: Annotated[str, PROFILE] = "cpu"
    overrides: Annotated[list[str] | None, SET] = None
    state: Annotated[Path | None, STATE] = None
    data: Annotated[str, typer.Option(help="Also read this local data.")] = ""
    ca: Annotated[str, CA] = ""
    cert: Annotated[str, CERT] = ""
    key: Annotated[str, KEY] = ""
    form: Annotated[Format, FORMAT] = Format.text
    debug: Annotated[bool, DEBUG] = False


@command(DoctorOptions)
def doctor(given: DoctorOptions) -> None:
    """Check this device before it takes part: what is wrong, each fault with an id and the way out.

    Its identity, clock and broker, Python, torch with a training step, onnxruntime, memory and the ceiling on it, the
    state directory and its disk, local data if named, sensors. Every fault is in docs/doctor.md.

    Exit codes: 0 no fault, or warnings alone; 1 a check failed.
    """
    import msgspec

    from device_agent.device_checks import Device, examine
    from edgefl.config.profiles import load_device
    from edgefl.transport.link import TlsFiles

    found = load_device(given.profile, given.overrides or [])
    checks = examine(
        Device(
            broker=given.broker,
            directory=state_of(given.state, given.fleet, given.device),
            torch_device=found.torch_device,
            unified=found.unified,
            plan_only=found.plan_only,
            data=given.data,
            files=TlsFiles(given.ca or None, given.cert or None, given.key or None),
            budget_bytes=found.budget.record().memory_bytes,
        )
    )
    if given.form is Format.json:
        write_data(msgspec.json.encode(checks).decode() + "\n")
    else:
        sys.stdout.write("".join(map(_shown, checks)))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _shown(check: Check) -> str:
    """A check's result as wrapped lines: the finding, with the id of a fault, then the remedy."""
    width, indent = max(60, shutil.get_terminal_size().columns), " " * 19
    fault = check.status != "ok"
    text = f"{check.status:<5} {check.name:<12} {check.detail}" + (f" [{check.id}]" if fault else "")
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    if fault:
        lines += textwrap.wrap(
            f"-> {check.remedy}", width, initial_indent=indent, subsequent_indent=indent + "   ", break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


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
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there already.")] = False
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
    out.write_text(yaml_text(found, width=110), encoding="utf-8")
    sys.stdout.write(f"{out}\n{out.read_text(encoding='utf-8')}")


command(service.InstallOptions)(service.install)
command(service.UninstallOptions)(service.uninstall)
command(service.StatusOptions)(service.status)
command(service.UpgradeOptions)(service.upgrade)


def main() -> None:
    """Entry point of the console script."""
    fit_outputs()
    app()


if __name__ == "__main__":
    main()
