"""What stands in for an absent modality's projection while training (arXiv 2312.13508, eqs 4-6, and its baselines).

Each function returns the stand-ins [B, d] of one modality; the rows that have the modality are then put over them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def zero(size: int, width: int, table: Tensor | None, labels: Tensor | None, like: Tensor) -> Tensor:
    """Zeros."""
    return like.new_zeros(size, width)


def random(size: int, width: int, table: Tensor | None, labels: Tensor | None, like: Tensor) -> Tensor:
    """Standard normal noise."""
    return torch.randn(size, width, dtype=like.dtype, device=like.device)


def prototype(size: int, width: int, table: Tensor | None, labels: Tensor | None, like: Tensor) -> Tensor:
    """The global prototype [C, d] of each sample's own class; zeros while there is none, or no label (-1)."""
    if table is None or labels is None:
        return like.new_zeros(size, width)
    known = (labels >= 0).unsqueeze(1)
    return torch.where(known, table[labels.clamp(min=0)], table.new_zeros(()))


#: ``ignore`` leaves incomplete samples out before batches are made, so that nothing is left to stand in for.
MISSING: dict[str, Callable[[int, int, Tensor | None, Tensor | None, Tensor], Tensor]] = {
    "ignore": zero,
    "zero": zero,
    "random": random,
    "prototype": prototype,
}
