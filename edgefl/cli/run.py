"""``edgefl run``: the whole job on one machine, with the same programs that run on separate ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgefl.cli.options import RUNS, Overrides, RunFile, RunsOption, show, write_text
from edgefl.cli.runs import read_run
from edgefl.run_records import RunReport

PAGE = "report.html"


def command(
    run: RunFile,
    runs: RunsOption = RUNS,
    resume: Annotated[str, typer.Option(metavar="RUN", help="Continue this run where it stopped.")] = "",
    trainers: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Let all devices share N trainer processes, for large fleets. 0: one a device."
        ),
    ] = 0,
    export: Annotated[bool, typer.Option(help="Write ONNX bundles at the end.")] = True,
    page: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
    format: Annotated[  # noqa: A002 - the option's own name
        Literal["terminal", "json"], typer.Option("--format", help="json: the finished run's report, alone on stdout.")
    ] = "terminal",
    set_: Overrides = None,
) -> None:
    """Train: start a broker, a coordinator and a local fleet from one run file, each a process of its own.

    Shares the data out to the devices of the run file's fleet, shows the run while it goes on, and leaves in
    runs/<id>/: the ledger, every device's bill (report.html), the model as ONNX bundles, and all logs.

    Example: edgefl run demo --set training.epochs=3
    """
    import asyncio

    from edgefl.cli.local import LocalRun

    local = LocalRun(run, set_ or [], runs=Path(runs), resume=resume, quiet=format == "json", trainers=trainers)
    try:
        asyncio.run(local.train())
    except (KeyboardInterrupt, asyncio.CancelledError) as error:  # Ctrl-C, SIGTERM
        raise KeyboardInterrupt(local.way_on()) from error
    if export:
        from edgefl.cli.export import export_run

        export_run(local.directory)
    report = read_run(local.directory)
    if page:
        from edgefl.report.html import render

        write_text(local.directory / PAGE, render(report))
    if format == "json":
        show(format, report)
    else:
        _close(report, local.directory, export=export, page=page)


def _close(report: RunReport, directory: Path, *, export: bool, page: bool) -> None:
    """The tables of a finished run, and what to run next."""
    from rich.console import Console

    from edgefl.report import decisions, inventory, quality, resources, rounds
    from edgefl.report.grid import with_rows

    console = Console()
    for text in rounds.warnings(report):
        console.print(f"Warning: {text}.", style="yellow", markup=False, highlight=False)
    grids = [quality.evaluation(report), *with_rows(quality.personal(report)), resources.device_bill(report)]
    grids += [decisions.refusals(report), *with_rows(decisions.not_offered(report))]
    show("terminal", None, *grids, *([inventory.bundles(report)] if export else []))
    lines = []
    if page:
        lines.append(f"open {directory / PAGE}                       # plots, and every device's bill per stage")
    lines.append(f"edgefl report {directory}         # the same in the terminal; --format csv or json for the figures")
    if export:
        lines.append(f"edgefl predict {directory / 'bundles'} {directory / 'shares' / 'test.npz'}")
    else:
        lines.append(f"edgefl export {directory}         # the model as ONNX bundles")
    console.print("\nNext:", style="bold")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, highlight=False)
