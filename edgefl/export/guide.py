"""README.md and example.py of a bundle's folder, for users without EdgeFL."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from edgefl.data.label_sets import classes_in, plain_names
from edgefl.data.levels import levels_in
from edgefl.data.tokens import padding_id
from edgefl.export.bundle_format import BATCH, STAND_INS, ZERO, Manifest, Port
from edgefl.models.spec import EncoderSpec
from edgefl.records import TableColumn

README, EXAMPLE = "README.md", "example.py"
#: What a sample of a kind is, and how EdgeFL makes it of a file; of kinds of other packages the shape alone is known.
PREPARATION: dict[str, str] = {
    "sensor": "a window of time steps by channels, in the units, at the rate and in the order of channels of training",
    "vision": "height, width and red, green, blue from 0 to 1; transparent pictures on white, turned upright by their "
    "EXIF note, resized with a bilinear filter",
    "audio": "frames by mel bands, from 0 (80 dB below the clip's loudest) to 1: windows of 32 ms every 16 ms, bands "
    "from 50 to 4000 Hz, cut or padded with 0 at the end",
    "text": "token ids, padded with 0",
    "table": "cells as two numbers each, the value and 1 where it is there, else 0 and 0; a category's value is its "
    "place from 0 in the column's list, a date's the days since 1970; in training's units and order of columns",
}
_HASHED = (
    "; 1 begins every text, and a lower-case word or punctuation mark is 2 + crc32(its UTF-8 bytes) mod "
    "(vocabulary - 2)"
)
#: Fields of an encoder that say nothing about its input.
_INSIDE = {"kind", "input_shape", "width", "depth", "heads", "mlp_ratio", "patch", "dropout", "stride", "positions"}
_INSIDE |= {"pretrained", "pool", "arch", "config", "standardize", "mean", "std", "columns"}
LABELS_SHOWN = 50


def readme(manifest: Manifest) -> str:
    """README of a bundle, in Markdown."""
    return "\n".join(_lines(manifest)) + "\n"


def _lines(manifest: Manifest) -> Iterator[str]:
    any_of = "any of " if len(manifest.modalities) > 1 else ""
    yield f"# {manifest.name}: an ONNX model\n"
    yield f"`{manifest.file}` (operator set {manifest.opset}, format {manifest.ir_version}, {manifest.precision}) takes"
    yield f"{any_of}{', '.join(manifest.modalities)}. `python {EXAMPLE}` runs it with numpy and onnxruntime;"
    yield "`edgefl predict . FILE` reads raw files as well. `manifest.json` has all of this for programs.\n"
    yield from _inputs(manifest)
    yield from _outputs(manifest)
    yield "\n## How samples are prepared\n"
    for m, encoder in manifest.encoders.items():
        yield f"* **{m}** {list(encoder.input_shape)}: {_prepared(encoder)}."
        yield from (f"  * {_column(column)}" for column in encoder.columns)
    yield "\n## How exact it is\n"
    yield from _exact(manifest)


def _inputs(manifest: Manifest) -> Iterator[str]:
    yield "## Inputs\n"
    yield "All are required." if manifest.table_file or not manifest.tables else "The tables are optional."
    yield "\n| name | type | shape | |\n|---|---|---|---|"
    for port in manifest.inputs:
        yield _row(port, f"{manifest.encoders[port.name].kind}, prepared as below")
    for port in manifest.presence:
        yield _row(port, "1 where a sample has it, else 0; then what stands in its row does not count")
    for port in manifest.tables:
        flags = port.name.endswith(".valid")
        yield _row(port, "1 for each row that holds a prototype, else 0" if flags else "a prototype of each class")
    for name, axis in manifest.axes.items():
        if name != BATCH:
            yield f"\n`{name}`: from {axis.minimum} to {axis.maximum}; pad shorter ones with 0."
    if manifest.table_file and manifest.mask == ZERO:
        yield f"\nThe prototypes found in training are in `{manifest.table_file}`, all marked by 0: zeros stand in."
        yield f"Mark the rows by 1, and they stand in; so do others, of {manifest.capacity} rows."
    elif manifest.table_file:
        yield f"\nThe prototypes found in training are in `{manifest.table_file}`. Others, of {manifest.capacity} rows"
        yield "with those that are not used marked by 0, need no new model. All marked by 0: zeros stand in."


def _outputs(manifest: Manifest) -> Iterator[str]:
    yield "\n## Outputs\n\n| name | type | shape | |\n|---|---|---|---|"
    for port in manifest.outputs:
        yield _row(port, _answer(port.name))
    if manifest.fills:
        stands = STAND_INS.get(manifest.mask, manifest.mask)
        yield f"\nWhat a sample lacks of {', '.join(manifest.fills)} is filled in by {stands}."
    if manifest.labels:
        rest = len(manifest.labels) - LABELS_SHOWN
        more = f", and {rest} more" if rest > 0 else ""
        yield f"\nLabels, in order: {', '.join(plain_names(manifest.labels)[:LABELS_SHOWN])}{more}."
        if classes_in(manifest.labels):
            yield "Each is answered by itself, whatever the others are: a sample may have several."
        if levels_in(manifest.labels) is not None:
            yield "They are levels of a number: the answer is the sum of each times its probability."
        yield "The model's metadata has them as JSON under `labels`."


def _row(port: Port, told: str) -> str:
    return f"| `{port.name}` | {port.dtype} | [{', '.join(map(str, port.shape))}] | {told} |"


def _answer(name: str) -> str:
    known = {
        "logits": "before the softmax, or the sigmoid",
        "probabilities": "of each label",
        "matched": "rows of the prototypes that stand in for each modality, in the order named below; -1: none",
        "weights": "their shares",
    }
    return known.get(name, "of length 1; 0 where the sample lacks the modality")


def _prepared(encoder: EncoderSpec) -> str:
    told = PREPARATION.get(encoder.kind, f"float32 as the kind '{encoder.kind}' takes them")
    if encoder.kind == "text":
        told += f" by the tokenizer of {encoder.pretrained}" if encoder.pretrained else _HASHED
        if padding := padding_id(encoder.config):
            told += f", in which 0 and the padding {padding} have changed places"
    plain = EncoderSpec()
    fields = msgspec.structs.asdict(encoder).items()
    set_here = [f"{k} {v}" for k, v in fields if k not in _INSIDE and v != getattr(plain, k)]
    return f"{told} ({', '.join(set_here)})" if set_here else told


def _column(column: TableColumn) -> str:
    what = f"one of {', '.join(column.values)}" if column.values else column.kind
    return f"`{column.name}`: {what}" + (f" ({column.unit})" if column.unit else "")


def _exact(manifest: Manifest) -> Iterator[str]:
    if manifest.reduced is None:
        yield f"onnxruntime's answers differ from torch's by {manifest.max_difference:.1g} at most, where"
        yield f"{manifest.tolerance:g} was allowed. OpenVINO needs `INFERENCE_PRECISION_HINT` f32 for that."
        return
    one = manifest.reduced
    yield f"In {manifest.precision}, {one.measure} in percent on {one.data}, before and after:\n"
    yield "| given | samples | f32 | here |\n|---|---|---|---|"
    for loss in one.losses:
        yield f"| {' + '.join(loss.given)} | {loss.samples} | {loss.before:.1f} | {loss.after:.1f} |"


def example(manifest: Manifest) -> str:
    """Source of a Python program with an inference on one sample of zeros."""
    lines = []
    for port in (*manifest.inputs, *manifest.presence):
        sizes = [1, *(manifest.axes[s].maximum if isinstance(s, str) else s for s in port.shape[1:])]
        shape = f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
        made, why = ("ones", "it has it") if port in manifest.presence else ("zeros", "your sample here")
        lines.append(f'    "{port.name}": np.{made}({shape}, np.{port.dtype}),  # {why}')
    tables = [
        f'for name, one in json.loads((here / "{manifest.table_file}").read_text()).items():',
        '    feeds[name] = np.array(one["data"], one["dtype"]).reshape(one["shape"])',
    ]
    labelled = [
        "answers = dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds)))",
        'labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])',
        'for label, probability in zip(labels, answers["probabilities"][0]):',
        '    print(f"{label}: {probability:.3f}")',
    ]
    embedded = [
        "for one, value in zip(session.get_outputs(), session.run(None, feeds)):",
        "    print(one.name, value.shape)",
    ]
    body = [
        f'"""Runs the bundle {manifest.name} with numpy and onnxruntime alone: python example.py"""',
        "",
        *(["import json"] if manifest.table_file or manifest.labels else []),
        "from pathlib import Path",
        "",
        "import numpy as np",
        "import onnxruntime",
        "",
        "here = Path(__file__).resolve().parent",
        f'session = onnxruntime.InferenceSession(str(here / "{manifest.file}"), providers=["CPUExecutionProvider"])',
        "feeds = {",
        *lines,
        "}",
        *(tables if manifest.table_file else []),
        *(labelled if manifest.task == "classify" else embedded),
    ]
    return "\n".join(body) + "\n"
