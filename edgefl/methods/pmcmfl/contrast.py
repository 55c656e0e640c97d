"""PmcmFL's contrasts with global class prototypes (arXiv 2312.13508, equation 7), and its ablation's alignment.

Fused:  mean_s CE(logits_s, s),  logits_si = h_s·P_{y_i} / τ over the samples i of the batch; neither h nor P is
normalised. D-P4: samples of the own class count as negatives, as printed; option: one logit per class,
CE(h_s·P_c / τ, y_s).
Of each modality, with the class-level denominator, so that matching by cosine works: mean over m of
CE(cos(r_m, P_m) / τ, y),  P_m [C, d].
Alignment ("FA" of its Table 1, of FedPAC, arXiv 2306.11867): mean over i of |f_i - P_{y_i}|² / d, with P fused, without
the rows whose class has no prototype (FedPAC's code takes the device's own mean there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.methods.terms import blank, known_cross_entropy, masked, mean_where, softmax_temperature
from edgefl.models.vectors import unit
from edgefl.prototypes.table import FUSED
from edgefl.registry import TERM_WEIGHT, Option, Rule, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.prototypes.mask import Table
    from edgefl.training.forward import Forward


def prototype_contrast(
    h: Tensor, table: Table, labels: Tensor, temperature: float = 0.07, *, class_level: bool = False
) -> Tensor:
    """For h [B, d], prototypes ``table`` [C, d] and labels [B], below 0: unknown.

    Rows without a label, and rows whose class has no prototype, are left out on both sides; 0 when none is left.
    """
    own = labels.clamp(min=0)
    known = (labels >= 0) & table.valid[own]
    if class_level:
        against, keep, target = table.rows, table.valid, labels
    else:
        against, keep, target = table.rows[own], known, torch.arange(len(labels), device=labels.device)
    logits = masked(blank(h, known) @ against.T / temperature, keep.unsqueeze(0))
    return known_cross_entropy(logits, torch.where(known, target, -1))


def fused_loss(forward: Forward, *, temperature: float, negatives: str) -> Tensor:
    """The fused representation against the fused prototypes; zero while there are none."""
    table = forward.auxiliary.tables.get(FUSED)
    if table is None or forward.labels is None:
        return forward.nothing()
    by_class = negatives == "classes"
    return prototype_contrast(forward.fused, table, forward.labels, temperature, class_level=by_class)


def prototype_alignment(h: Tensor, table: Table, labels: Tensor) -> Tensor:
    """Mean squared error of h [B, d] to the prototypes ``table`` [C, d] of its ``labels`` [B], below 0: unknown.

    Rows without a label, and rows whose class has no prototype, are left out; 0 when none is left.
    """
    own = labels.clamp(min=0)
    known = (labels >= 0) & table.valid[own]
    return mean_where((blank(h, known) - table.rows[own]).square().mean(dim=1), known)


def alignment_loss(forward: Forward) -> Tensor:
    """The fused representation to its class's fused prototype; zero while there are none."""
    table = forward.auxiliary.tables.get(FUSED)
    if table is None or forward.labels is None:
        return forward.nothing()
    return prototype_alignment(forward.fused, table, forward.labels)


def modality_loss(forward: Forward, *, temperature: float) -> Tensor:
    """Zero while there are no prototypes; classes without one are left out.

    No branch depends on values: the meta device prices it as it runs, and a GPU need not wait.
    """
    none = next(iter(forward.projected.values())).new_zeros(())
    total, terms = none, none
    for modality, projected in forward.projected.items():
        table, labels, rows = forward.auxiliary.tables.get(modality), forward.labels, forward.rows[modality]
        if table is None or labels is None:
            continue
        own = labels if rows is None else labels[rows]
        known = (own >= 0) & table.valid[own.clamp(min=0)]
        logits = masked(unit(projected) @ unit(table.rows).T / temperature, table.valid)
        total = total + known_cross_entropy(logits, torch.where(known, own, -1))
        terms = terms + known.any()
    return total / terms.clamp(min=1) + forward.nothing()


def _needs_class_means(term: str) -> tuple[Rule]:
    text = f"{term} needs class prototypes; set prototypes: class_mean, or leave the term out"
    return (Rule("prototypes", "candidates", text),)


register(
    Objective(
        "prototype_contrast",
        "the fused representation against the fused prototypes, from the second round on (arXiv 2312.13508, eq. 7)",
        {
            "weight": TERM_WEIGHT,
            "temperature": softmax_temperature(0.07),
            "negatives": Option("samples", "the batch's other samples, or the other classes", ("samples", "classes")),
        },
        rules=_needs_class_means("prototype_contrast"),
        loss=fused_loss,
    ),
    Objective(
        "prototype_alignment",
        "the fused representation to its class's fused prototype by squared error, from the second round on (FedPAC)",
        {"weight": TERM_WEIGHT},
        rules=_needs_class_means("prototype_alignment"),
        loss=alignment_loss,
    ),
    Objective(
        "modality_contrast",
        "each modality's projection against that modality's global class prototypes, from the second round on",
        {"weight": TERM_WEIGHT, "temperature": softmax_temperature(0.1)},
        rules=_needs_class_means("modality_contrast"),
        loss=modality_loss,
    ),
)
