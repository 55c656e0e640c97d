"""Attention and GELU in exported files are what onnxruntime fuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from export_fixture import exported
from torch import Tensor, nn

from edgefl.export import tracing
from edgefl.export.bundle_format import MODEL_FILE
from edgefl.export.operators import attention, gelu, translations

ATTENTION, GELU = torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.gelu.default


@pytest.mark.slow
def test_onnxruntime_computes_gelu_as_one_and_transposes_keys_once(tmp_path: Path):
    path = exported().directory / "acc" / MODEL_FILE
    nodes = onnx.load(str(path)).graph.node
    written = Counter(node.op_type for node in nodes)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fused = Counter(node.op_type for node in onnx.load(str(tmp_path / "fused.onnx")).graph.node)
    assert written["Erf"] == 3  # one a block, and the fusion's
    assert (fused["Erf"], fused["Gelu"] + fused["BiasGelu"]) == (0, 3)
    swaps = Counter(tuple(node.attribute[0].ints) for node in nodes if node.op_type == "Transpose")
    assert swaps == {(0, 2, 1, 3): 2 * 3, (0, 2, 3, 1): 2, (1, 0): 1}  # queries, values, answers; keys; prototypes


class Of(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


@pytest.mark.parametrize(
    ("call", "opset", "expected"),
    [
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), 17, {ATTENTION: attention, GELU: gelu}),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), 17, {GELU: gelu}),
        (lambda x: nn.functional.scaled_dot_product_attention(x[0], x[0], x[0]), 17, {GELU: gelu}),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), 17, {ATTENTION: attention}),
        (nn.functional.gelu, 20, {ATTENTION: attention}),
    ],
    ids=["plain", "causal", "three axes", "tanh", "one operator"],
)
def test_other_calls_are_left_to_torch(call: Callable[[Tensor], Tensor], opset: int, expected: dict):
    program = torch.export.export(Of(call), (torch.zeros(3, 2, 5, 4),), strict=False)
    assert translations(program, opset) == expected


def test_a_scale_of_ones_own_and_both_kinds_of_masks_are_written_as_torch_computes_them():
    shape = (2, 3, 5, 4)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3))
    real, added = torch.arange(5) < torch.tensor([[3], [5]]), torch.linspace(-2, 2, 25).reshape(5, 5)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        own, dense = (nn.functional.scaled_dot_product_attention(x, k, v, m) for m in (real[:, None, None, :], added))
        return nn.functional.scaled_dot_product_attention(x, k, v, scale=0.3), own, dense

    with tracing._quiet():
        program = torch.export.export(Of(call), (q,), strict=False)
        table = translations(program, 18)
        proto = torch.onnx.export(
            program, (), dynamo=True, verbose=False, opset_version=18, custom_translation_table=table
        ).model_proto
    assert "Reshape" not in {node.op_type for node in proto.graph.node}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: q.numpy()})
    for one, expected in zip(found, call(q), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), expected, rtol=0, atol=1e-6)
