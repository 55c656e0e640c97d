"""Terms that hold parameters near others.

Proximal (Li et al., FedProx, arXiv 1812.06127):  μ/2 Σ ‖θ - θ_received‖².
Regulariser (AproMFL, arXiv 2502.04400, equation 6):  λ Σ ‖θ - θ_private‖², λ = 0.01.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.errors import ModelError, Problem
from edgefl.lazy import torch
from edgefl.registry import Objective, Options, Recipe, TermWeight, offers, register

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.training.forward import Forward


class Pull(Options, frozen=True):
    """Options of a term that holds parameters near others."""

    weight: TermWeight = 0.01


def proximal(own: Mapping[str, Tensor], received: Mapping[str, Tensor], mu: float) -> Tensor:
    """``own``, ``received``: name -> parameter; the received ones get no gradient. The rest as ``squared_distance``."""
    return mu / 2 * squared_distance(own, received)


def regulariser(own: Mapping[str, Tensor], private: Mapping[str, Tensor], weight: float = 0.01) -> Tensor:
    """``own``, ``private``: name -> parameter; the private ones get no gradient. The rest as ``squared_distance``."""
    return weight * squared_distance(own, private)


def squared_distance(own: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> Tensor:
    """Sum over the parameters of ``own`` of the squared distance to the anchor of the same name; 0 without any.

    Raises ModelError, naming the parameter, when it has no anchor or one of another shape.
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


def proximal_loss(forward: Forward) -> Tensor:
    """The trained parameters stay near those received."""
    own = {str(i): parameter for i, (parameter, _) in enumerate(forward.auxiliary.received)}
    anchors = {str(i): value for i, (_, value) in enumerate(forward.auxiliary.received)}
    return proximal(own, anchors, 1.0) if own else forward.nothing()


def regulariser_loss(forward: Forward) -> Tensor:
    """The heads stay near their private copies."""
    own: dict[str, Tensor] = {}
    anchors: dict[str, Tensor] = {}
    for m, private in forward.auxiliary.private_heads.items():
        own |= {f"{m}/{name}": p for name, p in forward.model.part(f"head/{m}").named_parameters()}
        anchors |= {f"{m}/{name}": p for name, p in private.named_parameters()}
    return regulariser(own, anchors, 1.0) if own else forward.nothing()


def _private_copy(recipe: Recipe) -> list[Problem]:
    if offers(recipe, "objective", "private_head"):
        return []
    return [Problem("objective", "regulariser needs the private copy that cluster_contrast trains; add it")]


register(
    Objective(
        "proximal",
        "the model stays near the one received (FedProx, arXiv 1812.06127)",
        Pull,
        source="arXiv 1812.06127",
        loss=proximal_loss,
        received=True,
    ),
    Objective(
        "regulariser",
        "the mapping of a device without labels stays near its private copy (AproMFL, eq. 6)",
        Pull,
        source="arXiv 2502.04400",
        conflicts=_private_copy,
        loss=regulariser_loss,
    ),
)
