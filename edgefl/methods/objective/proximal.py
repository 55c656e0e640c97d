"""Terms that hold parameters near others.

Proximal (Li et al., FedProx, arXiv 1812.06127):  μ/2 Σ ‖θ - θ_received‖².
Regulariser (AproMFL, arXiv 2502.04400, equation 6):  λ Σ ‖θ - θ_private‖², λ = 0.01.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.errors import ModelError
from edgefl.lazy import torch
from edgefl.registry import TERM_WEIGHT, Objective, Rule, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


def squared_distance(own: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> Tensor:
    """Sum over the parameters of ``own`` of the squared distance to the anchor of the same name; 0 without any.

    No gradient reaches the anchors. Raises ModelError, naming the parameter, when it has no anchor or one of another
    shape.
    """
    total = torch.zeros((), device=next(iter(own.values())).device if own else None)
    for name, parameter in own.items():
        if name not in anchors or anchors[name].shape != parameter.shape:
            found = list(anchors[name].shape) if name in anchors else "not there"
            raise ModelError(
                f"parameter '{name}' is {list(parameter.shape)}, what it should stay near is {found}",
                remedy="Copy the anchors from the very model that is trained, before its first step.",
            )
        total = total + (parameter - anchors[name].detach()).square().sum()
    return total


def proximal(forward: Forward) -> Tensor:
    """½ of the squared distance of the trained parameters to those received: the term's weight is μ."""
    own = {str(i): parameter for i, (parameter, _) in enumerate(forward.auxiliary.received)}
    anchors = {str(i): value for i, (_, value) in enumerate(forward.auxiliary.received)}
    return 0.5 * squared_distance(own, anchors) if own else forward.nothing()


def regulariser(forward: Forward) -> Tensor:
    """The squared distance of the heads to their private copies: the term's weight is λ."""
    own: dict[str, Tensor] = {}
    anchors: dict[str, Tensor] = {}
    for m, private in forward.auxiliary.private_heads.items():
        own |= {f"{m}/{name}": p for name, p in forward.model.part(f"head/{m}").named_parameters()}
        anchors |= {f"{m}/{name}": p for name, p in private.named_parameters()}
    return squared_distance(own, anchors) if own else forward.nothing()


_WEIGHT = {"weight": TERM_WEIGHT._replace(default=0.01)}
register(
    Objective(
        "proximal",
        "the model stays near the one received (FedProx, arXiv 1812.06127)",
        _WEIGHT,
        loss=proximal,
        received=True,
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
