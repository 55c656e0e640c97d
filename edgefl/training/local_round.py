"""A client's local training in one round: load the parts, train them on its samples, return what was trained.

Counted while it runs: FLOPs (forward and backward, 2 per multiply-accumulate; each shape of batch is counted once),
samples per part, seconds inside steps.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, DivergedError, EdgeFLError
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.reuse import Models
from edgefl.models.spec import LAYERS, PROTOTYPES, SIGNATURE, modality_of, space_of_part, task_parts
from edgefl.models.staged import StagedModel, build
from edgefl.plan.choice_of_k import candidates
from edgefl.plan.job import WHOLE_ROUND, Job
from edgefl.plan.stages import is_closing, sent
from edgefl.plan.stages import kept as kept_parts
from edgefl.plan.training_samples import built_parts
from edgefl.registry import Observed, Observer, chosen, signature
from edgefl.resources.process_memory import trim
from edgefl.training.batches import Batch, mixed_rows, too_few, training_batches, unmixed_rows, usable_rows
from edgefl.training.embeddings import device_of, own_modalities, take_local_statistics
from edgefl.training.exchanged_layers import asked_layers, between, by_part
from edgefl.training.flop_cache import FlopCounts, add_flops, counted, kind_of_step, linear_in, metered
from edgefl.training.forward import (
    Auxiliary,
    auxiliary_of,
    keeping,
    local_tables,
    private_head_tensors,
    pseudo_labels_of,
)
from edgefl.training.local_evaluation import local_evaluation, losses_by_modalities, personal_evaluation
from edgefl.training.matching import match_parts
from edgefl.training.optimizers import Optimizer
from edgefl.training.prefix_cache import PrefixCache
from edgefl.training.sending import Seen, uploaded
from edgefl.training.step import Updates, make_optimizer, prepare, train_step, updates_of
from edgefl.training.weights_on_disk import on_disk

Tensors = dict[str, np.ndarray]
#: epoch, step, steps of the round, loss of the step
OnProgress = Callable[[int, int, int, float], None]


@dataclass(frozen=True)
class LocalState:
    """State of a device besides its training samples, kept between rounds.

    ``holdout``: samples to test on before and after training; ``kept``: parts the last round left here; ``device``: of
    torch; ``counts``: FLOPs by shape, so that none is counted twice; ``cache``: the frozen prefix's outcome;
    ``models``: those of earlier rounds in this process, None where each round builds its own.
    """

    holdout: Dataset | None = None
    kept: Mapping[str, Tensors] = field(default_factory=dict)
    device: str = "cpu"
    counts: FlopCounts = field(default_factory=FlopCounts)
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(Path(tempfile.gettempdir())))
    models: Models | None = None


class AbandonedError(EdgeFLError):
    """The round is left off before its end. ``steps``, ``compute_s``, ``flops``: until then."""

    steps = 0
    compute_s = 0.0
    flops = 0.0


@dataclass(frozen=True)
class RoundResult:
    """Outcome of one device's round.

    ``parts``: what is sent, "prototypes" and "signature" among it; ``kept``: what stays for the next round;
    ``samples[part]``: samples the part was trained on; ``observed``: for the repair, as in an update;
    ``flops``: counted, ``cache_fill_flops`` of them for the frozen prefix of every sample.
    """

    parts: dict[str, Tensors]
    kept: dict[str, Tensors]
    samples: dict[str, int]
    metrics: dict[str, float]
    compute_s: float
    flops: float = 0.0
    observed: Observed = field(default_factory=Observed)
    cache_fill_flops: float = 0.0


R = TypeVar("R")
P = ParamSpec("P")
#: A round that halts before its steps.
Halting = Generator["Training", None, R]


def finished(halting: Halting[R]) -> R:
    """The result of a round that halts before its steps, and takes them itself."""
    while True:
        try:
            next(halting)
        except StopIteration as end:
            result: R = end.value
            return result


def begin_round(
    job: Job,
    dataset: Dataset,
    parts: Mapping[str, Tensors],
    local: LocalState | None = None,
    *,
    salt: str = "",
    on_progress: OnProgress = lambda *_: None,
) -> Halting[RoundResult]:
    """Train ``job.stage.trained`` for ``job.hyper.epochs`` epochs on ``dataset``.

    ``parts`` holds every present part as received, and "prototypes" when there are global ones. ``salt`` (device and
    round) makes batches differ between devices and rounds, reproducibly. Raises DataError when the share cannot fill
    one batch (decision D-L3), DivergedError when the loss is not finite, and AbandonedError as ``on_progress`` does.
    It halts before its steps: whoever goes on with it may have taken them (``Training.taken``).
    """
    local = local or LocalState()
    rng = np.random.default_rng((job.hyper.seed, zlib.crc32(salt.encode())))
    seed = int(rng.integers(2**63))
    if local.device == "cpu":  # torch.manual_seed notes where it was called from, for GPUs that are not in use
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    with metered(local.counts) as bill:
        try:
            if is_closing(job.stage):
                result = _closing_round(job, dataset, _load(job, parts, local), rng)
            else:
                result = yield from _training_round(job, dataset, parts, local, rng, on_progress)
        except AbandonedError as error:
            error.flops = bill.flops
            raise
    return replace(result, flops=bill.flops)


def _whole(begin: Callable[P, Halting[R]]) -> Callable[P, R]:
    return lambda *given, **named: finished(begin(*given, **named))


#: A round from first to last, by its own steps; arguments and errors are those of ``begin_round``.
train_round = _whole(begin_round)


def _training_round(
    job: Job,
    dataset: Dataset,
    parts: Mapping[str, Tensors],
    local: LocalState,
    rng: np.random.Generator,
    on_progress: OnProgress,
) -> Halting[RoundResult]:
    usable = usable_rows(job, dataset)
    if len(usable) < job.hyper.batch_size:
        raise too_few(job, dataset, len(usable))
    holdout = dataset.subset([]) if local.holdout is None else local.holdout
    with metered() as cache_fill:
        dataset = local.cache.encoded(job, dataset, parts, local.device)
        holdout = local.cache.encoded(job, holdout, parts, local.device)
    trim()
    model = _load(job, parts, local)
    trim()
    statistics = partial(take_local_statistics, job, model, dataset, usable)
    statistics()
    ks = candidates(job.slots.prototypes, job.model.classes)
    received = local_evaluation(job, model, holdout, parts, "received", ks)
    personal = personal_evaluation(job, model, holdout, parts, local.kept, statistics)
    prepare(model, job.stage.trained, checkpoint=job.hyper.checkpoint)
    auxiliary = auxiliary_of(job, model, parts, local.kept)
    statistics(auxiliary.teachers)
    repair = chosen("repair", job.slots.repair)[0]
    observer: Observer | None = repair.method.observe and repair.bind(repair.method.observe)(job, model)
    training = Training(job, model, dataset, usable, auxiliary, rng, observer, on_progress)
    trim()
    yield training
    try:
        training.run()
    except AbandonedError as error:
        error.steps, error.compute_s = len(training.loss), training.compute_s
        raise
    trim()
    trained = local_evaluation(job, model, holdout, parts, "trained")
    sending, samples = training.update()
    losses = partial(losses_by_modalities, job, model, holdout, parts)
    sending, noted = uploaded(job, sending, Seen(parts, local.kept, losses), rng)
    noted |= private_head_tensors(auxiliary) | keeping(job, auxiliary, local.kept)
    complete = bool(dataset.complete(list(job.model.encoders)).all())
    staying = job.stage.trained if repair.method.mend else kept_parts(job)
    return RoundResult(
        parts=sending,
        kept={p: part_tensors(model, p, copy=False) for p in staying} | noted,
        samples=samples,
        metrics=training.metrics() | received | personal | trained,
        compute_s=training.compute_s,
        observed=Observed(complete) if observer is None else observer.observed(sending),
        cache_fill_flops=cache_fill.flops,
    )


def _closing_round(job: Job, dataset: Dataset, model: StagedModel, rng: np.random.Generator) -> RoundResult:
    """Training of the matcher networks alone; the model stays as it was received."""
    started = time.perf_counter()
    take_local_statistics(job, model, dataset, usable_rows(job, dataset))
    parts, samples = match_parts(job, model, dataset, rng)
    metrics = {"matching_networks": float(len(parts))}
    return RoundResult(parts, {}, samples, metrics, time.perf_counter() - started)


def _load(job: Job, parts: Mapping[str, Tensors], local: LocalState) -> StagedModel:
    """The model before training: parts as received, or the device's own with the layers that it was lent.

    Its own are those that are not exchanged; inside a period all that it trains.
    """
    wanted = built_parts(job)
    settle = on_disk(job, local.cache.folder) if local.device == "cpu" else None
    if local.models is not None and settle is None:
        model = local.models.take(job.model, wanted, local.device, job.hyper.seed)
    else:
        model = build(job.model, wanted, device=local.device, seed=job.hyper.seed, settle=settle)
    resumes = (job.period or WHOLE_ROUND).resumes
    own = set(job.stage.trained if resumes else kept_parts(job))
    lent = by_part(parts[LAYERS]) if resumes and LAYERS in parts else {}
    for name in wanted:
        tensors = local.kept[name] if name in own and name in local.kept else parts[name]
        load_part(model, name, {**tensors, **lent[name]} if name in lent else tensors)
    return model


class Taken(NamedTuple):
    """Steps that were taken with other devices': their FLOPs, and what ended them early."""

    flops: float
    error: EdgeFLError | None = None


@dataclass
class Training:
    """The model in training, what it is trained with, and sums over the steps so far.

    ``usable``: indices of the samples it is trained on; ``observer``: of the recipe's repair; ``taken``: its steps,
    where they are.
    """

    job: Job
    model: StagedModel
    dataset: Dataset
    usable: np.ndarray
    auxiliary: Auxiliary
    rng: np.random.Generator
    observer: Observer | None
    on_progress: OnProgress = lambda *_: None
    taken: Taken | None = None
    loss: list[float] = field(default_factory=list)
    correct: int = 0
    labelled: int = 0
    compute_s: float = 0.0

    @property
    def planned(self) -> int:
        """Steps of the round."""
        return len(self.usable) // self.job.hyper.batch_size * self.job.hyper.epochs

    def run(self) -> None:
        """Every epoch's steps, or what came of those that are taken.

        Raises DataError when the samples fill no batch that can be trained on.
        """
        if self.taken is None:
            self._take_steps()
        else:
            add_flops(self.taken.flops)
            if self.taken.error is not None:
                raise self.taken.error
        self.model.zero_grad(set_to_none=True)

    def _take_steps(self) -> None:
        job, model, dataset, observer = self.job, self.model, self.dataset, self.observer
        hyper = job.hyper
        pseudo_labels = pseudo_labels_of(job, model, self.auxiliary, dataset, self.rng)
        optimizer = make_optimizer(model, job.stage.trained, hyper, self.auxiliary.extra)
        updates = updates_of(model, job, optimizer)
        kind = kind_of_step(job, with_tables=bool(self.auxiliary.tables))
        modalities = own_modalities(job, dataset)
        for epoch in range(1, hyper.epochs + 1):
            rows: Iterable[np.ndarray] = mixed_rows(self.usable, hyper.batch_size, self.rng)
            if observer is not None:
                rows = unmixed_rows(dataset, self.usable, modalities, hyper.batch_size, self.rng)
            for batch in training_batches(dataset, rows, modalities, device_of(model), pseudo_labels):
                self._step(optimizer, batch, updates, kind)
                self.on_progress(epoch, len(self.loss), self.planned, self.loss[-1])
            if observer is not None:
                observer.epoch()
        if not self.loss:
            raise DataError(
                f"no batch of {hyper.batch_size} holds two samples of one modality",
                remedy="Give the device more data, or raise training.batch_size.",
            )

    def _step(self, optimizer: Optimizer, batch: Batch, updates: Updates, kind: bytes) -> None:
        """One optimisation step, whose FLOPs are of this kind. Raises DivergedError for a loss that is not finite."""
        started = time.perf_counter()
        job = self.job
        complete = batch.complete == batch.size and len(batch.inputs) == len(job.model.encoders)
        with self.observer.step(optimizer, complete) if self.observer is not None else nullcontext():
            work = partial(train_step, self.model, job, batch, optimizer, self.auxiliary, updates)
            loss, forward = counted(kind, batch.shape_key, work, linear=linear_in(job))
            if not np.isfinite(loss):
                raise self.diverged(loss)
            self.loss.append(loss)
        if forward.classified is not None and batch.labels is not None:
            first = forward.classified.detach().argmax(1)
            if batch.sets is None:
                right = first == batch.labels  # never without a label
            else:
                right = (batch.sets.gather(1, first[:, None])[:, 0] > 0) & (batch.labels >= 0)
            self.correct += int(torch.count_nonzero(right))
            self.labelled += int(torch.count_nonzero(batch.labels >= 0))
        self.compute_s += time.perf_counter() - started

    def diverged(self, loss: float) -> DivergedError:
        """The error of a step whose loss is not finite."""
        return DivergedError(
            f"the loss became {loss} at step {len(self.loss) + 1}",
            remedy="Lower training.lr, or set training.clip_norm: 1.0.",
        )

    def update(self) -> tuple[dict[str, Tensors], dict[str, int]]:
        """The parts to send (trained ones, prototypes, the signature), and the samples each was trained on.

        Those are the ones that have the part's modality, or a label of its set; all, for shared parts.
        """
        job, model, dataset, usable = self.job, self.model, self.dataset, self.usable
        modalities = {part: modality_of(part) for part in job.stage.trained}
        counts = {part: int(dataset.has(m)[usable].sum()) if m else len(usable) for part, m in modalities.items()}
        places, labels = task_parts(job.model), np.asarray(dataset.labels)
        counts |= {p: int(np.isin(labels[usable], places[p]).sum()) for p in counts if space_of_part(p)}
        samples = {part: count for part, count in counts.items() if count > 0}
        # Views: from here on nothing changes the model, and a copy of it would be the largest moment of the round.
        if between(job):
            sending = asked_layers(job, model, samples)
        else:
            exchanged = sent(job.stage, job.slots.exchange)
            sending = {p: part_tensors(model, p, copy=False) for p in exchanged if p in samples}
            tables = local_tables(job, model, self.auxiliary, dataset, self.rng)
            if tables is not None:
                sending[PROTOTYPES], samples[PROTOTYPES] = tables, len(usable)
        if job.signature:
            sending[SIGNATURE] = signature(job.signature).sign(dataset, job.model.classes, job.hyper.seed)
        return sending, samples

    def metrics(self) -> dict[str, float]:
        """Mean loss of all steps and of the last quarter, and the accuracy while training."""
        last = self.loss[-max(1, len(self.loss) // 4) :]
        found = {"loss": float(np.mean(self.loss)), "loss_last": float(np.mean(last)), "steps": float(len(self.loss))}
        return found | ({"train_accuracy": self.correct / self.labelled} if self.labelled else {})
