"""Vectors of length one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Norms below this count as this, so that a zero vector stays zero and has cosine 0 with every other.
SMALLEST_NORM = 1e-12


def unit(rows: Tensor) -> Tensor:
    """Rows [N, d] scaled to length one; a zero row stays zero."""
    # The square is clamped, not the root: the root's slope at zero is infinite, and its gradient would not be a number.
    return rows / (rows * rows).sum(dim=1, keepdim=True).clamp(min=SMALLEST_NORM**2).sqrt()
