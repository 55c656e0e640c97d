"""Margin alignment (RAM): the joint follows a modality that classifies better (FedMVP, arXiv 2406.11048).

Equations 6-7:  mean_i Σ_M ‖X_i^J - X_i^M‖₂ [CE(X_i^M) < CE(X_i^J)];  X^M and the comparison are not differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from edgefl.lazy import F, torch
from edgefl.methods.objectives.rules import needs_joint
from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class Ram(Options, frozen=True):
    """Options of margin alignment."""

    weight: TermWeight = 1.0


def ram(joint: Tensor, embeddings: Embeddings, has: Flags, ce_joint: Tensor, ce: Mapping[str, Tensor]) -> Tensor:
    """Mean of ``ram_terms`` over the rows that have any modality; 0 when none has."""
    return ram_terms(joint, embeddings, has, ce_joint, ce).mean()


def ram_terms(joint: Tensor, embeddings: Embeddings, has: Flags, ce_joint: Tensor, ce: Mapping[str, Tensor]) -> Terms:
    """Per sample: joint and embeddings [B, d]; the classifier's cross-entropy from each, [B], not reduced.

    ``has``: False also for rows without a label, whose cross-entropies say nothing.
    """
    total = joint.new_zeros(len(joint))
    for m, e in embeddings.items():
        better = has[m] & (ce[m] < ce_joint)
        # Rows that do not count are zero here; the norm's gradient at zero is defined as zero.
        apart = blank(joint, better) - blank(e.detach(), better)
        total = total + torch.linalg.vector_norm(apart, dim=1)
    return Terms(total, torch.stack([has[m] for m in embeddings]).any(dim=0))


def loss(forward: Forward) -> Tensor:
    """The joint representation follows a modality from which the classifier does better; both as unit vectors."""
    if forward.labels is None:
        return forward.nothing()
    full, has = forward.spread
    known = forward.labels >= 0
    labels = forward.labels.clamp(min=0)
    joint, own = unit(forward.fused), {m: unit(r) for m, r in full.items()}
    with torch.no_grad():
        ce, *each = (
            F.cross_entropy(forward.model.classify(x), labels, reduction="none") for x in (joint, *own.values())
        )
    return ram(joint, own, {m: rows & known for m, rows in has.items()}, ce, dict(zip(own, each, strict=True)))


register(
    Objective(
        "ram",
        "the joint representation follows a modality that classifies better (FedMVP, eqs 6-7)",
        Ram,
        source="arXiv 2406.11048",
        conflicts=partial(needs_joint, "ram"),
        loss=loss,
        joint=True,
    )
)
