"""``edgefl devices``: the devices of a run."""

from __future__ import annotations

from typing import Any

from edgefl.cli.locate import RUNS, RunArgument, RunsOption, find_run, read_run
from edgefl.cli.options import Format, print_json
from edgefl.report.rows import RunReport


def command(
    run: RunArgument = "latest",
    runs: RunsOption = RUNS,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Show each device of a run: what it is, what it may spend, when it was last heard of, what it spent.

    Example: edgefl devices latest --format json
    """
    report = read_run(find_run(run, runs))
    if format == "json":
        body = {"run": report.run, "devices": [_as_json(report, device.device) for device in report.devices]}
        print_json(body)
        return
    from rich.console import Console

    from edgefl.report import bills, inventory
    from edgefl.report.tables import print_grid

    console = Console()
    print_grid(inventory.devices(report), console)
    print_grid(bills.device_bill(report), console)


def _as_json(report: RunReport, name: str) -> dict[str, Any]:
    """The device as it introduced itself, when it was last heard of, and its totals in base units."""
    import msgspec

    from edgefl.records import FIGURES
    from edgefl.report import inventory, totals

    rows = totals.by_device(report)[name]
    return {
        **msgspec.to_builtins(totals.device_row(report, name)),
        "last_seen": inventory.last_seen(report, name),
        "totals": {figure: msgspec.to_builtins(totals.measured(figure, rows)) for figure in FIGURES},
    }
