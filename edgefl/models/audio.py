"""The audio encoder: `transformers`' Audio Spectrogram Transformer (arXiv 2104.01778) cut into parts.

Pooled is, as in the original, the mean of the class token and the distillation token.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.audio_spectrogram_transformer.configuration_audio_spectrogram_transformer import ASTConfig
from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import (
    ASTEmbeddings,
    ASTLayer,
)

from edgefl.models.encoder import Kind, TokenState, run_unmasked
from edgefl.models.leading import leading_vit
from edgefl.models.spec import EncoderSpec


def ast_config(spec: EncoderSpec) -> ASTConfig:
    """The encoder as `transformers` describes it."""
    frames, bands = spec.input_shape
    stride = spec.stride or spec.patch
    return ASTConfig(
        hidden_size=spec.width,
        num_hidden_layers=spec.depth,
        num_attention_heads=spec.heads,
        intermediate_size=int(spec.width * spec.mlp_ratio),
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        patch_size=spec.patch,
        frequency_stride=stride,
        time_stride=stride,
        max_length=frames,
        num_mel_bins=bands,
        attn_implementation="sdpa",
    )


class AudioEmbed(nn.Module):
    """Spectrogram [B, frames, bands], scaled as the data set says -> tokens [B, 2 + patches, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.embeddings = ASTEmbeddings(ast_config(spec))

    def forward(self, x: Tensor) -> TokenState:
        return TokenState(self.embeddings(x))


def _block(spec: EncoderSpec) -> nn.Module:
    layer: nn.Module = ASTLayer(ast_config(spec))
    return layer


def _norm(spec: EncoderSpec) -> nn.Module:
    return nn.LayerNorm(spec.width, eps=ast_config(spec).layer_norm_eps)


def _pool(tokens: Tensor) -> Tensor:
    return (tokens[:, 0] + tokens[:, 1]) / 2


def _run_leading(block: nn.Module, tokens: Tensor, _mask: Tensor | None, count: int) -> Tensor | None:
    return leading_vit(block, tokens, count)


KIND = Kind(
    embed=AudioEmbed, block=_block, run_block=run_unmasked, norm=_norm, pool=_pool, pooled=2, run_leading=_run_leading
)
