"""The conv encoder: what its convolutions give, no effect of other samples, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from edgefl.models.check import spec_problems, token_count
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build

SPEC = EncoderSpec("vision", (16, 8, 3), width=8, depth=2, heads=2, patch=4, arch="conv")


def of(encoder: EncoderSpec) -> ModelSpec:
    return ModelSpec({"photo": encoder}, 2, HeadSpec(width=8, out=4))


def test_tokens_are_the_outcome_of_as_many_convolutions_as_halve_to_the_patch() -> None:
    model = build(of(SPEC), seed=1)
    embed = model.part("photo/embed")
    x = torch.rand(2, 16, 8, 3)
    with torch.no_grad():
        tokens = model.embed("photo", x).tokens
        assert tokens.shape == (2, 1 + 4 * 2, 8)
        assert len(tokens[0]) == token_count(SPEC)
        first, norm, _, second, again, _, last = embed.stem
        assert (first.out_channels, second.out_channels, last.kernel_size) == (4, 8, (1, 1))
        half = torch.nn.functional.gelu(norm(first(x.permute(0, 3, 1, 2) / 0.5 - 1)))
        given = last(torch.nn.functional.gelu(again(second(half))))  # [B, D, 4, 2]
        torch.testing.assert_close(tokens[:, 1:], given.flatten(2).transpose(1, 2) + embed.position_embeddings[:, 1:])


def test_the_class_token_is_given_the_pixels_or_means_of_them() -> None:
    long = replace(SPEC, input_shape=(4, 68, 1))  # 4 x 22 means of 1 x 3 pixels, the last two pixels in none
    model = build(of(long), seed=1)
    embed = model.part("photo/embed")
    x = torch.rand(2, 4, 68, 1)
    with torch.no_grad():
        pixels = x[:, :, :66, 0].reshape(2, 4, 22, 3).mean(3).flatten(1) * 2 - 1
        wide = model.embed("photo", x).tokens[:, 0] - embed.cls_token[0] - embed.position_embeddings[0, :1]
        torch.testing.assert_close(wide, embed.wide(pixels))


def test_a_sample_is_the_same_alone_and_in_training_mode() -> None:
    model = build(of(SPEC), seed=1)
    x = torch.rand(3, 16, 8, 3)
    with torch.no_grad():
        together = model.train().embed("photo", x).tokens
        torch.testing.assert_close(model.eval().embed("photo", x[1:2]).tokens, together[1:2])


@pytest.mark.parametrize(
    ("kind", "shape", "patch", "text"),
    [
        ("vision", (12, 12, 3), 6, "is 6, and convolutions of stride 2 make it 2, 4, 8"),
        ("vision", (12, 12, 3), 1, "is 1, and convolutions"),
        ("vision", (12, 12, 3), 8, "does not divide"),
        ("audio", (16, 8), 4, "none of audio; leave it out, or set bands"),
        ("text", (16,), 4, "'conv' is none of text"),
    ],
)
def test_what_has_no_such_convolutions_is_refused(kind: str, shape: tuple[int, ...], patch: int, text: str) -> None:
    encoder = EncoderSpec(kind, shape, width=8, depth=2, heads=2, patch=patch, vocabulary=9, arch="conv")
    assert text in " ".join(problem.message for problem in spec_problems(of(encoder)))
