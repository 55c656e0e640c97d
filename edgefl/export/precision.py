"""ONNX models in float16 and in 8-bit integers, by onnxruntime's own tools. Inputs and outputs stay float32.

int8: products with constant weights are quantised dynamically (weights per channel beforehand, activations by their own
range at each call), tables of embeddings are stored in 8 bits, and convolutions, which onnxruntime computes slowly that
way, get fixed ranges from calibration samples. f16: everything but what works with prototype tables, whose distances
may exceed 65504.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgefl.export.session import open_session

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

#: Weights of fewer numbers stay as they are: 4 KiB are not worth a scale for each channel and a change of type.
SMALLEST = 1024
#: Samples by which nodes are ranked: an audio encoder of the paper's size holds 15 MB a sample in one layer.
PROBE = 4
#: onnxruntime's own scale; warnings are its default.
_WARNINGS, _ERRORS = 2, 3
Feeds = Mapping[str, np.ndarray]


def loaded(data: bytes) -> ModelProto:
    """Decode a model, with each Gemm as MatMul and Add for the quantiser."""
    import onnx
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = ONNXModel(onnx.load_model_from_string(data))
    model.replace_gemm_with_matmul()
    proto: ModelProto = model.model
    return proto


def weight_of(proto: ModelProto, tables: Collection[str]) -> dict[str, str]:
    """Quantisable node -> its weight's name, in the graph's order; without the prototype ``tables``."""
    sizes = {one.name: int(np.prod(one.dims)) for one in proto.graph.initializer if one.name not in tables}
    floats = {one.name for one in proto.graph.initializer if one.data_type == 1}
    at = {"MatMul": 1, "Conv": 1, "Gather": 0}
    found = {}
    for node in proto.graph.node:
        weight = node.input[at[node.op_type]] if node.op_type in at else ""
        if weight in floats and sizes.get(weight, 0) >= SMALLEST:
            found[node.name] = weight
    return found


def to_int8(
    proto: ModelProto, nodes: Collection[str], calibration: Feeds, reduce_range: bool, tables: Collection[str] = ()
) -> bytes:
    """The model with ``nodes`` in 8 bits. ``calibration``: samples of every input, along the first axis; ``tables``:
    those of the inputs that every sample is given whole.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

    kinds = {node.name: node.op_type for node in proto.graph.node if node.name in nodes}
    fixed = [name for name, kind in kinds.items() if kind == "Conv"]
    dynamic = [name for name, kind in kinds.items() if kind != "Conv"]
    with tempfile.TemporaryDirectory(prefix="edgefl-int8-") as folder, _quiet():
        source, ready, path = (Path(folder) / f"{name}.onnx" for name in ("source", "ready", "int8"))
        source.write_bytes(proto.SerializeToString())  # a model handed over as it is would be changed
        if fixed:
            quantize_static(
                source, ready, _Samples(calibration, tables), QuantFormat.QDQ, ["Conv"], True, reduce_range,
                QuantType.QUInt8, QuantType.QInt8, fixed,
            )  # fmt: skip
            source = ready
        if dynamic:
            quantize_dynamic(
                source, path, ["MatMul", "Gather"], True, reduce_range, QuantType.QInt8, dynamic,
                extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
        return (path if dynamic else ready).read_bytes()


class _Samples:
    """Calibration samples one by one, with the interface of onnxruntime's ``CalibrationDataReader``."""

    def __init__(self, feeds: Feeds, tables: Collection[str]) -> None:
        whole = {name: array for name, array in feeds.items() if name in tables}
        own = {name: array for name, array in feeds.items() if name not in tables}
        count = min((len(array) for array in own.values()), default=0)
        self._rows = iter([{**{name: a[i : i + 1] for name, a in own.items()}, **whole} for i in range(count)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next sample, None after the last."""
        return next(self._rows, None)


def to_f16(data: bytes, tables: Collection[str]) -> tuple[bytes, int]:
    """(model in float16 except nodes that depend on the inputs ``tables``, number of float16 nodes)."""
    import onnx
    from onnxruntime.quantization.onnx_model import ONNXModel
    from onnxruntime.transformers.float16 import convert_float_to_float16

    proto = onnx.load_model_from_string(data)
    kept = _after(proto, tables)
    for i, node in enumerate(proto.graph.node):
        node.name = node.name or f"node_{i}"
    blocked = [node.name for node in proto.graph.node if kept.intersection(node.output)]
    half = convert_float_to_float16(proto, keep_io_types=True, node_block_list=blocked)
    _once(half)
    ONNXModel(half).topological_sort()  # the casts of the inputs come last
    _join_casts(half)
    onnx.checker.check_model(half)
    names = {node.name for node in proto.graph.node} - set(blocked)
    return half.SerializeToString(), sum(1 for node in half.graph.node if node.name in names)


def _once(proto: ModelProto) -> None:
    """Remove duplicate casts made by the converter, with the same output."""
    made: set[str] = set()
    for node in list(proto.graph.node):
        if node.output[0] in made:
            proto.graph.node.remove(node)
        made.update(node.output)


def _after(proto: ModelProto, names: Collection[str]) -> set[str]:
    """Names of all values that depend on any of ``names``, themselves included."""
    found = set(names)
    for node in proto.graph.node:  # in topological order
        if found.intersection(node.input):
            found.update(node.output)
    return found


def _join_casts(proto: ModelProto) -> None:
    """Remove casts of float32 values to float16 and back, which lose bits."""
    half, single = 10, 1  # onnx.TensorProto's numbers
    casts = {n.output[0]: (n.input[0], n.attribute[0].i) for n in proto.graph.node if n.op_type == "Cast"}
    back = {
        out: casts[into][0]
        for out, (into, kind) in casts.items()
        if kind == single and casts.get(into, ("", 0))[1] == half
    }
    outputs = {value.name for value in proto.graph.output}
    for node in list(proto.graph.node):
        for i, name in enumerate(node.input):
            if name in back:
                node.input[i] = back[name]
        if node.output[0] in back:
            if node.output[0] in outputs:
                node.op_type, node.input[0] = "Identity", back[node.output[0]]
                del node.attribute[:]
            else:
                proto.graph.node.remove(node)


def by_noise(proto: ModelProto, weights: Mapping[str, str], feeds: Feeds) -> list[str]:
    """The nodes of ``weights``, noisiest first, by relative output error in 8 bits.

    Each has its f32 inputs, so that errors of earlier nodes do not count. ``feeds``: a few samples.
    """
    import onnx

    arrays = {one.name: one for one in proto.graph.initializer}
    nodes = {node.name: node for node in proto.graph.node if node.name in weights}
    wanted = [n for node in nodes.values() if node.op_type == "MatMul" for n in (node.input[0], node.output[0])]
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    known = {value.name for value in (*shown.graph.output, *shown.graph.input)}
    shown.graph.output.extend(onnx.ValueInfoProto(name=n) for n in dict.fromkeys(wanted) if n not in known)
    names = [*dict.fromkeys(n for n in wanted if n not in feeds)]
    found = open_session(shown.SerializeToString()).run(names, dict(feeds))
    values = {**feeds, **dict(zip(names, found, strict=True))}
    noise = {}
    for name, node in nodes.items():
        weight = onnx.numpy_helper.to_array(arrays[weights[name]])
        noise[name] = _noise(node, weight, values)
    return sorted(noise, key=lambda name: -noise[name])


def _noise(node: NodeProto, weight: np.ndarray, values: Mapping[str, np.ndarray]) -> float:
    rough = _rounded(weight, axis=0 if node.op_type == "MatMul" else None)
    if node.op_type == "MatMul":
        exact, rough = values[node.output[0]], _rounded(values[node.input[0]]) @ rough
    else:
        exact = weight
    return float(np.linalg.norm(rough - exact) / max(float(np.linalg.norm(exact)), 1e-12))


def _rounded(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Values rounded to 255 steps of the largest absolute value, per column with ``axis`` 0."""
    step = np.maximum(np.abs(values).max(axis=axis, keepdims=True), 1e-12) / 127
    rounded: np.ndarray = np.round(values / step) * step
    return rounded


def needs_reduced_range(processor: str) -> bool:
    """True if 8-bit products may saturate: x86 without VNNI adds pairs of them in 16 bits."""
    flags = next((line for line in processor.splitlines() if line.startswith("flags")), "").split()
    return bool(flags) and not {"avx512_vnni", "avx_vnni"} & set(flags)


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """Smallest number of nodes to leave in f32 for which ``enough`` is True; None if ``most`` is not.

    Tries 0, then 1, 2, 4, …, ``most``; then halves what lies between the last that was not enough and the first that
    was.
    """
    low, high = -1, 0
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(most, max(1, 2 * high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence onnxruntime's quantisation advice, which does not apply to transformers."""
    import onnxruntime

    def passes(record: logging.LogRecord) -> bool:
        return "quantization" not in Path(record.pathname).parts

    root = logging.getLogger()
    root.addFilter(passes)
    onnxruntime.set_default_logger_severity(_ERRORS)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)
        root.removeFilter(passes)
