"""``edgefl export``: a run's model as ONNX bundles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from edgefl.api.export_run import MaskChoice, export_checkpoints, export_run, export_weights
from edgefl.api.runs import RUNS, find_run
from edgefl.cli.lower_precision import lower_precisions
from edgefl.cli.options import Format, RunArgument, RunsOption, show
from edgefl.export.bundle_format import TOLERANCE
from edgefl.export.form import OPSETS, PLAIN, PRECISIONS, Form, Tables, precisions_of
from edgefl.export.precision_record import EXACT
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
            help="What stands in for absent modalities; auto: the recipe's own where it trained one, both where the "
            "run has prototypes, else zero. Of both, a call that names none has zeros where the recipe trained "
            "with zeros, else prototypes."
        ),
    ] = "auto",
    labels: Annotated[
        str,
        typer.Option(
            metavar="SET", help="Label set that the bundles answer; default: of several each, in a folder of its name."
        ),
    ] = "",
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Rows of each prototype table; default: the number of classes.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference from torch with which a bundle is published.")
    ] = TOLERANCE,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(PRECISIONS),
            help="float32, float16 or 8-bit integers; repeatable. All but f32 go to a folder with the precision at its "
            "end, such as bundles-int8. Default: f32.",
        ),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Percentage points that a lower precision may cost any subset of the modalities; what costs more is "
            "left in f32, where int8 allows it.",
        ),
    ] = PLAIN.max_loss,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA", help="Samples that measure and calibrate lower precisions; default: the run's test set."
        ),
    ] = None,
    tables: Annotated[
        Tables,
        typer.Option(
            help="Prototype tables: inputs that every call gives (their values in tables.json); inputs with defaults "
            "in the model, which some runtimes ignore; or in the model for good."
        ),
    ] = PLAIN.tables,
    opset: Annotated[int, typer.Option(help=f"ONNX operator set: {', '.join(map(str, OPSETS))}.")] = PLAIN.opset,
    to: Annotated[
        Literal["onnx", "transformers", "safetensors"],
        typer.Option(
            help="transformers: the trained encoders as folders for AutoModel.from_pretrained, no bundles; "
            "safetensors: the weights of a model of own training code, for edgefl.client.load and model.own."
        ),
    ] = "onnx",
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Write a run's model as ONNX: one bundle for each modality alone and one of all, which serves any of them.

    Each bundle is compared with torch first; when one differs, none is published. An earlier export is replaced.

    Examples: edgefl export latest · edgefl export latest --precision f32 --precision int8 --max-loss 0.5
    """
    directory = find_run(run, runs)
    if to == "transformers":
        folders = export_checkpoints(directory, output=output)
        for modality, folder in folders.items():
            told(f"{modality}: {folder}")
        show(format, {"checkpoints": {modality: str(folder) for modality, folder in folders.items()}})
        return
    if to == "safetensors":
        file = export_weights(directory, output=output)
        told(f"weights: {file}")
        show(format, {"weights": str(file)})
        return
    form = Form(precisions_of(precision or [EXACT]), max_loss, tables, opset)
    done = export_run(
        directory,
        output=output,
        mask=mask,
        labels=labels,
        capacity=capacity,
        tolerance=tolerance,
        form=form,
        calibrate=calibrate,
        say=told,
    )
    body = {"run": done.state.report.run, "stage": done.state.stage.index, "round": done.state.round}
    body |= {"mask": done.mask, "directory": str(done.directory), "untrained": done.state.untrained}
    report = msgspec.structs.replace(done.state.report, bundles=tuple(done.rows))
    show(format, {**body, "bundles": done.rows}, rounds.bundles(report), *lower_precisions(done.rows))
