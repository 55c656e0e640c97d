"""Batches with absent modalities: which rows of a batch have which modality.

A batch of B samples holds, per modality m, only the n_m rows that have it; ``rows[m]`` says which rows these are
([n_m] int64), or is None when all B have it. So absent samples cost no computation.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.models.encoder import Input, TokenState, rows_in
from edgefl.models.spec import is_task
from edgefl.plan.job import Job
from edgefl.plan.training_samples import (
    LABEL_THEM,
    clusters_apart,
    complete_only,
    held_out,
    needs_labels,
    needs_pairs,
    prefixes,
    unlabelled,
)
from edgefl.records import Refusal
from edgefl.registry import chosen

#: Batch norm in the heads cannot train on one row.
LEAST_ROWS = 2


#: See ``Batch.shape_key``.
ShapeKey = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Batch:
    """Batch of samples with missing modalities.

    ``inputs[m]``: [n_m, *shape], or tokens that stand for them; ``rows[m]``: [n_m] or None (all).
    ``labels``: [B] int64 or None; ``pseudo_labels`` [B]: class or local cluster, -1: none, or None; ``complete``: rows
    that have every modality of the batch; ``targets``: [B] float32, NaN: none, of a numeric target, or None; ``sets``:
    [B, C] float32, 1 for each class of a sample that may have several, or None.
    """

    size: int
    inputs: Mapping[str, Input]
    rows: Mapping[str, Tensor | None]
    labels: Tensor | None
    pseudo_labels: Tensor | None = None
    complete: int = 0
    targets: Tensor | None = None
    sets: Tensor | None = None

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
    complete = np.ones(len(indices), dtype=bool) if dataset.whole is None else dataset.whole[indices]
    inputs: dict[str, Input] = {}
    rows: dict[str, Tensor | None] = {}
    for m in modalities:
        has = dataset.has(m)[indices]
        count = np.count_nonzero(has)
        if count < least_rows:
            continue
        if count == len(indices):
            inputs[m], rows[m] = input_of(dataset, m, indices, device), None
            continue
        complete = complete & has
        inputs[m] = input_of(dataset, m, indices[has], device)
        rows[m] = torch.from_numpy(np.flatnonzero(has)).to(device)
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels[indices]).to(device)
    targets = None if dataset.targets is None else torch.from_numpy(dataset.targets[indices]).float().to(device)
    sets = None if dataset.sets is None else torch.from_numpy(dataset.sets[indices]).float().to(device)
    chosen = None if pseudo_labels is None else torch.from_numpy(pseudo_labels[indices]).to(device)
    return Batch(len(indices), inputs, rows, labels, chosen, int(np.count_nonzero(complete)), targets, sets)


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
    complete = dataset.complete(modalities)[usable]
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
    tokens = torch.empty((rows, prefix.tokens, prefix.width), dtype=stored, device="meta")
    mask = torch.empty((rows, prefix.tokens), dtype=torch.bool, device="meta") if text else None
    return TokenState(tokens, mask, prefix.depth)


def meta_batch(job: Job, rows: Mapping[str, int]) -> Batch:
    """A batch on the meta device with ``rows[m]`` samples having m."""
    size = job.hyper.batch_size
    index = {m: None if n == size else torch.empty(n, dtype=torch.int64, device="meta") for m, n in rows.items()}
    inputs = {m: meta_input(job, m, count) for m, count in rows.items()}
    labelled = needs_labels(job.slots) and any(map(is_task, job.stage.trained))
    labels = torch.empty(size, dtype=torch.int64, device="meta") if labelled else None
    clustered = clusters_apart(job.slots, job.stage)
    pseudo_labels = torch.empty(size, dtype=torch.int64, device="meta") if clustered else None
    return Batch(size, inputs, index, labels, pseudo_labels, min(rows.values(), default=0))


class Split(NamedTuple):
    """A device's samples: what it trains on, and what it only tests on."""

    train: Dataset
    holdout: Dataset


def usable_rows(job: Job, dataset: Dataset) -> np.ndarray:
    """Indices of the samples that can be trained on: labelled, or with two modalities, as the objective needs."""
    keep = _telling(job, dataset)
    if chosen("missing", job.slots.missing)[0].method.complete_only:
        keep &= _having(job, dataset).all(axis=0)
    return np.flatnonzero(keep)


def split(job: Job, dataset: Dataset, device: str) -> Split:
    """``hyper.holdout`` of the samples set apart, the same ones in every round of a run.

    They are drawn from all that can be judged, before any is left out or completed, so that recipes with the same task
    set the same ones apart. At least one batch of these stays; without room for that nothing is set apart. Windows of
    one recording are never on both sides.
    """
    judged = np.flatnonzero(_telling(job, dataset))
    count = held_out(job.hyper, len(judged))
    if not count:
        return Split(dataset, dataset.subset([]))
    rng = np.random.default_rng((job.hyper.seed, zlib.crc32(f"holdout/{device}".encode())))
    if dataset.recordings is None:
        holdout = np.sort(rng.permutation(judged)[:count])
    else:
        holdout = _whole_recordings(dataset.recordings, judged, count, rng)
    return Split(dataset.subset(np.delete(np.arange(len(dataset)), holdout)), dataset.subset(holdout))


def _whole_recordings(recordings: np.ndarray, judged: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """All windows of recordings, drawn one after the other while at most ``most`` of the ``judged`` are in them."""
    found, sizes = np.unique(recordings[judged], return_counts=True)
    taken, left = [], most
    for one in rng.permutation(len(found)):
        if sizes[one] <= left:
            taken.append(one)
            left -= sizes[one]
    return np.flatnonzero(np.isin(recordings, found[taken]))


def _having(job: Job, dataset: Dataset) -> np.ndarray:
    """[M, N] bool: which of the model's modalities a sample has."""
    return np.stack([dataset.has(m) for m in job.model.encoders])


def _telling(job: Job, dataset: Dataset) -> np.ndarray:
    """[N] bool: samples the objective can learn something from."""
    has = _having(job, dataset)
    labelled = dataset.labels >= 0 if dataset.labels is not None else np.zeros(len(dataset), dtype=bool)
    keep = has.any(axis=0) & labelled if needs_labels(job.slots) else np.zeros(len(dataset), dtype=bool)
    if needs_pairs(job.slots):
        keep |= has.sum(axis=0) >= 2
    return keep


def no_label(job: Job, dataset: Dataset) -> Refusal | None:
    """The refusal of a share without a label whose objective learns from labels alone."""
    labelled = 0 if dataset.labels is None else int((dataset.labels >= 0).sum())
    return unlabelled(job.slots, len(dataset), labelled)


def too_few(job: Job, dataset: Dataset, usable: int) -> DataError:
    """Why the share does not fill one batch (decision D-L3)."""
    if (refusal := no_label(job, dataset)) is not None:
        return DataError(refusal.detail, remedy=LABEL_THEM)
    which = "complete samples" if complete_only(job.slots) else "usable samples"
    return DataError(
        f"the share has {usable} {which}, fewer than one batch of {job.hyper.batch_size}",
        remedy="Give the device more data, or lower training.batch_size.",
    )
