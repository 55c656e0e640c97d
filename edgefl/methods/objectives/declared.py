"""Terms of the local loss: their options and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.registry import Objective, Options, Recipe, Temperature, TermWeight, register


class Term(Options, frozen=True):
    """Options of a term with a weight only."""

    weight: TermWeight = 1.0


class Clip(Term, frozen=True):
    """Options of the contrast of pairs."""

    temperature: Temperature = 0.05


class Margin(Term, frozen=True):
    """Options of the margins of pairs."""

    positive: Annotated[float, Meta(ge=-1, le=1, description="cosine that pairs should reach")] = 0.8
    negative: Annotated[float, Meta(ge=-1, le=1, description="cosine that other pairs should stay below")] = 0.2


class Contrast(Term, frozen=True):
    """Options of a contrast."""

    temperature: Temperature = 0.1


class PrototypeContrast(Term, frozen=True):
    """Options of the contrast with fused prototypes."""

    temperature: Temperature = 0.07
    negatives: Annotated[
        Literal["samples", "classes"], Meta(description="the batch's other samples, or the other classes")
    ] = "samples"


class Transfer(Term, frozen=True):
    """Options of AproMFL's transfers from prototypes."""

    temperature: Temperature = 0.07


class ModelTransfer(Term, frozen=True):
    """Options of the transfer from the model received."""

    temperature: Temperature = 1.0


class Pull(Options, frozen=True):
    """Options of a term that pulls towards earlier weights."""

    weight: TermWeight = 0.01


class Mcm(Term, frozen=True):
    """Options of FedMVP's contrast."""

    temperature: Temperature = 0.07
    form: Annotated[
        Literal["literal", "ntxent"], Meta(description="as printed, or with the positive in the denominator")
    ] = "literal"


def _needs_class_means(term: str) -> Callable[[Recipe], list[Problem]]:
    def conflicts(recipe: Recipe) -> list[Problem]:
        if "class_mean" in recipe["prototypes"]:
            return []
        advice = "set prototypes: class_mean, or leave the term out"
        return [Problem("objective", f"{term} needs class prototypes; {advice}")]

    return conflicts


def _needs_adaptive(term: str) -> Callable[[Recipe], list[Problem]]:
    def conflicts(recipe: Recipe) -> list[Problem]:
        if "adaptive" in recipe["prototypes"]:
            return []
        advice = "set prototypes: adaptive, or leave the term out"
        return [Problem("objective", f"{term} needs adaptive prototypes; {advice}")]

    return conflicts


def _needs_labels(term: str) -> Callable[[Recipe], list[Problem]]:
    def conflicts(recipe: Recipe) -> list[Problem]:
        if "cross_entropy" in recipe["objective"]:
            return []
        text = f"{term} needs the joint representation, which is learned with labels; add the term cross_entropy"
        return [Problem("objective", text)]

    return conflicts


def _own_mapping(recipe: Recipe) -> list[Problem]:
    if "relationship" in recipe["weight"]:
        return []
    advice = "set weight: relationship, or leave the term out"
    return [Problem("objective", f"model_transfer needs a mapping of the device's own; {advice}")]


def _cluster_contrast(recipe: Recipe) -> list[Problem]:
    found = _needs_adaptive("cluster_contrast")(recipe)
    if not {"clip", "margin"} & set(recipe["objective"]):
        text = "cluster_contrast is trained by devices without labels, whose task is of pairs; add margin or clip"
        found.append(Problem("objective", text))
    return found


def _private_copy(recipe: Recipe) -> list[Problem]:
    if "cluster_contrast" in recipe["objective"]:
        return []
    return [Problem("objective", "regulariser needs the private copy that cluster_contrast trains; add it")]


register(
    Objective("cross_entropy", "classification of the fused representation", Term, labels=True, default=True),
    Objective("clip", "contrast of the modalities' projections, labels unused (arXiv 2407.15426)", Clip, pairs=True),
    Objective("margin", "pairs above one cosine, other pairs below another, labels unused", Margin, pairs=True),
    Objective(
        "modality_contrast",
        "each modality's projection against that modality's global class prototypes, from the second round on",
        Contrast,
        conflicts=_needs_class_means("modality_contrast"),
    ),
    Objective(
        "prototype_contrast",
        "the fused representation against the fused prototypes, from the second round on (arXiv 2312.13508, eq. 7)",
        PrototypeContrast,
        conflicts=_needs_class_means("prototype_contrast"),
    ),
    Objective(
        "cluster_contrast",
        "devices without labels cluster by a private copy of the mapping, taught by those clusters (AproMFL, eqs 3-5)",
        Transfer,
        conflicts=_cluster_contrast,
        headless="cluster_contrast trains a copy of the mappings, the heads, and without them there is none",
    ),
    Objective(
        "prototype_transfer",
        "a sample, of one modality too, sees both halves of the global prototype pairs alike (AproMFL, eqs 7-8)",
        Transfer,
        conflicts=_needs_adaptive("prototype_transfer"),
    ),
    Objective(
        "model_transfer",
        "the mapping received teaches the device's own: Kullback-Leibler divergence of unit vectors (AproMFL, eq. 9)",
        ModelTransfer,
        conflicts=_own_mapping,
    ),
    Objective(
        "regulariser",
        "the mapping of a device without labels stays near its private copy (AproMFL, eq. 6)",
        Pull,
        conflicts=_private_copy,
    ),
    Objective(
        "mcm",
        "the joint representation matches each modality's (FedMVP, eqs 4-5)",
        Mcm,
        conflicts=_needs_labels("mcm"),
    ),
    Objective(
        "ram",
        "the joint representation follows a modality that classifies better (FedMVP, eqs 6-7)",
        Term,
        conflicts=_needs_labels("ram"),
    ),
    Objective(
        "gmc",
        "each modality's projection against the joint one (GMC, arXiv 2202.03390)",
        Contrast,
        conflicts=_needs_labels("gmc"),
    ),
    Objective("proximal", "the model stays near the one received (FedProx, arXiv 1812.06127)", Pull),
    Objective("reconstruction", "each modality's projection is predicted from the others'", Term),
)
