"""Aggregation weights: their options and rules."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.registry import Combine, Options, Recipe, Weight, register


class Fediot(Options, frozen=True):
    """Options of FedIoT's weights."""

    factor: Annotated[float, Meta(ge=0, description="how many times as much")] = 100.0


class Mean(Options, frozen=True):
    """Options of the mean."""

    absent: Annotated[
        Literal["keep", "leave_out"],
        Meta(
            description=(
                "devices of the round whose stage or budget left out an encoder stage of a modality that they have: "
                "they count as keeping it as it was, or are left out"
            )
        ),
    ] = "keep"


def _depth(recipe: Recipe) -> list[Problem]:
    if "mixed" not in recipe["schedule"]:
        return []
    text = "cka compares models at the whole depth, which with schedule: mixed some do not have; set another weight"
    return [Problem("weight", text)]


def _alone(recipe: Recipe) -> list[Problem]:
    resting = (("cluster", "none"), ("prototypes", "none"), ("repair", "none"), ("optimise", "plain"))
    return [
        Problem(role, f"weight: own exchanges nothing; set {role}: {nothing}")
        for role, nothing in resting
        if nothing not in recipe[role]
    ]


register(
    Weight("samples", "number of samples, per part", default=True),
    Weight("fediot", "the same, devices with several modalities counting more (FedIoT)", Fediot),
    Weight(
        "cka",
        "how much a model's view of probe samples agrees with the others' (FedMVP)",
        conflicts=_depth,
        per_round=True,
    ),
    Weight(
        "relationship",
        "each device gets its own mean of the mappings, by their cosine; its classifier stays at home (AproMFL)",
        per_round=True,
        headless="weight: relationship exchanges the mappings, the heads, and without them nothing is left to map",
    ),
    Weight("own", "nothing is exchanged: each device trains alone", conflicts=_alone, per_round=True),
    Combine("mean", "streaming weighted mean per part", Mean, default=True),
)
