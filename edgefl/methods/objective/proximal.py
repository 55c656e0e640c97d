"""Terms that hold parameters near others.

Proximal (Li et al., FedProx, arXiv 1812.06127):  μ/2 Σ ‖θ - θ_received‖².
Regulariser (AproMFL, arXiv 2502.04400, equation 6):  λ Σ ‖θ - θ_private‖², λ = 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgefl.lazy import torch
from edgefl.registry import TERM_WEIGHT, Rule, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def squared_distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum of the squared distances of parameters to their anchors, which get no gradient. At least one pair."""
    total = torch.zeros((), device=pairs[0][0].device)
    for parameter, anchor in pairs:
        total = total + (parameter - anchor.detach()).square().sum()
    return total


def proximal(forward: Forward) -> Tensor:
    """Proximal term: ½ ‖θ - θ_received‖² over the trained parameters.

    The term's weight is μ.
    """
    received = [*forward.auxiliary.received.values()]
    return 0.5 * squared_distance(received) if received else forward.nothing()


def regulariser(forward: Forward) -> Tensor:
    """The squared distance of the heads to their private copies: the term's weight is λ."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for m, private in forward.auxiliary.private_heads.items():
        pairs += zip(forward.model.part(f"head/{m}").parameters(), private.parameters(), strict=True)
    return squared_distance(pairs) if pairs else forward.nothing()


_WEIGHT = {"weight": TERM_WEIGHT._replace(default=0.01)}
register(
    Objective(
        "proximal",
        "the model stays near the one received (FedProx, arXiv 1812.06127)",
        _WEIGHT,
        loss=proximal,
        auxiliaries=("received",),
    ),
    Objective(
        "regulariser",
        "the mapping of a device without labels stays near its private copy (AproMFL, eq. 6)",
        _WEIGHT,
        rules=(
            Rule(
                "objective", "private_head", "regulariser needs the private copy that cluster_contrast trains; add it"
            ),
        ),
        loss=regulariser,
    ),
)
