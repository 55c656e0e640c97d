"""Classification: CE(task(fusion([r_1; …; r_M])), y), the mean over the labelled samples; absent r_m are stand-ins.

A numeric target has the ranked probability score over its levels in place of CE (``edgefl.data.levels``).
Where a sample may have several classes (``edgefl.data.label_sets``), CE is the sum over the classes of binary ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.data.levels import levels_in, ranked_probability_score
from edgefl.methods.terms import binary_cross_entropy, known_cross_entropy
from edgefl.registry import TERM_WEIGHT, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def loss(forward: Forward) -> Tensor:
    """Mean over the labelled samples; 0 when none is."""
    if forward.labels is None:
        return forward.nothing()
    if forward.sets is not None:
        return binary_cross_entropy(forward.logits, forward.sets, forward.labels >= 0)
    levels = levels_in(forward.model.spec.label_names)
    if forward.targets is not None and levels is not None:
        return ranked_probability_score(forward.logits, forward.targets, levels)
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
