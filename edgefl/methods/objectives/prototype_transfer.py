"""A sample sees both halves of the global prototype pairs alike (AproMFL, arXiv 2502.04400, equations 7-8).

mean_j JS(Q_j^a, Q_j^b),  Q_j^m = softmax over k of cos(e_j, p_k^m) / τ,  JS(p, q) = ½KL(p‖M) + ½KL(q‖M), M = (p + q)/2.
A sample of one modality has one embedding, compared with both halves; one of several compares the embedding of each
with that modality's half. Natural logarithm; D-A2: τ = 0.07. More than two modalities: the mean over unordered pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.methods.objectives.rules import needs_adaptive
from edgefl.methods.objectives.shared import Embeddings, Flags, Terms, blank, masked, mean_of, mean_where, nothing
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, Temperature, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.prototypes.mask import Table
    from edgefl.training.forward import Forward


class PrototypeTransfer(Options, frozen=True):
    """Options of the transfer from prototypes."""

    weight: TermWeight = 1.0
    temperature: Temperature = 0.07


def js_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, 0..log 2, of distributions given by finite logarithms [..., K] -> [...]."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2


def prototype_transfer(
    embeddings: Embeddings, has: Flags, tables: Mapping[str, Table], temperature: float = 0.07
) -> Tensor:
    """Mean over pairs of modalities with prototypes, on the rows that have both, or one of them and no other modality.

    ``tables`` [K, d], also of modalities that no row has: rows at the same index are a pair, and a prototype counts
    where both modalities have it. A pair without such a prototype or row does not count; 0 when none counts.
    """
    own = {m: e for m, e in embeddings.items() if m in tables}
    if not own:
        return nothing(embeddings)
    single = torch.stack([has[m] for m in own]).sum(dim=0) == 1  # [B]
    pairs = [{m: tables[m] for m in pair} for pair in combinations(tables, 2) if own.keys() & set(pair)]
    return mean_of([_pair(pair, own, has, single, temperature) for pair in pairs], embeddings)


def _pair(pair: Mapping[str, Table], own: Embeddings, has: Flags, single: Tensor, temperature: float) -> Terms:
    """``pair``: two modalities' tables. ``single`` [B]: rows with one modality only."""
    at_hand = {m: has[m] for m in pair if m in own}
    shown = torch.stack(list(at_hand.values()))
    counts = (shown.sum(dim=0) == 2) | (single & shown.any(dim=0))  # both, or one and nothing else
    a, b = pair.values()
    valid = a.valid & b.valid
    views = [
        masked(unit(seen) @ unit(table.rows).T / temperature, valid).log_softmax(dim=1)
        for m, table in pair.items()
        for seen in [_compared(m, own, at_hand, counts, single)]
    ]
    return Terms(mean_where(js_divergence(*views), counts), counts.any() & valid.any())


def _compared(m: str, own: Embeddings, at_hand: Flags, counts: Tensor, single: Tensor) -> Tensor:
    """[B, d] that the prototypes of ``m`` are compared with: each row's embedding of m, or the only one it has."""
    found = [blank(own[n], rows & (counts if n == m else single)) for n, rows in at_hand.items()]
    return torch.stack(found).sum(dim=0)


def loss(forward: Forward, *, temperature: float) -> Tensor:
    """Both halves of the global prototype pairs are seen alike, by one modality too; zero while there are none."""
    known = forward.auxiliary.tables
    tables = {m: known[m] for m in forward.model.spec.encoders if m in known}
    return prototype_transfer(*forward.spread, tables, temperature)


register(
    Objective(
        "prototype_transfer",
        "a sample, of one modality too, sees both halves of the global prototype pairs alike (AproMFL, eqs 7-8)",
        PrototypeTransfer,
        source="arXiv 2502.04400",
        conflicts=partial(needs_adaptive, "prototype_transfer"),
        loss=loss,
    )
)
