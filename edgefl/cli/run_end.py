"""The end of a local run: bundles, report.html, the tables, and what to run next."""

from __future__ import annotations

from pathlib import Path

from edgefl.cli.find_run import read_run, write_text
from edgefl.run_records import RunReport

PAGE = "report.html"


def close_run(directory: Path, *, export: bool, page: bool, quiet: bool) -> RunReport:
    """Export and report the finished run in ``directory``, with report.html if ``page``.

    Raises ExportError, StoreError.
    """
    if export:
        from edgefl.cli.export import export_run

        export_run(directory)
    report = read_run(directory)
    if page:
        from edgefl.report.html import render

        write_text(directory / PAGE, render(report))
    if not quiet:
        _show(report, directory, export=export, page=page)
    return report


def _show(report: RunReport, directory: Path, *, export: bool, page: bool) -> None:
    from rich.console import Console

    from edgefl.report import absences, decisions, inventory, quality
    from edgefl.report import accuracy as outcome
    from edgefl.report import resources as bills
    from edgefl.report.run_warnings import warnings
    from edgefl.report.terminal import print_grid

    console = Console()
    told: set[str] = set()
    for text in warnings(report):
        console.print(f"Warning: {text}.", style="yellow", markup=False, highlight=False)
    grids = [outcome.evaluation(report), *(grid for grid in (quality.personal(report),) if grid.rows)]
    grids += [bills.device_bill(report), decisions.refusals(report)]
    grids += [grid for grid in (absences.table(report),) if grid.rows]
    if export:
        grids.append(inventory.bundles(report))
    for grid in grids:
        print_grid(grid, console, told=told)
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
