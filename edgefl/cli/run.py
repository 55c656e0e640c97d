"""The verbs of a run file: run does the whole job on one machine, plan predicts it, data shares its data out."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgefl.api.runs import PAGE, RUNS
from edgefl.cli.options import (
    Format,
    Html,
    JointSteps,
    Overrides,
    RunFile,
    RunsOption,
    Verbose,
    show,
    write_out,
    wrote_page,
)
from edgefl.run_records import EventRow, RunReport


def run_command(
    run: RunFile,
    runs: RunsOption = RUNS,
    resume: Annotated[str, typer.Option(metavar="RUN", help="Continue this run where it stopped.")] = "",
    trainers: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Let all devices share N trainer processes, for large fleets. 0: one a device."
        ),
    ] = 0,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="All of it in this process, without a broker: the same result for less; no memory measured.",
        ),
    ] = False,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --in-process: train on N processes. 0: in this one.")
    ] = 0,
    joint_steps: JointSteps = False,
    export: Annotated[bool, typer.Option(help="Write ONNX bundles at the end.")] = True,
    page: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
    format: Annotated[  # noqa: A002 - the option's own name
        Literal["terminal", "json"], typer.Option("--format", help="json: the finished run's report, alone on stdout.")
    ] = "terminal",
    web: Annotated[
        bool, typer.Option("--web", help="Show the run on a page while it goes on: open the address that is printed.")
    ] = False,
    web_at: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where that page is; elsewhere than on this machine, by a link only."),
    ] = "",
    web_control: Annotated[
        bool, typer.Option("--web-control", help="Let the page pause, resume and stop the run and leave devices out.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track",
            metavar="KIND",
            help="Write scalars: tensorboard[:DIR] or mlflow[:URI]; in the run's folder. Repeatable.",
        ),
    ] = None,
    verbose: Verbose = False,
    set_: Overrides = None,
) -> None:
    """Train: start a broker, a coordinator and a local fleet from one run file, each a process of its own.

    Shares the data out to the devices of the run file's fleet, shows the run while it goes on, and leaves in
    runs/<id>/: the ledger, every device's bill (report.html), the model as ONNX bundles, and all logs.

    Example: edgefl run demo --set training.epochs=3
    """
    from contextlib import nullcontext

    if in_process:  # before numpy and torch are loaded: a fleet's processes compute with one thread each
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from edgefl.api.local_run import LocalOptions
    from edgefl.api.running import Made, carry_out
    from edgefl.cli.bundles import told
    from edgefl.report.live import LiveView

    more = ["--web"] * web + [f"--web-at={web_at}"] * bool(web_at) + ["--web-control"] * web_control
    asked = LocalOptions(run, set_ or [], Path(runs), resume=resume, trainers=trainers, in_process=in_process)
    options = asked._replace(workers=workers, joint_steps=joint_steps, track=track or (), more=more)
    view = None if format == "json" else LiveView(verbose=verbose)
    with view or nullcontext():
        feed = quietly if view is None else view.feed
        done = carry_out(options, feed, Made(export, page, told), end_on_sigterm)
    report = done.report.record
    if format == "json":
        show(format, report)
    else:
        _close(report, done.directory, export=export and report.status != "stopped", page=page, verbose=verbose)


def quietly(event: EventRow) -> None:
    """Write the events that a person must see to stderr, since stdout holds JSON: the page's address, warnings."""
    if event.kind == "page":
        sys.stderr.write(f"live page: {event.data.get('url', '')}\n")
    elif event.kind == "warning":
        sys.stderr.write(f"warning: {event.data.get('text', '')}\n")


def end_on_sigterm() -> None:
    """SIGTERM cancels the task that this is called in, as Ctrl-C does."""
    import asyncio

    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _close(report: RunReport, directory: Path, *, export: bool, page: bool, verbose: bool) -> None:
    """The tables of a finished run, and what to run next."""
    from rich.console import Console

    from edgefl.report.writers import print_report

    console = Console(highlight=False)
    print_report(report, console, verbose=verbose)
    run = report.run if directory == RUNS / report.run else directory
    lines = {"every device's costs, with pictures": f"open {directory / PAGE}"} if page else {}
    lines["every stage, round and note"] = f"edgefl report {run} --verbose"
    if export:
        lines["predict"] = f"edgefl predict {run} {directory / 'shares' / 'test.npz'}"
        lines["answer over HTTP"] = f"edgefl serve {run}"
    else:
        lines["the model as ONNX bundles"] = f"edgefl export {run}"
    console.print("\nNext:", style="bold")
    for what, line in lines.items():
        console.print(f"  {line}", style="bold", soft_wrap=True)
        console.print(f"    {what}", style="dim")


def _show_sizes(wanted: bool) -> None:
    if wanted:
        from edgefl.api.run_inputs import encoder_sizes

        show("terminal", None, encoder_sizes())
        raise typer.Exit


def plan_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN.yaml",
            help="Run file, or the name of a shipped one: demo, har. Or a run that has been: its id, the beginning of "
            "one, or `latest`.",
        ),
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="PROFILE", help="Device profile to plan for, instead of the run's fleet; repeatable."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples a device has (default: what the partition gives it).")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Price the schedules with this batch size instead of the run's; repeatable."),
    ] = None,
    trainer_base: Annotated[str, typer.Option(metavar="BYTES", help="Size of the idle trainer, such as 250MiB.")] = "",
    sizes: Annotated[
        bool, typer.Option("--sizes", callback=_show_sizes, is_eager=True, help="List the encoder sizes and leave.")
    ] = False,
    convention: Annotated[
        str, typer.Option(metavar="NAME", help="Also show the schedules by a paper's accounting: lw-fedmml.")
    ] = "",
    runs_a_month: Annotated[
        int,
        typer.Option(
            "--runs-a-month",
            min=0,
            metavar="N",
            help="Also what a month of N runs costs each device, waiting included.",
        ),
    ] = 0,
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="Also what the memory goes to, what a round costs, and every schedule's stages."
        ),
    ] = False,
    html: Html = None,
    format: Format = "terminal",  # noqa: A002 - the option's own name
    runs: RunsOption = RUNS,
    set_: Overrides = None,
) -> None:
    """Predict what each stage costs on each device, and who can train it, without running anything.

    The first sentence is the verdict: who fits, and whose budget is tightest; or who does not fit, by which numbers,
    and what would help. Then what each device would train in each stage, and this schedule beside the others.

    Of a run that has been: for its devices, with their samples; bytes of a month as counted, where they were.

    Examples: edgefl plan demo --device jetson-nano --device single-stage · edgefl plan latest --runs-a-month 30
    """
    from edgefl.api.planning import plan_of, to_plan
    from edgefl.api.run_inputs import PlanOptions

    run, past = to_plan(run, runs)
    options = PlanOptions(device or [], samples, trainer_base, convention, batch_size or [], runs_a_month, past)
    plan = plan_of(run, set_ or [], options)
    if wrote_page(html, Path("plan.html"), plan.to_html):
        return
    if format == "json":
        show(format, plan.price)
        return
    from rich.console import Console

    from edgefl.report.price_tables import price_grids

    console = Console()
    console.print(plan.verdict, style="bold", markup=False, highlight=False)
    for sentence in plan.assumptions:
        console.print(sentence, markup=False, highlight=False)
    for text in plan.price.warnings:
        console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    show(format, plan.price, *price_grids(plan.price, details=details))


def data_command(
    run: RunFile,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write <device>.npz and test.npz here.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Device names, instead of the run's fleet; repeatable.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--show",
            metavar="FILE.html",
            help="Write a page of what goes into the model: samples as prepared, and who has what; `-` is stdout.",
        ),
    ] = None,
    format: Format = "terminal",  # noqa: A002 - the option's own name
    set_: Overrides = None,
) -> None:
    """Show how a run's data is shared out to its devices; with --out, write the shares; with --show, a page of samples.

    Each device's share goes to that device and stays there; test.npz goes to the coordinator (data.test).

    Examples: edgefl data demo --device left --device right --out shares · edgefl data photos.yaml --show photos.html
    """
    from tempfile import TemporaryDirectory

    from edgefl.api.run_inputs import shares_of, shares_table
    from edgefl.config.profiles import load_run

    config, _ = load_run(run, set_ or [])
    with TemporaryDirectory() as folder:
        prepared = shares_of(config, device or [entry.name for entry in config.fleet], out or Path(folder))
        if page is not None:
            from edgefl.api.data_page import page_of

            write_out(page, page_of(config, prepared))
    if page != Path("-"):
        show(format, prepared, shares_table(config.name, prepared))
    if out is not None and format == "terminal":
        typer.echo(f"\nWritten to {out}: one .npz a device, and test.npz for the coordinator.")
