"""Focal loss (Lin et al. 2017, arXiv 1708.02002): classification in which easy samples count less.

mean over the labelled samples of  -(1 - p_y)^γ log p_y,  p = softmax(logits [B, C]); γ = 0 is cross-entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.registry import TERM_WEIGHT, Option, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def focal(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """``logits`` [B, C], ``labels`` [B], below 0: unknown. 0 when no sample has a label."""
    known = labels >= 0
    log_p = logits.log_softmax(dim=1).gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    terms = -((1 - log_p.exp()) ** gamma) * log_p
    return torch.where(known, terms, 0.0).sum() / known.sum().clamp(min=1)


def loss(forward: Forward, *, gamma: float) -> Tensor:
    """Of the fused representation's logits."""
    return forward.nothing() if forward.labels is None else focal(forward.logits, forward.labels, gamma)


register(
    Objective(
        "focal",
        "classification in which easy samples count less",
        {"weight": TERM_WEIGHT, "gamma": Option(2.0, "how much less an easy sample counts", least=0)},
        loss=loss,
        labels=True,
    )
)
