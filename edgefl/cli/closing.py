"""The end of a local run: bundles, report.html, the tables, and what to run next."""

from __future__ import annotations

from pathlib import Path

from edgefl.cli.locate import read_run, write_text
from edgefl.report.rows import RunReport


def close_run(directory: Path, *, export: bool, quiet: bool) -> RunReport:
    """Export and report the finished run in ``directory``. Raises ExportError, StoreError."""
    if export:
        from edgefl.cli.export import export_run

        export_run(directory)
    report = read_run(directory)
    from edgefl.report.html import render

    page = directory / "report.html"
    write_text(page, render(report))
    if not quiet:
        _show(report, directory, page, export=export)
    return report


def _show(report: RunReport, directory: Path, page: Path, *, export: bool) -> None:
    from rich.console import Console

    from edgefl.report import bills, decisions, inventory, outcome
    from edgefl.report.tables import print_grid

    console = Console()
    told: set[str] = set()
    grids = [outcome.evaluation(report), bills.device_bill(report), decisions.refusals(report)]
    if export:
        grids.append(inventory.bundles(report))
    for grid in grids:
        print_grid(grid, console, told=told)
    lines = [f"open {page}                       # plots, and every device's bill per stage"]
    lines.append(f"edgefl report {directory}         # the same in the terminal; --format csv or json for the figures")
    if export:
        lines.append(f"edgefl predict {directory / 'bundles'} {directory / 'shares' / 'test.npz'}")
    else:
        lines.append(f"edgefl export {directory}         # the model as ONNX bundles")
    console.print("\nNext:", style="bold")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, highlight=False)
