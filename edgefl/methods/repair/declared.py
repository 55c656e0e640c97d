"""Repairs of updates: their options and rules."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.registry import Options, Recipe, Repair, register


class Poverty(Options, frozen=True):
    """Options of the substitution of the poverty layer."""

    form: Annotated[
        Literal["exact", "optimiser"],
        Meta(description="how the change is had: from copies, or from the optimiser's own step"),
    ] = "optimiser"
    donors: Annotated[
        Literal["complete", "less_affected"],
        Meta(
            description=(
                "who lends it: devices that trained with complete data in the round (eq. 11); less_affected: in rounds "
                "without any, those whose layers missing modalities changed less"
            )
        ),
    ] = "less_affected"


def _one_model(recipe: Recipe) -> list[Problem]:
    found = []
    if "relationship" in recipe["weight"]:
        advice = "set another weight, or repair: none"
        found.append(Problem("repair", f"poverty mends one model for all, relationship makes one for each; {advice}"))
    if "ignore" in recipe["missing"]:
        found.append(Problem("repair", "poverty needs samples that lack a modality, missing: ignore leaves them out"))
    return found


register(
    Repair("none", "nothing", default=True),
    Repair(
        "poverty",
        "the layer that missing modalities change most comes from devices of the group with complete data (MMiC)",
        Poverty,
        conflicts=_one_model,
        per_round=True,
    ),
)
