"""The prototype mask in torch, without control flow: the same arithmetic in training and in exported graphs.

    s_p = cosine(r, own_p) or -distance(r, own_p);  best k among the rows valid in both tables;  w = softmax(s / T);
    sum_j w_j other_j

``edgefl.prototypes.mask`` is the reference in numpy. No row valid in both tables: the stand-in is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: In place of the score of a row that must not match: far below any distance between finite projections, and after the
#: division by any temperature down to 1e-8 still a number.
EXCLUDED = -1e30
#: Norms below this count as this, as in ``edgefl.prototypes.matching``.
SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Table:
    """One modality's prototypes [P, d] and which rows hold one [P]."""

    rows: Tensor
    valid: Tensor


def stand_in(
    r: Tensor, own: Table, other: Table, top_k: int, temperature: float, metric: str = "cosine"
) -> tuple[Tensor, Tensor, Tensor]:
    """For projections r [B, d]: stand-ins of the other modality [B, d], matched rows [B, k] (-1: none), weights [B, k].

    The weights sum to one, or are all zero when no row is valid in both tables. ``metric``: a key of ``SCORES``.
    """
    return mixed(SCORES[metric](r, own.rows), own.valid & other.valid, other.rows, top_k, temperature)


def mixed(scores: Tensor, among: Tensor, rows: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`stand_in`, from scores [B, P] of the ``rows`` [P, d], of which those ``among`` [P] may match."""
    best, index = torch.where(among, scores, EXCLUDED).topk(top_k, dim=1)
    usable = among[index]  # [B, k]
    weights = (best / temperature).softmax(dim=1) * usable
    total = weights.sum(dim=1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    made = (weights.unsqueeze(2) * rows[index]).sum(dim=1)
    return made, torch.where(usable, index, -1), weights


def cosine(r: Tensor, rows: Tensor) -> Tensor:
    """Cosines [B, P] of r [B, d] with the rows [P, d]."""
    return unit(r) @ unit(rows).T


def l1(r: Tensor, rows: Tensor) -> Tensor:
    """-sum|r - row| [B, P]."""
    return -(r.unsqueeze(1) - rows).abs().sum(dim=2)


def l2(r: Tensor, rows: Tensor) -> Tensor:
    """-|r - row| [B, P]."""
    # Not from |r|^2 - 2 r.row + |row|^2, which loses the digits of small distances.
    return -(r.unsqueeze(1) - rows).square().sum(dim=2).clamp(min=SMALLEST_NORM**2).sqrt()


#: Scores by the metrics that need no trained network; larger is nearer.
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "l1": l1, "l2": l2}


def unit(rows: Tensor) -> Tensor:
    """Rows [N, d] scaled to length one; a zero row stays zero."""
    # The square is clamped, not the root: the root's slope at zero is infinite, and its gradient would not be a number.
    return rows / (rows * rows).sum(dim=1, keepdim=True).clamp(min=SMALLEST_NORM**2).sqrt()
