"""FedMVP's terms (arXiv 2406.11048): the joint representation X^J beside each modality's X^M.

Multimodal matching (MCM, eqs 4-5):  L = -mean_i log Σ_M sim(X_i^M, X_i^J) / Ω_i^M,  sim = exp(cos / τ),
Ω_i^M = Σ over j ≠ i of sim(X_i^M, X_j^M) + sim(X_i^M, X_j^J) + sim(X_i^J, X_j^J).
As printed it may be negative. Option NT-Xent: each modality a term of its own, the positive in its denominator too,
-mean_i mean_M log sim(X_i^M, X_i^J) / (sim(X_i^M, X_i^J) + Ω_i^M).
Margin alignment (RAM, eqs 6-7):  mean_i Σ_M ‖X_i^J - X_i^M‖₂ [CE(X_i^M) < CE(X_i^J)];  X^M and the comparison are not
differentiated: the joint follows a modality that classifies better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.lazy import F, torch
from edgefl.methods.terms import (
    Embeddings,
    Flags,
    Terms,
    blank,
    masked,
    needs_joint,
    nothing,
    off_diagonal,
    softmax_temperature,
)
from edgefl.models.vectors import unit
from edgefl.registry import TERM_WEIGHT, Option, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def mcm(joint: Tensor, embeddings: Embeddings, has: Flags, temperature: float, *, ntxent: bool = False) -> Terms:
    """Per sample: joint [B, d] and each modality's embeddings [B, d], normalised here; none counts of fewer than two.

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


def mcm_loss(forward: Forward, *, temperature: float, form: str) -> Tensor:
    """The joint representation matches each modality's."""
    return mcm(forward.fused, *forward.spread, temperature, ntxent=form == "ntxent").mean()


def ram(joint: Tensor, embeddings: Embeddings, has: Flags, ce_joint: Tensor, ce: Mapping[str, Tensor]) -> Terms:
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


def ram_loss(forward: Forward) -> Tensor:
    """Margin alignment (RAM) of the joint representation with better-classifying modalities.

    Both as unit vectors. 0 without labels.
    """
    if forward.labels is None:
        return forward.nothing()
    full, has = forward.spread
    known = forward.labels >= 0
    labels = forward.labels.clamp(min=0)
    joint, own = unit(forward.fused), {m: unit(r) for m, r in full.items()}

    def judged(x: Tensor) -> Tensor:
        return F.cross_entropy(forward.classify(x), labels, reduction="none")

    with torch.no_grad():
        ce_joint, ce = judged(joint), {m: judged(r) for m, r in own.items()}
    labelled = {m: rows & known for m, rows in has.items()}
    return ram(joint, own, labelled, ce_joint, ce).mean()


register(
    Objective(
        "mcm",
        "the joint representation matches each modality's (FedMVP, eqs 4-5)",
        {
            "weight": TERM_WEIGHT,
            "temperature": softmax_temperature(0.07),
            "form": Option("literal", "as printed, or with the positive in the denominator", ("literal", "ntxent")),
        },
        rules=(needs_joint("mcm"),),
        loss=mcm_loss,
        modalities=2,
        joint=True,
        unlabelled=True,
    ),
    Objective(
        "ram",
        "the joint representation follows a modality that classifies better (FedMVP, eqs 6-7)",
        {"weight": TERM_WEIGHT},
        rules=(needs_joint("ram"),),
        loss=ram_loss,
        joint=True,
        one_label=True,
    ),
)
