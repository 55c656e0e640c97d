"""A data set through a model without a gradient: projections of each modality alone, and batch norm's statistics.

Running statistics are taken at the weights a model has (precise batch norm, arXiv 2105.07576). A server step, a repair
or a late update moves the weights off the mean of the models that the averaged statistics are of
(``edgefl.plan.stages``). Then a model's statistics are its samples' own: mean and variance of what reaches each batch
norm, in evaluation mode otherwise, so that no dropout widens them. Only the heads hold batch norm; their input is
encoded in pieces, and a head sees all of it at once, so that the order and number of pieces do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.data.dataset import Dataset
from edgefl.models.parts import loaded, part_tensors
from edgefl.models.spec import ModelSpec, shares_attention
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job, Stage
from edgefl.plan.training_samples import LEAST, MOST, rows_of_step
from edgefl.training.batches import ShapeKey, input_of, make_batch
from edgefl.training.flop_cache import counted, kind_of_step, linear_in

#: Samples encoded at once: small enough for a server's worker beside everything else.
BATCH = 128


def embeddings(
    model: StagedModel,
    modality: str,
    dataset: Dataset,
    depth: int,
    head: nn.Module | None = None,
    wanted: np.ndarray | None = None,
    together: int = BATCH,
) -> np.ndarray:
    """[N, d], f32: ``modality`` encoded through ``depth`` stages and projected; rows that lack it hold zeros.

    ``head``: another one than the model's own; ``wanted`` [N] bool: the other rows hold zeros, too; ``together``:
    samples encoded at once. Everything ends in the mode (training or evaluation) it had.
    """
    project = partial(model.project, modality) if head is None else head
    head = model.part(f"head/{modality}") if head is None else head
    out = np.zeros((len(dataset), model.spec.head.out), np.float32)
    rows = np.flatnonzero(dataset.has(modality) if wanted is None else dataset.has(modality) & wanted)
    with evaluation_mode(model, head), torch.no_grad():
        for index in _pieces(rows, together):
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
    """The torch device of a model's weights."""
    return next(model.parameters()).device


def own_modalities(job: Job, dataset: Dataset) -> list[str]:
    """The modalities a device can train: of the stage, and in its data."""
    return [m for m in job.model.encoders if f"head/{m}" in job.stage.present and dataset.has(m).any()]


def projections_of(
    job: Job,
    model: StagedModel,
    dataset: Dataset,
    heads: Mapping[str, nn.Module] | None = None,
    wanted: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """``embeddings`` of each modality this device has; ``heads``: by modality, in place of the model's own."""
    own, given = own_modalities(job, dataset), heads or {}
    has = {m: dataset.has(m) if wanted is None else dataset.has(m) & wanted for m in own}
    depth, together = job.stage.depth, min(BATCH, rows_of_step(job))
    return counted(
        b"alone" + kind_of_step(job, with_tables=False),
        tuple((m, int(rows.sum())) for m, rows in has.items()),
        lambda: {m: embeddings(model, m, dataset, depth, given.get(m), wanted, together) for m in own},
        linear="rows",
    )


Tensors = dict[str, np.ndarray]


def take_local_statistics(
    job: Job, model: StagedModel, dataset: Dataset, usable: np.ndarray, heads: Mapping[str, nn.Module] | None = None
) -> None:
    """Take the statistics on a device's samples ``usable`` if the job asks for it.

    ``heads``: others than the model's own. A modality with fewer than two samples, which is not trained here either,
    keeps the statistics it has. Everything ends in the mode (training or evaluation) it had.
    """
    for m, head in (_heads(model) if heads is None else heads).items() if job.slots.statistics else ():
        rows = chosen_rows(dataset, m, usable)
        if batch_norms(head) and len(rows) >= LEAST:
            kind = b"statistics" + m.encode() + kind_of_step(job, with_tables=False)
            pieces = _pieces(rows, rows_of_step(job))
            work = partial(_take, model, m, head, dataset, pieces, job.stage.depth)
            counted(kind, _shape(model, m, dataset, rows), work, linear=linear_in(job))


def take_statistics(model: StagedModel, dataset: Dataset, depth: int) -> list[str]:
    """Take the statistics of every head on the inputs of ``dataset``; the heads' parts that have them.

    A modality of which it has fewer than two samples keeps what it has. Everything ends in the mode it had.
    """
    taken = []
    for m, head in _heads(model).items():
        rows = chosen_rows(dataset, m, np.arange(len(dataset)))
        if batch_norms(head) and len(rows) >= LEAST:
            _take(model, m, head, dataset, _pieces(rows, BATCH), depth)
            taken.append(f"head/{m}")
    return taken


def heads_with_statistics(
    spec: ModelSpec, stage: Stage, parts: Mapping[str, Tensors], dataset: Dataset
) -> dict[str, Tensors]:
    """The heads among ``parts`` with their statistics taken on the inputs of ``dataset``."""
    model = loaded(spec, stage.present, parts)
    return {part: part_tensors(model, part) for part in take_statistics(model, dataset, stage.depth)}


def chosen_rows(dataset: Dataset, modality: str, usable: np.ndarray) -> np.ndarray:
    """At most ``MOST`` of the samples ``usable`` that have the modality, evenly spaced: the same ones every time."""
    rows = np.asarray(usable[dataset.has(modality)[usable]])
    return rows if len(rows) <= MOST else rows[np.arange(MOST) * len(rows) // MOST]


def batch_norms(module: nn.Module) -> list[nn.BatchNorm1d]:
    """The layers with running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d)]


def _heads(model: StagedModel) -> dict[str, nn.Module]:
    return {m: model.part(f"head/{m}") for m in model.spec.encoders if f"head/{m}" in model.parts_present}


def _names(model: StagedModel, modality: str) -> list[str]:
    """Modalities encoded for one modality's head: with shared attention all that a sample has, as in training."""
    return list(_heads(model)) if shares_attention(model.spec) else [modality]


def _shape(model: StagedModel, modality: str, dataset: Dataset, rows: np.ndarray) -> ShapeKey:
    """As ``Batch.shape_key`` of these samples."""
    has = {m: dataset.has(m)[rows] for m in _names(model, modality)}
    here = {m: int(flags.sum()) for m, flags in has.items() if flags.any()}
    complete = int(np.logical_and.reduce([has[m] for m in here]).sum())
    return (("", int(min(here.values()) < len(rows))), ("&", complete), *sorted(here.items()))


@torch.no_grad()
def _take(
    model: StagedModel, modality: str, head: nn.Module, dataset: Dataset, pieces: list[np.ndarray], depth: int
) -> None:
    """Take the statistics of ``head`` on all rows of ``pieces``, which are encoded one after the other."""
    names = _names(model, modality)
    with evaluation_mode(model, head):
        batches = (make_batch(dataset, rows, names, device_of(model)) for rows in pieces)
        encoded = [model.encode_batch(b.inputs, b.rows, b.size, depth)[modality] for b in batches]
        retake(head, torch.cat(encoded))


def _pieces(rows: np.ndarray, together: int) -> list[np.ndarray]:
    return [rows[start : start + together] for start in range(0, len(rows), together)]


def retake(head: nn.Module, h: Tensor) -> None:
    """The statistics of ``head``, which is in evaluation mode, become those of h [n, D]."""
    layers = batch_norms(head)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.train()
        layer.momentum = 1.0  # what was is forgotten
    head(h)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.eval()
        layer.momentum = momentum
