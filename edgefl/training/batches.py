"""Batches with absent modalities: which rows of a batch have which modality.

A batch of B samples holds, per modality m, only the n_m rows that have it; ``rows[m]`` says which rows these are
([n_m] int64), or is None when all B have it. So absent samples cost no computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset

#: Batch norm in the heads can not train on one row.
LEAST_ROWS = 2


#: Rows of each modality, sorted by name.
ShapeKey = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Batch:
    """``inputs[m]``: [n_m, *shape]; ``rows[m]``: [n_m] or None (all); ``labels``: [B] int64 or None."""

    size: int
    inputs: dict[str, Tensor]
    rows: dict[str, Tensor | None]
    labels: Tensor | None

    @property
    def shape_key(self) -> ShapeKey:
        """Rows per modality, and under "" whether stand-ins are made: batches of equal key cost the same."""
        incomplete = int(any(rows is not None for rows in self.rows.values()))
        return (("", incomplete), *sorted((m, int(x.shape[0])) for m, x in self.inputs.items()))


def make_batch(
    dataset: Dataset, indices: np.ndarray, modalities: Sequence[str], device: str, *, least_rows: int = 1
) -> Batch:
    """The samples ``indices`` [B]. A modality with fewer than ``least_rows`` rows is treated as absent."""
    inputs: dict[str, Tensor] = {}
    rows: dict[str, Tensor | None] = {}
    for m in modalities:
        has = dataset.has(m)[indices]
        if int(has.sum()) < least_rows:
            continue
        inputs[m] = torch.from_numpy(dataset.modalities[m][indices[has]]).to(device)
        rows[m] = None if has.all() else torch.from_numpy(np.flatnonzero(has)).to(device)
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels[indices]).to(device)
    return Batch(size=len(indices), inputs=inputs, rows=rows, labels=labels)


def training_batches(
    dataset: Dataset,
    usable: np.ndarray,
    modalities: Sequence[str],
    batch_size: int,
    device: str,
    rng: np.random.Generator,
) -> Iterator[Batch]:
    """One epoch over the samples ``usable``: shuffled, full batches only (the last short one is dropped).

    A batch in which no modality has two rows, as can happen among very few samples, is left out.
    """
    order = rng.permutation(usable)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        batch = make_batch(dataset, order[start : start + batch_size], modalities, device, least_rows=LEAST_ROWS)
        if batch.inputs:
            yield batch


def meta_batch(
    shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, int], size: int, *, text: Sequence[str], labelled: bool
) -> Batch:
    """A batch on the meta device with ``rows[m]`` of ``size`` samples having m: shapes without data, for pricing."""
    inputs, index = {}, {}
    for m, count in rows.items():
        dtype = torch.int64 if m in text else torch.float32
        inputs[m] = torch.empty((count, *shapes[m]), dtype=dtype, device="meta")
        index[m] = None if count == size else torch.empty(count, dtype=torch.int64, device="meta")
    labels = torch.empty(size, dtype=torch.int64, device="meta") if labelled else None
    return Batch(size=size, inputs=inputs, rows=index, labels=labels)
