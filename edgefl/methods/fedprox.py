"""Proximal term (Li et al., FedProx, arXiv 1812.06127):  μ/2 Σ ‖θ - θ_received‖²."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.methods.terms import squared_distance
from edgefl.registry import TERM_WEIGHT, register
from edgefl.roles import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def proximal(forward: Forward) -> Tensor:
    """Proximal term: ½ ‖θ - θ_received‖² over the trained parameters.

    The term's weight is μ.
    """
    received = [*forward.auxiliary.received.values()]
    return 0.5 * squared_distance(received) if received else forward.nothing()


register(
    Objective(
        "proximal",
        "the model stays near the one received (FedProx, arXiv 1812.06127)",
        {"weight": TERM_WEIGHT._replace(default=0.01)},
        loss=proximal,
        auxiliaries=("received",),
    ),
)
