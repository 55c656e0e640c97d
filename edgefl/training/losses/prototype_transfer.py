"""Both modalities of a sample see the global prototypes alike (AproMFL, arXiv 2502.04400, equation 8).

mean_i JS(Q_i^I, Q_i^T),  Q^m = softmax over k of cos(e^m, p_k^m) / τ,  JS(p, q) = ½KL(p‖M) + ½KL(q‖M),  M = (p + q)/2.
Natural logarithm; D-A2: τ = 0.07. More than two modalities: the mean over unordered pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from edgefl.models.matching import Table, unit
from edgefl.training.losses.rows import Embeddings, Flags, Terms, blank, masked, mean_of, mean_where


def js_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, 0..log 2, of distributions given by finite logarithms [..., K] -> [...]."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2


def prototype_transfer(
    embeddings: Embeddings, has: Flags, tables: Mapping[str, Table], temperature: float = 0.07
) -> Tensor:
    """Mean over pairs of modalities with prototypes, on the rows that have both.

    Tables [K, d] are pairs by index: a prototype counts where both modalities have it. A pair without such a prototype
    or without such a row does not count; 0 when none counts.
    """
    pairs = combinations([m for m in embeddings if m in tables], 2)
    return mean_of([_pair(a, b, embeddings, has, tables, temperature) for a, b in pairs], embeddings)


def _pair(a: str, b: str, embeddings: Embeddings, has: Flags, tables: Mapping[str, Table], temperature: float) -> Terms:
    both, valid = has[a] & has[b], tables[a].valid & tables[b].valid
    views = [
        masked(unit(blank(embeddings[m], both)) @ unit(tables[m].rows).T / temperature, valid).log_softmax(dim=1)
        for m in (a, b)
    ]
    return Terms(mean_where(js_divergence(*views), both), both.any() & valid.any())
