"""From the torch module to an ONNX model: exported, named, stripped of traces, with the tables as default inputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.errors import ExportError
from edgefl.export.graph import BundleGraph
from edgefl.export.manifest import Axis, Port

#: Rows of the example batch: not 0, 1 or a size that occurs elsewhere in a model, lest torch takes them for the same.
EXAMPLE_ROWS = 7
_FIELDS = {"float32": 1, "int64": 7, "bool": 9}  # onnx.TensorProto's numbers


def to_onnx(
    graph: BundleGraph,
    inputs: Sequence[Port],
    presence: Sequence[Port],
    outputs: Sequence[Port],
    axes: Mapping[str, Axis],
    tables: Mapping[str, np.ndarray],
) -> bytes:
    """The ONNX file. ``presence``: which samples have each input, () where all do; ``tables``: optional inputs by name,
    in the order the graph takes them, with their defaults.

    Raises ExportError when torch cannot export the graph, made a dynamic axis constant, or the file exceeds 2 GiB.
    """
    import onnx

    given = (*inputs, *presence)
    example = tuple(tuple(_example(port, axes) for port in ports) for ports in (inputs, presence))
    defaults = tuple(torch.from_numpy(np.ascontiguousarray(table)) for table in tables.values())
    try:
        shapes = _dynamic((inputs, presence), axes)
        proto = _export(
            graph.eval(),
            (*example, defaults),
            (*shapes, (None,) * len(defaults)),
            [*(port.name for port in given), *tables],
            [port.name for port in outputs],
        )
        _strip(proto)
        _name_axes(proto, given, outputs)
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in tables.items())
        onnx.checker.check_model(proto)
        data: bytes = proto.SerializeToString()
    except ExportError:
        raise
    except Exception as error:  # torch, onnxscript and protobuf each raise kinds of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"the graph of {' + '.join(graph.given)} can not be exported to ONNX: {reason}",
            remedy="Run it again with --debug to see the exporter's own words; `edgefl doctor` lists tested versions.",
        ) from error
    return data


def _example(port: Port, axes: Mapping[str, Axis]) -> Tensor:
    rest = [axes[size].maximum or 1 if isinstance(size, str) else size for size in port.shape[1:]]
    if port.dtype == "int64":
        return torch.ones(EXAMPLE_ROWS, *rest, dtype=torch.int64)
    return torch.zeros(EXAMPLE_ROWS, *rest)


def _dynamic(groups: Sequence[Sequence[Port]], axes: Mapping[str, Axis]) -> tuple[tuple[dict[int, Any], ...], ...]:
    """Each port's dynamic axes as torch takes them."""
    dims = {
        name: torch.export.Dim(f"axis{i}", min=axis.minimum, max=axis.maximum)
        for i, (name, axis) in enumerate(axes.items())
    }
    return tuple(
        tuple({at: dims[size] for at, size in enumerate(p.shape) if isinstance(size, str)} for p in ports)
        for ports in groups
    )


def _export(
    graph: BundleGraph, example: tuple[Any, ...], shapes: tuple[Any, ...], names: list[str], outputs: list[str]
) -> Any:
    """The model proto. The tables are inputs of the trace, so that no optimisation folds them away."""
    with torch.no_grad(), _quiet():
        program = torch.export.export(graph, example, dynamic_shapes=shapes, strict=False)
        onnx_program = torch.onnx.export(
            program, (), dynamo=True, verbose=False, optimize=True, input_names=names, output_names=outputs
        )
    if onnx_program is None:
        raise ExportError("torch.onnx.export returned nothing", remedy="Use a torch of 2.6 or newer.")
    return onnx_program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks that tell a user nothing; errors pass."""
    # "torchvision is not installed. Skipping torchvision::nms", four lines an export: no model here uses it.
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch's own use of its own deprecated class while it copies the exported program.
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def _strip(proto: Any) -> None:
    """Remove what only the exporter's authors need, among it stack traces with paths of this machine.

    ``value_info`` goes too: `onnxruntime.quantization.quantize_dynamic` fails on it, and sessions infer them.
    """
    parts = (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer)
    for part in parts:
        part.doc_string = ""
        del part.metadata_props[:]
    del proto.graph.value_info[:]


def _name_axes(proto: Any, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """Give every dynamic axis its name; ExportError when an axis or a type is not what it should be."""
    values = {value.name: value.type.tensor_type for value in (*proto.graph.input, *proto.graph.output)}
    for port in (*inputs, *outputs):
        tensor = values[port.name]
        if tensor.elem_type != _FIELDS[port.dtype] or len(tensor.shape.dim) != len(port.shape):
            raise ExportError(f"'{port.name}' is not {port.dtype} {list(port.shape)} in the exported graph")
        for dim, size in zip(tensor.shape.dim, port.shape, strict=True):
            if isinstance(size, str):
                if dim.HasField("dim_value"):
                    raise ExportError(f"'{port.name}': the axis '{size}' became the constant {dim.dim_value}")
                dim.dim_param = size
            elif dim.dim_value != size:
                raise ExportError(f"'{port.name}': an axis of {size} became {dim.dim_param or dim.dim_value}")
