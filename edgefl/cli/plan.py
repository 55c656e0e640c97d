"""The verbs before a run: ``edgefl plan`` predicts what it costs, ``edgefl data`` shares its data out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.options import Format, Overrides, RunFile, show


def _show_sizes(wanted: bool) -> None:
    if wanted:
        from edgefl.cli.run_inputs import encoder_sizes

        show("terminal", None, encoder_sizes())
        raise typer.Exit


def plan_command(
    run: RunFile,
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
    format: Format = "terminal",  # noqa: A002 - the option's own name
    set_: Overrides = None,
) -> None:
    """Predict what each stage costs on each device, and who can train it, without running anything.

    The first tables compare the schedules on one device's share; "Devices" says what each device would train in each
    stage, or which budget refuses, with both numbers; the last tables say what that takes of its memory and otherwise.

    Example: edgefl plan demo --device jetson-nano --device single-stage
    """
    from edgefl.cli.run_inputs import PlanOptions, assumptions, price_of

    options = PlanOptions(device or [], samples, trainer_base, convention, batch_size or [])
    price = price_of(run, set_ or [], options)
    if format == "json":
        show(format, price)
        return
    for sentence in assumptions(run, set_ or [], options):
        typer.echo(sentence)
    from rich.console import Console

    from edgefl.report.price_tables import price_grids

    for text in price.warnings:
        Console().print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    show(format, price, *price_grids(price))


def data_command(
    run: RunFile,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write <device>.npz and test.npz here.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Device names, instead of the run's fleet; repeatable.")
    ] = None,
    format: Format = "terminal",  # noqa: A002 - the option's own name
    set_: Overrides = None,
) -> None:
    """Show how a run's data is shared out to its devices; with --out, write the shares.

    Each device's share goes to that device and stays there; test.npz goes to the coordinator (data.test).

    Example: edgefl data demo --device left --device right --out shares
    """
    from tempfile import TemporaryDirectory

    from edgefl.cli.run_inputs import shares_of, shares_table
    from edgefl.config.profiles import load_run

    config, _ = load_run(run, set_ or [])
    with TemporaryDirectory() as folder:
        prepared = shares_of(config, device or [entry.name for entry in config.fleet], out or Path(folder))
    show(format, prepared, shares_table(config.name, prepared))
    if out is not None and format == "terminal":
        typer.echo(f"\nWritten to {out}: one .npz a device, and test.npz for the coordinator.")
