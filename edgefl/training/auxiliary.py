"""Auxiliary state of the loss terms: prototypes, private copies of heads, teachers, and the values received.

A private copy (AproMFL's clustering model) is that of a device without labels: it begins as the mapping the device was
first sent, is trained along and stays on the device. A teacher is the mapping as it was received in this round; the
device's own goes on from its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from edgefl.data.dataset import Dataset
from edgefl.models.parts import load_module, module_tensors
from edgefl.models.spec import PROTOTYPES
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.plan.training_samples import clusters_apart
from edgefl.prototypes.adaptive import LOCAL_CLUSTERS, Local, local_pairs
from edgefl.prototypes.mask import Table, in_torch
from edgefl.prototypes.table import from_tensors
from edgefl.registry import chosen
from edgefl.training.embeddings import device_of, embeddings
from edgefl.training.flop_cache import counted, kind_of_step
from edgefl.training.forward import Auxiliary, copied
from edgefl.training.scoring import matcher_of

R = TypeVar("R")
Tensors = Mapping[str, np.ndarray]
#: What a private copy is called among the parts a device keeps.
PRIVATE_HEAD = "twin/"


def auxiliary_of(job: Job, model: StagedModel, parts: Mapping[str, Tensors], kept: Mapping[str, Tensors]) -> Auxiliary:
    """Auxiliary state of the recipe's terms. ``parts``: as received; ``kept``: parts of this device's last round."""
    terms = [term.method for term in chosen("objective", job.slots.objective)]
    heads = [m for m in job.model.encoders if f"head/{m}" in job.stage.trained]
    private_heads: dict[str, nn.Module] = {}
    teachers: dict[str, nn.Module] = {}
    for m in heads:
        head = model.part(f"head/{m}")
        if clusters_apart(job.slots, job.stage):
            private_heads[m] = copied(head, trained=True)
            load_module(PRIVATE_HEAD + m, private_heads[m], kept.get(PRIVATE_HEAD + m, parts[f"head/{m}"]))
        if any(term.teacher for term in terms):
            teachers[m] = copied(head, trained=False)
            load_module(f"head/{m}", teachers[m], parts[f"head/{m}"])
    trained = [p for part in job.stage.trained for p in model.part(part).parameters()]
    received = tuple((p, p.detach().clone()) for p in trained if any(term.received for term in terms))
    return Auxiliary(tables_of(parts, device_of(model)), private_heads, teachers, received, matcher_of(job.slots, {}))


def tables_of(parts: Mapping[str, Tensors], device: torch.device) -> dict[str, Table]:
    """The global prototypes that were received; none in the first round."""
    return in_torch(from_tensors(parts[PROTOTYPES]), device) if PROTOTYPES in parts else {}


def private_head_tensors(auxiliary: Auxiliary) -> dict[str, dict[str, np.ndarray]]:
    """The private copies, as parts to keep."""
    return {PRIVATE_HEAD + m: module_tensors(head) for m, head in auxiliary.private_heads.items()}


def local_prototypes(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> Local:
    """Adaptive prototypes of this device and the class or cluster of each sample, by the private heads if there are
    any. ``model`` and the heads end in the modes they had.
    """
    options = chosen("prototypes", job.slots.prototypes)[0].options
    heads = {m: auxiliary.private_heads.get(m) for m in _own(job, dataset)}  # None: the model's own
    teaching = _teaching(job, dataset)
    projections = _counted(
        job,
        dataset,
        teaching,
        lambda: {m: embeddings(model, m, dataset, job.stage.depth, head, teaching) for m, head in heads.items()},
    )
    has = {m: dataset.has(m) for m in projections}
    least = float(options.get("min_count", 1))  # a cluster of fewer samples does not leave the device
    clusters = max(1, min(int(options.get("local_clusters", LOCAL_CLUSTERS)), int(teaching.sum() // least)))
    labels = dataset.labels if job.model.classes else None
    return local_pairs(projections, has, labels, job.model.classes, rng, clusters=clusters)


def _teaching(job: Job, dataset: Dataset) -> np.ndarray:
    """[N] bool: the samples adaptive prototypes are made of: the labelled ones, without labels the complete ones."""
    if job.model.classes and dataset.labels is not None and (dataset.labels >= 0).any():
        return np.asarray(dataset.labels >= 0)
    return np.asarray(np.logical_and.reduce([dataset.has(m) for m in _own(job, dataset)]))


def pseudo_labels_of(
    job: Job, model: StagedModel, auxiliary: Auxiliary, dataset: Dataset, rng: np.random.Generator
) -> np.ndarray | None:
    """Each sample's local cluster [N] for this round, where a private head is trained by it."""
    if not clusters_apart(job.slots, job.stage):
        return None
    return local_prototypes(job, model, auxiliary, dataset, rng).labels


def projections_of(job: Job, model: StagedModel, dataset: Dataset) -> dict[str, np.ndarray]:
    """[N, d] of each modality this device has, encoded alone, zeros in rows that lack it."""
    own = _own(job, dataset)
    whole = np.ones(len(dataset), dtype=bool)
    return _counted(job, dataset, whole, lambda: {m: embeddings(model, m, dataset, job.stage.depth) for m in own})


def _counted(job: Job, dataset: Dataset, rows: np.ndarray, work: Callable[[], R]) -> R:
    """What ``work`` returns, which encodes each modality of the ``rows`` [N] (bool) by itself."""
    shape = tuple((m, int((dataset.has(m) & rows).sum())) for m in _own(job, dataset))
    return counted(b"alone" + kind_of_step(job, with_tables=False), shape, work, linear="rows")


def _own(job: Job, dataset: Dataset) -> list[str]:
    return [m for m in job.model.encoders if f"head/{m}" in job.stage.present and dataset.has(m).any()]
