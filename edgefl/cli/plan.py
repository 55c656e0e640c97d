"""``edgefl plan``: cost of every stage and schedule, and each device's placement, before a run."""

from __future__ import annotations

from typing import Annotated

import typer

from edgefl.cli.options import Format, Overrides, RunFile, print_json


def _show_sizes(wanted: bool) -> None:
    if not wanted:
        return
    from rich.console import Console

    from edgefl.encoder_kinds import encoder_kind, kind_names
    from edgefl.report.inventory import encoder_sizes
    from edgefl.report.terminal import print_grid

    print_grid(encoder_sizes({name: encoder_kind(name).sizes for name in kind_names()}), Console())
    raise typer.Exit


def command(
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
    from edgefl.cli.planning import PlanOptions, assumptions, price_of

    options = PlanOptions(device or [], samples, trainer_base, convention, batch_size or [])
    price = price_of(run, set_ or [], options)
    if format == "json":
        print_json(price)
        return
    for sentence in assumptions(run, set_ or [], options):
        typer.echo(sentence)
    from rich.console import Console

    from edgefl.report.plan import price_grids
    from edgefl.report.terminal import print_grid

    console = Console()
    for text in price.warnings:
        console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    for grid in price_grids(price):
        print_grid(grid, console)
