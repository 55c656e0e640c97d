"""What all kinds of encoder have in common: the token state, the stage, the first weights.

Each kind's module exports one ``KIND``; ``edgefl.encoder_kinds`` has them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edgefl.models.rematerialise import checkpoint
from edgefl.models.spec import EncoderSpec


class TokenState(NamedTuple):
    """What travels between the parts of an encoder: tokens [B, N, D], and for text which are real [B, N] (bool).

    ``depth``: of tokens that stand for a model's input, how many stages they have been through.
    """

    tokens: Tensor
    mask: Tensor | None = None
    depth: int = 0

    def of(self, rows: Tensor | slice) -> TokenState:
        """Those of some rows: indices [n], flags [B], or a slice."""
        return TokenState(self.tokens[rows], None if self.mask is None else self.mask[rows], self.depth)


#: What a model takes of a modality: raw samples [B, *input_shape], or tokens that part of the encoder has made of them.
Input = Tensor | TokenState


def rows_in(x: Input) -> int:
    """How many rows an input has."""
    return len(x.tokens if isinstance(x, TokenState) else x)


def rows_of(x: Input, rows: Tensor | slice) -> Input:
    """Some rows of an input."""
    return x.of(rows) if isinstance(x, TokenState) else x[rows]


def device_of_input(x: Input) -> torch.device:
    """Where an input lies."""
    return x.tokens.device if isinstance(x, TokenState) else x.device


@dataclass(frozen=True)
class Kind:
    """How one kind of encoder is built and run."""

    embed: Callable[[EncoderSpec], nn.Module]  # input [B, *shape] -> TokenState
    block: Callable[[EncoderSpec], nn.Module]  # tokens, mask, how many are wanted (0: all) -> tokens
    norm: Callable[[EncoderSpec], nn.Module]  # tokens -> tokens
    pool: Callable[[Tensor], Tensor]  # tokens [B, N, D] -> [B, D]


class Stage(nn.Module):
    """Neighbouring transformer blocks of one encoder: TokenState -> TokenState."""

    def __init__(self, kind: Kind, spec: EncoderSpec, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind.block(spec) for _ in range(count))
        self.activation_checkpointing = False  # of the blocks (``edgefl.models.rematerialise``)

    def forward(self, state: TokenState, leading: int = 0) -> TokenState:
        """``leading`` > 0: only that many first tokens are wanted."""
        tokens, mask = state.tokens, state.mask
        for i, block in enumerate(self.blocks):
            wanted = leading if i + 1 == len(self.blocks) else 0
            run = partial(block, mask=mask, count=wanted)
            tokens = checkpoint(run, tokens, [block]) if self.activation_checkpointing else run(tokens)
        return TokenState(tokens, mask[:, :leading] if mask is not None and leading else mask)


def first_token(tokens: Tensor) -> Tensor:
    """The class token: [B, N, D] -> [B, D]."""
    return tokens[:, 0]


def mean_token(state: TokenState) -> Tensor:
    """The mean of the real tokens: [B, N, D] -> [B, D]."""
    if state.mask is None:
        return state.tokens.mean(dim=1)
    real = state.mask[:, :, None].to(state.tokens.dtype)  # the first token of a text always is
    return (state.tokens * real).sum(dim=1) / real.sum(dim=1)


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """First weights, drawn from torch's CPU generator; the same rule for every kind, whatever the library's own.

    Linear and patch convolutions: Xavier uniform, zero bias. Unlike a fixed deviation of 0.02 it keeps the signal at
    tiny widths too. Tables and tokens: normal with deviation 0.02, the padding row zero. Norms: one and zero.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.flatten(1))  # a view: the convolution as the linear map it is
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.padding_idx is not None:
                layer.weight[layer.padding_idx].zero_()
    for name, parameter in module.named_parameters():
        if name.endswith(("_token", "position_embeddings")):
            nn.init.normal_(parameter, std=0.02)
