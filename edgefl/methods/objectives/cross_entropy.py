"""Classification: CE(task(fusion([r_1; …; r_M])), y), the mean over the labelled samples; absent r_m are stand-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.lazy import F
from edgefl.registry import Objective, Options, TermWeight, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class CrossEntropy(Options, frozen=True):
    """Options of classification."""

    weight: TermWeight = 1.0


def loss(forward: Forward) -> Tensor:
    """Mean over the labelled samples; 0 when none is."""
    if forward.labels is None:
        return forward.nothing()
    # A share without a known label is a mean of nothing: the sum over none, divided by one, is zero.
    summed = F.cross_entropy(forward.logits, forward.labels, ignore_index=-1, reduction="sum")
    return summed / (forward.labels >= 0).sum().clamp(min=1)


register(
    Objective(
        "cross_entropy",
        "classification of the fused representation",
        CrossEntropy,
        default=True,
        loss=loss,
        labels=True,
    )
)
