"""Weights by number of samples (FedAvg, arXiv 1602.05629), and of devices that exchange nothing.

w_k ~ n_k over the devices that trained the part.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.aggregation.mean import proportional
from edgefl.errors import Problem
from edgefl.registry import Recipe, Rule, default, register
from edgefl.roles import Weight


def by_samples(samples: Mapping[str, int], modalities: Mapping[str, int] | None = None) -> dict[str, float]:
    """Weights, which sum to 1, of the devices with samples; devices with none are left out."""
    return proportional(samples)


def _alone(recipe: Recipe) -> list[Problem]:
    return [
        Problem(role, f"weight: own exchanges nothing; set {role}: {default(role)}")
        for role in ("cluster", "prototypes", "repair", "combine", "optimise")
        if default(role) not in recipe[role]
    ]


_FREEZES = (
    "with weight: own nothing trains the global model, from which this schedule takes what it freezes; set schedule: "
    "end_to_end, progressive or heads"
)
register(
    Weight("samples", "number of samples, per part", default=True, weigh=by_samples),
    Weight(
        "own",
        "nothing is exchanged: each device trains alone",
        conflicts=_alone,
        rules=(Rule("schedule", "freezes", _FREEZES, wanted=False),),
        per_round=True,
        weigh=by_samples,
        exchange="nothing",
    ),
)
