"""Margin alignment (RAM): the joint follows a modality that classifies better (FedMVP, arXiv 2406.11048).

Equations 6-7:  mean_i Σ_M ‖X_i^J - X_i^M‖₂ [CE(X_i^M) < CE(X_i^J)];  X^M and the comparison are not differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank


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
