"""The heads' normalisation: which one a recipe takes by default, and where batch statistics would be another model's.

Batch norm evaluates with running means and variances. Averaged like the weights, over the same models, they describe
the averaged model well enough (FedAvg). Where the server moves the weights elsewhere they do not (Reddi et al. 2021,
arXiv 2003.00295, use group norm for that reason).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgefl.errors import Problem
from edgefl.models.spec import ModelSpec, Norm, shares_projection
from edgefl.plan.job import RunPlan
from edgefl.registry import choose

#: Samples of a modality without which no variance can be taken.
LEAST = 2
#: Most samples of a modality that batch statistics are taken on: a mean is then within 4 % of a deviation, a deviation
#: within 3 %, and what a head of width w holds meanwhile, 12 * 512 * w bytes, is less than 1 MiB above the gradients
#: and moments, 12 * w * w bytes, of a training step.
MOST = 512


def moving_slot(server: Mapping[str, Mapping[str, Any]]) -> str:
    """The slot (role: choice) by which new weights are not the mean of the devices' models; "": none."""
    for role in ("weight", "optimise", "repair"):
        one = choose(role, server)
        if one.method.moves:
            return f"{role}: {one.name}"
    return ""


def default_norm(server: Mapping[str, Mapping[str, Any]]) -> Norm:
    """Default normalisation of a recipe's heads: AproMFL's mappings have none; layer norm needs no statistics."""
    slot = moving_slot(server)
    if slot.startswith("weight: "):
        return "none"
    return "layer" if slot else "batch"


def moving(plan: RunPlan) -> str:
    """The setting by which new weights are not the mean of the models whose statistics they are given; "": none."""
    if slot := moving_slot(plan.server):
        return slot
    if plan.policy.keeps:
        return "rounds: async" if plan.policy.mode == "async" else "round.late: keep"
    return ""


def with_statistics(plan: RunPlan) -> RunPlan:
    """The plan with ``slots.statistics`` as it has to be; plans of earlier versions do not have it."""
    wanted = _averages_statistics(plan.model) and bool(moving(plan))
    return msgspec.structs.replace(plan, slots=msgspec.structs.replace(plan.slots, statistics=wanted))


def _averages_statistics(model: ModelSpec) -> bool:
    """Whether the model holds batch norm: only the heads do, unless one projection without any is all there is."""
    return model.head.kind != "none" and model.head.norm == "batch" and not shares_projection(model)


def untaken(plan: RunPlan, samples: Mapping[str, int]) -> Problem | None:
    """Why the coordinator cannot take batch statistics on a test set of ``samples``: modality -> how many have it."""
    lacking = [m for m in plan.model.encoders if samples.get(m, 0) < LEAST] if plan.slots.statistics else []
    if not lacking:
        return None
    has = f"{samples.get(lacking[0], 0)} samples of {lacking[0]!r}, {LEAST} are needed"
    why = f"{moving(plan)} moves the weights away from their statistics, which are then taken on data.test"
    text = f"is batch, and {why}; it has {has}: add them, or set layer"
    return Problem("model.head.norm", text)
