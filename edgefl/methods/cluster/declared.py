"""Clusterings of devices: their options and rules."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.registry import Cluster, Options, Recipe, register

Models = Annotated[Literal["shared", "own"], Meta(description="whether each cluster has a model of its own")]


class Lsh(Options, frozen=True):
    """Options of clusters by sketches."""

    clusters: Annotated[int, Meta(ge=1, description="number of groups")] = 8
    models: Models = "shared"


class Pacfl(Options, frozen=True):
    """Options of clusters by principal angles."""

    threshold: Annotated[float, Meta(ge=0, le=90, description="largest angle within a group, in degrees")] = 30.0
    models: Models = "shared"


def _own_models(recipe: Recipe) -> list[Problem]:
    if any(options.get("models") == "own" for options in recipe["cluster"].values()) and (
        "relationship" in recipe["weight"]
    ):
        return [Problem("cluster", "weight: relationship gives each device a model already; set models: shared")]
    return []


def _classes(recipe: Recipe) -> list[Problem]:
    if "cross_entropy" not in recipe["objective"]:
        text = "pacfl compares the devices class by class, and no term of the objective has classes; set cluster: lsh"
        return [Problem("cluster", text), *_own_models(recipe)]
    return _own_models(recipe)


register(
    Cluster("none", "all devices form one group", default=True),
    Cluster(
        "lsh",
        "by sketches of their features: random sign hashes, then K-means (MMiC)",
        Lsh,
        conflicts=_own_models,
        per_round=True,
    ),
    Cluster(
        "pacfl",
        "by the smallest principal angle between bases of their classes, average linkage (PACFL)",
        Pacfl,
        conflicts=_classes,
        per_round=True,
    ),
)
