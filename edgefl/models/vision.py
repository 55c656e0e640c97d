"""The vision encoder: `transformers`' ViT (arXiv 2010.11929) cut into parts; pooled is the class token (no pooler)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTLayer

from edgefl.models.encoder import Kind, TokenState, first_token, run_unmasked
from edgefl.models.leading import leading_vit
from edgefl.models.spec import EncoderSpec

#: ViT's own preprocessing: pixels of 0..1 become -1..1. A checkpoint with another one is converted when it is loaded.
PIXEL_MEAN = 0.5
PIXEL_DEVIATION = 0.5


def vit_config(spec: EncoderSpec) -> ViTConfig:
    """The encoder as `transformers` describes it."""
    height, width, channels = spec.input_shape
    return ViTConfig(
        hidden_size=spec.width,
        num_hidden_layers=spec.depth,
        num_attention_heads=spec.heads,
        intermediate_size=int(spec.width * spec.mlp_ratio),
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        image_size=(height, width),
        patch_size=spec.patch,
        num_channels=channels,
        attn_implementation="sdpa",
    )


class VisionEmbed(nn.Module):
    """[B, H, W, C] in 0..1 -> tokens [B, 1 + patches, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.embeddings = ViTEmbeddings(vit_config(spec))

    def forward(self, x: Tensor) -> TokenState:
        pixels = (x.permute(0, 3, 1, 2) - PIXEL_MEAN) / PIXEL_DEVIATION
        return TokenState(self.embeddings(pixels))


def _block(spec: EncoderSpec) -> nn.Module:
    layer: nn.Module = ViTLayer(vit_config(spec))
    return layer


def _norm(spec: EncoderSpec) -> nn.Module:
    return nn.LayerNorm(spec.width, eps=vit_config(spec).layer_norm_eps)


def _run_leading(block: nn.Module, tokens: Tensor, _mask: Tensor | None, count: int) -> Tensor | None:
    return leading_vit(block, tokens, count)


KIND = Kind(
    embed=VisionEmbed,
    block=_block,
    run_block=run_unmasked,
    norm=_norm,
    pool=first_token,
    pooled=1,
    run_leading=_run_leading,
)
