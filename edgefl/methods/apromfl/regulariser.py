"""Regulariser of a device without labels (AproMFL, arXiv 2502.04400, equation 6):  λ Σ ‖θ - θ_private‖², λ = 0.01."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.methods.terms import squared_distance
from edgefl.registry import TERM_WEIGHT, Rule, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def regulariser(forward: Forward) -> Tensor:
    """The squared distance of the heads to their private copies: the term's weight is λ."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for m, private in forward.auxiliary.private_heads.items():
        pairs += zip(forward.model.part(f"head/{m}").parameters(), private.parameters(), strict=True)
    return squared_distance(pairs) if pairs else forward.nothing()


register(
    Objective(
        "regulariser",
        "the mapping of a device without labels stays near its private copy (AproMFL, eq. 6)",
        {"weight": TERM_WEIGHT._replace(default=0.01)},
        rules=(
            Rule(
                "objective", "private_head", "regulariser needs the private copy that cluster_contrast trains; add it"
            ),
        ),
        loss=regulariser,
    ),
)
