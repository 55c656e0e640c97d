"""Bundles that are made by hand in milliseconds, and ``edgefl serve`` on them as a process of its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgefl.export.bundle_format import (
    MANIFEST_FILE,
    MODEL_FILE,
    Manifest,
    Port,
    bundle_name,
    encode_json,
    input_ports,
    presence_ports,
)
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.records import TableColumn

LABELS = ("rest", "run", "walk")
SPEC = ModelSpec(
    encoders={
        "acc": EncoderSpec(kind="sensor", input_shape=(4, 3)),
        "image": EncoderSpec(kind="vision", input_shape=(8, 8, 3)),
        "text": EncoderSpec(kind="text", input_shape=(6,), vocabulary=100),
    },
    classes=3,
    label_names=LABELS,
)
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
BATCH = "batch"
TOP_K = 2


def _graph(
    spec: ModelSpec, given: tuple[str, ...], fills: tuple[str, ...], ports: Sequence[Port], outputs: Sequence[Port]
) -> bytes:
    """logits = sum over modalities of present · (sum over the first axis, flat) · W; the matches are rows 1 and 0."""
    rng = np.random.default_rng(len(given))
    nodes, weights, summed = [], [], []

    def const(name: str, value: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(value, name))
        return name

    for m in given:
        size = int(np.prod(spec.encoders[m].input_shape[1:]))
        axes = const(f"{m}.axes", np.array([1], np.int64))
        nodes.append(helper.make_node("Cast", [m], [f"{m}.f"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("ReduceSum", [f"{m}.f", axes], [f"{m}.s"], keepdims=1))
        shape = const(f"{m}.shape", np.array([-1, size], np.int64))
        nodes.append(helper.make_node("Reshape", [f"{m}.s", shape], [f"{m}.r"]))
        w = const(f"{m}.w", rng.standard_normal((size, 3)).astype(np.float32) * 0.1)
        nodes.append(helper.make_node("MatMul", [f"{m}.r", w], [f"{m}.z"]))
        if len(given) > 1:
            column = const(f"{m}.column", np.array([-1, 1], np.int64))
            nodes.append(helper.make_node("Reshape", [f"{m}.present", column], [f"{m}.p"]))
            nodes.append(helper.make_node("Mul", [f"{m}.z", f"{m}.p"], [f"{m}.y"]))
        summed.append(f"{m}.y" if len(given) > 1 else f"{m}.z")
    nodes.append(helper.make_node("Sum", summed, ["logits"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1))
    nodes.append(helper.make_node("Shape", ["logits"], ["size"], end=1))
    rest = const("rest", np.array([len(fills), TOP_K], np.int64))
    nodes.append(helper.make_node("Concat", ["size", rest], ["match.shape"], axis=0))
    for name, row in (("matched", np.array([[[1, 0]]], np.int64)), ("weights", np.array([[[0.75, 0.25]]], np.float32))):
        nodes.append(helper.make_node("Expand", [const(f"{name}.row", row), "match.shape"], [name]))

    def values(some: Sequence[Port]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(port.name, _TYPES[port.dtype], port.shape) for port in some]

    graph = helper.make_graph(nodes, "edgefl", values(ports), values(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def write_bundle(folder: Path, given: tuple[str, ...], spec: ModelSpec = SPEC, label_column: str = "") -> None:
    """A bundle of these modalities, with three labels; of several it answers any of them."""
    every = tuple(spec.encoders)
    fills = every if len(given) > 1 else tuple(m for m in every if m not in given)
    inputs, axes = input_ports(spec, given)
    presence = presence_ports(given)
    outputs = (
        Port("logits", "float32", (BATCH, 3)),
        Port("probabilities", "float32", (BATCH, 3)),
        Port("matched", "int64", (BATCH, len(fills), TOP_K)),
        Port("weights", "float32", (BATCH, len(fills), TOP_K)),
    )
    data = _graph(spec, given, fills, [*inputs, *presence], outputs)
    manifest = Manifest(
        name=bundle_name(given),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        modalities=given,
        absent=() if len(given) > 1 else fills,
        subsets="any" if len(given) > 1 else "complete",
        encoders={m: spec.encoders[m] for m in given},
        labels=spec.label_names,
        label_column=label_column,
        inputs=inputs,
        presence=presence,
        outputs=outputs,
        axes=axes,
        mask="prototype",
        masks=("prototype", "zero"),
        top_k=TOP_K,
    )
    folder.mkdir(parents=True)
    (folder / MODEL_FILE).write_bytes(data)
    (folder / MANIFEST_FILE).write_bytes(encode_json(manifest))


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def bundles() -> Path:
    """A folder ``demo/bundles`` with acc, image, text and acc+image+text. Do not change it."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="edgefl-serve-"))
    folder = Path(_KEPT[0].name) / "demo" / "bundles"
    for given in (("acc",), ("image",), ("text",), ("acc", "image", "text")):
        write_bundle(folder / bundle_name(given), given)
    return folder


def tabular(folder: Path, labels: tuple[str, ...] = LABELS) -> Path:
    """A bundle of a table with the columns mass and isle, whose label's column is kind; and of that with a text."""
    columns = (TableColumn("mass"), TableColumn("isle", "category", ("Biscoe", "Dream")))
    table, text = EncoderSpec("table", (2, 2), columns=columns), EncoderSpec("text", (6,), vocabulary=100)
    spec = ModelSpec({"features": table, "text": text}, classes=3, label_names=labels)
    for given in (("features",), ("features", "text")):
        write_bundle(folder / bundle_name(given), given, spec, "kind")
    return folder


def windowed(folder: Path) -> Path:
    """A bundle that cuts recordings into windows of four rows."""
    made = Path(shutil.copytree(bundles() / "acc", folder / "acc"))
    manifest = json.loads((made / MANIFEST_FILE).read_text())
    manifest["encoders"]["acc"]["step"] = 4
    (made / MANIFEST_FILE).write_text(json.dumps(manifest))
    return made


def arrays(rows: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of all modalities."""
    rng = np.random.default_rng(seed)
    return {
        "acc": rng.standard_normal((rows, 4, 3)).astype(np.float32),
        "image": rng.random((rows, 8, 8, 3)).astype(np.float32),
        "text": rng.integers(0, 100, (rows, 6)),
    }


@dataclass(frozen=True)
class Server:
    """A running server. ``said``: its sentence at the start."""

    url: str
    process: subprocess.Popen[str]
    said: str

    def rss(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@contextlib.contextmanager
def running(*options: object, where: Path | None = None, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """``edgefl serve`` on a free port of this machine."""
    words = [sys.executable, "-m", "edgefl.cli.main", "serve", str(where or bundles()), "--host", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*words, "--threads", "1", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        said = process.stdout.readline() if process.stdout else ""
        assert said.startswith("Serving"), process.communicate(timeout=10)
        yield Server(next(word.strip(",") for word in said.split() if word.startswith("http")), process, said)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def json_inputs(some: dict[str, np.ndarray]) -> list[dict[str, object]]:
    """Inputs in the protocol's JSON."""
    return [
        {
            "name": m,
            "shape": list(a.shape),
            "datatype": "INT64" if a.dtype == np.int64 else "FP32",
            "data": a.ravel().tolist(),
        }
        for m, a in some.items()
    ]


def post(url: str, body: object, model: str = "demo") -> httpx.Response:
    """An inference request as JSON."""
    return httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=30)


def until(condition: object, seconds: float = 10.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
