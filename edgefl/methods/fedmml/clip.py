"""Contrast of modalities' projections, labels unused.

Wang et al., LW-FedMML, arXiv 2407.15426:  ½[CE(L, diagonal) + CE(Lᵀ, diagonal)],  L = z_a z_bᵀ / τ,  z L2-normalised.
More than two modalities: the mean over unordered pairs.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from edgefl.lazy import F, torch
from edgefl.methods.terms import Embeddings, Flags, Terms, blank, masked, mean_of, softmax_temperature
from edgefl.models.vectors import unit
from edgefl.registry import TERM_WEIGHT, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def clip_loss(z_a: Tensor, z_b: Tensor, temperature: float) -> Tensor:
    """½[CE(L, diagonal) + CE(Lᵀ, diagonal)] with L = z_a z_bᵀ / temperature; z_a, z_b: [B, d], rows normalised."""
    logits = z_a @ z_b.T / temperature
    target = torch.arange(z_a.shape[0], device=z_a.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def clip(embeddings: Embeddings, has: Flags, temperature: float) -> Tensor:
    """Mean over pairs of ``clip_loss`` on the rows that have both, normalised here.

    A pair that fewer than two rows have says nothing and does not count; 0 when none counts.
    """
    pairs = combinations(embeddings, 2)
    return mean_of([_pair(embeddings[a], embeddings[b], has[a] & has[b], temperature) for a, b in pairs], embeddings)


def _pair(e_a: Tensor, e_b: Tensor, both: Tensor, temperature: float) -> Terms:
    z_a, z_b = unit(blank(e_a, both)), unit(blank(e_b, both))
    logits = masked(z_a @ z_b.T / temperature, both.unsqueeze(0) & both.unsqueeze(1))
    target = torch.where(both, torch.arange(len(both), device=both.device), -1)
    summed = [F.cross_entropy(x, target, ignore_index=-1, reduction="sum") for x in (logits, logits.T)]
    count = both.sum()
    return Terms((summed[0] + summed[1]) / (2 * count.clamp(min=1)), count >= 2)


def loss(forward: Forward, *, temperature: float) -> Tensor:
    """Contrast of the modalities' projections over the samples that have both of a pair."""
    return clip(*forward.spread, temperature)


register(
    Objective(
        "clip",
        "contrast of the modalities' projections, labels unused (arXiv 2407.15426)",
        {"weight": TERM_WEIGHT, "temperature": softmax_temperature(0.05)},
        loss=loss,
        pairs=True,
        modalities=2,
    )
)
