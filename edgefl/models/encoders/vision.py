"""The vision encoder: ViT (arXiv 2010.11929) cut into parts; pooled is the class token (no pooler)."""

from __future__ import annotations

from torch import Tensor, nn

from edgefl.models.blocks import PatchTokens, PreNormBlock, final_norm
from edgefl.models.encoders.base import Kind, TokenState, first_token
from edgefl.models.spec import EncoderSpec

#: ViT's own preprocessing: pixels of 0..1 become -1..1. A checkpoint with another one is converted when it is loaded.
PIXEL_MEAN = 0.5
PIXEL_DEVIATION = 0.5


class VisionEmbed(nn.Module):
    """[B, H, W, C] in 0..1 -> tokens [B, 1 + patches, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        height, width, channels = spec.input_shape
        self.embeddings = PatchTokens(spec, (height, width), channels, ["cls_token"])

    def forward(self, x: Tensor) -> TokenState:
        pixels = (x.permute(0, 3, 1, 2) - PIXEL_MEAN) / PIXEL_DEVIATION
        return TokenState(self.embeddings(pixels))


KIND = Kind(embed=VisionEmbed, block=PreNormBlock, norm=final_norm, pool=first_token)
