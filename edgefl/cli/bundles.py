"""``edgefl export``: a run's model as ONNX bundles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from edgefl.api.export_run import TOLERANCE, MaskChoice, export_run
from edgefl.api.runs import RUNS, find_run
from edgefl.cli.options import Format, RunArgument, RunsOption, show
from edgefl.report import rounds


def told(line: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def command(
    run: RunArgument = "latest",
    runs: RunsOption = RUNS,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: bundles/ in the run's directory.")
    ] = None,
    mask: Annotated[
        MaskChoice,
        typer.Option(
            help="What stands in for absent modalities; auto: reconstruction where the recipe trained it, both where "
            "the run has prototypes, else zero."
        ),
    ] = "auto",
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Rows of each prototype table; default: the number of classes.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference from torch with which a bundle is published.")
    ] = TOLERANCE,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Write a run's model as ONNX: one bundle for each modality alone and one of all, which serves any of them.

    Each bundle is compared with torch first; when one differs, none is published. An earlier export is replaced.

    Examples: edgefl export latest · edgefl export 2026 -o bundles --mask both --capacity 32
    """
    directory = find_run(run, runs)
    done = export_run(directory, output=output, mask=mask, capacity=capacity, tolerance=tolerance, say=told)
    body = {"run": done.state.report.run, "stage": done.state.stage.index, "round": done.state.round}
    body |= {"mask": done.mask, "directory": str(done.directory), "untrained": done.state.untrained}
    report = msgspec.structs.replace(done.state.report, bundles=tuple(done.rows))
    show(format, {**body, "bundles": done.rows}, rounds.bundles(report))
