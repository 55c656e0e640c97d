"""The heads' normalisation: which one a recipe takes by default, and where batch statistics would be another model's.

Batch norm evaluates with running means and variances. Averaged like the weights, over the same models, they describe
the averaged model well enough (FedAvg). Where the server moves the weights elsewhere they do not (Reddi et al. 2021,
arXiv 2003.00295, use group norm for that reason).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.models.spec import Norm


def moving_slot(server: Mapping[str, Mapping[str, Any]]) -> str:
    """The slot (role: choice) by which new weights are not the mean of the devices' models; "": none."""
    for role, still in (
        ("weight", ("samples", "fediot", "cka", "own")),
        ("optimise", ("plain",)),
        ("repair", ("none",)),
    ):
        choice = next(iter(server.get(role) or {}), still[0])
        if choice not in still:
            return f"{role}: {choice}"
    return ""


def default_norm(server: Mapping[str, Mapping[str, Any]]) -> Norm:
    """Of a recipe whose run file says nothing: AproMFL's mappings have none; layer norm needs no statistics."""
    slot = moving_slot(server)
    if slot.startswith("weight: "):
        return "none"
    return "layer" if slot else "batch"
