"""Activation checkpointing: a block keeps its input only; the backward pass runs it once more (arXiv 1604.06174).

Ours because the first use of torch.utils.checkpoint imports torch's compiler, 67 MiB for a device that is short of
them. For the same reason gradients that are at hand go into a backward pass by ``inject_gradients``: handed to
torch.autograd as they are, the first of them imports sympy, 34 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn, overrides

Run = Callable[[Tensor], Tensor]


def checkpoint(run: Run, tokens: Tensor, blocks: Sequence[nn.Module]) -> Tensor:
    """``run(tokens)``, of which only ``tokens`` are kept; ``blocks``: whose parameters it reads.

    The same dropout is drawn and the same precision used both times. Costs a forward pass more. Without gradients
    ``run`` is only called.
    """
    if not torch.is_grad_enabled():
        return run(tokens)
    parameters = [p for block in blocks for p in block.parameters() if p.requires_grad]
    result: Tensor = _Checkpoint.apply(run, tokens, *parameters)  # type: ignore[no-untyped-call]
    return result


def inject_gradients(values: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar (0) whose gradient with respect to each of ``values`` is the one of ``gradients``."""
    result: Tensor = _InjectGradients.apply(tuple(gradients), *values)  # type: ignore[no-untyped-call]
    return result


class _InjectGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *values: Tensor) -> Tensor:
        ctx.gradients = gradients
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.surroundings = run, _Surroundings(tokens.device)
        ctx.save_for_backward(tokens, *parameters)
        return run(tokens.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *parameters = ctx.saved_tensors
        own = tokens.detach().requires_grad_(tokens.requires_grad)
        wanted = [own, *parameters] if tokens.requires_grad else parameters
        with torch.enable_grad():
            with ctx.surroundings.again():
                result = ctx.run(own)
            end = inject_gradients([result], gradients)
        found = torch.autograd.grad(end, wanted, allow_unused=True)
        return (None, *found) if tokens.requires_grad else (None, None, *found)


class _Surroundings:
    """Surroundings of a forward pass besides its arguments, restored to run it the same way again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = torch.get_rng_state()
        self._random_there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        known = device.type != "meta"
        self._narrow = torch.get_autocast_dtype(device.type) if known and _autocast(device) else None
        # Those of a pass on shapes alone.
        self._modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # noqa: SLF001

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([self._device] if self._random_there is not None else []))
            torch.set_rng_state(self._random)
            if self._random_there is not None:
                torch.cuda.set_rng_state(self._random_there, self._device)
            if self._narrow is not None:
                stack.enter_context(torch.autocast(self._device.type, self._narrow, cache_enabled=False))
            for mode in self._modes:
                stack.enter_context(mode)
            yield


def _autocast(device: torch.device) -> bool:
    return bool(torch.is_autocast_enabled(device.type))
