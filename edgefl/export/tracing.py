"""ONNX files of bundles, each cut out of a single torch trace of all their graphs.

Tracing costs 10 ms a node and a second besides, and was 19 of 20 s for three sensors with each bundle traced alone.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from edgefl import __version__
from edgefl.data.label_sets import plain_names
from edgefl.errors import ExportError
from edgefl.export.bundle_format import Axis, Manifest, Port
from edgefl.export.drafts import Draft
from edgefl.export.form import Form, Tables
from edgefl.export.graph import Together
from edgefl.export.operators import translations
from edgefl.export.opset import LEAST, lower
from edgefl.export.recurrent import recurrent_as_one

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

#: Rows of the example batch: not 0, 1 or a size that occurs elsewhere in a model, lest torch takes them for the same.
EXAMPLE_ROWS = 7
_FIELDS = {"float32": 1, "int64": 7, "bool": 9}  # onnx.TensorProto's numbers


class Trace:
    """Joint trace of a model's bundles, made at the first ``cut``."""

    def __init__(self, drafts: Sequence[Draft], opset: int) -> None:
        self._drafts, self._opset = tuple(drafts), opset

    @functools.cached_property
    def _proto(self) -> ModelProto:
        """ONNX model of all the graphs; outputs are named ``<bundle>/<output>``."""
        ports: dict[str, Port] = {}
        axes: dict[str, Axis] = {}
        tables: dict[str, np.ndarray] = {}
        for draft in self._drafts:
            ports |= {port.name: port for port in (*draft.manifest.inputs, *draft.manifest.presence)}
            axes |= draft.manifest.axes
            tables |= draft.tables
        names = [*ports, *tables]
        graph = Together([one.graph for one in self._drafts], names, [list(one.tables) for one in self._drafts])
        dims = {n: torch.export.Dim(f"axis{i}", min=a.minimum, max=a.maximum) for i, (n, a) in enumerate(axes.items())}
        shapes = [{i: dims[s] for i, s in enumerate(p.shape) if isinstance(s, str)} for p in ports.values()]
        example = [_example(port, axes) for port in ports.values()]
        example += [torch.from_numpy(np.ascontiguousarray(table)) for table in tables.values()]
        outputs = [_joint_name(one.manifest, port) for one in self._drafts for port in one.manifest.outputs]
        proto = exported(graph.eval(), example, [*shapes, *[None] * len(tables)], (names, outputs), self._opset)
        _strip(proto)
        return proto

    def cut(self, draft: Draft) -> ModelProto:
        """ONNX model with only the nodes and weights of a bundle."""
        import onnx

        whole, manifest = self._proto.graph, draft.manifest
        named = {_joint_name(manifest, port): port.name for port in manifest.outputs}
        needed, nodes = set(named), []
        for node in reversed(whole.node):  # in topological order
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        values = {value.name: value for value in (*whole.input, *whole.output)}
        ports = [port.name for port in (*manifest.inputs, *manifest.presence)]
        taken = [values[name] for name in (*ports, *draft.tables)]
        weights = [one for one in whole.initializer if one.name in needed]
        own = onnx.helper.make_graph(nodes[::-1], whole.name, taken, [values[name] for name in named], weights)
        _count_rows(own, {value.name for value in whole.input}, ports[0])
        for value in own.output:
            value.name = named[value.name]
        for node in own.node:
            for names in (node.input, node.output):
                names[:] = [named.get(name, name) for name in names]
        return onnx.helper.make_model(
            own,
            opset_imports=self._proto.opset_import,
            ir_version=self._proto.ir_version,
            producer_name=self._proto.producer_name,
            producer_version=self._proto.producer_version,
        )


def _count_rows(graph: GraphProto, inputs: Collection[str], own: str) -> None:
    """Read the batch size from the input ``own`` in place of joint ``inputs`` absent from this bundle. Raises
    ExportError for any other use of an absent input.
    """
    known = {value.name for value in graph.input}
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in inputs and name not in known:
                read = {one.name: one.i for one in node.attribute}
                if node.op_type != "Shape" or (read.get("start", 0), read.get("end")) != (0, 1):
                    raise ExportError(f"the graph of {own} needs the input '{name}' for a {node.op_type}")
                node.input[i] = own


def _joint_name(manifest: Manifest, port: Port) -> str:
    return f"{manifest.name}/{port.name}"


def to_onnx(draft: Draft, form: Form, trace: Trace | None = None) -> bytes:
    """The bundle's ONNX file. ``form`` says where its tables go, and which operator set is written; ``trace``:
    of this bundle and others, None: of this one alone.

    Raises ExportError when torch cannot export the graph, made a dynamic axis constant, or the file exceeds 2 GiB.
    """
    import onnx

    manifest, tables = draft.manifest, draft.tables
    try:
        proto = (trace or Trace([draft], form.opset)).cut(draft)
        _name_axes(proto, (*manifest.inputs, *manifest.presence), manifest.outputs)
        _place_tables(proto, tables, form.tables)
        _labelled(proto, manifest)
        lower(proto, form.opset)
        onnx.checker.check_model(proto, full_check=True)
        data: bytes = proto.SerializeToString()
    except ExportError:
        raise
    except Exception as error:  # torch, onnxscript and protobuf each raise kinds of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"the graph of {' + '.join(manifest.modalities)} cannot be exported to ONNX: {reason}",
            remedy="Run it again with --debug to see the exporter's own words; `edgefl doctor` lists tested versions.",
        ) from error
    return data


def _place_tables(proto: ModelProto, tables: Mapping[str, np.ndarray], where: Tables) -> None:
    """Store the tables in the model, unless ``where`` is "required"; "fixed" ones are no inputs."""
    import onnx

    if where != "required":
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in tables.items())
    if where == "fixed":
        inputs = [value for value in proto.graph.input if value.name not in tables]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)


def _labelled(proto: ModelProto, manifest: Manifest) -> None:
    """Store name, version and labels in the ONNX metadata, for runtimes without the manifest."""
    import onnx

    told = {"edgefl.bundle": manifest.name, "edgefl.version": __version__}
    if manifest.task == "classify":
        told["labels"] = json.dumps(plain_names(manifest.labels), ensure_ascii=False)
    onnx.helper.set_model_props(proto, told)


def _example(port: Port, axes: Mapping[str, Axis]) -> Tensor:
    rest = [axes[size].maximum or 1 if isinstance(size, str) else size for size in port.shape[1:]]
    if port.dtype == "int64":
        return torch.ones(EXAMPLE_ROWS, *rest, dtype=torch.int64)
    return torch.zeros(EXAMPLE_ROWS, *rest)


def exported(
    graph: nn.Module,
    example: Sequence[Tensor],
    shapes: Sequence[Mapping[int, object] | None],
    names: tuple[list[str], list[str]],
    opset: int,
) -> ModelProto:
    """Trace a graph to an ONNX model. Tables are inputs of the trace, so that no optimisation folds them."""
    with torch.no_grad(), _quiet(), recurrent_as_one() as recurrent:
        program = torch.export.export(graph, (tuple(example),), dynamic_shapes=(tuple(shapes),), strict=False)
        onnx_program = torch.onnx.export(
            program, (), dynamo=True, verbose=False, optimize=True, input_names=names[0], output_names=names[1],
            opset_version=max(opset, LEAST), custom_translation_table={**translations(program, opset), **recurrent},
        )  # fmt: skip
    if onnx_program is None:
        raise ExportError("torch.onnx.export returned nothing", remedy="Use a torch of 2.6 or newer.")
    return onnx_program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks; errors pass."""
    # "torchvision is not installed. Skipping torchvision::nms", four lines an export: no model here uses it.
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch's own use of its own deprecated class while it copies the exported program.
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
            # Of a GRU's list of its own weights, which the trace restores.
            warnings.filterwarnings("ignore", message=r"(?s).*_flat_weights.*were assigned during export")
            yield
    finally:
        logger.setLevel(level)


def _strip(proto: ModelProto) -> None:
    """Remove the exporter's debug metadata, such as stack traces with local paths.

    ``value_info`` goes too: `onnxruntime.quantization.quantize_dynamic` fails on it, and sessions infer them.
    """
    parts = (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer)
    for part in parts:
        part.doc_string = ""
        del part.metadata_props[:]
    del proto.graph.value_info[:]


def _name_axes(proto: ModelProto, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
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
