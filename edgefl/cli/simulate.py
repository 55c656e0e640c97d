"""The verb ``simulate``: a run file with any number of devices, in one process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgefl.api.runs import RUNS
from edgefl.cli.options import JointSteps, Overrides, RunFile, RunsOption, Verbose, show


def command(
    run: RunFile,
    devices: Annotated[int, typer.Option(min=1, max=1_000_000, metavar="N", help="Devices of the fleet.")] = 1000,
    asked: Annotated[
        int, typer.Option(min=0, metavar="N", help="Devices of a round if all can train, drawn; 0: as in the run file.")
    ] = 0,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="PROFILE[:WEIGHT]", help="Kind of device, and its weight among them; repeatable."),
    ] = None,
    trace: Annotated[
        str, typer.Option(metavar="synthetic|FILE", help="When devices are there, by their states; default: always.")
    ] = "",
    links: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Link speeds of the devices, with --trace.", show_default=False)
    ] = None,
    needs: Annotated[
        list[str] | None,
        typer.Option(
            "--while",
            metavar="idle|wifi|charging",
            help="With --trace: ask a device only in this state; repeatable. Default: all three.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Train on N processes: the same result. 0: in this one.")
    ] = 0,
    joint_steps: JointSteps = False,
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002 - the option's own name
        Literal["terminal", "json"], typer.Option("--format", help="json: the forecast, alone on stdout.")
    ] = "terminal",
    verbose: Verbose = False,
    set_: Overrides = None,
) -> None:
    """Train a fleet of any size on this machine, and predict what a real fleet of such devices would take.

    The run file's data are shared out to the devices, which take the place of its fleet. The result is that of the same
    fleet as processes; the seconds and joules are predicted by the speeds in the device profiles. Budgets of memory are
    left out, since no device's memory is measured: ask `edgefl plan RUN --device PROFILE` for these.

    Example: edgefl simulate demo --devices 100 --asked 10 --device jetson-nano:3 --device raspberry-pi-5
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is loaded
    from edgefl.api.given_data import merged
    from edgefl.api.local_run import LocalOptions
    from edgefl.api.running import Made, carry_out
    from edgefl.api.simulation import drawn_fleet, kinds_of
    from edgefl.cli.run import end_on_sigterm, quietly
    from edgefl.errors import ConfigError, Problem
    from edgefl.report.forecast import basis, forecast, sentence
    from edgefl.report.grid import print_grid
    from edgefl.report.live import LiveView

    given: dict[str, object] = {"links": links and str(links), "needs": needs}
    if any(given.values()) and not trace:
        problem = Problem("--links, --while", "say more of a trace, and none is given")
        raise ConfigError("the fleet", [problem], remedy="Give --trace synthetic, or a file.")
    more = {"states": trace, **{name: value for name, value in given.items() if value}} if trace else None
    fields: dict[str, object] = {"fleet": drawn_fleet(devices, kinds_of(device or []), more)}
    if asked:
        fields["slots.select"] = {"random": {"share": min(1.0, asked / devices)}}
    options = LocalOptions(run, merged(fields, set_ or []), Path(runs), in_process=True, workers=workers)
    options = options._replace(joint_steps=joint_steps)
    view = None if format == "json" else LiveView(verbose=verbose)
    with view or nullcontext():
        done = carry_out(
            options, quietly if view is None else view.feed, Made(export=False, page=False), end_on_sigterm
        )
    expected = forecast(done.report.record)
    if format == "json":
        show(format, expected._asdict())
        return
    from rich.console import Console

    from edgefl.report.writers import print_report

    console = Console(highlight=False)
    print_report(done.report.record, console, verbose=verbose)
    console.print(f"\n{sentence(expected)}", markup=False)
    print_grid(basis(expected), console)
    console.print(f"\nEvery device's costs: edgefl report {done.directory} --html", markup=False, soft_wrap=True)
