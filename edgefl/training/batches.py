"""Batches with absent modalities: which rows of a batch have which modality.

A batch of B samples holds, per modality m, only the n_m rows that have it; ``rows[m]`` says which rows these are
([n_m] int64), or is None when all B have it. So absent samples cost no computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.models.encoders.base import Input, TokenState, rows_in
from edgefl.plan.job import Job
from edgefl.plan.training_samples import clusters_apart, needs_labels, prefixes

#: Batch norm in the heads can not train on one row.
LEAST_ROWS = 2


#: See ``Batch.shape_key``.
ShapeKey = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Batch:
    """``inputs[m]``: [n_m, *shape], or tokens that stand for them; ``rows[m]``: [n_m] or None (all).

    ``labels``: [B] int64 or None; ``pseudo_labels`` [B]: class or local cluster, -1: none, or None; ``complete``: rows
    that have every modality of the batch.
    """

    size: int
    inputs: Mapping[str, Input]
    rows: Mapping[str, Tensor | None]
    labels: Tensor | None
    pseudo_labels: Tensor | None = None
    complete: int = 0

    @property
    def shape_key(self) -> ShapeKey:
        """Rows per modality, under "" whether stand-ins are made, under "&" the complete ones.

        Batches of equal key cost the same.
        """
        incomplete = int(any(rows is not None for rows in self.rows.values()))
        return (("", incomplete), ("&", self.complete), *sorted((m, rows_in(x)) for m, x in self.inputs.items()))


def input_of(dataset: Dataset, modality: str, rows: np.ndarray, device: str | torch.device) -> Input:
    """A model's input of one modality for the samples ``rows`` [n], which all have it."""
    encoded = dataset.encoded.get(modality)
    if encoded is None:
        return torch.from_numpy(dataset.modalities[modality][rows]).to(device)
    mask = None if encoded.mask is None else torch.from_numpy(encoded.mask[rows]).to(device)
    return TokenState(torch.from_numpy(encoded.tokens[rows]).to(device), mask, encoded.depth)


def make_batch(
    dataset: Dataset,
    indices: np.ndarray,
    modalities: Sequence[str],
    device: str | torch.device,
    *,
    least_rows: int = 1,
    pseudo_labels: np.ndarray | None = None,
) -> Batch:
    """The samples ``indices`` [B]. A modality with fewer than ``least_rows`` rows is treated as absent.

    ``pseudo_labels`` [N]: of every sample of the data set.
    """
    complete = np.ones(len(indices), dtype=bool)
    inputs: dict[str, Input] = {}
    rows: dict[str, Tensor | None] = {}
    for m in modalities:
        has = dataset.has(m)[indices]
        if int(has.sum()) < least_rows:
            continue
        complete &= has
        inputs[m] = input_of(dataset, m, indices[has], device)
        rows[m] = None if has.all() else torch.from_numpy(np.flatnonzero(has)).to(device)
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels[indices]).to(device)
    chosen = None if pseudo_labels is None else torch.from_numpy(pseudo_labels[indices]).to(device)
    return Batch(len(indices), inputs, rows, labels, chosen, int(complete.sum()))


def training_batches(
    dataset: Dataset,
    rows: Iterable[np.ndarray],
    modalities: Sequence[str],
    device: str | torch.device,
    pseudo_labels: np.ndarray | None = None,
) -> Iterator[Batch]:
    """A batch of each of ``rows`` (indices [B]), but for those in which no modality has two rows.

    That can happen among very few samples.
    """
    for indices in rows:
        batch = make_batch(dataset, indices, modalities, device, least_rows=LEAST_ROWS, pseudo_labels=pseudo_labels)
        if batch.inputs:
            yield batch


def mixed_rows(usable: np.ndarray, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """One epoch over the samples ``usable``: shuffled, full batches only (the last short one is dropped)."""
    order = rng.permutation(usable)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def unmixed_rows(
    dataset: Dataset, usable: np.ndarray, modalities: Sequence[str], batch_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """As ``mixed_rows``, with complete samples and others in batches of their own, as far as they fill one.

    The batches are in random order; what is left over of both kinds is mixed.
    """
    complete = np.logical_and.reduce([dataset.has(m)[usable] for m in modalities])
    batches, left = [], []
    for rows in (rng.permutation(usable[complete]), rng.permutation(usable[~complete])):
        whole = len(rows) // batch_size * batch_size
        batches += list(rows[:whole].reshape(-1, batch_size))
        left.append(rows[whole:])
    batches += list(mixed_rows(np.concatenate(left), batch_size, rng))
    return [batches[i] for i in rng.permutation(len(batches))]


def meta_input(job: Job, modality: str, rows: int) -> Input:
    """A model's input of one modality for ``rows`` samples on the meta device: shapes without data, for pricing."""
    encoder = job.model.encoders[modality]
    text = encoder.kind == "text"
    prefix = prefixes(job).get(modality)
    if prefix is None:
        dtype = torch.int64 if text else torch.float32
        return torch.empty((rows, *encoder.input_shape), dtype=dtype, device="meta")
    stored = torch.float16 if job.hyper.cache == "f16" else torch.float32
    tokens = torch.empty((rows, prefix.tokens, encoder.width), dtype=stored, device="meta")
    mask = torch.empty((rows, prefix.tokens), dtype=torch.bool, device="meta") if text else None
    return TokenState(tokens, mask, prefix.depth)


def meta_batch(job: Job, rows: Mapping[str, int]) -> Batch:
    """A batch on the meta device with ``rows[m]`` samples having m."""
    size = job.hyper.batch_size
    index = {m: None if n == size else torch.empty(n, dtype=torch.int64, device="meta") for m, n in rows.items()}
    inputs = {m: meta_input(job, m, count) for m, count in rows.items()}
    labelled = needs_labels(job.slots) and "task" in job.stage.trained
    labels = torch.empty(size, dtype=torch.int64, device="meta") if labelled else None
    clustered = clusters_apart(job.slots, job.stage)
    pseudo_labels = torch.empty(size, dtype=torch.int64, device="meta") if clustered else None
    return Batch(size, inputs, index, labels, pseudo_labels, min(rows.values(), default=0))
