"""Terms that hold parameters near others.

Proximal (Li et al., FedProx, arXiv 1812.06127):  μ/2 Σ ‖θ - θ_received‖².
Regulariser (AproMFL, arXiv 2502.04400, equation 6):  λ Σ ‖θ - θ_private‖², λ = 0.01.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edgefl.errors import ModelError


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
