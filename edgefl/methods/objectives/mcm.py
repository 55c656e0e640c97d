"""Multimodal matching (MCM): the joint representation and each modality's (FedMVP, arXiv 2406.11048, eqs 4-5).

L = -mean_i log Σ_M sim(X_i^M, X_i^J) / Ω_i^M,  sim = exp(cos / τ),
Ω_i^M = Σ over j ≠ i of sim(X_i^M, X_j^M) + sim(X_i^M, X_j^J) + sim(X_i^J, X_j^J).
As printed it may be negative. Option NT-Xent: each modality a term of its own, the positive in its denominator too,
-mean_i mean_M log sim(X_i^M, X_i^J) / (sim(X_i^M, X_i^J) + Ω_i^M).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from edgefl.lazy import torch
from edgefl.methods.objectives.rules import needs_joint
from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank, masked, nothing, off_diagonal
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, Temperature, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class Mcm(Options, frozen=True):
    """Options of multimodal matching."""

    weight: TermWeight = 1.0
    temperature: Temperature = 0.07
    form: Annotated[
        Literal["literal", "ntxent"], Meta(description="as printed, or with the positive in the denominator")
    ] = "literal"


def mcm(joint: Tensor, embeddings: Embeddings, has: Flags, temperature: float, *, ntxent: bool = False) -> Tensor:
    """Mean of ``mcm_terms``; 0 for fewer than two rows with any modality."""
    return mcm_terms(joint, embeddings, has, temperature, ntxent=ntxent).mean()


def mcm_terms(joint: Tensor, embeddings: Embeddings, has: Flags, temperature: float, *, ntxent: bool = False) -> Terms:
    """Per sample: joint [B, d] and each modality's embeddings [B, d], normalised here.

    Where a row lacks a modality, its term of that modality and its part in the others' Ω of it are left out; a row
    without any takes no part.
    """
    given = torch.stack([has[m] for m in embeddings])  # [M, B]
    real = given.any(dim=0)
    if len(joint) < 2:
        return Terms(nothing(embeddings).expand(len(joint)), torch.zeros_like(real))
    z_j = unit(blank(joint, real))
    ratios = torch.stack([_log_ratio(z_j, e, has[m], real, temperature, ntxent) for m, e in embeddings.items()])
    counts = real & (real.sum() > 1)
    if ntxent:
        values = -torch.where(given, ratios, 0.0).sum(dim=0) / given.sum(dim=0).clamp(min=1)
    else:
        values = -masked(ratios, given).logsumexp(dim=0)
    return Terms(torch.where(counts, values, 0.0), counts)


def _log_ratio(z_j: Tensor, e: Tensor, has: Tensor, real: Tensor, temperature: float, ntxent: bool) -> Tensor:
    """log sim(X_i^M, X_i^J) / Ω_i^M of every row [B]."""
    z = unit(blank(e, has))
    others = real & off_diagonal(len(z), z)  # [B, B]: the samples j of sample i
    crossed = z @ z_j.T / temperature
    within = masked(z @ z.T / temperature, others & has)
    joints = masked(z_j @ z_j.T / temperature, others)
    log_omega = torch.cat((within, masked(crossed, others), joints), dim=1).logsumexp(dim=1)
    positive = crossed.diagonal()
    return positive - (torch.logaddexp(positive, log_omega) if ntxent else log_omega)


def loss(forward: Forward, *, temperature: float, form: str = "literal") -> Tensor:
    """The joint representation matches each modality's."""
    return mcm(forward.fused, *forward.spread, temperature, ntxent=form == "ntxent")


register(
    Objective(
        "mcm",
        "the joint representation matches each modality's (FedMVP, eqs 4-5)",
        Mcm,
        source="arXiv 2406.11048",
        conflicts=partial(needs_joint, "mcm"),
        loss=loss,
        modalities=2,
        joint=True,
        unlabelled=True,
    )
)
