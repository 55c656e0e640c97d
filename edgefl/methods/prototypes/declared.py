"""Prototypes: their options and rules."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgefl.errors import Problem
from edgefl.methods.prototypes.complete import complete
from edgefl.registry import Options, Prototypes, Recipe, register

#: A mean of one sample is that sample.
MinCount = Annotated[
    int,
    Meta(
        ge=1,
        description="fewest samples of a class on a device whose mean it sends; fewer would give them away",
    ),
]


class ClassMean(Options, frozen=True):
    """Options of class means."""

    weighting: Annotated[
        Literal["modality", "class"],
        Meta(description="weights of the merge: each device's samples of the modality, or of the class"),
    ] = "modality"
    source: Annotated[
        Literal["all", "pairs"],
        Meta(
            description=(
                "samples of a modality's prototypes: all that have it, or pairs: those that have every modality"
            )
        ),
    ] = msgspec.field(default="all", name="from")
    match: Annotated[
        Literal["cosine", "l1", "l2", "classifier", "prior"],
        Meta(
            description=(
                "how a sample finds its classes at inference: nearest prototype, a small classifier, or a small "
                "network into the other modality's space; the small ones are trained in a closing round by all devices"
            )
        ),
    ] = "cosine"
    combine: Annotated[
        Literal["average", "largest", "ensemble"],
        Meta(
            description="how the devices' small networks become one: their mean, the largest device's, or all of them"
        ),
    ] = "average"
    min_count: MinCount = 2
    k: Annotated[int, Meta(ge=1, description="classes mixed at inference")] = 3
    temperature: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "of the softmax that weighs them; 0: the match's own, which is 0.01 for cosine and 1 for the others: "
                "the plain softmax of -distances and of a prior's cosines, and a classifier's probabilities themselves"
            ),
        ),
    ] = 0.0


class Adaptive(Options, frozen=True):
    """Options of AproMFL's prototypes."""

    min_count: MinCount = 2
    local_clusters: Annotated[int, Meta(ge=1, description="prototypes of a device without labels")] = 20
    clusters: Annotated[int, Meta(ge=1, description="global prototypes")] = 10
    neighbours: Annotated[int, Meta(ge=1, description="multimodal prototypes that complete a unimodal one")] = 10


def _labels(recipe: Recipe) -> list[Problem]:
    if "cross_entropy" in recipe["objective"]:
        return []
    advice = "add the term cross_entropy, or set prototypes: none"
    return [Problem("prototypes", f"class_mean needs labels, which no term of the objective uses; {advice}")]


register(
    Prototypes(
        "class_mean",
        "class means of each modality and of the fused representation (arXiv 2312.13508, eqs 1-3)",
        ClassMean,
        conflicts=_labels,
    ),
    Prototypes(
        "adaptive",
        "class means where there are labels, else K-means; completed and clustered on the server (AproMFL)",
        Adaptive,
        per_round=True,
        merge=complete,
    ),
)
