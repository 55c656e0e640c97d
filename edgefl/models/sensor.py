"""The sensor encoder: a patch transformer over time series, in the manner of ViT (arXiv 2010.11929), in plain torch.

Non-overlapping patches of time, each flattened and mapped to a token; a class token and learned positions; pre-norm
blocks. A standardised sensor's channels are scaled first, by constants of the specification, and spikes are clipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from edgefl.models.encoder import Kind, TokenState, attend, first_token
from edgefl.models.low_rank import some_rows
from edgefl.models.spec import EncoderSpec

#: Deviations from the mean that no value exceeds: beyond what sensors show, and a spike of 10^4 weighs as little.
_FARTHEST = 20.0


class Standardize(nn.Module):
    """(x - mean) / std of each channel [..., C] by constants of the specification, where it has some."""

    mean: Tensor  # [C]
    std: Tensor

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.standardized = spec.standardize == "fleet"
        if self.standardized:  # no part of the part: they come with the specification
            channels = spec.input_shape[-1]
            mean, std = (spec.mean, spec.std) if spec.mean else ((0.0,) * channels, (1.0,) * channels)
            self.register_buffer("mean", torch.tensor(mean), persistent=False)
            self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).clamp(-_FARTHEST, _FARTHEST) if self.standardized else x


class SensorEmbed(nn.Module):
    """[B, T, C] -> tokens [B, 1 + ceil(T / patch), D]. A last short patch is filled with zeros."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        time, channels = spec.input_shape
        self.padding = -time % spec.patch
        self.patches = (time + self.padding) // spec.patch
        self.project = nn.Linear(spec.patch * channels, spec.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + self.patches, spec.width))
        self.dropout = nn.Dropout(spec.dropout)
        self.scale = Standardize(spec)

    def forward(self, x: Tensor) -> TokenState:
        x = self.scale(x)
        padded = F.pad(x, (0, 0, 0, self.padding)) if self.padding else x
        patches = self.project(padded.reshape(x.shape[0], self.patches, -1))
        tokens = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), patches), dim=1)
        return TokenState(self.dropout(tokens + self.position_embeddings))


class SensorBlock(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)); [B, N, D] -> [B, N, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        hidden = int(spec.width * spec.mlp_ratio)
        self.heads = spec.heads
        self.attention_dropout = spec.dropout
        self.attention_norm = nn.LayerNorm(spec.width)
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(spec.width, spec.width)
        self.mlp_norm = nn.LayerNorm(spec.width)
        self.mlp = nn.Sequential(nn.Linear(spec.width, hidden), nn.GELU(), nn.Linear(hidden, spec.width))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, count: int = 0) -> Tensor:
        """As ``PreNormBlock.forward``."""
        normed = self.attention_norm(tokens)
        share = self.attention_dropout if self.training else 0.0
        if not count:
            q, k, v = self.qkv(normed).chunk(3, dim=2)
            return self._after(tokens, attend(q, k, v, self.heads, mask, share))
        width = self.out.in_features
        q = some_rows(self.qkv, normed[:, :count], slice(None, width))
        k, v = some_rows(self.qkv, normed, slice(width, None)).chunk(2, dim=2)
        return self._after(tokens[:, :count], attend(q, k, v, self.heads, mask, share))

    def _after(self, tokens: Tensor, attended: Tensor) -> Tensor:
        tokens = tokens + self.dropout(self.out(attended))
        after: Tensor = tokens + self.dropout(self.mlp(self.mlp_norm(tokens)))
        return after


KIND = Kind(embed=SensorEmbed, block=SensorBlock, norm=lambda spec: nn.LayerNorm(spec.width), pool=first_token)
