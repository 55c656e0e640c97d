"""The multiway transformer (VLMo, arXiv 2111.02358; used by PmcmFL, arXiv 2312.13508), in plain torch, pre-norm.

A layer: x <- x + attention(norm(x)) over the tokens of all modalities at hand, weights shared; then for each
modality m its own x_m <- x_m + mlp_m(norm_m(x_m)). With one modality it is an ordinary transformer layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from edgefl.models.blocks import attend
from edgefl.models.encoders.base import TokenState
from edgefl.models.rematerialise import checkpoint
from edgefl.models.spec import EncoderSpec


class SharedAttention(nn.Module):
    """x + attention(norm(x)): tokens [B, N, D], keys [B, N] (bool, which tokens are real) or None -> [B, N, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.attention_dropout = spec.dropout
        self.norm = nn.LayerNorm(spec.width)
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(spec.width, spec.width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor, keys: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, dim=2)
        attended = attend(q, k, v, self.heads, keys, self.attention_dropout if self.training else 0.0)
        after: Tensor = tokens + self.dropout(self.out(attended))
        return after


class FeedForward(nn.Module):
    """x + mlp(norm(x)): one modality's tokens [B, N, D] -> [B, N, D]."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        hidden = int(spec.width * spec.mlp_ratio)
        self.norm = nn.LayerNorm(spec.width)
        self.mlp = nn.Sequential(nn.Linear(spec.width, hidden), nn.GELU(), nn.Linear(hidden, spec.width))
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        after: Tensor = tokens + self.dropout(self.mlp(self.norm(tokens)))
        return after


class SharedStage(nn.Module):
    """A stage's layers as far as modalities share them: the attention. Run by :func:`run_stage`."""

    def __init__(self, spec: EncoderSpec, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SharedAttention(spec) for _ in range(count))
        self.activation_checkpointing = False  # as ``Stage.activation_checkpointing``


class OwnStage(nn.Module):
    """A stage's layers of one modality: the feed-forward. Run by :func:`run_stage`."""

    def __init__(self, spec: EncoderSpec, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(spec) for _ in range(count))
        self.activation_checkpointing = False  # the same


def run_stage(
    shared: SharedStage, own: Mapping[str, OwnStage], states: Mapping[str, TokenState]
) -> dict[str, TokenState]:
    """Rows that all have the modalities of ``states``, in the same order, through one stage."""
    lengths = [state.tokens.shape[1] for state in states.values()]
    tokens = torch.cat([state.tokens for state in states.values()], dim=1)
    keys = real_tokens(states)
    checkpointed = shared.activation_checkpointing or any(stage.activation_checkpointing for stage in own.values())

    def layer(i: int, tokens: Tensor) -> Tensor:
        pieces = torch.split(shared.layers[i](tokens, keys), lengths, dim=1)
        return torch.cat([own[m].layers[i](piece) for m, piece in zip(states, pieces, strict=True)], dim=1)

    for i, attention in enumerate(shared.layers):
        read = [attention, *(stage.layers[i] for stage in own.values())]
        run = partial(layer, i)
        tokens = checkpoint(run, tokens, read) if checkpointed else run(tokens)
    after = torch.split(tokens, lengths, dim=1)
    return {m: TokenState(piece, state.mask) for (m, state), piece in zip(states.items(), after, strict=True)}


def real_tokens(states: Mapping[str, TokenState]) -> Tensor | None:
    """Which of the concatenated tokens are real [B, sum of N]; None: all of them."""
    if all(state.mask is None for state in states.values()):
        return None
    masks = [
        torch.ones_like(state.tokens[:, :, 0], dtype=torch.bool) if state.mask is None else state.mask
        for state in states.values()
    ]
    return torch.cat(masks, dim=1)
