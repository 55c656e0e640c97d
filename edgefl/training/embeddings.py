"""Projections of a data set's samples, each modality by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.data.dataset import Dataset
from edgefl.models.staged import StagedModel
from edgefl.training.batches import input_of

#: Samples encoded at once: small enough for a server's worker beside everything else.
BATCH = 128


def embeddings(
    model: StagedModel,
    modality: str,
    dataset: Dataset,
    depth: int,
    head: nn.Module | None = None,
    wanted: np.ndarray | None = None,
) -> np.ndarray:
    """[N, d], f32: ``modality`` encoded through ``depth`` stages and projected; rows that lack it hold zeros.

    ``head``: another one than the model's own; ``wanted`` [N] bool: the other rows hold zeros, too. Everything ends in
    the mode (training or evaluation) it had.
    """
    project = partial(model.project, modality) if head is None else head
    head = model.part(f"head/{modality}") if head is None else head
    out = np.zeros((len(dataset), model.spec.head.out), np.float32)
    rows = np.flatnonzero(dataset.has(modality) if wanted is None else dataset.has(modality) & wanted)
    with evaluation_mode(model, head), torch.no_grad():
        for start in range(0, len(rows), BATCH):
            index = rows[start : start + BATCH]
            x = input_of(dataset, modality, index, device_of(model))
            out[index] = to_numpy(project(model.encode(modality, x, depth)))
    return out


@contextmanager
def evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Inside, the modules are in evaluation mode; afterwards each of their layers is in the mode it had."""
    modes = [(layer, layer.training) for module in modules for layer in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


def to_numpy(values: Tensor) -> np.ndarray:
    """The values on the host; zeros for those of the meta device, where a function runs for its FLOPs alone."""
    return np.zeros(tuple(values.shape), np.float32) if values.is_meta else np.asarray(values.cpu().numpy())


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are."""
    return next(model.parameters()).device
