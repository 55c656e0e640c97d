"""The bands encoder: statistics of real frames alone, spans of frames, and where it is refused."""

from __future__ import annotations

import pytest
import torch

from edgefl.models.check import spec_problems
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build

SPEC = EncoderSpec(
    "audio", (10, 3), width=8, depth=2, heads=2, patch=4, arch="bands", standardize="fleet",
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 1.0),
)  # fmt: skip


def of(encoder: EncoderSpec) -> ModelSpec:
    return ModelSpec({"sound": encoder}, 2, HeadSpec(width=8, out=4))


def test_statistics_are_of_the_frames_that_sound() -> None:
    embed = build(of(SPEC), seed=1).part("sound/embed")
    x = torch.zeros(1, 10, 3)
    x[0, 0], x[0, 1] = torch.tensor([1.0, 0.5, 0.5]), torch.tensor([0.5, 0.5, 0.5])
    with torch.no_grad():
        tokens = embed(x).tokens
        # First band: 1 and 0, mean 0.5, deviation 0.5; the others 0. Eight silent frames do not count.
        given = torch.tensor([[0.5, 0, 0, (0.25 + 1e-4) ** 0.5, 0.01, 0.01]])
        torch.testing.assert_close(tokens[:, 1], embed.wide(given))
    assert tokens.shape == (1, 5, 8)  # class, statistics, three spans of four frames


def test_a_longer_silence_changes_no_statistics() -> None:
    long = EncoderSpec("audio", (14, 3), width=8, depth=2, heads=2, patch=4, arch="bands")
    embed = build(of(long), seed=1).part("sound/embed")
    x = torch.rand(2, 14, 3) + 0.1
    x[:, 6:] = 0
    with torch.no_grad():
        wide = embed(x).tokens[:, 1]
        x[:, 6:] = 0.0
        assert torch.equal(wide, embed(x).tokens[:, 1])
        assert embed(torch.zeros(1, 14, 3)).tokens.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "shape", "arch", "text"),
    [
        ("vision", (8, 8, 3), "bands", "none of vision"),
        ("audio", (16, 8), "bag", "none of audio; leave it out, or set bands"),
    ],
)
def test_an_arch_of_another_kind_is_refused(kind: str, shape: tuple[int, ...], arch: str, text: str) -> None:
    encoder = EncoderSpec(kind, shape, width=8, depth=2, heads=2, patch=4, arch=arch)  # type: ignore[arg-type]
    assert text in " ".join(problem.message for problem in spec_problems(of(encoder)))


def test_bands_alone_are_standardised_over_the_fleet() -> None:
    squares = EncoderSpec("audio", (16, 8), width=8, depth=2, heads=2, patch=4, standardize="fleet")
    assert "by bands" in " ".join(problem.message for problem in spec_problems(of(squares)))
