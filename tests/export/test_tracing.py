"""Files of bundles that were traced together: each has what it needs and nothing of the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from export_fixture import exported, stage_of
from onnx import TensorProto, helper

from edgefl.errors import ExportError
from edgefl.export import tracing
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MODEL_FILE, Manifest, Port
from edgefl.export.drafts import Draft, TrainedState


def whole(*, of: int = 0) -> onnx.ModelProto:
    """y = x · w in a, z = v · w in b; the rows of both are counted in v, by its axis ``of``."""
    nodes = [
        helper.make_node("Shape", ["v"], ["size"], start=of, end=of + 1),
        helper.make_node("Concat", ["size", "two"], ["shape"], axis=0),
        helper.make_node("Expand", ["w", "shape"], ["wide"]),
        helper.make_node("Mul", ["x", "wide"], ["a/y"]),
        helper.make_node("Mul", ["v", "only"], ["b/y"]),
    ]
    weights = [
        helper.make_tensor("two", TensorProto.INT64, [1], [2]),
        helper.make_tensor("w", TensorProto.FLOAT, [2], [3.0, 5.0]),
        helper.make_tensor("only", TensorProto.FLOAT, [2], [7.0, 7.0]),
    ]
    ports = {name: helper.make_tensor_value_info(name, 1, ["n", 2]) for name in ("x", "v", "a/y", "b/y")}
    graph = helper.make_graph(nodes, "both", [ports["x"], ports["v"]], [ports["a/y"], ports["b/y"]], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def cut(name: str, takes: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    port, out = (Port(one, "float32", ("batch", 2)) for one in (takes, "y"))
    trace = tracing.Trace([], 17)
    trace.__dict__["_proto"] = proto
    return trace.cut(Draft(None, Manifest(name=name, inputs=(port,), outputs=(out,)), {}))  # type: ignore[arg-type]


def test_a_bundle_has_its_own_nodes_and_weights_and_counts_its_own_rows():
    a, b = cut("a", "x", whole()), cut("b", "v", whole())
    assert ([one.name for one in a.graph.input], [one.name for one in a.graph.initializer]) == (["x"], ["two", "w"])
    assert ([one.op_type for one in b.graph.node], [one.name for one in b.graph.initializer]) == (["Mul"], ["only"])
    x = np.array([[1, 1], [2, 2], [3, 4]], np.float32)
    for proto, takes, expected in ((a, "x", x * [3, 5]), (b, "v", x * 7)):
        onnx.checker.check_model(proto, full_check=True)
        (found,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(["y"], {takes: x})
        np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_what_only_another_bundle_is_given_is_an_error():
    with pytest.raises(ExportError, match="the graph of x needs the input 'v' for a Shape"):
        cut("a", "x", whole(of=1))


@pytest.mark.parametrize(("name", "absent"), [("acc", "gyro"), ("gyro", "acc")])
def test_a_single_bundle_holds_nothing_of_the_other_encoder(name: str, absent: str):
    graph = onnx.load(str(exported().directory / name / MODEL_FILE)).graph
    assert [one.name for one in graph.initializer if f"{name}/embed" in one.name]
    assert [one.name for one in graph.initializer if f"{absent}/" in one.name or one.name.endswith(f"/{absent}")] == []
    used = {value for node in graph.node for value in node.input} | {one.name for one in graph.output}
    assert {one.name for one in graph.initializer} <= used


def test_the_bundles_of_a_model_are_traced_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made, seen = exported(), []

    def traced(graph: tracing.Together, *_rest: object) -> onnx.ModelProto:
        seen.append([one.given for one in graph.graphs])
        raise ExportError("enough")

    monkeypatch.setattr(tracing, "exported", traced)
    with pytest.raises(ExportError, match="enough"):
        export_bundles(TrainedState(made.spec, stage_of(made.spec), made.parts), tmp_path / "bundles")
    assert seen == [[("acc",), ("gyro",), ("acc", "gyro")]]
