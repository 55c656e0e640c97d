"""What every clustering of devices has: signatures, cluster models of their own, and what they do not mix with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgefl.data.arrays import Array
from edgefl.errors import Problem
from edgefl.registry import Recipe, offers

Floats = npt.NDArray[np.float64]
#: device -> the tensors of its signature.
Signatures = Mapping[str, Mapping[str, Array]]
Models = Annotated[Literal["shared", "own"], Meta(description="whether each cluster has a model of its own")]


def own_models(recipe: Recipe) -> list[Problem]:
    """Cluster models beside one model for each device."""
    if any(options.get("models") == "own" for options in recipe["cluster"].values()) and (
        offers(recipe, "weight", "personal")
    ):
        return [Problem("cluster", "weight: relationship gives each device a model already; set models: shared")]
    return []
