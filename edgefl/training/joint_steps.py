"""Joint steps: the training steps of a round's devices at once, by stacked weights [K, …] (docs/decisions/0105).

One forward and one backward pass for K devices by ``torch.func.vmap``, one update by an optimiser that is elementwise.
The same updates as one by one to rounding: ``trial`` compares gradients and times both ways, ``refused`` says what it
has not been shown for.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edgefl.data.dataset import Dataset
from edgefl.errors import DivergedError, EdgeFLError
from edgefl.models.spec import fuses_tokens, shares_attention, shares_projection, task_parts
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Hyper, Job
from edgefl.registry import chosen
from edgefl.training.batches import Batch, mixed_rows, training_batches
from edgefl.training.embeddings import device_of, own_modalities
from edgefl.training.flop_cache import FlopCounts, counted, kind_of_step, linear_in, metered
from edgefl.training.forward import Auxiliary
from edgefl.training.step import make_optimizer, run_backward, run_forward

if TYPE_CHECKING:
    from edgefl.training.local_round import OnProgress, _Training

#: What gradients may differ by, as a share of the largest: some hundred roundings of f32.
ROUNDING = 1e-5
#: Steps of each way that a trial times, after one that is not timed.
TIMED = 3
#: Norms that keep statistics, or depend on the mode of the module.
_STATEFUL = (nn.modules.batchnorm._NormBase, nn.RNNBase)  # noqa: SLF001 - the base of every batch and instance norm


class Trial(NamedTuple):
    """One by one against joint steps. ``gain``: processor seconds by those of joint steps; ``flops``: of one step."""

    gain: float
    difference: float
    flops: float

    @property
    def agrees(self) -> bool:
        """Whether the gradients are the same to rounding."""
        return self.difference <= ROUNDING


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


class _Loss(nn.Module):
    """Loss and logits of a complete batch, as one module: inputs[m] [B, …], labels [B]."""

    def __init__(self, model: StagedModel, job: Job) -> None:
        super().__init__()
        self.model, self.job = model, job

    def forward(self, inputs: Mapping[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        batch = Batch(len(labels), inputs, dict.fromkeys(inputs), labels, complete=len(labels))
        done = run_forward(self.model, self.job, batch, Auxiliary())
        return done.loss, done.forward.logits


class Stack:
    """The models of K devices with stacked weights [K, …], and one optimiser for them."""

    def __init__(self, models: Sequence[StagedModel], job: Job) -> None:
        from torch.func import functional_call, stack_module_state, vmap

        self.modules = modules = [_Loss(model, job) for model in models]
        names = {value: name for name, value in modules[0].named_parameters()}
        values, self.buffers = stack_module_state(list[nn.Module](modules))
        self.values = {name: nn.Parameter(values[name].detach(), own.requires_grad) for own, name in names.items()}
        self.optimizer = make_optimizer(models[0], job.stage.trained, job.hyper)
        self.optimizer.groups = tuple(
            replace(group, parameters=tuple(self.values[names[own]] for own in group.parameters))
            for group in self.optimizer.groups
        )

        def losses(
            own: Mapping[str, Tensor], state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], labels: Tensor
        ) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = functional_call(modules[0], {**own, **state}, (inputs, labels))
            return found

        self._losses = vmap(losses)

    def backward(self, inputs: Mapping[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [K] and logits [K, B, C] of inputs[m] [K, B, …]; gradients are where parameters have them."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for value in self.values.values():
            value.grad = None
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no rule under vmap: it runs device by device
            losses, logits = self._losses(dict(self.values), self.buffers, inputs, labels)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        return losses.detach(), logits.detach()

    @torch.no_grad()
    def unstack(self) -> None:
        """Set every device's weights to its own."""
        for place, module in enumerate(self.modules):
            for name, value in module.named_parameters():
                value.copy_(self.values[name][place])


def steps_together(trainings: Sequence[_Training], progress: Sequence[OnProgress]) -> list[EdgeFLError | None]:
    """Every epoch's steps of devices that are not ``refused``, in place of each one's ``run``.

    Returns each device's error: DivergedError for a loss that is not finite, or what its ``progress`` raises; the
    others go on. FLOPs are not counted here: each step has ``Trial.flops``.
    """
    job = trainings[0].job
    stack = Stack([one.model for one in trainings], job)
    planned = len(trainings[0].usable) // job.hyper.batch_size * job.hyper.epochs
    errors: list[EdgeFLError | None] = [None] * len(trainings)
    for epoch in range(1, job.hyper.epochs + 1):
        for batches in zip(*(_batches(one) for one in trainings), strict=True):
            began = time.perf_counter()
            inputs, labels = stacked(batches)
            losses, logits = stack.backward(inputs, labels)
            stack.optimizer.step()
            right, share = (logits.argmax(2) == labels).sum(1), (time.perf_counter() - began) / len(trainings)
            for place, (one, loss) in enumerate(zip(trainings, losses.tolist(), strict=True)):
                if errors[place] is None:
                    _note(one, loss, int(right[place]), share)
                    errors[place] = _error(one, loss, progress[place], epoch, planned)
    stack.unstack()
    for one in trainings:
        one.model.zero_grad(set_to_none=True)
    return errors


def _note(training: _Training, loss: float, right: int, seconds: float) -> None:
    training.compute_s += seconds
    if np.isfinite(loss):
        training.loss.append(loss)
        training.correct += right
        training.labelled += training.job.hyper.batch_size


def _error(training: _Training, loss: float, progress: OnProgress, epoch: int, planned: int) -> EdgeFLError | None:
    if not np.isfinite(loss):
        return DivergedError(
            f"the loss became {loss} at step {len(training.loss) + 1}",
            remedy="Lower training.lr, or set training.clip_norm: 1.0.",
        )
    try:
        progress(epoch, len(training.loss), planned, loss)
    except EdgeFLError as error:
        return error
    return None


def trial(
    trainings: Sequence[_Training], counts: FlopCounts, clock: Callable[[], float] = time.process_time
) -> Trial | None:
    """Both ways on copies of devices that are not ``refused``; None where the model has no rule under vmap.

    The devices, their batches and random numbers stay as they are.
    """
    job, models = trainings[0].job, [copy.deepcopy(one.model) for one in trainings]
    draw = np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        batches = [next(_batches(one, draw)) for one in trainings]
        optimizers = [make_optimizer(model, job.stage.trained, job.hyper) for model in models]
        try:
            stack = Stack(models, job)
            joint = stacked(batches)
            stack.backward(*joint)
        except RuntimeError:  # torch's for what it cannot batch: random numbers, branches on values, updates in place
            return None
        with metered(counts) as bill:
            kind = kind_of_step(job, with_tables=False)
            first = models[0], job, batches[0]
            counted(kind, batches[0].shape_key, lambda: _backward(*first), linear=linear_in(job))
        for model, batch in zip(models, batches, strict=True):
            _backward(model, job, batch)
        difference = _difference(stack)

        def alone() -> None:
            for model, batch, optimizer in zip(models, batches, optimizers, strict=True):
                _backward(model, job, batch)
                optimizer.step()

        def together() -> None:
            stack.backward(*joint)
            stack.optimizer.step()

        seconds = [_seconds(step, clock) for step in (alone, together)]
    return Trial(seconds[0] / max(seconds[1], 1e-9), difference, bill.flops)


def _seconds(step: Callable[[], None], clock: Callable[[], float]) -> float:
    step()
    began = clock()
    for _ in range(TIMED):
        step()
    return clock() - began


def _backward(model: StagedModel, job: Job, batch: Batch) -> None:
    model.zero_grad(set_to_none=True)
    run_backward(model, job, batch, run_forward(model, job, batch, Auxiliary()))


def _difference(stack: Stack) -> float:
    """The largest difference of a gradient between both ways, as a share of the device's largest."""
    found = 0.0
    for place, module in enumerate(stack.modules):
        own = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in own.values())
        for name, gradient in own.items():
            other = stack.values[name].grad
            if other is None:
                return float("inf")
            found = max(found, float((other[place] - gradient).abs().max()) / max(largest, ROUNDING))
    return found


def _batches(training: _Training, rng: np.random.Generator | None = None) -> Iterator[Batch]:
    """One epoch's batches, as ``_Training.run`` draws them."""
    data: Dataset = training.dataset
    rows = mixed_rows(training.usable, training.job.hyper.batch_size, rng or training.rng)
    return training_batches(data, rows, list(training.job.model.encoders), "cpu")


def stacked(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs[m] [K, B, …] and labels [K, B]."""
    every = [(batch.inputs, batch.labels) for batch in batches]
    inputs = {m: torch.stack([own[m] for own, _ in every if isinstance(own[m], Tensor)]) for m in every[0][0]}  # type: ignore[misc]
    return inputs, torch.stack([labels for _, labels in every if labels is not None])
