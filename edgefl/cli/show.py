"""The verbs that look: runs, report, devices, recipes and doctor; ``devices revoke`` acts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.cli.options import (
    RUNS,
    Format,
    RunArgument,
    RunsOption,
    find_run,
    read_run,
    read_runs,
    show,
    write_text,
)
from edgefl.records import FIGURES
from edgefl.registry import ROLES, default, method
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Record, Tone, table
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    from device_agent.device_checks import Check

_Choice = tuple[str, int, str, Record]  # role, place among its choices, name, options
_RUN_TONES: dict[str, Tone] = {"done": "good", "failed": "bad", "interrupted": "warn"}
_CHECK_TONES: dict[str, Tone] = {"ok": "good", "warn": "warn", "fail": "bad"}


def runs_command(
    runs: RunsOption = RUNS,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """List the runs, newest first: id, name, recipe, status, when, how long.

    Example: edgefl runs --format json
    """
    found, unreadable = read_runs(runs)
    for sentence in unreadable:
        sys.stderr.write(f"warning: {sentence}\n")
    keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
    body = [{key: getattr(report, key) for key in keys} for report in found]
    show(format, body, runs_table(found, str(runs), time.time()))


def runs_table(reports: Sequence[RunReport], where: str, now: float) -> Grid:
    """The runs there are, one a row; ``now``: seconds since the epoch."""

    def started(row: RunReport) -> Cell:
        return Cell(units.ago(now - row.started_at), tip=units.moment(row.started_at))

    def took(row: RunReport) -> str:
        return "" if row.finished_at is None else units.seconds(row.finished_at - row.started_at)

    columns: list[Column[RunReport]] = [
        Column("run", lambda row: row.run, key=True, text=True, whole=True),
        Column("recipe", lambda row: row.recipe, text=True),
        Column("status", lambda row: Cell(row.status, tone=_RUN_TONES.get(row.status, "")), text=True),
        Column("started", started, text=True),
        Column("took", took, text=True),
    ]
    if not all(row.run.startswith(row.name) for row in reports):  # an id begins with the name by default
        columns.insert(1, Column("name", lambda row: row.name, text=True))
    return table("Runs", columns, reports, empty=f"There is no run in {where}; start one with `edgefl run RUN.yaml`.")


def report_command(
    run: RunArgument = "latest",
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "csv", "html"], typer.Option("--format", help="How to show it.")
    ] = "terminal",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; `-` is stdout. HTML goes to RUN's report.html by default."),
    ] = None,
) -> None:
    """Show a run: test accuracy with and without each modality, what every device spent, who was refused and why.

    Examples: edgefl report latest · edgefl report latest --format html · edgefl report 2026 --format csv -o run.csv
    """
    directory = find_run(run, runs)
    report = read_run(directory)
    if format == "html" and output is None:
        output = directory / "report.html"
    text = _text(report, format, to_terminal=output is None)
    if output is None or str(output) == "-":
        sys.stdout.write(text)
        return
    write_text(output, text)
    sys.stderr.write(f"wrote {output}\n")


def _text(report: RunReport, form: str, *, to_terminal: bool) -> str:
    """The report in the wanted format; terminal tables keep their colours only when they go to a terminal."""
    from edgefl.report import writers

    if form != "terminal":
        return {"json": writers.to_json, "csv": writers.to_csv, "html": writers.to_html}[form](report)
    from rich.console import Console

    console = Console(force_terminal=None if to_terminal else False)
    with console.capture() as captured:
        writers.print_report(report, console)
    return captured.get()


def devices_command(
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
    import msgspec

    from edgefl.report import resources, rounds

    report = read_run(find_run(run, runs))
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
    show(format, {"run": report.run, "devices": body}, rounds.devices(report), resources.device_bill(report))


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


def recipes_command(
    action: Annotated[Literal["list", "show"], typer.Argument(help="List the recipes, or show one.")] = "list",
    name: Annotated[str, typer.Argument(help="show: a shipped recipe's name, or a recipe file.")] = "",
    format: Format = "terminal",  # noqa: A002 - the option's own name
) -> None:
    """List the recipes with their sources, or explain one slot by slot.

    Example: edgefl recipes show pmcmfl
    """
    from edgefl.config.profiles import load_recipe, shipped

    if action == "show" and not name:
        raise typer.BadParameter(f"which one? {', '.join(sorted(shipped('recipes')))}", param_hint="NAME")
    recipes = [load_recipe(one).model_dump() for one in ([name] if name else sorted(shipped("recipes")))]
    if name:
        show(format, recipes[0], _slots(recipes[0]))
    else:
        show(format, recipes, _recipes(recipes))


def _recipes(found: Sequence[Record]) -> Grid:
    columns: list[Column[Record]] = [
        Column("recipe", lambda recipe: recipe["name"], key=True, text=True),
        Column("what it does", lambda recipe: recipe["summary"], text=True),
        Column("source", lambda recipe: recipe["source"], text=True),
    ]
    return table("Recipes", columns, found, ["edgefl recipes show NAME explains a recipe slot by slot."])


def _slots(recipe: Record) -> Grid:
    """One recipe role by role: its methods, their summaries and options. Defaults are dimmed."""

    def tone(row: _Choice) -> Tone:
        return "dim" if row[2] == default(row[0]) and not row[3] else ""

    def option(name: str, value: float | str) -> str:
        return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value or '—'}"

    columns: list[Column[_Choice]] = [
        Column("slot", lambda row: "" if row[1] else row[0], key=True, text=True),
        Column("decides", lambda row: "" if row[1] else ROLES[row[0]][0], text=True),
        Column("filled with", lambda row: Cell(row[2], tone=tone(row)), text=True),
        Column("which means", lambda row: Cell(method(row[0], row[2]).summary, tone=tone(row)), text=True),
        Column("options", lambda row: ", ".join(option(name, value) for name, value in row[3].items()), text=True),
    ]
    rows = [(role, i, name, options) for role in ROLES for i, (name, options) in enumerate(recipe[role].items())]
    return table(f"{recipe['name']}: {recipe['summary']}", columns, rows, [f"Source: {recipe['source']}."])


def doctor_command(
    broker: Annotated[
        str, typer.Option("--broker", help="Also try this broker, such as mqtts://user:password@host:8883.")
    ] = "",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where torch shall try a training step.")
    ] = "auto",
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Check this machine: Python, a real training step with torch, memory, disk, sensors, and the broker if named.

    Ends with exit code 1 when a check failed; warnings do not count.

    Example: edgefl doctor --broker mqtt://192.168.1.10:1883
    """
    from device_agent.device_checks import examine

    checks = examine(broker=broker, torch_device=device)
    columns: list[Column[Check]] = [
        Column("check", lambda check: check.name, key=True, text=True),
        Column("result", lambda check: Cell(check.status, tone=_CHECK_TONES[check.status]), text=True),
        Column("found", lambda check: check.detail, text=True),
        Column("what to do", lambda check: check.remedy, text=True),
    ]
    show(format, checks, table("This machine", columns, checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
