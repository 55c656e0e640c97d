"""What stands in for an absent modality's projection while training (arXiv 2312.13508, eqs 4-6, and its baselines).

zero: 0.  random: N(0, 1).  prototype: P_m[y], the global prototype of the sample's own class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgefl.models.matching import Table

#: (what the stand-ins shall look like [B, d], the modality's table if there is one, labels [B]) -> stand-ins [B, d]
StandIn = Callable[[Tensor, Table | None, Tensor | None], Tensor]


def zero(like: Tensor, table: Table | None, labels: Tensor | None) -> Tensor:
    """Zeros."""
    return torch.zeros_like(like)


def random(like: Tensor, table: Table | None, labels: Tensor | None) -> Tensor:
    """Standard normal noise."""
    return torch.randn_like(like)


def prototype(like: Tensor, table: Table | None, labels: Tensor | None) -> Tensor:
    """The prototype of each sample's class; zeros while there is none, and for samples without a label."""
    if table is None or labels is None:
        return torch.zeros_like(like)
    known = (labels >= 0).unsqueeze(1)
    return torch.where(known, table.rows[labels.clamp(min=0)], 0.0)


#: ``ignore`` leaves incomplete samples out before batches are made, so that nothing is left to stand in for.
MISSING: dict[str, StandIn] = {"ignore": zero, "zero": zero, "random": random, "prototype": prototype}
