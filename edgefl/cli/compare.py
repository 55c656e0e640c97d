"""The verb ``compare``: runs side by side, against the first that is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.api.runs import RUNS, find_run, read_run, referenced
from edgefl.cli.options import Html, RunsOption, drawn, write_out, wrote_page

if TYPE_CHECKING:
    from edgefl.report.compare import Comparison


def command(
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Two runs or more: ids, beginnings of ids, `latest`, or directories."),
    ],
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "csv"], typer.Option("--format", help="How to show it.")
    ] = "terminal",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; `-` is stdout."),
    ] = None,
    html: Html = None,
) -> None:
    """Show runs side by side: scores, memory, FLOPs, bytes, time and energy against the first, and what differs.

    A directory, such as other/runs/RUN, is a run of elsewhere. What cannot be compared is said, and why; a figure that
    is missing is a dash with its reason. Beside the scores: those of simple models on the same samples.

    Examples: edgefl compare demo-20260918-141320 latest · edgefl compare demo-2026 latest --html both.html
    """
    if len(run) < 2:
        raise typer.BadParameter("name at least two runs; `edgefl runs` lists them", param_hint="RUN")
    directories = [find_run(one, runs) for one in run]
    for index, directory in enumerate(directories):
        if directory.resolve() in {one.resolve() for one in directories[:index]}:
            raise typer.BadParameter(f"{run[index]} names {directory.name} again", param_hint="RUN")
    from edgefl.report.compare import compare

    found = compare([referenced(read_run(directory), directory) for directory in directories])
    from edgefl.report.compare_output import to_html

    if wrote_page(html, directories[0] / "compare.html", lambda: to_html(found)):
        return
    content = _content(found, format, to_terminal=output is None)
    write_out(output or Path("-"), content, to_read=format == "terminal")


def _content(found: Comparison, form: str, *, to_terminal: bool) -> str:
    """The comparison in the wanted format."""
    from edgefl.report import compare, compare_output

    if form == "terminal":
        return drawn(lambda console: compare.print_all(found, console), to_terminal=to_terminal)
    write = {"json": compare_output.to_json, "csv": compare_output.to_csv}
    return write[form](found)
