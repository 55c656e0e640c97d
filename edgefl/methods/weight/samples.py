"""Weights by number of samples (FedAvg, arXiv 1602.05629), and of devices that exchange nothing.

w_k ~ n_k over the devices that trained the part.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.aggregation.mean import proportional
from edgefl.errors import Problem
from edgefl.registry import Recipe, Weight, default, register


def by_samples(samples: Mapping[str, int], modalities: Mapping[str, int] | None = None) -> dict[str, float]:
    """Weights, which sum to 1, of the devices with samples; devices with none are left out."""
    return proportional(samples)


#: Schedules whose later stages freeze what a device has trained, and take it from the global model.
_FREEZING = ("layerwise", "freeze", "mixed")


def _alone(recipe: Recipe) -> list[Problem]:
    found = [
        Problem(role, f"weight: own exchanges nothing; set {role}: {default(role)}")
        for role in ("cluster", "prototypes", "repair", "optimise")
        if default(role) not in recipe[role]
    ]
    frozen = "weight: own exchanges nothing, so {} would freeze what nobody has trained; set schedule: end_to_end"
    return found + [Problem("schedule", frozen.format(one)) for one in _FREEZING if one in recipe["schedule"]]


register(
    Weight("samples", "number of samples, per part", default=True, weigh=by_samples),
    Weight(
        "own",
        "nothing is exchanged: each device trains alone",
        conflicts=_alone,
        per_round=True,
        weigh=by_samples,
        exchange="nothing",
    ),
)
