"""Adaptive prototypes (AproMFL, arXiv 2502.04400): class means where there are labels, else K-means clusters.

Completed and clustered on the server (``edgefl.methods.prototypes.complete``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from edgefl.methods.prototypes.complete import complete
from edgefl.methods.prototypes.min_count import MinCount
from edgefl.models.spec import ModelSpec
from edgefl.plan.job import Candidate, Job
from edgefl.plan.training_samples import held_out, usable_samples
from edgefl.prototypes.table import ClassMeans
from edgefl.registry import Options, Prototypes, register

if TYPE_CHECKING:
    from edgefl.data.dataset import Dataset
    from edgefl.models.staged import StagedModel
    from edgefl.training.forward import Auxiliary


class Adaptive(Options, frozen=True):
    """Options of AproMFL's prototypes."""

    min_count: MinCount = 2
    local_clusters: Annotated[int, Meta(ge=1, description="prototypes of a device without labels")] = 20
    clusters: Annotated[int, Meta(ge=1, description="global prototypes")] = 10
    neighbours: Annotated[int, Meta(ge=1, description="multimodal prototypes that complete a unimodal one")] = 10


def local(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> Mapping[str, ClassMeans]:
    """Class means or cluster centres of a device's projections, by its private heads if it has any."""
    from edgefl.training.forward import local_prototypes  # loads torch

    return dict(local_prototypes(job, model, auxiliary, dataset, rng).pairs.tables)


def rows(model: ModelSpec, *, clusters: float) -> dict[str, tuple[int, int]]:
    """A table of global prototypes a modality; rows at one index are a pair."""
    return dict.fromkeys(model.encoders, (int(clusters), model.head.out))


def local_rows(
    job: Job, candidate: Candidate, own: Sequence[str], *, local_clusters: float, min_count: float
) -> dict[str, tuple[int, int]]:
    """Classes where the device has labels; else clusters of its samples with all its modalities, hold-out aside."""
    if job.model.classes and any(candidate.class_counts):
        count = job.model.classes
    else:
        complete = min((candidate.samples[m] for m in own), default=0)
        judged = usable_samples(job.slots, candidate.samples, list(job.model.encoders), 0)
        trained = complete - round(held_out(job.hyper, judged) * min(1.0, complete / max(1, judged)))
        count = min(int(local_clusters), int(trained // min_count))
    return dict.fromkeys(own, (count, job.model.head.out)) if count else {}


register(
    Prototypes(
        "adaptive",
        "class means where there are labels, else K-means; completed and clustered on the server (AproMFL)",
        Adaptive,
        source="arXiv 2502.04400",
        per_round=True,
        local=local,
        merge=complete,
        rows=rows,
        local_rows=local_rows,
    )
)
