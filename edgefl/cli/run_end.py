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

    from edgefl.report import decisions, inventory, quality, resources, rounds
    from edgefl.report.grid import with_rows
    from edgefl.report.terminal import print_grids

    console = Console()
    for text in rounds.warnings(report):
        console.print(f"Warning: {text}.", style="yellow", markup=False, highlight=False)
    grids = [quality.evaluation(report), *with_rows(quality.personal(report)), resources.device_bill(report)]
    grids += [decisions.refusals(report), *with_rows(decisions.not_offered(report))]
    print_grids([*grids, *([inventory.bundles(report)] if export else [])], console)
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
