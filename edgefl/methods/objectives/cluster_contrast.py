"""Contrast within and between modalities by class or pseudo-label (AproMFL, arXiv 2502.04400, equations 3-4).

intra_i = -1/|S(i)| sum over j in S(i) of log softmax_j(cos(e_i, e_j) / τ),  S(i): the samples with i's label;
inter_i: the same from the embedding of i in one modality to those of all j in the other.
D-A7: mean over i; in intra, i itself is a positive (option: it is left out, of the softmax too).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from edgefl.errors import Problem
from edgefl.lazy import torch
from edgefl.methods.objectives.device_task import task_loss
from edgefl.methods.objectives.rules import needs_adaptive
from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank, masked, off_diagonal
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, Recipe, Temperature, TermWeight, offers, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class ClusterContrast(Options, frozen=True):
    """Options of the contrast by local cluster."""

    weight: TermWeight = 1.0
    temperature: Temperature = 0.07


def intra(e: Tensor, labels: Tensor, temperature: float, include_self: bool = True, has: Tensor | None = None) -> Terms:
    """Within a modality, per sample: e [B, d], labels [B] (below 0: none), ``has`` [B] (None: all rows are real).

    Rows without a label take no part. Without self, a sample alone in its class does not count.
    """
    taking_part = _known(labels, has)
    pairs = taking_part.unsqueeze(0).expand(len(labels), -1)
    return _terms(e, e, labels, temperature, taking_part, pairs if include_self else pairs & off_diagonal(len(e), e))


def inter(
    e_a: Tensor,
    e_b: Tensor,
    labels: Tensor,
    temperature: float,
    has_a: Tensor | None = None,
    has_b: Tensor | None = None,
) -> Terms:
    """From each sample of ``e_a`` [B, d] to those of ``e_b`` [B, d]; the rest as for ``intra``."""
    pairs = _known(labels, has_b).unsqueeze(0).expand(len(labels), -1)
    return _terms(e_a, e_b, labels, temperature, _known(labels, has_a), pairs)


def cluster_contrast(
    embeddings: Embeddings, has: Flags, labels: Tensor, temperature: float, include_self: bool = True
) -> Tensor:
    """Sum of the means of ``intra`` over the modalities and ``inter`` over their pairs, the first to the later."""
    found = [intra(e, labels, temperature, include_self, has[m]) for m, e in embeddings.items()]
    for a, b in combinations(embeddings, 2):
        found.append(inter(embeddings[a], embeddings[b], labels, temperature, has[a], has[b]))
    return torch.stack([terms.mean() for terms in found]).sum()


def _known(labels: Tensor, has: Tensor | None) -> Tensor:
    return labels >= 0 if has is None else (labels >= 0) & has


def _terms(e_a: Tensor, e_b: Tensor, labels: Tensor, temperature: float, rows: Tensor, pairs: Tensor) -> Terms:
    """``rows`` [B]: samples of ``e_a`` that take part; ``pairs`` [B, B]: samples of ``e_b`` each may be compared to."""
    z_a, z_b = unit(blank(e_a, rows)), unit(blank(e_b, pairs.any(0)))
    log_share = masked(z_a @ z_b.T / temperature, pairs).log_softmax(dim=1)
    positives = pairs & (labels.unsqueeze(0) == labels.unsqueeze(1))
    count = positives.sum(dim=1)
    values = -torch.where(positives, log_share, 0.0).sum(dim=1) / count.clamp(min=1)
    counts = rows & (count > 0)
    return Terms(torch.where(counts, values, 0.0), counts)


def loss(forward: Forward, *, temperature: float) -> Tensor:
    """The private copies' task and contrast by local cluster; zero where there are none."""
    values, has = forward.private_projections()
    if not values:
        return forward.nothing()
    task = task_loss(forward, values, has)
    if forward.pseudo_labels is None:
        return task
    return task + cluster_contrast(values, has, forward.pseudo_labels, temperature)


def _conflicts(recipe: Recipe) -> list[Problem]:
    found = needs_adaptive("cluster_contrast", recipe)
    if not offers(recipe, "objective", "pairs"):
        text = "cluster_contrast is trained by devices without labels, whose task is of pairs; add margin or clip"
        found.append(Problem("objective", text))
    return found


register(
    Objective(
        "cluster_contrast",
        "devices without labels cluster by a private copy of the mapping, taught by those clusters (AproMFL, eqs 3-5)",
        ClusterContrast,
        source="arXiv 2502.04400",
        conflicts=_conflicts,
        headless="cluster_contrast trains a copy of the mappings, the heads, and without them there is none",
        loss=loss,
        private_head=True,
    )
)
