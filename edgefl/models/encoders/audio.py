"""The audio encoder: the Audio Spectrogram Transformer (arXiv 2104.01778) cut into parts.

Pooled is, as in the original, the mean of the class token and the distillation token.
"""

from __future__ import annotations

from torch import Tensor, nn

from edgefl.models.blocks import PatchTokens, PreNormBlock, final_norm
from edgefl.models.encoders.base import Kind, TokenState
from edgefl.models.spec import EncoderSpec


class AudioEmbed(nn.Module):
    """Spectrogram [B, frames, bands], scaled as the data set says -> tokens [B, 2 + patches, D], band by band."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        frames, bands = spec.input_shape
        self.embeddings = PatchTokens(spec, (bands, frames), 1, ["cls_token", "distillation_token"])

    def forward(self, x: Tensor) -> TokenState:
        return TokenState(self.embeddings(x.transpose(1, 2)[:, None]))


def _pool(tokens: Tensor) -> Tensor:
    return (tokens[:, 0] + tokens[:, 1]) / 2


KIND = Kind(embed=AudioEmbed, block=PreNormBlock, norm=final_norm, pool=_pool)
