"""Local training of one round: load the parts, train them on this device's share, hand back what was trained.

Counted while it runs: FLOPs of every step (forward and backward, 2 per multiply-accumulate; each shape of batch is
counted once and then multiplied), samples per part, seconds inside steps.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, RunError
from edgefl.methods.cluster.signature import signature_of
from edgefl.methods.repair.poverty_layer import PovertyMeter, exact_changes, is_exact, optimizer_changes, poverty_layers
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import PROTOTYPES, SIGNATURE, is_scheduled, modality_of
from edgefl.models.staged import StagedModel, build
from edgefl.plan.exchange import kept as kept_parts
from edgefl.plan.exchange import sent
from edgefl.plan.frozen_prefix import built_parts
from edgefl.plan.job import Job
from edgefl.plan.schedule import is_closing
from edgefl.training.auxiliary import auxiliary_of, private_head_tensors, pseudo_labels_of
from edgefl.training.batches import Batch, training_batches
from edgefl.training.closing_round import match_parts
from edgefl.training.flop_cache import FlopCounts, counted, kind_of_step, linear_in, metered
from edgefl.training.forward import Auxiliary
from edgefl.training.holdout import too_few, usable_rows
from edgefl.training.local_evaluation import local_evaluation, personal_evaluation
from edgefl.training.local_prototypes import local_tables
from edgefl.training.norm_statistics import take_local_statistics
from edgefl.training.optimizers import Optimizer
from edgefl.training.prefix_cache import PrefixCache
from edgefl.training.step import make_optimizer, prepare, train_step

Tensors = dict[str, np.ndarray]
#: epoch, step, steps of the round, loss of the step
OnProgress = Callable[[int, int, int, float], None]


@dataclass(frozen=True)
class RoundResult:
    """What one device's round came to.

    ``parts``: what is sent, "prototypes" and "signature" among it; ``kept``: what stays for the next round;
    ``samples[part]``: samples the part was trained on; ``complete``, ``poverty``, ``poverty_change``: as in an update;
    ``flops``: counted, ``cache_fill_flops`` of them for the frozen prefix of every sample.
    """

    parts: dict[str, Tensors]
    kept: dict[str, Tensors]
    samples: dict[str, int]
    metrics: dict[str, float]
    compute_s: float
    flops: float = 0.0
    complete: bool = True
    poverty: int = -1
    poverty_change: float = 0.0
    cache_fill_flops: float = 0.0


@dataclass
class _Tally:
    """Running sums over the steps."""

    kind: bytes
    meter: PovertyMeter | None
    compute_s: float = 0.0
    loss: list[float] = field(default_factory=list)
    correct: int = 0
    labelled: int = 0


def train_round(
    job: Job,
    dataset: Dataset,
    parts: Mapping[str, Tensors],
    *,
    holdout: Dataset | None = None,
    kept: Mapping[str, Tensors] | None = None,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
    salt: str = "",
    counts: FlopCounts | None = None,
    cache: PrefixCache | None = None,
) -> RoundResult:
    """Train ``job.stage.trained`` for ``job.hyper.epochs`` epochs on ``dataset``.

    ``parts`` holds every present part as received, and "prototypes" when there are global ones; ``holdout``: samples to
    test on, before and after; ``kept``: what this device's last round left here. ``salt`` (device and round) makes
    batches differ between devices and rounds, reproducibly. ``counts``: kept by the caller between rounds, so that no
    shape of step is counted twice; so is ``cache``. Raises DataError when the share can not fill one batch (decision
    D-L3) and RunError when the loss is not finite.
    """
    kept = kept or {}
    rng = np.random.default_rng((job.hyper.seed, zlib.crc32(salt.encode())))
    torch.manual_seed(int(rng.integers(2**63)))
    with metered(counts) as bill:
        if is_closing(job.stage):
            result = _closing_round(job, dataset, _load(job, parts, kept, device), rng)
        else:
            holdout = dataset.subset([]) if holdout is None else holdout
            cache = cache or PrefixCache(Path(tempfile.gettempdir()))
            result = _usual_round(job, dataset, holdout, parts, kept, device, cache, rng, on_progress)
    return replace(result, flops=bill.flops)


def _usual_round(
    job: Job,
    dataset: Dataset,
    holdout: Dataset,
    parts: Mapping[str, Tensors],
    kept: Mapping[str, Tensors],
    device: str,
    cache: PrefixCache,
    rng: np.random.Generator,
    on_progress: OnProgress | None,
) -> RoundResult:
    usable = usable_rows(job, dataset)
    steps = len(usable) // job.hyper.batch_size * job.hyper.epochs
    if steps == 0:
        raise too_few(job, dataset, len(usable))
    with metered() as cache_fill:
        dataset = cache.encoded(job, dataset, parts, device)
        holdout = cache.encoded(job, holdout, parts, device)
    model = _load(job, parts, kept, device)
    statistics = partial(take_local_statistics, job, model, dataset, usable)
    statistics()
    metrics = local_evaluation(job, model, holdout, parts, "received")
    personal_metrics = personal_evaluation(job, model, holdout, parts, kept, statistics)
    prepare(model, job.stage.trained, checkpoint=job.hyper.checkpoint)
    auxiliary = auxiliary_of(job, model, parts, kept, device)
    statistics(auxiliary.teachers)
    pseudo_labels = pseudo_labels_of(job, model, auxiliary, dataset, rng)
    meter = PovertyMeter() if "poverty" in job.slots.repair else None
    tally = _Tally(kind_of_step(job, with_tables=bool(auxiliary.tables)), meter)
    _train(job, model, dataset, usable, auxiliary, pseudo_labels, tally, device, rng, steps, on_progress)
    model.zero_grad(set_to_none=True)
    after = local_evaluation(job, model, holdout, parts, "trained")
    sending, samples = _outcome(job, model, auxiliary, dataset, usable, rng)
    mine = job.stage.trained if meter is not None else kept_parts(job)  # with poverty, a personal model stays here
    staying = {part: part_tensors(model, part, copy=False) for part in mine}  # the model is at its end
    return RoundResult(
        parts=sending,
        kept=staying | private_head_tensors(auxiliary),
        samples=samples,
        metrics=_metrics(tally) | metrics | personal_metrics | after,
        compute_s=tally.compute_s,
        complete=meter.complete if meter is not None else all(dataset.has(m).all() for m in job.model.encoders),
        poverty=_poverty(meter, sending),
        poverty_change=meter.change if meter is not None else 0.0,
        cache_fill_flops=cache_fill.flops,
    )


def _closing_round(job: Job, own: Dataset, model: StagedModel, rng: np.random.Generator) -> RoundResult:
    """Only the networks that match; the model is as it was received."""
    started = time.perf_counter()
    take_local_statistics(job, model, own, usable_rows(job, own))
    parts, samples = match_parts(job, model, own, rng)
    metrics = {"matching_networks": float(len(parts))}
    return RoundResult(parts, {}, samples, metrics, compute_s=time.perf_counter() - started)


def _train(
    job: Job,
    model: StagedModel,
    own: Dataset,
    usable: np.ndarray,
    auxiliary: Auxiliary,
    pseudo_labels: np.ndarray | None,
    tally: _Tally,
    device: str,
    rng: np.random.Generator,
    steps: int,
    on_progress: OnProgress | None,
) -> None:
    optimizer = make_optimizer(model, job.stage.trained, job.hyper, auxiliary.extra)
    modalities = [m for m in job.model.encoders if f"head/{m}" in job.stage.present and own.has(m).any()]
    layers = poverty_layers(job, model) if tally.meter is not None else {}
    done = 0
    for epoch in range(1, job.hyper.epochs + 1):
        size, unmixed = job.hyper.batch_size, tally.meter is not None  # a poverty layer shows between the two kinds
        for batch in training_batches(own, usable, modalities, size, device, rng, pseudo_labels, unmixed=unmixed):
            _counted_step(model, job, batch, optimizer, auxiliary, tally, layers)
            done += 1
            if on_progress is not None:
                on_progress(epoch, done, steps, tally.loss[-1])
        if tally.meter is not None:
            tally.meter.epoch()
    if not tally.loss:
        raise DataError(
            f"no batch of {job.hyper.batch_size} holds two samples of one modality",
            remedy="Give the device more data, or raise training.batch_size.",
        )


def _load(job: Job, parts: Mapping[str, Tensors], kept: Mapping[str, Tensors], device: str) -> StagedModel:
    """The model as training starts: what was received, and of the parts that go on by themselves the own copy."""
    wanted = built_parts(job)
    model = build(job.model, wanted, device=device, seed=job.hyper.seed)
    own = set(kept_parts(job))
    for name in wanted:
        load_part(model, name, kept[name] if name in own and name in kept else parts[name])
    return model


def _counted_step(
    model: StagedModel,
    job: Job,
    batch: Batch,
    optimizer: Optimizer,
    auxiliary: Auxiliary,
    tally: _Tally,
    layers: Mapping[torch.nn.Parameter, str],
) -> None:
    started = time.perf_counter()
    complete = batch.complete == batch.size and len(batch.inputs) == len(job.model.encoders)
    exact = is_exact(job)
    due = tally.meter is not None and tally.meter.due(complete)
    before = {name: p.detach().clone() for p, name in layers.items()} if due and exact else {}
    work = partial(train_step, model, job, batch, optimizer, auxiliary)
    loss, forward = counted(tally.kind, batch.shape_key, work, linear=linear_in(job))
    if not np.isfinite(loss):
        raise RunError(
            f"the loss became {loss} at step {len(tally.loss) + 1}",
            remedy="Lower training.lr, or set training.clip_norm: 1.0.",
        )
    tally.loss.append(loss)
    if tally.meter is not None:
        after = {name: p for p, name in layers.items()}
        changes = exact_changes(before, after) if exact else optimizer_changes(optimizer, layers) if due else {}
        tally.meter.batch(complete, changes)
    logits = forward.classified
    if logits is not None and batch.labels is not None:
        known = batch.labels >= 0
        tally.correct += int((logits.detach().argmax(1) == batch.labels)[known].sum())
        tally.labelled += int(known.sum())
    tally.compute_s += time.perf_counter() - started


def _outcome(
    job: Job,
    model: StagedModel,
    auxiliary: Auxiliary,
    own: Dataset,
    usable: np.ndarray,
    rng: np.random.Generator,
) -> tuple[dict[str, Tensors], dict[str, int]]:
    """(what is sent, samples of each trained part): trained parts, prototypes, the signature."""
    samples = _samples(job, own, usable)
    # Where they lie: from here on nothing changes the model, and the largest moment shall not be a copy of it.
    trained = [part for part in sent(job.stage, job.slots.exchange) if part in samples]
    sending = {part: part_tensors(model, part, copy=False) for part in trained}
    tables = local_tables(job, model, auxiliary, own, rng)
    if tables is not None:
        sending[PROTOTYPES], samples[PROTOTYPES] = tables, len(usable)
    if job.signature:
        sending[SIGNATURE] = signature_of(own, job.signature, job.model.classes, job.hyper.seed)
    return sending, samples


def _samples(job: Job, dataset: Dataset, usable: np.ndarray) -> dict[str, int]:
    """Samples each part was trained on: those that have the part's modality; all, for shared parts."""
    result = {}
    for name in job.stage.trained:
        modality = modality_of(name)
        result[name] = len(usable) if modality is None else int(dataset.has(modality)[usable].sum())
    return {name: count for name, count in result.items() if count > 0}


def _poverty(meter: PovertyMeter | None, sending: Mapping[str, Tensors]) -> int:
    """The poverty layer's place among the weight tensors of the parts that are sent, sorted; -1: none."""
    poorest = meter.poorest() if meter is not None else None
    trained = {part: tensors for part, tensors in sending.items() if is_scheduled(part)}
    layers = sorted((part, name) for part, tensors in trained.items() for name, v in tensors.items() if v.ndim >= 2)
    return [f"{part}|{name}" for part, name in layers].index(poorest) if poorest is not None else -1


def _metrics(tally: _Tally) -> dict[str, float]:
    steps = len(tally.loss)
    last = tally.loss[-max(1, steps // 4) :]
    metrics = {"loss": float(np.mean(tally.loss)), "loss_last": float(np.mean(last)), "steps": float(steps)}
    if tally.labelled:
        metrics["train_accuracy"] = tally.correct / tally.labelled
    return metrics
