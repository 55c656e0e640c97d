"""``edgefl runs``: the runs there are."""

from __future__ import annotations

import sys
import time

from edgefl.cli.find_run import RUNS, RunsOption, read_runs
from edgefl.cli.options import Format, print_json


def command(
    runs: RunsOption = RUNS,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """List the runs, newest first: id, name, recipe, status, when, how long.

    Example: edgefl runs --format json
    """
    found, unreadable = read_runs(runs)
    for sentence in unreadable:
        sys.stderr.write(f"warning: {sentence}\n")
    if format == "json":
        keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
        body = [{key: getattr(report, key) for key in keys} for report in found]
        print_json(body)
        return
    from rich.console import Console

    from edgefl.report import inventory
    from edgefl.report.terminal import print_grid

    print_grid(inventory.runs(found, str(runs), time.time()), Console())
