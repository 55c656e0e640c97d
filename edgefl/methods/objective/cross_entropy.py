"""Classification: CE(task(fusion([r_1; …; r_M])), y), the mean over the labelled samples; absent r_m are stand-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.methods.objective.terms import known_cross_entropy
from edgefl.registry import TERM_WEIGHT, Objective, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def loss(forward: Forward) -> Tensor:
    """Mean over the labelled samples; 0 when none is."""
    if forward.labels is None:
        return forward.nothing()
    return known_cross_entropy(forward.logits, forward.labels)


register(
    Objective(
        "cross_entropy",
        "classification of the fused representation",
        {"weight": TERM_WEIGHT},
        default=True,
        loss=loss,
        labels=True,
    )
)
