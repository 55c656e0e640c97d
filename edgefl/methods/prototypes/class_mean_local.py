"""Class-mean prototypes of one device, after local training (arXiv 2312.13508; decisions D-P2, D-P7).

Per modality: mean projection r_m [d] of each class over the samples that have the modality, or with ``from: pairs``
over the complete ones: the paper defines its representations for pairs (section 3.2), and a multiway encoder makes
something else of a modality alone. "fused": mean fused representation over the complete samples. A class without
samples has count 0: absent, not zero.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.models.encoder import TokenState
from edgefl.models.spec import fused_width
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.prototypes.table import FUSED, ClassMeans
from edgefl.training.batches import ShapeKey, make_batch
from edgefl.training.embeddings import device_of, to_numpy
from edgefl.training.flop_cache import counted, kind_of_step, linear_in


def class_means(model: StagedModel, job: Job, dataset: Dataset, source: str = "all") -> dict[str, ClassMeans]:
    """Tables by modality and for "fused". ``model`` ends in evaluation mode."""
    model.eval()
    modalities = [m for m in job.model.encoders if f"head/{m}" in model.parts_present and dataset.has(m).any()]
    classes, width = job.model.classes, job.model.head.out
    sums = {m: np.zeros((classes, width), np.float64) for m in modalities}
    counts = {m: np.zeros(classes, np.float32) for m in modalities}
    if set(modalities) == set(job.model.encoders):
        sums[FUSED] = np.zeros((classes, fused_width(job.model)), np.float64)
        counts[FUSED] = np.zeros(classes, np.float32)
    labels = dataset.labels if dataset.labels is not None else np.full(len(dataset), -1)
    telling = labels >= 0
    if source == "pairs":
        telling &= np.logical_and.reduce([dataset.has(m) for m in job.model.encoders])
    labelled = np.flatnonzero(telling)
    size = job.hyper.micro_batch or job.hyper.batch_size
    kind = FUSED.encode() + kind_of_step(job, with_tables=False)
    for start in range(0, len(labelled), size):
        indices = labelled[start : start + size]
        work = partial(_representations, model, job, dataset, indices, modalities)
        found = counted(kind, _shape(dataset, indices, modalities), work, linear=linear_in(job))
        for name, rows, values in found:
            np.add.at(sums[name], labels[rows], values)
            np.add.at(counts[name], labels[rows], 1)
    return {m: ClassMeans((sums[m] / np.maximum(counts[m], 1)[:, None]).astype(np.float32), counts[m]) for m in sums}


def _shape(dataset: Dataset, indices: np.ndarray, modalities: list[str]) -> ShapeKey:
    """Rows of each modality, and the complete ones, which alone are fused."""
    has = {m: dataset.has(m)[indices] for m in modalities}
    complete = int(np.logical_and.reduce(list(has.values())).sum())
    return (*((m, int(rows.sum())) for m, rows in has.items()), (FUSED, complete))


@torch.no_grad()
def _representations(
    model: StagedModel, job: Job, dataset: Dataset, indices: np.ndarray, modalities: list[str]
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(table, dataset rows [n], values [n, d]) of one batch."""
    batch = make_batch(dataset, indices, modalities, device_of(model))
    states: dict[str, TokenState] = {}
    if job.model.fusion == "joint":
        states = model.encode_batch_tokens(batch.inputs, batch.rows, batch.size, job.stage.depth)
        pooled = {m: model.pool_tokens(m, state) for m, state in states.items()}
    else:
        pooled = model.encode_batch(batch.inputs, batch.rows, batch.size, job.stage.depth)
    projected = {m: model.project(m, h) for m, h in pooled.items()}
    result = [(m, indices[dataset.has(m)[indices]], to_numpy(r)) for m, r in projected.items()]
    if len(projected) == len(job.model.encoders):
        complete = np.logical_and.reduce([dataset.has(m)[indices] for m in projected])
        if complete.any():
            rows = {m: np.flatnonzero(complete[dataset.has(m)[indices]]) for m in projected}
            kept = {m: torch.from_numpy(rows[m]).to(r.device) for m, r in projected.items()}
            chosen = {m: r[kept[m]] for m, r in projected.items()}
            tokens = {m: state.of(kept[m]) for m, state in states.items()}
            fused = model.fuse(chosen, None, tokens or None, dict.fromkeys(kept))
            result.append((FUSED, indices[complete], to_numpy(fused)))
    return result
