"""Contrast of fused representations with the global fusion prototypes (PmcmFL, arXiv 2312.13508, equation 7).

mean_s CE(logits_s, s),  logits_si = h_s·P_{y_i} / τ over the samples i of the batch; neither h nor P is normalised.
D-P4: samples of the own class count as negatives, as printed; option: one logit per class, CE(h_s·P_c / τ, y_s).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from edgefl.lazy import F, torch
from edgefl.methods.objectives.rules import needs_class_means
from edgefl.methods.objectives.shared import blank, masked
from edgefl.prototypes.table import FUSED
from edgefl.registry import Objective, Options, Temperature, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.prototypes.mask import Table
    from edgefl.training.forward import Forward


class PrototypeContrast(Options, frozen=True):
    """Options of the contrast with fused prototypes."""

    weight: TermWeight = 1.0
    temperature: Temperature = 0.07
    negatives: Annotated[
        Literal["samples", "classes"], Meta(description="the batch's other samples, or the other classes")
    ] = "samples"


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
    summed = F.cross_entropy(logits, torch.where(known, target, -1), ignore_index=-1, reduction="sum")
    return summed / known.sum().clamp(min=1)


def loss(forward: Forward, *, temperature: float, negatives: str = "samples") -> Tensor:
    """The fused representation against the fused prototypes; zero while there are none."""
    table = forward.auxiliary.tables.get(FUSED)
    if table is None or forward.labels is None:
        return forward.nothing()
    by_class = negatives == "classes"
    return prototype_contrast(forward.fused, table, forward.labels, temperature, class_level=by_class)


register(
    Objective(
        "prototype_contrast",
        "the fused representation against the fused prototypes, from the second round on (arXiv 2312.13508, eq. 7)",
        PrototypeContrast,
        source="arXiv 2312.13508",
        conflicts=partial(needs_class_means, "prototype_contrast"),
        loss=loss,
    )
)
