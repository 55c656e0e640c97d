"""Local training of one round: load the parts, train them on this device's share, hand back what was trained.

Counted while it runs: FLOPs of every step (forward and backward, 2 per multiply-accumulate; each shape of batch is
counted once and then multiplied), samples per part, seconds inside steps.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, RunError
from edgefl.models.build import StagedModel, build
from edgefl.models.matching import Table
from edgefl.models.spec import modality_of
from edgefl.models.state import load_part, part_tensors
from edgefl.plan.fit import complete_only
from edgefl.plan.values import Job
from edgefl.prototypes.library import from_tensors, to_tensors
from edgefl.training.batches import Batch, training_batches
from edgefl.training.counting import FlopCounts, is_linear, kind_of_step
from edgefl.training.optimizers import Optimizer
from edgefl.training.prototypes import class_means
from edgefl.training.step import make_optimizer, prepare, train_step

Tensors = dict[str, np.ndarray]
#: epoch, step, steps of the round, loss of the step
OnProgress = Callable[[int, int, int, float], None]

PROTOTYPES = "prototypes"


@dataclass(frozen=True)
class RoundResult:
    """What one device's round came to. ``samples[part]``: samples the part was trained on; ``flops``: as counted."""

    parts: dict[str, Tensors]
    prototypes: Tensors | None
    samples: dict[str, int]
    metrics: dict[str, float]
    flops: float
    compute_s: float


@dataclass
class _Tally:
    """Running sums over the steps."""

    kind: bytes
    counts: FlopCounts
    flops: float = 0.0
    compute_s: float = 0.0
    loss: list[float] = field(default_factory=list)
    correct: int = 0
    labelled: int = 0


def train_round(
    job: Job,
    dataset: Dataset,
    parts: Mapping[str, Tensors],
    *,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
    salt: str = "",
    counts: FlopCounts | None = None,
) -> RoundResult:
    """Train ``job.stage.trained`` for ``job.hyper.epochs`` epochs.

    ``parts`` holds every present part, and "prototypes" when there are global ones. ``salt`` (device and round)
    makes batches differ between devices and rounds, reproducibly. ``counts``: kept by the caller between
    rounds, so that no shape of step is counted twice. Raises DataError when the share can not fill one batch (decision
    D-L3) and RunError when the loss is not finite.
    """
    seed = (job.hyper.seed, zlib.crc32(salt.encode()))
    rng = np.random.default_rng(seed)
    torch.manual_seed(int(rng.integers(2**63)))
    usable = usable_rows(job, dataset)
    steps = len(usable) // job.hyper.batch_size * job.hyper.epochs
    if steps == 0:
        raise _too_few(job, dataset, len(usable))
    model = _load(job, parts, device)
    tables = _tables(parts, device)
    tally = _Tally(kind_of_step(job, with_tables=bool(tables)), counts or FlopCounts())
    optimizer = make_optimizer(model, job.stage.trained, job.hyper)
    modalities = [m for m in job.model.encoders if f"head/{m}" in job.stage.present and dataset.has(m).any()]
    done = 0
    for epoch in range(1, job.hyper.epochs + 1):
        for batch in training_batches(dataset, usable, modalities, job.hyper.batch_size, device, rng):
            _counted_step(model, job, batch, optimizer, tables, tally)
            done += 1
            if on_progress is not None:
                on_progress(epoch, done, steps, tally.loss[-1])
    if not tally.loss:
        raise DataError(
            f"no batch of {job.hyper.batch_size} holds two samples of one modality",
            remedy="Give the device more data, or raise training.batch_size.",
        )
    del optimizer
    model.zero_grad(set_to_none=True)
    prototypes = None
    if "class_mean" in job.slots.prototypes:
        means, flops = class_means(model, job, dataset, device, tally.counts)
        prototypes, tally.flops = to_tensors(means), tally.flops + flops
    samples = _samples(job, dataset, usable)
    return RoundResult(
        parts={name: part_tensors(model, name) for name in samples if name != PROTOTYPES},
        prototypes=prototypes,
        samples=samples,
        metrics=_metrics(tally),
        flops=tally.flops,
        compute_s=tally.compute_s,
    )


def usable_rows(job: Job, dataset: Dataset) -> np.ndarray:
    """Indices of the samples that can be trained on: labelled where the loss needs it, complete with ``ignore``."""
    keep = np.zeros(len(dataset), dtype=bool)
    for m in job.model.encoders:
        keep |= dataset.has(m)
    if complete_only(job.slots):
        for m in job.model.encoders:
            keep &= dataset.has(m)
    if "cross_entropy" in job.slots.objective and dataset.labels is not None:
        keep &= dataset.labels >= 0
    elif "cross_entropy" in job.slots.objective:
        keep[:] = False
    return np.flatnonzero(keep)


def _too_few(job: Job, dataset: Dataset, usable: int) -> DataError:
    batch = job.hyper.batch_size
    if "cross_entropy" in job.slots.objective and dataset.labels is None:
        return DataError(
            "the share has no labels, and the objective cross_entropy needs them",
            remedy="Label the samples, or train with objective: clip.",
        )
    which = "complete samples" if complete_only(job.slots) else "usable samples"
    return DataError(
        f"the share has {usable} {which}, fewer than one batch of {batch}",
        remedy="Give the device more data, or lower training.batch_size.",
    )


def _load(job: Job, parts: Mapping[str, Tensors], device: str) -> StagedModel:
    model = build(job.model, job.stage.present, device=device, seed=job.hyper.seed)
    for name in job.stage.present:
        load_part(model, name, parts[name])
    prepare(model, job.stage.trained)
    return model


def _tables(parts: Mapping[str, Tensors], device: str) -> dict[str, Table]:
    if PROTOTYPES not in parts:
        return {}
    return {
        name: Table(torch.from_numpy(table.means).to(device), torch.from_numpy(table.present).to(device))
        for name, table in from_tensors(parts[PROTOTYPES]).items()
    }


def _counted_step(
    model: StagedModel,
    job: Job,
    batch: Batch,
    optimizer: Optimizer,
    tables: Mapping[str, Table],
    tally: _Tally,
) -> None:
    started = time.perf_counter()
    (loss, forward), flops = tally.counts.run(
        tally.kind,
        batch.shape_key,
        lambda: train_step(model, job, batch, optimizer, tables),
        linear=is_linear(job),
    )
    tally.flops += flops
    if not np.isfinite(loss):
        raise RunError(
            f"the loss became {loss} at step {len(tally.loss) + 1}",
            remedy="Lower training.lr, or set training.clip_norm: 1.0.",
        )
    tally.loss.append(loss)
    if forward.logits is not None and batch.labels is not None:
        known = batch.labels >= 0
        tally.correct += int((forward.logits.detach().argmax(1) == batch.labels)[known].sum())
        tally.labelled += int(known.sum())
    tally.compute_s += time.perf_counter() - started


def _samples(job: Job, dataset: Dataset, usable: np.ndarray) -> dict[str, int]:
    """Samples each part was trained on: those that have the part's modality; all, for shared parts."""
    result = {}
    for name in job.stage.trained:
        modality = modality_of(name)
        result[name] = len(usable) if modality is None else int(dataset.has(modality)[usable].sum())
    result = {name: count for name, count in result.items() if count > 0}
    if "class_mean" in job.slots.prototypes:
        result[PROTOTYPES] = len(usable)
    return result


def _metrics(tally: _Tally) -> dict[str, float]:
    steps = len(tally.loss)
    last = tally.loss[-max(1, steps // 4) :]
    metrics = {"loss": float(np.mean(tally.loss)), "loss_last": float(np.mean(last)), "steps": float(steps)}
    if tally.labelled:
        metrics["train_accuracy"] = tally.correct / tally.labelled
    return metrics
