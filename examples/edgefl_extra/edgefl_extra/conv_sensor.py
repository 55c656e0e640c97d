"""A sensor encoder with a convolutional stem in place of patches, after Xiao et al. 2021 (arXiv 2106.14881).

Two convolutions over time of width 3 and stride 2, a class token and learned positions; then the blocks of EdgeFL's own
sensor encoder. In the paper, pictures: four 3 x 3 convolutions of stride 2 with batch norm, and one of 1 x 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.encoder_kinds import EncoderKind

if TYPE_CHECKING:
    from edgefl.models.encoder import Kind
    from edgefl.models.spec import EncoderSpec


def tokens(encoder: EncoderSpec) -> int:
    """The class token, and one for every four steps of time or a part of them."""
    return 1 + -(-encoder.input_shape[0] // 4)


def build() -> Kind:
    """Embedding by convolutions; blocks, norm and class token as of kind sensor."""
    import torch
    from torch import Tensor, nn

    from edgefl.models import sensor
    from edgefl.models.encoder import Kind, TokenState

    class ConvEmbed(nn.Module):
        """[B, T, C] -> tokens [B, 1 + ceil(T / 4), D]."""

        def __init__(self, spec: EncoderSpec) -> None:
            super().__init__()
            self.first = nn.Conv1d(spec.input_shape[1], spec.width, 3, stride=2, padding=1)
            self.second = nn.Conv1d(spec.width, spec.width, 3, stride=2, padding=1)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.width))
            self.position_embeddings = nn.Parameter(torch.zeros(1, tokens(spec), spec.width))

        def forward(self, x: Tensor) -> TokenState:
            stem = self.second(self.first(x.transpose(1, 2)).relu()).transpose(1, 2)
            return TokenState(
                torch.cat((self.cls_token.expand(x.shape[0], -1, -1), stem), dim=1) + self.position_embeddings
            )

    return Kind(ConvEmbed, sensor.KIND.block, sensor.KIND.norm, sensor.KIND.pool)


CONV_SENSOR = EncoderKind(
    axes=("time", "channels"),
    sizes={"tiny": {"width": 32, "depth": 6, "heads": 2}, "small": {"width": 64, "depth": 6, "heads": 4}},
    tokens=tokens,
    build=build,
)
