"""``edgefl report``: a run on the terminal, as HTML, JSON or CSV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgefl.cli.find_run import RUNS, RunArgument, RunsOption, find_run, read_run, write_text
from edgefl.run_records import RunReport

OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write; `-` is stdout. HTML goes to RUN's report.html by default."),
]


def command(
    run: RunArgument = "latest",
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "csv", "html"], typer.Option("--format", help="How to show it.")
    ] = "terminal",
    output: OutputOption = None,
) -> None:
    """Show a run: test accuracy with and without each modality, what every device spent, who was refused and why.

    Examples: edgefl report latest · edgefl report latest --format html · edgefl report 2026 --format csv -o run.csv
    """
    directory = find_run(run, runs)
    report = read_run(directory)
    if format == "html" and output is None:
        output = directory / "report.html"
    text = _text(report, format, to_terminal=output is None)
    if output is None or str(output) == "-":
        sys.stdout.write(text)
        return
    write_text(output, text)
    sys.stderr.write(f"wrote {output}\n")


def _text(report: RunReport, format: str, *, to_terminal: bool) -> str:  # noqa: A002  # as in command
    """The report in the wanted format; terminal tables keep their colours only when they go to a terminal."""
    if format == "json":
        from edgefl.report.writers import to_json

        return to_json(report)
    if format == "csv":
        from edgefl.report.writers import to_csv

        return to_csv(report)
    if format == "html":
        from edgefl.report.html import render

        return render(report)
    from rich.console import Console

    from edgefl.report.terminal import print_report

    console = Console(force_terminal=None if to_terminal else False)
    with console.capture() as captured:
        print_report(report, console)
    return captured.get()
