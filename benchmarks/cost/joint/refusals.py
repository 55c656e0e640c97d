"""Eligibility for joint steps: refusals of whatever they have not been shown to give the same updates for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import nn

from edgefl.models.spec import fuses_tokens, shares_attention, shares_projection, task_parts
from edgefl.plan.job import Hyper, Job
from edgefl.registry import chosen
from edgefl.training.embeddings import device_of, own_modalities

if TYPE_CHECKING:
    from edgefl.training.local_round import _Training

#: Norms that keep statistics, or depend on the mode of the module.
_STATEFUL = (nn.modules.batchnorm._NormBase, nn.RNNBase)  # noqa: SLF001 - the base of every batch and instance norm


def refused(trainings: Sequence[_Training]) -> str:
    """The reason why these devices' steps are not taken together; "": they may be, where ``trial`` agrees."""
    first = trainings[0]
    if len(trainings) < 2:
        return "one device alone"
    if any(one.job != first.job for one in trainings):
        return "different jobs"
    if len({len(one.usable) // first.job.hyper.batch_size for one in trainings}) > 1:
        return "different numbers of batches"
    return _refused_job(first.job) or next(filter(None, map(_refused_device, trainings)), "")


def _refused_job(job: Job) -> str:
    """Of what is equal for all devices."""
    model, slots = job.model, job.slots
    terms = [term.method for term in chosen("objective", slots.objective)]
    (missing,), (prototypes,) = chosen("missing", slots.missing), chosen("prototypes", slots.prototypes)
    reasons = {
        "a loss of several terms, or with state of its own": len(terms) > 1
        or any(not term.labels or term.pairs or term.auxiliaries or term.keep for term in terms),
        "modalities hidden at random": bool(missing.options.get("drop")),
        "prototypes": prototypes.method.local is not None or prototypes.method.start is not None,
        "rounds in a period": job.period is not None,
        "low-rank adaptation": model.lora is not msgspec.UNSET,
        "shared attention, a shared projection or a fusion of tokens": shares_attention(model)
        or shares_projection(model)
        or fuses_tokens(model),
        "several label sets": len(task_parts(model)) != 1,
        "a model of the transformers library": any(encoder.config for encoder in model.encoders.values()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or _refused_hyper(job.hyper)


def _refused_hyper(hyper: Hyper) -> str:
    reasons = {
        f"optimiser {hyper.optimizer}, whose update is not elementwise": hyper.optimizer not in {"sgd", "adamw"},
        "micro-batches": 0 < hyper.micro_batch < hyper.batch_size,
        "activation checkpointing": hyper.checkpoint,
        "a limit on the norm of gradients": hyper.clip_norm > 0,
        "mixed precision": hyper.precision != "f32",
        "weights on disk": hyper.weights != "memory",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _refused_device(training: _Training) -> str:
    """Of one device's own."""
    model, auxiliary = training.model, training.auxiliary
    private = auxiliary.private_heads or auxiliary.teachers or auxiliary.received or auxiliary.kept
    reasons = {
        "an observer of the steps": training.observer is not None,
        "state beside the model": bool(private or auxiliary.tables or auxiliary.initial),
        "steps on another processor": device_of(model).type != "cpu",
        "batch norm or a recurrent layer": any(isinstance(layer, _STATEFUL) for layer in model.modules()),
        "dropout": any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or _refused_data(training)


def _refused_data(training: _Training) -> str:
    data, usable = training.dataset, training.usable
    encoders = list(training.job.model.encoders)
    if own_modalities(training.job, data) != encoders or not data.complete(encoders)[usable].all():
        return "samples without a modality"
    if data.encoded:
        return "a stored outcome of frozen parts"
    if data.labels is None or (data.labels[usable] < 0).any():
        return "samples without a label"
    return "targets that are numbers or sets" if data.targets is not None or data.sets is not None else ""
