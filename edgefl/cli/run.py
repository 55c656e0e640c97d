"""``edgefl run``: the whole job on one machine, with the same programs that run on separate ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgefl.cli.find_run import RUNS, RunsOption
from edgefl.cli.options import Overrides, RunFile, print_json


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
    report = local.finish(export=export, page=page)
    if format == "json":
        print_json(report)
