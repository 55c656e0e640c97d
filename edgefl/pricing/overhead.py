"""FLOPs of a round outside its steps, on the meta device: local evaluation, prototypes, matcher networks.

Each of these runs the model over samples without a graph, so its FLOPs are a sum over samples; a sample's depend on
which modalities it has (its pattern) and on how far through the model it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from edgefl.data.dataset import Dataset, Encoded
from edgefl.methods.pmcmfl.matcher_networks import MatcherSettings, classifier_loss, prior_losses
from edgefl.models.spec import PROTOTYPES, answered
from edgefl.models.staged import StagedModel, build
from edgefl.patterns import Pattern
from edgefl.plan.choice_of_k import candidates
from edgefl.plan.job import Job
from edgefl.plan.stages import is_closing
from edgefl.plan.training_samples import LEAST, MOST, built_parts, needs_labels, prefixes
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.registry import chosen
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.training.embeddings import projections_of, take_local_statistics
from edgefl.training.flop_cache import kind_of_step, metered
from edgefl.training.forward import Auxiliary, local_tables, pseudo_labels_of
from edgefl.training.local_evaluation import local_evaluation, subsets

#: What a round does with samples outside its steps.
Function = Callable[[Job, StagedModel, Dataset], object]
#: A small network's loss of its input and what it is to become.
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Samples that it is run on for its price. FLOPs are by sample, so that any number would do; batch norm takes two.
_ROWS = 2


class Share(NamedTuple):
    """A device's sample counts: ``total``, ``trained``, ``holdout``; ``patterns``: pattern -> share of one.

    Prototypes and matcher networks use the ``own`` samples. ``tried``: patterns of the hold-out samples.
    """

    total: int
    trained: int
    holdout: int
    patterns: Mapping[Pattern, float]
    tried: Mapping[Pattern, float]

    @property
    def own(self) -> int:
        """Number of samples outside the hold-out."""
        return self.total - self.holdout

    def having(self, *modalities: str) -> float:
        """Share of the samples with all of these modalities."""
        return sum(part for pattern, part in self.patterns.items() if set(modalities) <= set(pattern))


class Overhead:
    """FLOPs of a round outside its steps, traced on the meta device and cached."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, str, Pattern], float] = {}

    def __call__(self, job: Job, share: Share) -> float:
        """FLOPs outside the steps, in a second or later round, with received and kept parts.

        The closing round has matcher networks, and no local evaluation or prototypes.
        """
        flops = self._statistics(job, share)
        if is_closing(job.stage):
            return flops + share.own * self._mean(job, share.patterns, projections_of) + matchers(job, share)
        if share.holdout:
            evaluations = 2 + _personal(job)  # as received, as trained, the personal model
            each = self._mean(job, share.tried, _evaluate)
            flops += evaluations * share.holdout * each
            if candidates(job.slots.prototypes, job.model.classes):
                flops += share.holdout * (self._mean(job, share.tried, _evaluate_received) - each)
            if chosen("upload", job.slots.upload)[0].method.returns:
                own = tuple(m for m in job.model.encoders if any(m in pattern for pattern in share.tried))
                by_sample = sum(self._by_sample(job, some, _evaluate) for some in subsets(own))
                flops += share.holdout * share.tried.get(own, 0.0) * by_sample
        count = share.own if needs_labels(job.slots) else share.trained
        return flops + count * (self._mean(job, share.patterns, _cluster) + self._mean(job, share.patterns, _tables))

    def personal(self, job: Job, share: Share) -> float:
        """FLOPs of evaluating the personal model, which a device has from its second round on."""
        if is_closing(job.stage) or not _personal(job) or not share.holdout:
            return 0.0
        return share.holdout * self._mean(job, share.tried, _evaluate) + self._pass(job, share)

    def _statistics(self, job: Job, share: Share) -> float:
        """FLOPs of taking batch statistics of the received model, the personal one and teachers: a pass each."""
        personal = _personal(job) and share.holdout > 0
        teachers = any("teacher" in term.method.auxiliaries for term in chosen("objective", job.slots.objective))
        return (1 + personal + teachers) * self._pass(job, share)

    def _pass(self, job: Job, share: Share) -> float:
        if not job.slots.statistics:
            return 0.0
        flops = 0.0
        for m in job.model.encoders:
            count = round(share.trained * share.having(m))
            if count >= LEAST:
                having = {pattern: part / share.having(m) for pattern, part in share.patterns.items() if m in pattern}
                flops += min(MOST, count) * self._mean(job, having, _statistics_of(m))
        return flops

    def _mean(self, job: Job, patterns: Mapping[Pattern, float], function: Function) -> float:
        """Mean FLOPs of ``function`` by sample over ``patterns`` (pattern -> share)."""
        return sum(part * self._by_sample(job, pattern, function) for pattern, part in patterns.items())

    def _by_sample(self, job: Job, pattern: Pattern, function: Function) -> float:
        key = (kind_of_step(job, with_tables=False), function.__name__, pattern)
        if key not in self._known:
            model = build(job.model, built_parts(job), device="meta").eval()
            with metered() as bill:
                function(job, model, _samples(job, pattern))
            self._known[key] = bill.flops / _ROWS
        return self._known[key]


def _personal(job: Job) -> bool:
    """True if the device also has a personal model to evaluate."""
    return bool(chosen("repair", job.slots.repair)[0].method.mend)


def zero_prototypes(job: Job) -> dict[str, dict[str, np.ndarray]]:
    """The part of global prototypes with zeros as values, as from the second round on."""
    slot = chosen("prototypes", job.slots.prototypes)[0]
    if slot.method.rows is None:
        return {}
    tables = slot.bind(slot.method.rows)(job.model)
    zeros = {m: ClassMeans(np.zeros((n, wide), np.float32), np.ones(n, np.float32)) for m, (n, wide) in tables.items()}
    return {PROTOTYPES: to_tensors(zeros)}


def _evaluate(job: Job, model: StagedModel, samples: Dataset) -> None:
    local_evaluation(job, model, samples, zero_prototypes(job), "")


def _evaluate_received(job: Job, model: StagedModel, samples: Dataset) -> None:
    ks = candidates(job.slots.prototypes, job.model.classes)
    local_evaluation(job, model, samples, zero_prototypes(job), "", ks)


def _cluster(job: Job, model: StagedModel, samples: Dataset) -> None:
    pseudo_labels_of(job, model, Auxiliary(), samples, np.random.default_rng(0))


def _tables(job: Job, model: StagedModel, samples: Dataset) -> None:
    local_tables(job, model, Auxiliary(), samples, np.random.default_rng(0))


def _statistics_of(m: str) -> Function:
    def statistics(job: Job, model: StagedModel, samples: Dataset) -> None:
        take_local_statistics(job, model, samples, np.arange(len(samples)), {m: model.part(f"head/{m}")})

    statistics.__name__ = f"statistics {m}"
    return statistics


def _samples(job: Job, pattern: Pattern) -> Dataset:
    """``_ROWS`` samples of zeros with a pattern's modalities, and labels if the job needs them."""
    encoders = {m: job.model.encoders[m] for m in pattern}
    classes = answered(job.model, job.stage.trained)
    dtypes = {m: np.int64 if encoder.kind == "text" else np.float32 for m, encoder in encoders.items()}
    encoded = {}
    for m, prefix in prefixes(job).items():
        if m in pattern:
            mask = np.ones((_ROWS, prefix.tokens), np.bool_) if encoders[m].kind == "text" else None
            stored = np.float16 if job.hyper.cache == "f16" else np.float32
            tokens = np.zeros((_ROWS, prefix.tokens, prefix.width), stored)
            encoded[m] = Encoded(tokens, mask, prefix.depth)
    return Dataset(
        modalities={m: np.zeros((_ROWS, *encoder.input_shape), dtypes[m]) for m, encoder in encoders.items()},
        present={m: np.ones(_ROWS, np.bool_) for m in pattern},
        labels=np.full(_ROWS, classes[0]) if classes else None,
        label_names=("",) * (classes[0] + 1) if classes else (),
        ids=[str(i) for i in range(_ROWS)],
        encoded=encoded,
    )


def matchers(job: Job, share: Share, counter: type[FlopCounter | LiveBytes] = FlopCounter) -> float:
    """FLOPs of training the matcher networks, or its operations, by ``counter``."""
    found = 0.0
    own = [m for m in job.model.encoders if share.having(m) and f"match/{m}" in job.stage.present]
    for m in own:
        small = build(job.model, [f"match/{m}"], device="meta").part(f"match/{m}")
        if job.model.matching == "classifier":
            rows = round(share.own * share.having(m))
            found += _training(job, small, rows, [partial(classifier_loss, small)], counter)
            continue
        for other in own:
            if other != m:
                prior = small.get_submodule(f"to/{other}")
                losses = prior_losses(prior, MatcherSettings().temperature)
                found += _training(job, prior, round(share.own * share.having(m, other)), losses, counter)
    return found


def _training(
    job: Job, module: nn.Module, rows: int, losses: Sequence[Loss], counter: type[FlopCounter | LiveBytes]
) -> float:
    """What ``counter`` counts of training a matcher network on ``rows`` samples by each loss, and its evaluation."""
    settings, width = MatcherSettings(), job.model.head.out
    if rows < _ROWS:
        return 0.0
    found = 0.0
    sizes = Counter(len(x) for x in np.array_split(np.empty(rows), max(1, rows // settings.batch_size)))
    for size, count in sizes.items():
        x = torch.empty((size, width), device="meta")
        target = torch.empty(size, dtype=torch.int64, device="meta") if job.model.matching == "classifier" else x
        with counter() as step:
            for loss in losses:
                loss(x, target).backward()  # type: ignore[no-untyped-call]
        found += settings.epochs * count * step.counted()[0]
    with counter() as whole, torch.no_grad():
        module(torch.empty((rows, width), device="meta"))
    return found + whole.counted()[0]
