"""A bundle's folder as a model of NVIDIA's Triton Inference Server, by its onnxruntime backend. Not tried on a server.

A folder of bundles is then a model repository as well: Triton reads ``<model>/config.pbtxt`` and
``<model>/1/model.onnx``, and looks at nothing else there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgefl.data.label_sets import plain_names
from edgefl.export.bundle_format import BATCH, MODEL_FILE, Manifest, Port
from edgefl.storage.disk import write_new

CONFIG, LABELS, VERSION = "config.pbtxt", "labels.txt", "1"
TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
#: Samples that Triton may put into one call: what is gained beyond is little, and activations grow with it.
MOST = 32


def add(folder: Path, manifest: Manifest) -> None:
    """Add what Triton reads to the bundle's ``folder``; the model is one file on disk where links are possible."""
    (folder / VERSION).mkdir()
    try:
        os.link(folder / MODEL_FILE, folder / VERSION / MODEL_FILE)
    except OSError:  # a file system without hard links
        shutil.copyfile(folder / MODEL_FILE, folder / VERSION / MODEL_FILE)
    write_new(folder / CONFIG, config(manifest).encode())
    if manifest.labels:
        write_new(folder / LABELS, "".join(f"{label}\n" for label in plain_names(manifest.labels)).encode())


def config(manifest: Manifest) -> str:
    """The model's configuration, a ModelConfig in protobuf's text form.

    Where tables are inputs Triton does not gather samples of several calls: they have no axis of samples.
    """
    batched = not manifest.tables
    lines = [
        f"name: {json.dumps(manifest.name)}",
        'backend: "onnxruntime"',
        f'default_model_filename: "{MODEL_FILE}"',
        f"max_batch_size: {MOST if batched else 0}",
        *(["dynamic_batching { }"] if batched else []),
    ]
    for port in (*manifest.inputs, *manifest.presence, *manifest.tables):
        lines += _port("input", port, batched)
    for port in manifest.outputs:
        label = f'  label_filename: "{LABELS}"' if manifest.labels and port.name == "probabilities" else ""
        lines += _port("output", port, batched, label)
    return "\n".join(lines) + "\n"


def _port(side: str, port: Port, batched: bool, more: str = "") -> Iterator[str]:
    sizes = [-1 if isinstance(size, str) else size for size in port.shape]
    if batched and port.shape[0] == BATCH:
        sizes = sizes[1:]
    yield f"{side} {{"
    yield f"  name: {json.dumps(port.name)}"
    yield f"  data_type: {TYPES[port.dtype]}"
    # A flag for each sample has no axis of its own, and Triton wants one: it is told to drop it again.
    yield f"  dims: [ {', '.join(map(str, sizes or [1]))} ]"
    if not sizes:
        yield "  reshape: { shape: [ ] }"
    if more:
        yield more
    yield "}"
