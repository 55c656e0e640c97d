"""Retrieval loss with two margins: AproMFL's task of devices without labels, arXiv 2502.04400.

mean_i relu(m_pos - s_ii) + mean over i ≠ j of relu(s_ij - m_neg),  s_ij = cos(a_i, b_j).
Both directions of retrieval are in it alike: s_ij and s_ji, each once. More than two modalities: the mean over
unordered pairs.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from edgefl.lazy import torch
from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank, mean_of, mean_where, off_diagonal
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class Margin(Options, frozen=True):
    """Options of the margins of pairs."""

    weight: TermWeight = 1.0
    positive: Annotated[float, Meta(ge=-1, le=1, description="cosine that pairs should reach")] = 0.8
    negative: Annotated[float, Meta(ge=-1, le=1, description="cosine that other pairs should stay below")] = 0.2


def margin(embeddings: Embeddings, has: Flags, positive: float = 0.8, negative: float = 0.2) -> Tensor:
    """Mean over pairs of modalities, on the rows that have both; a pair that no row has does not count.

    ``positive``: the cosine a pair should reach; ``negative``: the one two samples should stay below.
    """
    pairs = combinations(embeddings, 2)
    found = [_pair(embeddings[a], embeddings[b], has[a] & has[b], positive, negative) for a, b in pairs]
    return mean_of(found, embeddings)


def _pair(e_a: Tensor, e_b: Tensor, both: Tensor, positive: float, negative: float) -> Terms:
    cosine = unit(blank(e_a, both)) @ unit(blank(e_b, both)).T  # [B, B]
    others = both.unsqueeze(0) & both.unsqueeze(1) & off_diagonal(len(both), both)
    pull = mean_where(torch.relu(positive - cosine.diagonal()), both)
    push = mean_where(torch.relu(cosine - negative), others)
    return Terms(pull + push, both.any())


def loss(forward: Forward, *, positive: float, negative: float) -> Tensor:
    """Pairs above one cosine, others below another."""
    return margin(*forward.spread, positive, negative)


register(
    Objective(
        "margin",
        "pairs above one cosine, other pairs below another, labels unused",
        Margin,
        source="arXiv 2502.04400",
        loss=loss,
        pairs=True,
        modalities=2,
    )
)
