"""AproMFL's terms beside the device's task (arXiv 2502.04400); more than two modalities: over unordered pairs.

Cluster contrast (eqs 3-4):  intra_i = -1/|S(i)| sum over j in S(i) of log softmax_j(cos(e_i, e_j) / τ),  S(i): the
samples with i's label, i too (D-A7);  inter_i: the same from the embedding of i in one modality to those of all j in
the other; mean over i. It teaches the clustering model, the private copy of the heads of devices without labels.
Prototype transfer (eqs 7-8):  mean_j JS(Q_j^a, Q_j^b),  Q_j^m = softmax over k of cos(e_j, p_k^m) / τ,
JS(p, q) = ½KL(p‖M) + ½KL(q‖M), M = (p + q)/2: a sample sees both halves of the global prototype pairs alike. A sample
of one modality has one embedding, compared with both halves; one of several compares the embedding of each with that
modality's half. Natural logarithm; D-A2: τ = 0.07.
Model transfer (eq. 9):  ν KL(softmax(ê_local / T) ‖ softmax(ê_global / T)) over coordinates, ê = e/|e|,
ν = L_task(local) / L_task(global), detached; 0 when the teacher's loss is 0. D-A3: as printed, T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.methods.apromfl.margin import task_loss
from edgefl.methods.terms import (
    Embeddings,
    Flags,
    Terms,
    blank,
    masked,
    mean_of,
    mean_where,
    nothing,
    softmax_temperature,
)
from edgefl.models.vectors import unit
from edgefl.registry import TERM_WEIGHT, Rule, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.prototypes.mask import Table
    from edgefl.training.forward import Forward


def cluster_terms(e_a: Tensor, e_b: Tensor, labels: Tensor, temperature: float, has_a: Tensor, has_b: Tensor) -> Terms:
    """Contrast of each sample of ``e_a`` [B, d] with those of ``e_b`` [B, d]: intra in one modality, else inter.

    ``labels`` [B], below 0: none; ``has_a``, ``has_b`` [B]: which rows are real. Others take no part.
    """
    rows, among = (labels >= 0) & has_a, (labels >= 0) & has_b
    z_a, z_b = unit(blank(e_a, rows)), unit(blank(e_b, among))
    log_share = masked(z_a @ z_b.T / temperature, among).log_softmax(dim=1)
    positives = among & (labels.unsqueeze(0) == labels.unsqueeze(1))  # [B, B]
    count = positives.sum(dim=1)
    values = -torch.where(positives, log_share, 0.0).sum(dim=1) / count.clamp(min=1)
    counts = rows & (count > 0)
    return Terms(torch.where(counts, values, 0.0), counts)


def cluster_contrast(embeddings: Embeddings, has: Flags, labels: Tensor, temperature: float) -> Tensor:
    """Sum of the means of intra over the modalities and inter over their pairs, the first to the later."""
    pairs = [*((m, m) for m in embeddings), *combinations(embeddings, 2)]
    found = [cluster_terms(embeddings[a], embeddings[b], labels, temperature, has[a], has[b]) for a, b in pairs]
    return torch.stack([terms.mean() for terms in found]).sum()


def cluster_loss(forward: Forward, *, temperature: float) -> Tensor:
    """The private copies' task and contrast by local cluster; zero where there are none."""
    values, has = forward.private_projections()
    if not values:
        return forward.nothing()
    task = task_loss(forward, values, has)
    if forward.pseudo_labels is None:
        return task
    return task + cluster_contrast(values, has, forward.pseudo_labels, temperature)


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
    views = []
    for m, table in pair.items():
        # What its prototypes are compared with: each row's embedding of m, or the only one it has.
        each = [blank(own[n], rows & (counts if n == m else single)) for n, rows in at_hand.items()]
        seen = torch.stack(each).sum(dim=0)  # [B, d]
        views.append(masked(unit(seen) @ unit(table.rows).T / temperature, valid).log_softmax(dim=1))
    return Terms(mean_where(js_divergence(*views), counts), counts.any() & valid.any())


def prototype_loss(forward: Forward, *, temperature: float) -> Tensor:
    """Both halves of the global prototype pairs are seen alike, by one modality too; zero while there are none."""
    known = forward.auxiliary.tables
    tables = {m: known[m] for m in forward.model.spec.encoders if m in known}
    return prototype_transfer(*forward.spread, tables, temperature)


def model_transfer(
    local: Embeddings, teacher: Embeddings, has: Flags, nu: Tensor | float, temperature: float = 1.0
) -> Tensor:
    """ν times the mean over the modalities at hand of the mean over their rows; no gradient reaches the teacher.

    ``local``, ``teacher``: embeddings [B, d] of the same samples, not normalised; ``nu``: see ``ratio``.
    """
    found = []
    for m, own in local.items():
        rows = unit(blank(own, has[m])), unit(blank(teacher[m].detach(), has[m]))
        found.append(Terms(mean_where(kl_divergence(*rows, temperature), has[m]), has[m].any()))
    return nu * mean_of(found, local)


def kl_divergence(local: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(softmax(local / T) ‖ softmax(teacher / T)) of coordinates [..., d] -> [...]."""
    log_p, log_q = (x.div(temperature).log_softmax(dim=-1) for x in (local, teacher))
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def ratio(local_loss: Tensor, teacher_loss: Tensor) -> Tensor:
    """ν = local / teacher of two scalars, detached; 0 when the denominator is."""
    local_loss, teacher_loss = local_loss.detach(), teacher_loss.detach()
    empty = teacher_loss == 0
    return torch.where(empty, 0.0, local_loss / torch.where(empty, 1.0, teacher_loss))


def model_loss(forward: Forward, *, temperature: float) -> Tensor:
    """The heads as received teach the device's own."""
    teacher = forward.teacher_projections()
    if not teacher:
        return forward.nothing()
    full, has = forward.spread
    own = {m: full[m] for m in teacher}
    with torch.no_grad():
        nu = ratio(task_loss(forward, own, has), task_loss(forward, teacher, has))
    return model_transfer(own, teacher, has, nu, temperature)


def _needs_adaptive(term: str) -> Rule:
    text = f"{term} needs adaptive prototypes; set prototypes: adaptive, or leave the term out"
    return Rule("prototypes", "merge", text)


register(
    Objective(
        "cluster_contrast",
        "devices without labels cluster by a private copy of the mapping, taught by those clusters (AproMFL, eqs 3-5)",
        {"weight": TERM_WEIGHT, "temperature": softmax_temperature(0.07)},
        rules=(
            _needs_adaptive("cluster_contrast"),
            Rule(
                "objective",
                "pairs",
                "cluster_contrast is trained by devices without labels, whose task is of pairs; add margin or clip",
            ),
        ),
        headless="cluster_contrast trains a copy of the mappings, the heads, and without them there is none",
        loss=cluster_loss,
        auxiliaries=("private_head",),
    ),
    Objective(
        "prototype_transfer",
        "a sample, of one modality too, sees both halves of the global prototype pairs alike (AproMFL, eqs 7-8)",
        {"weight": TERM_WEIGHT, "temperature": softmax_temperature(0.07)},
        rules=(_needs_adaptive("prototype_transfer"),),
        loss=prototype_loss,
    ),
    Objective(
        "model_transfer",
        "the mapping received teaches the device's own: Kullback-Leibler divergence of unit vectors (AproMFL, eq. 9)",
        {"weight": TERM_WEIGHT, "temperature": softmax_temperature(1.0)},
        rules=(
            Rule(
                "weight",
                "personal",
                "model_transfer needs a mapping of the device's own; set weight: relationship, or leave the term out",
            ),
        ),
        loss=model_loss,
        auxiliaries=("teacher",),
    ),
)
