"""Mixed precision: matrices are multiplied in bf16, weights, sums and the loss stay in f32 (arXiv 1905.12322).

On a device torch's own autocast does it, and fused attention never holds the scores of all pairs of tokens. On the meta
device, where the planner traces a step, torch has neither: here the operations that autocast would narrow are given
narrowed operands there, and attention is the fused kernel's, so that the price is of what really runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map  # torch's own; no public alias

from edgefl.plan.job import Precision

_NARROWED = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
}


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Inside, forward passes multiply matrices in ``precision``. Backward passes follow by themselves."""
    if precision == "f32":
        return contextlib.nullcontext()
    if device.type == "meta":
        return _Narrowed()
    # Without its cache: it would hold a narrow copy of every weight until the context ends.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def widened(value: torch.Tensor) -> torch.Tensor:
    """What came out of narrow products, in f32."""
    return value.float() if value.dtype == torch.bfloat16 else value


class _Narrowed(TorchFunctionMode):
    """What autocast would do to shapes alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NARROWED:
            args, kwargs = tree_map(_narrowed, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class FusedAttention(TorchFunctionMode):
    """On the meta device attention keeps what the CPU's fused kernel does; with dropout that kernel is not used."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    enable_gqa: bool = False,
    **options: Any,
) -> torch.Tensor:
    if dropout_p > 0 or not query.is_meta or enable_gqa:
        options["enable_gqa"] = enable_gqa
        result: torch.Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
        return result
    mask = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - what the CPU runs, by its name
    attended: torch.Tensor = fused(query, key, value, dropout_p, attn_mask=mask, **options)[0]
    return attended


def _narrowed(value: Any) -> Any:
    wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(torch.bfloat16) if wide else value
