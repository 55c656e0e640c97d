"""Representations of a few probe samples by each device's model, which the weights cka compare (FedMVP).

One complete labelled sample a class (of unlabelled data: the first ones) of the coordinator's own; they are probes
only, and no longer part of the test.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.models.parts import load_part
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Stage

Tensors = Mapping[str, np.ndarray]
#: Probes where there are no classes to choose by.
UNLABELLED = 16


def probe_rows(data: Dataset, model: ModelSpec) -> np.ndarray:
    """Indices of the probes. Raises DataError with fewer than two, for which no likeness is defined."""
    complete = np.logical_and.reduce([data.has(m) for m in model.encoders])
    if data.labels is None or not model.classes:
        rows = np.flatnonzero(complete)[:UNLABELLED]
    else:
        labels = np.where(complete, data.labels, -1)
        found = [np.flatnonzero(labels == c)[:1] for c in range(model.classes)]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(rows) < 2:
        raise DataError(
            f"the test set has {len(rows)} complete samples to compare models with, at least 2 are needed",
            remedy="Add complete samples of several classes, or set weight: samples.",
        )
    return rows


def represent(model: ModelSpec, stage: Stage, parts: Mapping[str, Tensors], probes: Dataset) -> np.ndarray:
    """[m, d]: the joint representation of each probe; without a fusion the projections side by side."""
    built = build(model, stage.present)
    for name in stage.present:
        load_part(built, name, parts[name])
    built.eval()
    with torch.no_grad():
        inputs = {m: torch.from_numpy(probes.modalities[m]) for m in model.encoders}
        whole = dict.fromkeys(inputs)
        states = built.encode_batch_tokens(inputs, whole, len(probes), stage.depth)
        projections = {m: built.project(m, built.pool_tokens(m, state)) for m, state in states.items()}
        if not model.classes:
            return np.asarray(torch.cat(list(projections.values()), dim=1).numpy())
        return np.asarray(built.fuse(projections, None, states, whole).numpy())
