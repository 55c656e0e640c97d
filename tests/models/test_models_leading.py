"""An encoder's last block for its pooled tokens alone: the same tokens and gradients, for less."""

from __future__ import annotations

import pytest
import torch

from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.resources.tensor_counters import FlopCounter

torch.set_num_threads(1)
SPECS = {
    "sensor": EncoderSpec("sensor", (24, 3), width=16, depth=2, heads=2, patch=4),
    "vision": EncoderSpec("vision", (16, 16, 3), width=16, depth=2, heads=2, patch=4),
    "conv": EncoderSpec("vision", (16, 16, 3), width=16, depth=2, heads=2, patch=4, arch="conv"),
    "audio": EncoderSpec("audio", (24, 16), width=16, depth=2, heads=2, patch=8),
    "distilbert": EncoderSpec("text", (9,), width=16, depth=2, heads=2, vocabulary=30),
    "bert": EncoderSpec("text", (9,), width=16, depth=2, heads=2, vocabulary=30, arch="bert"),
}


def samples(spec: EncoderSpec) -> torch.Tensor:
    torch.manual_seed(1)
    if spec.kind != "text":
        return torch.rand(5, *spec.input_shape)
    ids = torch.randint(1, 30, (5, 9))
    ids[0, 4:] = 0  # padding is not attended to
    return ids


@pytest.mark.parametrize("name", SPECS)
def test_pooled_tokens_and_gradients_are_those_of_the_whole_block(name: str) -> None:
    spec = SPECS[name]
    model = build(ModelSpec({"m": spec}, 2, HeadSpec(width=8, out=4)), seed=3)
    x = samples(spec)
    found = []
    for encode in (model.encode, lambda m, x: model.pool_tokens(m, model.encode_tokens(m, x))):
        model.zero_grad()
        with FlopCounter() as counter:
            h = encode("m", x)
            (h * torch.linspace(-1, 2, h.numel()).view_as(h)).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((h.detach(), gradients, counter.flops))
    (h, gradients, flops), (whole, every, all_flops) = found
    torch.testing.assert_close(h, whole, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == every.keys()
    for parameter, gradient in every.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-4, atol=1e-4, msg=parameter)
    assert flops < 0.85 * all_flops  # one of two blocks loses most of its work


def test_a_mean_over_tokens_needs_them_all() -> None:
    spec = EncoderSpec("sensor", (24, 3), width=16, depth=2, heads=2, patch=4, pool="mean")
    model = build(ModelSpec({"m": spec}, 2, HeadSpec(width=8, out=4)), seed=3)
    x = samples(spec)
    tokens = model.encode_tokens("m", x).tokens
    assert tokens.shape == (5, 7, 16)
    torch.testing.assert_close(model.encode("m", x), tokens.mean(dim=1))
