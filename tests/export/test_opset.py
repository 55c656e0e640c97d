"""Operator set 18 written as 17: the same answers, or a refusal."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from edgefl.errors import ExportError
from edgefl.export.opset import lower
from edgefl.export.session import open_session


def model(node: onnx.NodeProto, outputs: list[str], **constants: list[int]) -> onnx.ModelProto:
    """One node on x [2, 7], of set 18."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 7])
    rank = 1 if node.op_type == "ReduceMax" else 2
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name in outputs]
    kept = [helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in constants.items()]
    graph = helper.make_graph([node], "g", [x], made, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


CASES = {
    "Split": (helper.make_node("Split", ["x"], ["a", "b", "c"], axis=1, num_outputs=3), ["a", "b", "c"], {}),
    "ReduceMax": (helper.make_node("ReduceMax", ["x", "axes"], ["a"], keepdims=0), ["a"], {"axes": [1]}),
    "Pad": (helper.make_node("Pad", ["x", "pads"], ["a"]), ["a"], {"pads": [0, 1, 0, 2]}),
    "Add": (helper.make_node("Add", ["x", "x"], ["a"]), ["a"], {}),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_17_can_say_means_the_same(kind: str):
    node, outputs, constants = CASES[kind]
    proto = model(node, outputs, **constants)
    x = np.random.default_rng(0).standard_normal((2, 7)).astype(np.float32)
    before = ReferenceEvaluator(proto).run(None, {"x": x})
    lower(proto, 17)
    onnx.checker.check_model(proto, full_check=True)
    assert (proto.opset_import[0].version, proto.ir_version) == (17, 8)
    for a, b in zip(before, open_session(proto.SerializeToString()).run(outputs, {"x": x}), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        (helper.make_node("Pad", ["x", "pads", "", "axes"], ["a"]), {"pads": [1, 2], "axes": [1]}),
        (helper.make_node("BitwiseNot", ["x"], ["a"]), {}),
    ],
    ids=["Pad of axes", "new in 18"],
)
def test_what_17_can_not_say_is_refused(node: onnx.NodeProto, constants: dict[str, list[int]]):
    with pytest.raises(
        ExportError, match=f"the operators {node.op_type} cannot be written in operator set 17"
    ) as found:
        lower(model(node, ["a"], **constants), 17)
    assert "--opset 18" in str(found.value.remedy)


def test_a_newer_set_stays_and_gets_the_oldest_format_that_holds_it():
    proto = model(*CASES["Add"][:2])
    proto.opset_import[0].version = 20
    lower(proto, 20)
    assert (proto.opset_import[0].version, proto.ir_version) == (20, 9)
