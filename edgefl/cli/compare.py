"""The verb ``compare``: runs side by side, against the first that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edgefl.cli.options import RUNS, RunsOption, drawn, find_run, read_run, write_out


def command(
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Two runs or more: ids, beginnings of ids, `latest`, or directories."),
    ],
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "csv", "html"], typer.Option("--format", help="How to show it.")
    ] = "terminal",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; `-` is stdout. HTML goes to compare.html in the first RUN's directory by default.",
        ),
    ] = None,
) -> None:
    """Show runs side by side: scores, memory, FLOPs, bytes, time and energy against the first, and what differs.

    A directory, such as other/runs/RUN, is a run of elsewhere. What cannot be compared is said, and why; a figure that
    is missing is a dash with its reason.

    Examples: edgefl compare 20260918-141320-demo latest · edgefl compare 2026 latest --format html -o both.html
    """
    if len(run) < 2:
        raise typer.BadParameter("name at least two runs; `edgefl runs` lists them", param_hint="RUN")
    directories = [find_run(one, runs) for one in run]
    for index, directory in enumerate(directories):
        if directory.resolve() in {one.resolve() for one in directories[:index]}:
            raise typer.BadParameter(f"{run[index]} names {directory.name} again", param_hint="RUN")
    from edgefl.report import compare

    found = compare.compare([read_run(directory) for directory in directories])
    if format == "html":
        from edgefl.report.compare_page import to_html

        write_out(output or directories[0] / "compare.html", to_html(found))
    elif format != "terminal":
        write_out(output or Path("-"), {"json": compare.to_json, "csv": compare.to_csv}[format](found))
    else:
        text = drawn(lambda console: compare.print_all(found, console), to_terminal=output is None)
        write_out(output or Path("-"), text)
