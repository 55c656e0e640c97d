"""FLOPs of a round outside its steps, on the meta device: local evaluation, prototypes, matcher networks.

Each of these runs the model over samples without a graph, so its FLOPs are a sum over samples; a sample's depend on
which modalities it has (its pattern) and on how far through the model it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from edgefl.methods.prototypes.matcher_networks import MatcherSettings, classifier_loss, prior_losses
from edgefl.models.encoders.base import TokenState
from edgefl.models.spec import encodes_together
from edgefl.models.staged import StagedModel, build
from edgefl.plan.frozen_prefix import built_parts
from edgefl.plan.job import Job
from edgefl.plan.norm import LEAST, MOST
from edgefl.plan.schedule import is_closing
from edgefl.plan.usable_samples import needs_pairs
from edgefl.prototypes.mask import Table
from edgefl.registry import chosen, method
from edgefl.resources.flops import FlopCounter
from edgefl.training.batches import meta_input
from edgefl.training.evaluate import logits_of
from edgefl.training.fill import BY_MATCH, AtHand, at_inference
from edgefl.training.flop_cache import kind_of_step
from edgefl.training.scoring import matcher_of

Pattern = tuple[str, ...]
#: How far a sample goes: to what its heads are given, to the projections of its modalities, each alone or together, to
#: the fused representation, to the logits.
Through = Literal["encode", "alone", "project", "fuse", "classify"]
#: Rows of a traced pass. FLOPs are by row, so that any number would do.
_ROWS = 2


class Share(NamedTuple):
    """A device's samples: ``total``, ``trained`` on, ``holdout`` to test on; ``patterns``: pattern -> part of 1.

    Prototypes and small networks are made of the ``own`` samples. ``tried``: patterns of those apart.
    """

    total: int
    trained: int
    holdout: int
    patterns: Mapping[Pattern, float]
    tried: Mapping[Pattern, float]

    @property
    def own(self) -> int:
        """How many samples the device's own figures are made of."""
        return self.total - self.holdout

    def having(self, *modalities: str) -> float:
        """Which part of the samples has all of these."""
        return sum(part for pattern, part in self.patterns.items() if set(modalities) <= set(pattern))


def patterns_of(shares: Mapping[str, float]) -> dict[Pattern, float]:
    """Which part of the samples has just these modalities, ``shares[m]`` of them m.

    Of two modalities this follows, since every sample has one; of more, the rarer are taken to lie within the others.
    """
    if len(shares) == 2:
        (a, of_a), (b, of_b) = shares.items()
        found = {(a, b): of_a + of_b - 1, (a,): 1 - of_b, (b,): 1 - of_a}
    else:
        order = sorted(shares, key=lambda m: -shares[m])
        rest = [*(shares[m] for m in order[1:]), 0.0]
        found = {tuple(m for m in shares if m in order[: k + 1]): shares[order[k]] - rest[k] for k in range(len(order))}
    return {pattern: part for pattern, part in found.items() if part > 0}


class Overhead:
    """Prices what is outside the steps, and remembers what it traced."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, Pattern, str], float] = {}

    def __call__(self, job: Job, share: Share) -> float:
        """FLOPs of a round from the second on, when there is something received and something kept.

        The closing round has small networks, and no local evaluation or prototypes.
        """
        made = self._statistics(job, share)
        if is_closing(job.stage):
            return made + self._matchers(job, share)
        return made + self._local_evaluations(job, share) + self._prototypes(job, share)

    def _local_evaluations(self, job: Job, share: Share) -> float:
        """The model as received and as trained on the samples apart and, where there is one, the personal one."""
        if not share.holdout:
            return 0.0
        together = encodes_together(job.model)
        alone = needs_pairs(job.slots) or not together
        share = share._replace(patterns=share.tried)
        flops = self._alone(job, share) if alone else 0.0
        if job.model.classes and "task" in job.stage.trained:
            for pattern, part in share.patterns.items():
                encoded = 0.0 if together else self._row(job, pattern, "alone")  # taken over from each alone
                flops += part * (self._row(job, pattern, "classify") - encoded)
        return share.holdout * flops * (2 + _personal(job))

    def _statistics(self, job: Job, share: Share) -> float:
        """FLOPs of the statistics of the model as received, of a personal one and of teachers: a pass for each."""
        if not job.slots.statistics:
            return 0.0
        personal = _personal(job) and share.holdout > 0
        taught = any(term.method.teacher for term in chosen("objective", job.slots.objective))
        passes = 1 + personal + taught
        return passes * sum(
            min(MOST, count) * self._head_input(job, share, m)
            for m in job.model.encoders
            if (count := round(share.trained * share.having(m))) >= LEAST
        )

    def _head_input(self, job: Job, share: Share, m: str) -> float:
        """One sample of m through its head, with shared attention beside what else such a sample has."""
        alone = self._row(job, (m,), "alone")
        if job.model.encoder_sharing != "multiway":
            return alone
        having = {pattern: part / share.having(m) for pattern, part in share.patterns.items() if m in pattern}
        encoded = sum(part * self._row(job, pattern, "encode") for pattern, part in having.items())
        return encoded + alone - self._row(job, (m,), "encode")

    def _prototypes(self, job: Job, share: Share) -> float:
        slot = chosen("prototypes", job.slots.prototypes)[0]
        if slot.method.passes is None:
            return 0.0
        times, passes = slot.bind(slot.method.passes)(job, share)
        return float(times * sum(part * self._row(job, pattern, through) for part, pattern, through in passes))

    def _matchers(self, job: Job, share: Share) -> float:
        flops = share.own * self._alone(job, share)
        own = [m for m in job.model.encoders if share.having(m) and f"match/{m}" in job.stage.present]
        for m in own:
            small = build(job.model, [f"match/{m}"], device="meta").part(f"match/{m}")
            if job.model.matching == "classifier":
                flops += _taught(job, small, round(share.own * share.having(m)), partial(_classified, job, small))
                continue
            for other in own:
                if other != m:
                    prior = small.get_submodule(f"to/{other}")
                    pairs = round(share.own * share.having(m, other))
                    flops += _taught(job, prior, pairs, partial(_predicted, job, prior))
        return flops

    def _alone(self, job: Job, share: Share) -> float:
        """Every modality of one sample, each encoded by itself and projected."""
        return sum(share.having(m) * self._row(job, (m,), "alone") for m in job.model.encoders if share.having(m))

    def _row(self, job: Job, pattern: Pattern, through: Through) -> float:
        key = (kind_of_step(job, with_tables=False), pattern, through)
        if key not in self._known:
            self._known[key] = _pass(job, pattern, through) / _ROWS
        return self._known[key]


def _personal(job: Job) -> bool:
    """Whether the device has a personal model too, which is evaluated like the others."""
    personal: bool = chosen("repair", job.slots.repair)[0].method.personal
    return personal


@torch.no_grad()
def _pass(job: Job, pattern: Pattern, through: Through) -> float:
    """FLOPs of ``_ROWS`` samples that have these modalities."""
    model = build(job.model, built_parts(job), device="meta").eval()
    with FlopCounter() as counter:
        _run(model, job, pattern, through)
    return float(counter.flops)


def _run(model: StagedModel, job: Job, pattern: Pattern, through: Through) -> None:
    inputs = {m: meta_input(job, m, _ROWS) for m in pattern}
    states: dict[str, TokenState] = {}
    if job.model.fusion == "joint" and through not in {"encode", "alone"}:
        states = model.encode_batch_tokens(inputs, dict.fromkeys(inputs), _ROWS, job.stage.depth)
        pooled = {m: model.pool_tokens(m, state) for m, state in states.items()}
    else:
        pooled = model.encode_batch(inputs, dict.fromkeys(inputs), _ROWS, job.stage.depth)
    if through == "encode":
        return
    projected = {m: model.project(m, h) for m, h in pooled.items()}
    if through in {"alone", "project"}:
        return
    if through == "classify":  # local evaluation fills in what is absent
        tables = meta_tables(job)
        given = AtHand(projected, {}, model, tables, None, BY_MATCH, matcher_of(job.slots, {}))
        logits_of(given, method("missing", at_inference(job.slots.missing, job.model, tables)).make, states or None)
        return
    has = {m: torch.ones(_ROWS, dtype=torch.bool, device="meta") for m in pattern}
    model.fuse(projected, has, states or None)


def meta_tables(job: Job) -> dict[str, Table]:
    """Prototypes as they are from the second round on, without values."""
    slot = chosen("prototypes", job.slots.prototypes)[0]
    tables = slot.bind(slot.method.rows)(job.model) if slot.method.rows is not None else {}
    return {
        m: Table(torch.empty(rows, wide, device="meta"), torch.empty(rows, dtype=torch.bool, device="meta"))
        for m, (rows, wide) in tables.items()
    }


def _taught(job: Job, module: nn.Module, rows: int, step: Callable[[int], float]) -> float:
    """FLOPs of a small network's training on ``rows`` samples, and of its last look at them all.

    ``step``: FLOPs of a step with n rows, by all losses.
    """
    settings = MatcherSettings()
    if rows < _ROWS:
        return 0.0
    sizes = Counter(len(x) for x in np.array_split(np.empty(rows), max(1, rows // settings.batch_size)))
    with FlopCounter() as counter, torch.no_grad():
        module(torch.empty((rows, job.model.head.out), device="meta"))
    return settings.epochs * sum(count * step(size) for size, count in sizes.items()) + float(counter.flops)


def _classified(job: Job, module: nn.Module, rows: int) -> float:
    x, y = torch.empty((rows, job.model.head.out), device="meta"), torch.empty(rows, dtype=torch.int64, device="meta")
    with FlopCounter() as counter:
        classifier_loss(module, x, y).backward()  # type: ignore[no-untyped-call]
    return float(counter.flops)


def _predicted(job: Job, module: nn.Module, rows: int) -> float:
    x, z = torch.empty((2, rows, job.model.head.out), device="meta")
    with FlopCounter() as counter:
        for loss in prior_losses(module, MatcherSettings().temperature):
            loss(x, z).backward()  # type: ignore[no-untyped-call]
    return float(counter.flops)
