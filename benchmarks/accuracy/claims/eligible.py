"""Eligible devices: those whose memory budgets admit a run's whole training in every stage, as the planner says.

One process holds no memory budget, so a study's run is planned with the budgets, and then carried out with the devices
that the planner admits. Smaller micro-batches, by which they fit, leave the outcome as it is (``edgefl.budget.fit``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from edgefl.api.run_inputs import PlanOptions, price_of
from edgefl.records import Refusal

Values = dict[str, Any]
#: FLOPs of a round that no training has: the planner refuses the device in one process, too.
NOTHING = {"flops": 1.0}


def limited(devices: Sequence[str], eligible: int, budget: Values, seed: int) -> list[Values]:
    """The fleet: ``eligible`` devices, drawn by the seed, without a limit; the others have ``budget``."""
    others = {devices[i] for i in np.random.default_rng(seed).permutation(len(devices))[eligible:]}
    return [{"name": name, "budget": dict(budget)} if name in others else {"name": name} for name in devices]


def has_memory_budgets(values: Values) -> bool:
    """Whether a device of a run file has a budget of step memory."""
    return any("step_memory_bytes" in one.get("budget", {}) for one in values["fleet"])


def refused(values: Values) -> Mapping[str, Refusal]:
    """Device -> the planner's reason against its training all of a stage, of the first such stage."""
    training = {name: value for name, value in values["training"].items() if name != "lr"}
    return _refused(json.dumps({**values, "training": training}))


@lru_cache(maxsize=64)
def _refused(told: str) -> Mapping[str, Refusal]:
    values = json.loads(told)
    values["training"]["lr"] = {"encoder": 1e-3, "head": 1e-3}  # no price depends on it
    found: dict[str, Refusal] = {}
    for plan in price_of(values, (), PlanOptions()).devices:
        reason = plan.placement.refusal or plan.placement.shortened
        if reason is not None:
            found.setdefault(plan.device, reason)
    return found


def for_one_process(values: Values) -> Values:
    """The run file with its devices' memory budgets carried out: who is refused may spend nothing, others all."""
    out = refused(values)
    made = copy.deepcopy(values)
    made["fleet"] = [
        {"name": one["name"], "budget": dict(NOTHING)} if one["name"] in out else {"name": one["name"]}
        for one in values["fleet"]
    ]
    return made
