"""The prototype mask in torch, without control flow: the same arithmetic in training and in exported graphs.

    score_p = cosine(r, own_p);  best k among the rows valid in both tables;  w = softmax(score / T);  sum_j w_j other_j

``edgefl.prototypes.mask`` is the reference in numpy. No row valid in both tables: the stand-in is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: In place of the cosine of a row that must not match: exp((-1e4 - 1) / T) is zero for every temperature below 90.
EXCLUDED = -1e4
#: Norms below this count as this, as in ``edgefl.prototypes.matching``.
SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Table:
    """One modality's prototypes [P, d] and which rows hold one [P]."""

    rows: Tensor
    valid: Tensor


def stand_in(r: Tensor, own: Table, other: Table, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """For projections r [B, d]: stand-ins of the other modality [B, d], matched rows [B, k] (-1: none), weights [B, k].

    The weights sum to one, or are all zero when no row is valid in both tables.
    """
    among = own.valid & other.valid  # [P]
    cosines = unit(r) @ unit(own.rows).T  # [B, P]
    best, index = torch.where(among, cosines, EXCLUDED).topk(top_k, dim=1)
    usable = among[index]  # [B, k]
    weights = (best / temperature).softmax(dim=1) * usable
    total = weights.sum(dim=1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    mixed = (weights.unsqueeze(2) * other.rows[index]).sum(dim=1)
    return mixed, torch.where(usable, index, -1), weights


def unit(rows: Tensor) -> Tensor:
    """Rows [N, d] scaled to length one; a zero row stays zero."""
    # The square is clamped, not the root: the root's slope at zero is infinite, and its gradient would not be a number.
    return rows / (rows * rows).sum(dim=1, keepdim=True).clamp(min=SMALLEST_NORM**2).sqrt()
