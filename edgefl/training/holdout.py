"""Which of a device's samples are trained on, and which are only tested on."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.plan.job import Job
from edgefl.plan.training_samples import LABEL_THEM, complete_only, held_out, needs_labels, needs_pairs, unlabelled
from edgefl.records import Refusal
from edgefl.registry import chosen


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
    set the same ones apart. At least one batch of these stays; without room for that nothing is set apart.
    """
    judged = np.flatnonzero(_telling(job, dataset))
    count = held_out(job.hyper, len(judged))
    if not count:
        return Split(dataset, dataset.subset([]))
    rng = np.random.default_rng((job.hyper.seed, zlib.crc32(f"holdout/{device}".encode())))
    holdout = np.sort(rng.permutation(judged)[:count])
    return Split(dataset.subset(np.delete(np.arange(len(dataset)), holdout)), dataset.subset(holdout))


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
