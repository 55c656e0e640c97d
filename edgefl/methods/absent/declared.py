"""Stand-ins for an absent modality: their options and rules."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.registry import Options, Recipe, StandIn, register


class Dropped(Options, frozen=True):
    """Options of a stand-in that complete samples can be trained with too."""

    drop: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="probability that a complete sample trains with one of its modalities hidden",
        ),
    ] = 0.0


class Prototype(Options, frozen=True):
    """Options of the prototype mask."""

    by: Annotated[
        Literal["label", "match"],
        Meta(
            description=(
                "whose: that of the sample's own class (the paper), or of the classes that the modality at "
                "hand matches, as at inference"
            )
        ),
    ] = "label"
    drop: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="probability that a complete sample trains with one of its modalities hidden",
        ),
    ] = 0.0


class Completion(Options, frozen=True):
    """Options of generated modalities."""

    generator: Annotated[
        Literal["nearest", "transformers", "diffusers"],
        Meta(
            description=(
                "nearest: the complete local sample that is most alike lends its other half; transformers: image to "
                "text; diffusers: text to image"
            )
        ),
    ] = "nearest"
    checkpoint: Annotated[str, Meta(description="the generator's name or folder")] = ""


def _prototypes(recipe: Recipe) -> list[Problem]:
    if "class_mean" in recipe["prototypes"]:
        return []
    return [Problem("missing", "prototype needs class prototypes; set prototypes: class_mean, or another missing")]


def _trained(recipe: Recipe) -> list[Problem]:
    if "reconstruction" in recipe["objective"]:
        return []
    return [Problem("missing", "reconstruction needs the term of the same name in the objective; add it")]


def _checkpoint(recipe: Recipe) -> list[Problem]:
    options = recipe["missing"]["completion"]
    if options.get("generator") == "nearest" or options.get("checkpoint"):
        return []
    return [Problem("missing", f"completion by {options.get('generator')} needs a checkpoint; name one")]


register(
    StandIn("zero", "zeros", Dropped, default=True),
    StandIn("ignore", "samples that lack a modality are left out"),
    StandIn("random", "standard normal noise", Dropped),
    StandIn(
        "prototype",
        "a global prototype (arXiv 2312.13508); zeros until there is one",
        Prototype,
        conflicts=_prototypes,
    ),
    StandIn(
        "completion",
        (
            "generated from the modality at hand, once, before training (FedMVP); nothing is generated for the test "
            "set: with one modality, the joint fusion sees that one and the token of an absent one"
        ),
        Completion,
        conflicts=_checkpoint,
    ),
    StandIn(
        "reconstruction",
        "predicted from the modalities at hand by a small network trained along (MMiC)",
        Dropped,
        conflicts=_trained,
    ),
)
