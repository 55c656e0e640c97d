"""Torch module of a bundle (encode, project, fill in the absent modalities, fuse, classify), and its export to ONNX.

Which modalities a row has is an input where there are several: nothing of a modality that a row lacks reaches its
answer. Absent modalities are filled in by the code of training and evaluation (``edgefl.training.fill``).
Prototype tables are inputs of a fixed capacity P, of which ``valid`` says which rows hold one: all false gives the zero
mask. Small networks that match, and networks that reconstruct, are inside the graph.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from edgefl import __version__
from edgefl.errors import ExportError
from edgefl.export.bundle_format import Axis, Manifest, Port, table_names
from edgefl.export.form import Form, Tables
from edgefl.export.opset import LEAST, lower
from edgefl.models.encoder import TokenState
from edgefl.models.spec import shares_attention
from edgefl.models.staged import StagedModel
from edgefl.models.vectors import unit
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher, Table
from edgefl.training.fill import BY_MATCH, AtHand, Made, Make, fill
from edgefl.training.matching import WeightedNetworks, answers

if TYPE_CHECKING:
    from onnx import ModelProto

#: Rows of the example batch: not 0, 1 or a size that occurs elsewhere in a model, lest torch takes them for the same.
EXAMPLE_ROWS = 7
_FIELDS = {"float32": 1, "int64": 7, "bool": 9}  # onnx.TensorProto's numbers


class BundleGraph(nn.Module):
    """The model for the modalities ``given``, of which a row has one at least; stand-ins for the others by ``make``.

    ``matcher``: how prototypes are found; ``networks``: those of each modality of ``given`` where it is a trained one.
    Labelled models give logits and probabilities [B, C] and, with tables, for the O modalities that may be absent the
    matched rows [B, O, k] (-1: none) and their weights. Unlabelled ones give each modality's normalised projection
    [B, d], zero where it is absent.
    """

    def __init__(
        self,
        model: StagedModel,
        depth: int,
        given: Sequence[str],
        make: Make,
        matcher: Matcher = DEFAULT_MATCHER,
        networks: Mapping[str, WeightedNetworks] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.depth = depth
        self.given = tuple(given)
        self.make = make
        self.matcher = matcher
        self.networks = nn.ModuleList(network for each in (networks or {}).values() for _, network in each)
        self.answers = {m: answers(each, m) for m, each in (networks or {}).items()}

    def forward(
        self, inputs: tuple[Tensor, ...], presence: tuple[Tensor, ...], tables: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """``inputs``: each [B, …] in the order of ``given``; ``presence``: for each which rows have it [B] (above one
        half), none at all: every row has them; ``tables``: rows and valid of each modality of ``table_names`` in turn,
        none where the stand-ins are not made of prototypes.
        """
        has = {m: flags > 0.5 for m, flags in zip(self.given, presence, strict=True)} if presence else {}
        states = self._encode(dict(zip(self.given, inputs, strict=True)), has)
        r = {m: self.model.project(m, self.model.pool_tokens(m, state)) for m, state in states.items()}
        r |= {m: torch.where(rows.unsqueeze(1), r[m], 0.0) for m, rows in has.items()}
        if not self.model.spec.classes:
            return tuple(unit(own) for own in r.values())
        names = table_names(self.model.spec, self.given, self.matcher) if tables else ()
        pairs = zip(names, tables[::2], tables[1::2], strict=True)
        found = {m: Table(means, valid > 0.5) for m, means, valid in pairs}
        filled = fill(self.make, self.at_hand(r, has, found))
        logits = self.model.classify(self.model.fuse(filled.values, has or None, states, counted=filled.counted))
        return (logits, logits.softmax(dim=1), *_matches(filled.made, has))

    def at_hand(self, r: Mapping[str, Tensor], has: Mapping[str, Tensor], tables: Mapping[str, Table]) -> AtHand:
        """Values that stand-ins are made of."""
        return AtHand(r, has, self.model, tables, None, BY_MATCH, self.matcher, self.answers)

    def _encode(self, inputs: dict[str, Tensor], has: Mapping[str, Tensor]) -> dict[str, TokenState]:
        # Past StagedModel.embed, whose check of the sample's shape would fix the length of texts.
        states: dict[str, TokenState] = {m: self.model.part(f"{m}/embed")(x) for m, x in inputs.items()}
        masks = {m: state.mask for m, state in states.items()}
        if has and shares_attention(self.model.spec):  # attention over what a row has
            states = {m: state._replace(mask=_shown(state, has[m])) for m, state in states.items()}
        for k in range(1, self.depth + 1):
            states = self.model.run_stage(k, states)
        return {m: self.model.norm(m, state)._replace(mask=masks[m]) for m, state in states.items()}


def _matches(made: Mapping[str, Made], has: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Matched rows and weights [B, O, k] of all that were mixed, none of a modality that a row has."""
    rows, weights = [], []
    for m, new in made.items():
        if new.mixture is not None:
            needed = ~has[m].unsqueeze(1) if m in has else None
            rows.append(new.mixture.rows if needed is None else torch.where(needed, new.mixture.rows, -1))
            weights.append(new.mixture.weights if needed is None else torch.where(needed, new.mixture.weights, 0.0))
    return (torch.stack(rows, 1), torch.stack(weights, 1)) if rows else ()


def _shown(state: TokenState, has: Tensor) -> Tensor:
    """Flags [B, N] of the tokens that are real and of a modality that the row has."""
    rows = has.unsqueeze(1).expand(-1, state.tokens.shape[1])
    return rows if state.mask is None else rows & state.mask


def to_onnx(graph: BundleGraph, manifest: Manifest, tables: Mapping[str, np.ndarray], form: Form) -> bytes:
    """The ONNX file of a bundle whose ports ``manifest`` describes. ``tables``: those of prototypes by input, in the
    order the graph takes them; ``form`` says where they go, and which operator set is written.

    Raises ExportError when torch cannot export the graph, made a dynamic axis constant, or the file exceeds 2 GiB.
    """
    import onnx

    given, axes = (*manifest.inputs, *manifest.presence), manifest.axes
    parts = (manifest.inputs, manifest.presence)
    example = tuple(tuple(_example(port, axes) for port in ports) for ports in parts)
    defaults = tuple(torch.from_numpy(np.ascontiguousarray(table)) for table in tables.values())
    try:
        dims = {n: torch.export.Dim(f"axis{i}", min=a.minimum, max=a.maximum) for i, (n, a) in enumerate(axes.items())}
        shapes = tuple(
            tuple({at: dims[size] for at, size in enumerate(port.shape) if isinstance(size, str)} for port in ports)
            for ports in parts
        )
        proto = _export(
            graph.eval(),
            (*example, defaults),
            (*shapes, (None,) * len(defaults)),
            ([*(port.name for port in given), *tables], [port.name for port in manifest.outputs]),
            form.opset,
        )
        _strip(proto)
        _name_axes(proto, given, manifest.outputs)
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
            f"the graph of {' + '.join(graph.given)} can not be exported to ONNX: {reason}",
            remedy="Run it again with --debug to see the exporter's own words; `edgefl doctor` lists tested versions.",
        ) from error
    return data


def _place_tables(proto: ModelProto, tables: Mapping[str, np.ndarray], where: Tables) -> None:
    """Put the tables into the file, unless each call gives them; as inputs, unless they are fixed."""
    import onnx

    if where != "required":
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in tables.items())
    if where == "fixed":
        inputs = [value for value in proto.graph.input if value.name not in tables]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)


def _labelled(proto: ModelProto, manifest: Manifest) -> None:
    """Put what a runtime without the manifest needs to know into the model's own metadata."""
    import onnx

    told = {"edgefl.bundle": manifest.name, "edgefl.version": __version__}
    if manifest.task == "classify":
        told["labels"] = json.dumps(manifest.labels, ensure_ascii=False)
    onnx.helper.set_model_props(proto, told)


def _example(port: Port, axes: Mapping[str, Axis]) -> Tensor:
    rest = [axes[size].maximum or 1 if isinstance(size, str) else size for size in port.shape[1:]]
    if port.dtype == "int64":
        return torch.ones(EXAMPLE_ROWS, *rest, dtype=torch.int64)
    return torch.zeros(EXAMPLE_ROWS, *rest)


def _export(
    graph: BundleGraph,
    example: tuple[object, ...],
    shapes: tuple[object, ...],
    names: tuple[list[str], list[str]],
    opset: int,
) -> ModelProto:
    """The model proto. The tables are inputs of the trace, so that no optimisation folds them away."""
    with torch.no_grad(), _quiet():
        program = torch.export.export(graph, example, dynamic_shapes=shapes, strict=False)
        onnx_program = torch.onnx.export(
            program, (), dynamo=True, verbose=False, optimize=True, input_names=names[0], output_names=names[1],
            opset_version=max(opset, LEAST),
        )  # fmt: skip
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


def _strip(proto: ModelProto) -> None:
    """Remove what only the exporter's authors need, among it stack traces with paths of this machine.

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
