"""Class means (PmcmFL, arXiv 2312.13508, equations 1-3): prototypes of each modality and of the fused representation.

P_m,c: mean projection of class c over the samples that have modality m; merged by counts, class by class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from edgefl.errors import Problem
from edgefl.methods.prototypes.min_count import MinCount
from edgefl.models.spec import ModelSpec, fused_width
from edgefl.plan.job import Candidate, Job
from edgefl.prototypes.table import FUSED, ClassMeans
from edgefl.registry import Options, Prototypes, Recipe, offers, register

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset
    from edgefl.models.staged import StagedModel
    from edgefl.training.forward import Auxiliary


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


def local(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator, **options: object
) -> Mapping[str, ClassMeans]:
    """Class means of a device's samples."""
    from edgefl.methods.prototypes.class_mean_local import class_means  # loads torch

    return class_means(model, job, dataset, str(options["from"]))


def rows(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """A table a modality, and the fused one."""
    return _tables(model, list(model.encoders))


def local_rows(job: Job, candidate: Candidate, own: Sequence[str], **options: object) -> dict[str, tuple[int, int]]:
    """Those of the device's modalities; none without labels or, of pairs, without all modalities."""
    unlabelled = bool(candidate.class_counts) and not any(candidate.class_counts)
    if unlabelled or (options["from"] == "pairs" and len(own) < len(job.model.encoders)):
        return {}
    return _tables(job.model, own)


def _tables(model: ModelSpec, modalities: Sequence[str]) -> dict[str, tuple[int, int]]:
    fused = {FUSED: fused_width(model)} if len(modalities) == len(model.encoders) else {}
    return {m: (model.classes, width) for m, width in {**dict.fromkeys(modalities, model.head.out), **fused}.items()}


def _labels(recipe: Recipe) -> list[Problem]:
    if offers(recipe, "objective", "labels"):
        return []
    advice = "add the term cross_entropy, or set prototypes: none"
    return [Problem("prototypes", f"class_mean needs labels, which no term of the objective uses; {advice}")]


register(
    Prototypes(
        "class_mean",
        "class means of each modality and of the fused representation (arXiv 2312.13508, eqs 1-3)",
        ClassMean,
        source="arXiv 2312.13508",
        conflicts=_labels,
        local=local,
        classes=True,
        rows=rows,
        local_rows=local_rows,
    )
)
