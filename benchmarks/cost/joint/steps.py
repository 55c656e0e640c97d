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

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cost.joint.refusals import refused
from edgefl.data.dataset import Dataset
from edgefl.errors import DivergedError, EdgeFLError
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.training.batches import Batch, mixed_rows, training_batches
from edgefl.training.flop_cache import FlopCounts, counted, kind_of_step, linear_in, metered
from edgefl.training.forward import Auxiliary
from edgefl.training.step import make_optimizer, run_backward, run_forward

if TYPE_CHECKING:
    from edgefl.training.local_round import OnProgress, _Training

#: What gradients may differ by, as a share of the largest: some hundred roundings of f32.
ROUNDING = 1e-5
#: Gain from which steps are taken together: a trial's own noise is a tenth.
LEAST_GAIN = 1.2
#: Steps of each way that a trial times, after one that is not timed.
TIMED = 3


class Trial(NamedTuple):
    """One by one against joint steps. ``gain``: processor seconds by those of joint steps; ``flops``: of one step."""

    gain: float
    difference: float
    flops: float

    @property
    def agrees(self) -> bool:
        """Whether the gradients are the same to rounding."""
        return self.difference <= ROUNDING


#: (kind of step, optimiser, devices) -> its trial; None: no rule under vmap.
Trials = dict[tuple[bytes, str, int], Trial | None]


class Joint(NamedTuple):
    """What became of each device: its error, and the FLOPs of its steps."""

    errors: list[EdgeFLError | None]
    flops: list[float]


def run_together(
    trainings: Sequence[_Training], progress: Sequence[OnProgress], counts: FlopCounts, trials: Trials
) -> Joint | None:
    """The steps of a round's devices, in place of each one's ``run``; None: run them one by one, nothing has happened.

    ``counts``: FLOPs by shape, shared by the devices; ``trials``: of earlier rounds, to which a first one is added.
    """
    if refused(trainings):
        return None
    job = trainings[0].job
    key = kind_of_step(job, with_tables=False), job.hyper.optimizer, len(trainings)
    if key not in trials:
        trials[key] = trial(trainings, counts)
    tried = trials[key]
    if tried is None or not tried.agrees or tried.gain < LEAST_GAIN:
        return None
    errors = steps_together(trainings, progress)
    return Joint(errors, [len(one.loss) * tried.flops for one in trainings])


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
