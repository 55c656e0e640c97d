"""Contrast of each modality's projection with that modality's global class prototypes.

Mean over m of CE(cos(r_m, P_m) / τ, y),  P_m [C, d]: equation 7 of PmcmFL (arXiv 2312.13508) with a class-level
denominator (D-P4) and on each modality, so that matching by cosine works.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from edgefl.lazy import F, torch
from edgefl.methods.objectives.rules import needs_class_means
from edgefl.models.vectors import unit
from edgefl.registry import Objective, Options, Temperature, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class ModalityContrast(Options, frozen=True):
    """Options of the contrast with a modality's prototypes."""

    weight: TermWeight = 1.0
    temperature: Temperature = 0.1


def loss(forward: Forward, *, temperature: float) -> Tensor:
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
        cosine = unit(projected) @ unit(table.rows).T
        # The lowest finite number, not -inf: a row with no class at all would be NaN, weight zero or not.
        logits = (cosine / temperature).masked_fill(~table.valid, torch.finfo(cosine.dtype).min)
        summed = F.cross_entropy(logits, torch.where(known, own, -1), ignore_index=-1, reduction="sum")
        total = total + summed / known.sum().clamp(min=1)
        terms = terms + known.any()
    return total / terms.clamp(min=1) + forward.nothing()


register(
    Objective(
        "modality_contrast",
        "each modality's projection against that modality's global class prototypes, from the second round on",
        ModalityContrast,
        source="arXiv 2312.13508",
        conflicts=partial(needs_class_means, "modality_contrast"),
        loss=loss,
    )
)
