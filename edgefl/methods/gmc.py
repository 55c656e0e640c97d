"""Geometric multimodal contrast (Poklukar et al., arXiv 2202.03390): each modality's projection and the joint one.

Σ_M mean over the 2n anchors x of -log sim(x, x') / Σ over y ≠ x of sim(x, y),  sim = exp(cos / τ):
x and y run over the joint and the modality's projections of the n samples that have it, x' is x's other one of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.methods.terms import (
    Embeddings,
    Flags,
    blank,
    known_cross_entropy,
    masked,
    needs_joint,
    off_diagonal,
    softmax_temperature,
)
from edgefl.models.vectors import unit
from edgefl.registry import TERM_WEIGHT, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def gmc(joint: Tensor, embeddings: Embeddings, has: Flags, temperature: float = 0.1) -> Tensor:
    """``joint`` and each modality's projections, [B, d] in one shared space; a modality that no row has adds 0."""
    return torch.stack([_nt_xent(joint, e, has[m], temperature) for m, e in embeddings.items()]).sum()


def _nt_xent(joint: Tensor, e: Tensor, has: Tensor, temperature: float) -> Tensor:
    size = len(joint)
    z = unit(torch.cat((blank(joint, has), blank(e, has))))  # [2B, d]
    twice = has.repeat(2)
    logits = masked(z @ z.T / temperature, twice & off_diagonal(2 * size, z))
    partner = torch.arange(2 * size, device=z.device).roll(size)
    return known_cross_entropy(logits, torch.where(twice, partner, -1))


def loss(forward: Forward, *, temperature: float) -> Tensor:
    """Each modality's projection against the joint one."""
    return gmc(forward.fused, *forward.spread, temperature)


register(
    Objective(
        "gmc",
        "each modality's projection against the joint one (GMC, arXiv 2202.03390)",
        {"weight": TERM_WEIGHT, "temperature": softmax_temperature(0.1)},
        rules=(needs_joint("gmc"),),
        loss=loss,
        joint=True,
        unlabelled=True,
    )
)
