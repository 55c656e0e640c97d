"""The verbs that look: runs, report, devices, recipes and doctor; some words after runs and devices act."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.api.runs import RUNS, find_run, priced, read_run, read_runs, referenced
from edgefl.cli.options import Format, Html, RunArgument, RunsOption, Verbose, drawn, show, write_out, wrote_page
from edgefl.registry import default, method
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Record, Tone, table
from edgefl.roles import ROLES
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    from edgefl.findings import Check

_Choice = tuple[str, int, str, Record]  # role, place among its choices, name, options
_RUN_TONES: dict[str, Tone] = {
    "done": "good",
    "failed": "bad",
    **dict.fromkeys(("interrupted", "stopped", "paused"), "warn"),
}
_CHECK_TONES: dict[str, Tone] = {"ok": "good", "warn": "warn", "fail": "bad"}


def runs_command(
    action: Annotated[
        Literal["list", "pause", "resume", "stop", "prune", "queue", "add", "reorder", "cancel"],
        typer.Argument(help="List the runs, control one that is running, delete old ones, or see to the queue."),
    ] = "list",
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="pause, resume, stop, reorder, cancel: which run; add: its run file.")
    ] = "",
    place: Annotated[
        int, typer.Argument(metavar="N", min=0, help="reorder: its place among those that wait, from 1.")
    ] = 0,
    runs: RunsOption = RUNS,
    keep: Annotated[int | None, typer.Option(min=0, metavar="N", help="prune: leave the newest N runs.")] = None,
    older_than: Annotated[str, typer.Option(metavar="30d", help="prune: only runs that ended so long ago.")] = "",
    keep_bundles: Annotated[bool, typer.Option("--keep-bundles", help="prune: leave their ONNX bundles.")] = False,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="prune: also runs that could be resumed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="prune: say what would be deleted.")] = False,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """List the runs, newest first: id, name, recipe, status, when, how long. Or control one, or delete old ones.

    pause: no further round opens; the open one is finished first, and no deadline runs out meanwhile. resume: it goes
    on; one that is stopped may be gone on with by its unit again. stop: the run ends at once, and --resume goes on with
    it in the same round. Exit code 22: the run does not do that, since it is not running, or is paused already.

    prune: runs that are done or failed are deleted, with their rows in the ledger; one that is running never is.

    queue: what `edgefl-coordinator run A.yaml B.yaml` executes, in order. add: append a run file. reorder, cancel: of
    runs that wait.

    Examples: edgefl runs --format json · edgefl runs pause latest · edgefl runs prune --keep 20 --older-than 30d
    """
    if action == "prune":
        from edgefl.cli.prune import Policy, prune, seconds

        policy = Policy(keep, seconds(older_than) if older_than else None, keep_bundles, unfinished)
        prune(runs, policy, format, dry_run=dry_run)
        return
    if action in {"queue", "add", "reorder", "cancel"}:
        _queue(action, run, place, runs, format)
        return
    if action != "list":
        from edgefl.cli import control

        if not run:
            raise typer.BadParameter("which run? Its id, the beginning of one, or `latest`", param_hint="RUN")
        {"pause": control.pause, "resume": control.resume, "stop": control.stop}[action](run, runs, format)
        return
    found, unreadable = read_runs(runs)
    for sentence in unreadable:
        sys.stderr.write(f"warning: {sentence}\n")
    found = [_paused(report, runs) for report in found]
    keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
    body = [{key: getattr(report, key) for key in keys} for report in found]
    show(format, body, runs_table(found, str(runs), time.time()))


def _queue(action: str, run: str, place: int, runs: Path, form: str) -> None:
    from edgefl.cli import queue

    if action != "queue" and not run:
        what = "which run file?" if action == "add" else "which run? Its id, or the beginning of one"
        raise typer.BadParameter(what, param_hint="RUN")
    if action == "reorder" and not place:
        raise typer.BadParameter("at which place? 1 is the next", param_hint="N")
    if action == "reorder":
        queue.reorder(run, place, runs, form)
    elif action == "queue":
        queue.queue(runs, form)
    else:
        {"add": queue.add, "cancel": queue.cancel}[action](run, runs, form)


def _paused(report: RunReport, runs: Path) -> RunReport:
    """The report; of a run that is paused, with that as its status: the ledger has it as running."""
    import msgspec

    from edgefl.cli.control import standing

    paused = report.status == "running" and standing(runs / report.run).get("phase") == "paused"
    return msgspec.structs.replace(report, status="paused") if paused else report


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
        Literal["terminal", "json", "csv", "parquet"], typer.Option("--format", help="How to show it.")
    ] = "terminal",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write, of Parquet also a folder (by default RUN's report.parquet); `-` is stdout.",
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--tables",
            help="csv, parquet: every table, a file each, in the folder of --output; by default RUN's tables.",
        ),
    ] = False,
    html: Html = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="--html without scripts: pictures to print and mail, a fifth of the size."),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Show a run: test accuracy with and without each modality, what every device spent, who was refused and why.

    Examples: edgefl report latest --html · edgefl report demo-2026 --format csv --tables -o tables
    """
    if every and format not in ("csv", "parquet"):
        raise typer.BadParameter("it goes with --format csv or parquet; JSON has every table", param_hint="--tables")
    if static and html is None:
        raise typer.BadParameter("it goes with --html", param_hint="--static")
    directory = find_run(run, runs)
    report = referenced(priced(read_run(directory), directory), directory)
    from edgefl.report import writers

    if wrote_page(html, directory / "report.html", lambda: writers.to_html(report, interactive=not static)):
        return
    if every:
        from edgefl.report.tables import COLUMNS

        for name in COLUMNS:
            content = _content(report, format, name, to_terminal=False, verbose=False)
            write_out((output or directory / "tables") / f"{name}.{format}", content)
        return
    if format == "parquet" and output is None:
        output = directory / "report.parquet"
    elif format == "parquet" and output is not None and str(output) != "-" and not output.suffix:
        output /= "report.parquet"
    content = _content(report, format, to_terminal=output is None, verbose=verbose)
    write_out(output or Path("-"), content, to_read=format == "terminal")


def _content(report: RunReport, form: str, table: str = "figures", *, to_terminal: bool, verbose: bool) -> str | bytes:
    """The report in the wanted format; terminal tables have colours only where they go to a terminal."""
    from edgefl.report import writers

    if form == "parquet":
        from edgefl.report.parquet import to_parquet

        return to_parquet(report, table)
    if form == "csv":
        return writers.to_csv(report, table)
    if form == "json":
        return writers.to_json(report)
    return drawn(lambda console: writers.print_report(report, console, verbose=verbose), to_terminal=to_terminal)


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
    from device_agent.device_checks import Device, examine

    checks = examine(Device(broker, torch_device=device))
    columns: list[Column[Check]] = [
        Column("check", lambda check: check.name, key=True, text=True),
        Column("result", lambda check: Cell(check.status, tone=_CHECK_TONES[check.status]), text=True),
        Column("found", lambda check: check.detail, text=True),
        Column("what to do", lambda check: check.remedy, text=True),
    ]
    show(format, checks, table("This machine", columns, checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
