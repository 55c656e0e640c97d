"""The verb devices: who is there, and what each device may and did spend; drop, restore and revoke act."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.api.runs import RUNS, NotBegunError, find_run, read_run, run_directories
from edgefl.cli.options import RunsOption, show
from edgefl.console import say
from edgefl.errors import ConfigError, Problem
from edgefl.groups import group_of, groups_of
from edgefl.records import FIGURES
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgefl.report.presence import Enrolled, SortBy


def devices_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|drop|restore|revoke|upgrade-plan",
            help="A run's id, the beginning of one, or `latest`, the default where no --identity is given; or the word "
            "drop, restore, revoke or upgrade-plan.",
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN|NAME|GROUP",
            help="drop, restore: the run. revoke: the device to shut out of its fleet. upgrade-plan: the group.",
        ),
    ] = "",
    device: Annotated[str, typer.Argument(help="drop, restore: the device.")] = "",
    runs: RunsOption = RUNS,
    identity: Annotated[
        Path | None,
        typer.Option(
            envvar="EDGEFL_IDENTITY",
            help="Directory of the fleet's identity, by default fleet: its devices are shown too; without RUN, alone.",
        ),
    ] = None,
    sort: Annotated[
        Literal["device", "state", "seen", "release", "identity"],
        typer.Option("--sort", help="Order: by name, state, last seen first, release, or certificate that ends first."),
    ] = "device",
    group: Annotated[str, typer.Option(metavar="GROUP", help="Only devices of this group.")] = "",
    to: Annotated[
        str, typer.Option("--to", metavar="VERSION|WHEEL", help="upgrade-plan: the release, or its wheel.")
    ] = "",
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "playbook"],
        typer.Option("--format", help="How to print; playbook, of upgrade-plan: for Ansible."),
    ] = "terminal",
) -> None:
    """Show the devices of a run and its fleet: state and spending.

    State: last sign of life and its kind, release, certificate. Spending: budget and use.

    The devices of the run, and those of the fleet whose identity is in --identity. Without that, the ledger alone.
    With --identity and no RUN, the fleet's devices: which of them are connected now, by their answer to a call, their
    release, which machine has the name and since when, and the end of its certificate.

    `edgefl devices drop RUN DEVICE` leaves a device out of a run that is going on: it is asked for nothing more, and
    the open round does without it. `edgefl devices restore RUN DEVICE` takes it in again. Exit code 22: the run is not
    running, or knows no such device. Both take group:NAME for all of the run's devices in that group.

    `edgefl devices revoke NAME` shuts a device out of its fleet, at once and for good: its certificate goes on the list
    of revoked ones, the broker reads it, the connection is cut, and coordinators drop whatever comes from it. Another
    machine gets its name by `edgefl-coordinator enroll --name NAME --replace`.

    `edgefl devices upgrade-plan GROUP --to VERSION` prints commands that bring a group to a release, for you to run:
    one device first, then the rest, without those that have it, and the way back of each. By --format playbook they are
    an Ansible playbook. Nothing is sent to a device.

    Examples: edgefl devices latest --format json · edgefl devices drop latest cam-01 · edgefl devices --identity fleet
    """
    if run in {"drop", "restore"}:
        from edgefl.cli import control

        if not (name and device):
            raise typer.BadParameter(
                f"{run} needs a run and a device: edgefl devices {run} RUN DEVICE", param_hint="RUN"
            )
        (control.drop if run == "drop" else control.restore)(name, device, runs, format)
        return
    place = identity or Path("fleet")
    if (format == "playbook" or to) and run != "upgrade-plan":
        raise typer.BadParameter("goes with upgrade-plan", param_hint="--to" if to else "--format")
    if run == "upgrade-plan" and not device:
        from edgefl.cli.upgrade_plan import upgrade_plan

        if not (name and to):
            text = "upgrade-plan needs a group and a release: edgefl devices upgrade-plan GROUP --to VERSION"
            raise typer.BadParameter(text, param_hint="GROUP")
        upgrade_plan(place, group_of(name) or name, to, runs, format)
        return
    if run == "revoke" and not device:
        _revoke(name, place, format)
        return
    if name:
        raise typer.BadParameter(f"{device or name!r} is one word too many", param_hint="NAME")
    import msgspec

    from edgefl.cli.control import standing
    from edgefl.report import bills, presence, resources, rounds

    group = group_of(group) or group
    enrolled = _enrolled(place, group)
    if not run and group and identity is not None:
        _of_fleet(place, group)
    if not run and (identity is not None or ((place / "fleet.json").is_file() and not run_directories(runs))):
        _between_runs(place, enrolled, group, sort, format)
        return
    found = [find_run(run or "latest", runs)]
    report, now = _of_group(_report(found[0]), group), time.time()
    status = standing(found[0]) if report.status == "running" else {}
    known = status.get("devices", {})
    live = {
        # a coordinator of before, which goes on after an upgrade, says less
        device: presence.Live(
            one["online"],
            one["left_out_by"],
            one.get("seen_at", 0.0),
            one.get("seen_by", ""),
            one.get("revoked", False),
        )
        for device, one in known.items()
    }
    enrolled = _enrolled(place, group, report.names)
    live = {device: one for device, one in live.items() if not group or device in report.groups[group]}
    there = presence.presences(report, enrolled, now, sort, live)
    rows = resources.by_device(report)
    body = [
        {
            **msgspec.to_builtins(device),
            "last_seen": rounds.last_seen(report, device.device),
            "totals": {
                figure: msgspec.to_builtins(resources.measured(figure, rows[device.device])) for figure in FIGURES
            },
        }
        for device in report.devices
    ]
    grids = (rounds.devices(report), bills.device_bill(report))
    whole = {"run": report.run, "presence": there, "devices": body}
    if format == "terminal" and "joining" in (report.status, status.get("phase")):
        joined = sorted(name for name, one in known.items() if one["online"])
        who = f"{', '.join(joined)} {'has' if len(joined) == 1 else 'have'}" if joined else "none has"
        typer.echo(f"run {report.run} waits for devices; {who} joined")
        if not there:
            return
    show(format, whole, presence.presence_grid(there, now), *grids)


def _between_runs(directory: Path, enrolled: Mapping[str, Enrolled], group: str, sort: SortBy, form: str) -> None:
    """Show the fleet's devices, all or of a group, and which of them are connected; unused tokens, too."""
    import asyncio

    from edgefl.cli.connected import connected
    from edgefl.errors import BrokerError
    from edgefl.identity.fleet import Fleet
    from edgefl.identity.issued_tokens import awaited
    from edgefl.report import presence

    fleet, trouble, answers = Fleet(directory), "", None
    try:
        shown = fleet.shown()
        answers = {shown[name]: one for name, one in asyncio.run(connected(fleet)).items()} if enrolled else {}
    except BrokerError as error:
        way = f"It runs with a run, or by: edgefl-coordinator enrollments --identity {directory}"
        trouble = f"which of them are connected is not known: {error.message}\n"
        trouble += f"what to do: {error.remedy if fleet.record.broker else way}"
    there, named = presence.between_runs(enrolled, answers, time.time(), sort), fleet.groups().get(group, ())
    tokens = {
        one: until for one, until in awaited(fleet).items() if until > time.time() and (not group or one in named)
    }
    body = {"run": "", "presence": there, "devices": [], "tokens": tokens}
    show(form, body, presence.fleet_grid(there, fleet.record.fleet, tokens))
    if trouble:
        say(trouble)


def _report(directory: Path) -> RunReport:
    """The run's report; of one that is just being started, no more than its name."""
    try:
        return read_run(directory)
    except NotBegunError:
        return RunReport(run=directory.name, status="joining")


def _of_group(report: RunReport, group: str) -> RunReport:
    """The report with the devices of a group, as the run has it; with all for "". Raises ConfigError."""
    from edgefl.report.resources import of_devices

    if group and group not in report.groups:
        raise _no_group(group, f"run {report.run}", report.groups)
    return of_devices(report, report.groups[group]) if group else report


def _of_fleet(directory: Path, group: str) -> None:
    """Raises ConfigError where the fleet has no such group."""
    from edgefl.identity.fleet import Fleet

    if group not in (groups := Fleet(directory).groups()):
        raise _no_group(group, f"the fleet in {directory}", groups)


def _no_group(group: str, where: str, groups: Mapping[str, object]) -> ConfigError:
    text = f"{where} has no group {group!r}; it has: {', '.join(groups) or 'none'}"
    way = "`edgefl-coordinator group add` makes one; a run has the groups that were there when it was made."
    return ConfigError(where, [Problem("--group", text)], remedy=way)


def _enrolled(directory: Path, group: str, names: Mapping[str, str] | None = None) -> dict[str, Enrolled]:
    """Devices of the fleet whose identity is there, by name, all or of a group; none where there is none.

    ``names``: of renamed devices, as a run has them; None: as they are now.
    """
    from edgefl.report.presence import Enrolled

    if not (directory / "fleet.json").is_file():
        return {}
    from edgefl.identity.fleet import Fleet

    fleet = Fleet(directory)
    known, groups, found = fleet.devices(), fleet.groups(), dict[str, Enrolled]()
    for own, shown in fleet.shown(known).items():
        name, one = names.get(own, own) if names is not None else shown, known[own]
        if not group or shown in groups.get(group, ()):
            in_groups = groups_of(shown, groups)
            found[name] = Enrolled(one.not_after, one.revoked_at is not None, one.generation, one.since, in_groups)
    return found


def _revoke(name: str, identity: Path, form: str) -> None:
    if not name:
        raise typer.BadParameter("which device?", param_hint="NAME")
    import asyncio

    from edgefl.identity.fleet import Fleet
    from edgefl.identity.membership import revoke

    done = asyncio.run(revoke(Fleet(identity), name, time.time()))
    if form == "json":
        show(form, done._asdict())
        return
    typer.echo(f"{name} is revoked; coordinators take nothing from it any more")
    if done.dropped:
        typer.echo("the broker has read the list and its connection is cut")
    elif done.reloaded:
        typer.echo(f"the broker has read the list, and gives it no topic any more; {done.trouble}")
    else:
        typer.echo(done.trouble or f"no broker runs here: take {identity / 'broker'} to it, and have it read its files")
