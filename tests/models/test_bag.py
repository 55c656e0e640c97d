"""The bag encoder: the mean of real ids' vectors, one token, no effect of padding."""

from __future__ import annotations

import torch

from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build

SPEC = EncoderSpec("text", (6,), width=4, depth=2, heads=1, vocabulary=9, arch="bag")


def test_the_token_is_the_normed_mean_of_the_real_vectors() -> None:
    model = build(ModelSpec({"t": SPEC}, 2, HeadSpec(width=8, out=4)), seed=1)
    embed = model.part("t/embed")
    with torch.no_grad():
        embed.vectors.weight.copy_(torch.arange(36.0).reshape(9, 4) ** 2)
        state = model.embed("t", torch.tensor([[2, 2, 5, 0, 0, 0], [0] * 6]))
        mean = (2 * embed.vectors.weight[2] + embed.vectors.weight[5]) / 3
        torch.testing.assert_close(state.tokens[0, 0], torch.nn.functional.layer_norm(mean, (4,)))
    assert state.tokens.shape == (2, 1, 4)
    assert state.tokens[1].isfinite().all()  # an absent sample's row of zeros


def test_order_and_padding_change_nothing_and_every_part_learns() -> None:
    model = build(ModelSpec({"t": SPEC}, 2, HeadSpec(width=8, out=4)), seed=1)
    ids = torch.tensor([[2, 3, 5, 0, 0, 0], [5, 0, 2, 3, 0, 0]])
    h = model.encode("t", ids)
    torch.testing.assert_close(h[0], h[1])
    (h * torch.linspace(-1, 2, h.numel()).view_as(h)).sum().backward()
    untouched = {n for n, p in model.named_parameters() if n.startswith("_parts.t/") and p.grad is None}
    assert not untouched
