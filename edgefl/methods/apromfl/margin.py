"""AproMFL's own task of a device (arXiv 2502.04400): its labels, or where it has none a retrieval loss of two margins.

mean_i relu(m_pos - s_ii) + mean over i ≠ j of relu(s_ij - m_neg),  s_ij = cos(a_i, b_j).
Both directions of retrieval are in it alike: s_ij and s_ji, each once. More than two modalities: the mean over
unordered pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.methods.terms import (
    Embeddings,
    Flags,
    Terms,
    blank,
    known_cross_entropy,
    mean_of,
    mean_where,
    off_diagonal,
)
from edgefl.models.spec import is_task
from edgefl.models.vectors import unit
from edgefl.registry import TERM_WEIGHT, Option, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


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


def task_loss(forward: Forward, values: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> Tensor:
    """The device's own task by other projections: its labels through the classifier, else the margins of its pairs.

    A device without labels does not train its classifier. The margins are those of the recipe's term margin; without
    one the paper's.
    """
    model = forward.model
    tasks = [model.part(part) for part in model.parts_present if is_task(part)]
    if forward.labels is None or not all(p.requires_grad for task in tasks for p in task.parameters()) or not tasks:
        options = forward.objective.get("margin", {})
        return margin(values, has, **{name: float(value) for name, value in options.items() if name != "weight"})
    zeros = torch.zeros_like(next(iter(values.values())))
    absent = torch.zeros(forward.size, dtype=torch.bool, device=zeros.device)
    wanted = list(model.spec.encoders)
    shown = {m: has.get(m, absent) for m in wanted}
    fused = model.fuse({m: values.get(m, zeros) for m in wanted}, shown, forward.tokens, forward.rows)
    return known_cross_entropy(forward.classify(fused), forward.labels)


register(
    Objective(
        "margin",
        "pairs above one cosine, other pairs below another, labels unused",
        {
            "weight": TERM_WEIGHT,
            "positive": Option(0.8, "cosine that pairs should reach", least=-1, most=1),
            "negative": Option(0.2, "cosine that other pairs should stay below", least=-1, most=1),
        },
        loss=loss,
        pairs=True,
        modalities=2,
    )
)
