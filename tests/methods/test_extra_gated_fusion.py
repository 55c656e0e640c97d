"""The example package's gated fusion (GMU): by hand, its gates, and rows that lack a modality."""

from __future__ import annotations

import math

import pytest
import torch
from extra_fixture import extra

from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec

build = extra("gated_fusion").build


def unit(gate: str, modalities: str = "ab", d: int = 1, width: int = 1) -> torch.nn.Module:
    encoders = {m: EncoderSpec(input_shape=(8, 1)) for m in modalities}
    torch.manual_seed(3)
    return build(ModelSpec(encoders, head=HeadSpec(8, d), fusion_width=width, classes=2), gate=gate)


def flags(*rows: bool) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("gate", "z"), [("sigmoid", (0.5, 1 / (1 + math.exp(-1)))), ("softmax", (1 / (1 + math.e), math.e / (1 + math.e)))]
)
@torch.no_grad()
def test_by_hand(gate: str, z: tuple[float, float]):
    """W_a = 1, W_b = 2, r = (1, 0.5), V r = (0, r_a): f = z_a tanh(1) + z_b tanh(2 * 0.5)."""
    fusion = unit(gate)
    for parameter in fusion.parameters():
        parameter.zero_()
    fusion.hidden[0].weight.fill_(1.0)
    fusion.hidden[1].weight.fill_(2.0)
    fusion.gates.weight[1, 0] = 1.0
    r = [torch.tensor([[1.0]]), torch.tensor([[0.5]])]
    expected = (z[0] + z[1]) * math.tanh(1.0)
    assert float(fusion(r, None)) == pytest.approx(expected, abs=1e-6)
    assert float(fusion(r, [flags(True), flags(True)])) == pytest.approx(expected, abs=1e-6)
    # a alone: the gates see (1, 0), and b's counts for nothing; of one gate the softmax is 1.
    alone = float(fusion(r, [flags(True), flags(False)]))
    assert alone == pytest.approx((1.0 if gate == "softmax" else 0.5) * math.tanh(1.0), abs=1e-6)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_what_stands_where_a_modality_is_not_shown_does_not_matter(gate: str):
    fusion = unit(gate, "abc", 4, 5)
    r = [torch.randn(3, 4).requires_grad_() for _ in range(3)]
    shown = [flags(True, True, False), flags(True, False, False), flags(True, True, False)]
    fused = fusion(r, shown)
    assert fused.shape == (3, 5)
    assert (fused[2] == 0).all()  # nothing is shown
    other = [r[0], torch.where(shown[1].unsqueeze(1), r[1], 9.0), r[2]]
    assert torch.equal(fusion(other, shown), fused)
    fused.sum().backward()
    assert (r[1].grad[1:] == 0).all()
    assert r[1].grad[0].any()
    assert all(torch.isfinite(p.grad).all() for p in fusion.parameters())


def test_the_gates_of_an_entry_sum_to_one_over_the_modalities_shown():
    fusion = unit("softmax", "abc", 4, 5)
    with torch.no_grad():
        for own in fusion.hidden:
            own.weight.zero_()
            own.bias.fill_(20.0)  # tanh(20) is 1 in float32
    r = [torch.randn(2, 4) for _ in range(3)]
    torch.testing.assert_close(fusion(r, None), torch.ones(2, 5))
    shown = [flags(True, False), flags(False, False), flags(True, True)]
    torch.testing.assert_close(fusion(r, shown), torch.ones(2, 5))
