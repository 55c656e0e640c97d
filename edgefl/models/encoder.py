"""Common to all kinds of encoder: token state, attention, stage, first weights, activation checkpointing.

With activation checkpointing a block keeps its input only; the backward pass runs it once more (arXiv 1604.06174). Ours
because the first use of torch.utils.checkpoint imports torch's compiler, 67 MiB for a device that is short of them. For
the same reason gradients that are at hand go into a backward pass by ``inject_gradients``: handed to torch.autograd as
they are, the first of them imports sympy, 34 MiB. ``edgefl.encoder_kinds`` has the kinds by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn, overrides
from torch.autograd.function import FunctionCtx

from edgefl.models.low_rank import parameters_read
from edgefl.models.spec import EncoderSpec


class TokenState(NamedTuple):
    """Token state between the parts of an encoder: tokens [B, N, D], and for text which are real [B, N] (bool).

    ``depth``: of tokens that stand for a model's input, how many stages they have been through.
    """

    tokens: Tensor
    mask: Tensor | None = None
    depth: int = 0

    def of(self, rows: Tensor | slice) -> TokenState:
        """The tokens of some rows: indices [n], flags [B], or a slice."""
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
    """The torch device of an input."""
    return x.tokens.device if isinstance(x, TokenState) else x.device


@dataclass(frozen=True)
class Kind:
    """How one kind of encoder is built and run."""

    embed: Callable[[EncoderSpec], nn.Module]  # input [B, *shape] -> TokenState
    block: Callable[[EncoderSpec], nn.Module]  # tokens, mask, how many are wanted (0: all) -> tokens
    norm: Callable[[EncoderSpec], nn.Module]  # tokens -> tokens
    pool: Callable[[Tensor], Tensor]  # tokens [B, N, D] -> [B, D]
    blocks: Callable[[EncoderSpec, range], Sequence[nn.Module]] | None = None  # where they differ by their place


class Stage(nn.Module):
    """Neighbouring transformer blocks of one encoder: TokenState -> TokenState."""

    def __init__(self, kind: Kind, spec: EncoderSpec, places: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind.blocks(spec, places) if kind.blocks else (kind.block(spec) for _ in places))
        self.activation_checkpointing = False  # of the blocks

    def forward(self, state: TokenState, leading: int = 0) -> TokenState:
        """``leading`` > 0: only that many first tokens are wanted."""
        tokens, mask = state.tokens, state.mask
        for i, block in enumerate(self.blocks):
            wanted = leading if i + 1 == len(self.blocks) else 0
            run = partial(block, mask=mask, count=wanted)
            tokens = checkpoint(run, tokens, [block]) if self.activation_checkpointing else run(tokens)
        return TokenState(tokens, mask[:, :leading] if mask is not None and leading else mask)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Multi-head scaled dot-product attention.

    Queries [B, n, D], keys and values [B, N, D], mask [B, N] (True: real) or None -> [B, n, D].
    """
    q, k, v = (x.reshape(*x.shape[:2], heads, -1).transpose(1, 2) for x in (queries, keys, values))
    real = None if mask is None else mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=real, dropout_p=dropout).transpose(1, 2).flatten(2)


def first_token(tokens: Tensor) -> Tensor:
    """The class token: [B, N, D] -> [B, D]."""
    return tokens[:, 0]


def mean_token(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the real tokens: [B, N, D], mask [B, N] (None: all are real) -> [B, D]."""
    if mask is None:
        return tokens.mean(dim=1)
    real = mask.to(tokens.dtype).unsqueeze(2)  # the first token of a text always is
    return (tokens * real).sum(dim=1) / real.sum(dim=1)


def joined_mask(states: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """Which of several modalities' concatenated tokens [B, N_m, D] are real by their masks [B, N_m]; None: all."""
    if all(mask is None for _, mask in states):
        return None
    masks = [torch.ones_like(x[:, :, 0], dtype=torch.bool) if mask is None else mask for x, mask in states]
    return torch.cat(masks, dim=1)


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """First weights, drawn from torch's CPU generator; the same rule for every kind, whatever the library's own.

    Modules with ``own_weights`` and all in them keep theirs.

    Linear and patch convolutions: Xavier uniform, zero bias. Unlike a fixed deviation of 0.02 it keeps the signal at
    tiny widths too. Tables and tokens: normal with deviation 0.02, the padding row zero. Norms: one and zero.
    """
    layers = list(_without_own(module))
    for layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.flatten(1))  # a view: the convolution as the linear map it is
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.padding_idx is not None:
                layer.weight[layer.padding_idx].zero_()
    for layer in layers:
        for name, parameter in layer.named_parameters(recurse=False):
            if name.endswith(("_token", "position_embeddings")):
                nn.init.normal_(parameter, std=0.02)


def _without_own(module: nn.Module) -> Iterator[nn.Module]:
    if not getattr(module, "own_weights", False):
        yield module
        for child in module.children():
            yield from _without_own(child)


Run = Callable[[Tensor], Tensor]


def checkpoint(run: Run, tokens: Tensor, blocks: Sequence[nn.Module]) -> Tensor:
    """``run(tokens)``, of which only ``tokens`` are kept; ``blocks``: whose parameters it reads.

    The same dropout is drawn and the same precision used both times. Costs a forward pass more. Without gradients
    ``run`` is only called.
    """
    if not torch.is_grad_enabled():
        return run(tokens)
    parameters = [p for block in blocks for p in parameters_read(block) if p.requires_grad]
    result: Tensor = _Checkpoint.apply(run, tokens, *parameters)  # type: ignore[no-untyped-call]
    return result


def inject_gradients(values: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar (0) whose gradient with respect to each of ``values`` is the one of ``gradients``."""
    result: Tensor = _InjectGradients.apply(tuple(gradients), *values)  # type: ignore[no-untyped-call]
    return result


class _Context(FunctionCtx):
    """State of a pass that its gradient needs."""

    gradients: tuple[Tensor, ...]
    run: Run
    again: Callable[[], AbstractContextManager[None]]
    saved_tensors: tuple[Tensor, ...]


class _InjectGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gradients: tuple[Tensor, ...], *values: Tensor) -> Tensor:
        ctx.gradients = gradients
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: _Context, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, run: Run, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.again = run, _surroundings(tokens.device)
        ctx.save_for_backward(tokens, *parameters)
        return run(tokens.detach())

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *parameters = ctx.saved_tensors
        own = tokens.detach().requires_grad_(tokens.requires_grad)
        wanted = [own, *parameters] if tokens.requires_grad else parameters
        with torch.enable_grad():
            with ctx.again():
                result = ctx.run(own)
            end = inject_gradients([result], gradients)
        found = torch.autograd.grad(end, wanted, allow_unused=True)
        return (None, *found) if tokens.requires_grad else (None, None, *found)


def _surroundings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Surroundings of a forward pass besides its arguments, as a context that restores them to run it the same way."""
    random = torch.get_rng_state()
    random_there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    narrow = torch.get_autocast_dtype(device.type) if autocast else None
    # Those of a pass on shapes alone.
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # noqa: SLF001

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if random_there is not None else []))
            torch.set_rng_state(random)
            if random_there is not None:
                torch.cuda.set_rng_state(random_there, device)
            if narrow is not None:
                stack.enter_context(torch.autocast(device.type, narrow, cache_enabled=False))
            for mode in modes:
                stack.enter_context(mode)
            yield

    return again
