"""The prototype mask in torch, without control flow: the same arithmetic in training and in exported graphs.

    s_p = cosine(r, own_p) or -distance(r, own_p);  best k among the rows valid in both tables;  w = softmax(s / T);
    sum_j w_j other_j
    with several modalities at hand s_p is the mean over those that have row p (docs/decisions/0034)
    a classifier's s_p is its probability of class p, and after the mean the logarithm of that (docs/decisions/0031)

``edgefl.prototypes.mask`` is the reference in numpy. No row valid in both tables: the stand-in is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.models.vectors import SMALLEST_NORM, unit
from edgefl.prototypes.matching import SMALLEST_PROBABILITY

#: In place of the score of a row that must not match: far below any distance between finite projections, and after the
#: division by any temperature down to 1e-8 still a number.
EXCLUDED = -1e30


@dataclass(frozen=True)
class Table:
    """One modality's prototypes [P, d] and which rows hold one [P]."""

    rows: Tensor
    valid: Tensor


def averaged(each: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Scores [B, P] of several modalities as one: of each row of the table the mean over those that may match it.

    ``each``: a modality's scores [B, P], and for which of them it counts [P] or [B, P]; of one modality its own.
    """
    if len(each) == 1:
        return each[0]
    counts = torch.stack([among.expand_as(scores) for scores, among in each]).sum(dim=0)
    total = torch.stack([torch.where(among, scores, 0.0) for scores, among in each]).sum(dim=0)
    return total / counts.clamp(min=1), counts > 0


def logarithms(probabilities: Tensor) -> Tensor:
    """Logarithms of probabilities, as in ``methods.prototypes.matching``: at T = 1 their softmax renormalises them."""
    return probabilities.clamp(min=SMALLEST_PROBABILITY).log()


def mixed(scores: Tensor, among: Tensor, rows: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """For B samples: stand-ins of an absent modality [B, d], matched rows [B, k] (-1: none), weights [B, k].

    From ``scores`` [B, P] of the ``rows`` [P, d] of its table, of which those ``among`` may match: [P], or [B, P] where
    that differs between samples. The weights sum to one, or are all zero when no row may match.
    """
    best, index = torch.where(among, scores, EXCLUDED).topk(top_k, dim=1)
    usable = among[index] if among.ndim == 1 else among.gather(1, index)  # [B, k]
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


#: Scores (r [B, d], rows [P, d]) -> [B, P] by the metrics that need no trained network; larger is nearer.
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "l1": l1, "l2": l2}
