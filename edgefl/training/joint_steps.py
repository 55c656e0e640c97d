"""Joint steps: the training steps of several devices at once, by stacked weights [K, …] (docs/decisions/0111).

One forward and one backward pass for K devices by ``torch.func.vmap``, one update by an optimiser that is elementwise.
Each device has its own batches, random numbers and statistics of batch norm: the same updates as one by one, to
rounding. ``edgefl.training.joint_trial`` says for which devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgefl.errors import EdgeFLError
from edgefl.models.encoder import Input, TokenState
from edgefl.training.batches import Batch, mixed_rows, training_batches
from edgefl.training.embeddings import own_modalities
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import Taken, Training
from edgefl.training.optimizers import SGD, AdamW
from edgefl.training.step import make_optimizer, prepare, run_forward


class Halted(NamedTuple):
    """A device at the beginning of its steps. ``values``: of its model's ``tensors``, which others use as well."""

    training: Training
    tensors: list[Tensor]
    values: list[Tensor]
    random: torch.Generator

    def resume(self) -> None:
        """Put its model, and the process' random numbers, to where it is."""
        with torch.no_grad():
            for tensor, own in zip(self.tensors, self.values, strict=True):
                tensor.copy_(own)
        prepare(self.training.model, self.training.job.stage.trained)
        torch.set_rng_state(self.random.get_state())


def halted(training: Training) -> Halted:
    """A device whose model is about to be used for another one."""
    tensors = [*training.model.parameters(), *training.model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    return Halted(training, tensors, values, _generator(torch.get_rng_state()))


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


class Stacked(NamedTuple):
    """A batch of each device: inputs[m] [K, B, …], masks of tokens[m] [K, B, N], labels [K, B], device [K]."""

    inputs: dict[str, Tensor]
    masks: dict[str, Tensor]
    labels: Tensor
    place: Tensor


def stacked(batches: Sequence[Batch]) -> Stacked:
    """The batches of several devices, which have the same modalities in all rows."""
    first = batches[0]
    inputs = {m: torch.stack([_tokens(batch.inputs[m]) for batch in batches]) for m in first.inputs}
    masks = {
        m: torch.stack([mask for batch in batches if (mask := _mask(batch.inputs[m])) is not None])
        for m, own in first.inputs.items()
        if _mask(own) is not None
    }
    labels = torch.stack([batch.labels for batch in batches if batch.labels is not None])
    return Stacked(inputs, masks, labels, torch.arange(len(batches)))


def _tokens(own: Input) -> Tensor:
    return own.tokens if isinstance(own, TokenState) else own


def _mask(own: Input) -> Tensor | None:
    return own.mask if isinstance(own, TokenState) else None


class _Loss(nn.Module):
    """Loss and logits [B, C] of a complete batch, as one module; without logits, the loss again.

    ``depths``: of tokens that stand for a modality's samples.
    """

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self.job = training.model, training.job
        # What belongs to one device alone is refused.
        self.auxiliary = Auxiliary(training.auxiliary.tables, matcher=training.auxiliary.matcher)
        self.depths = {m: encoded.depth for m, encoded in training.dataset.encoded.items()}

    def forward(
        self, tokens: Mapping[str, Tensor], masks: Mapping[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs: dict[str, Input] = {
            m: TokenState(x, masks.get(m), self.depths[m]) if m in self.depths else x for m, x in tokens.items()
        }
        batch = Batch(len(labels), inputs, dict.fromkeys(inputs), labels, complete=len(labels))
        done = run_forward(self.model, self.job, batch, self.auxiliary)
        return done.loss, done.loss if done.forward.classified is None else done.forward.classified


class Stack:
    """The models of K devices with stacked weights [K, …], and one optimiser for them.

    ``values``: parameters by name; what is frozen and equal in all devices is there once, and not among them.
    """

    def __init__(self, devices: Sequence[Halted]) -> None:
        from torch.func import functional_call, vmap

        training = devices[0].training
        self._loss = loss = _Loss(training)
        self._generators = [_generator(one.random.get_state()) for one in devices]
        self._names = [name for name, _ in (*loss.named_parameters(), *loss.named_buffers())]
        parameters = dict(loss.named_parameters())
        self._shared: dict[str, Tensor] = {}
        self.values: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        trained = set(training.job.stage.trained)
        for name, *own in zip(self._names, *(one.values for one in devices), strict=True):
            if part_of(name) not in trained and all(torch.equal(own[0], other) for other in own[1:]):
                self._shared[name] = own[0]
            elif name in parameters:
                self.values[name] = nn.Parameter(torch.stack(own), parameters[name].requires_grad)
            else:
                self.buffers[name] = torch.stack(own)
        self.optimizer = make_optimizer(training.model, training.job.stage.trained, training.job.hyper)
        names = {value: name for name, value in parameters.items()}
        self.optimizer.groups = tuple(
            replace(group, parameters=tuple(self.values[names[own]] for own in group.parameters))
            for group in self.optimizer.groups
        )

        def losses(
            own: Mapping[str, Tensor],
            state: Mapping[str, Tensor],
            inputs: Mapping[str, Tensor],
            masks: Mapping[str, Tensor],
            labels: Tensor,
            place: Tensor,
        ) -> tuple[Tensor, Tensor]:
            with _EachItsOwn(place, self._generators):
                found: tuple[Tensor, Tensor] = functional_call(
                    loss, {**self._shared, **own, **state}, (inputs, masks, labels)
                )
            return found

        self._losses = vmap(losses)

    def __len__(self) -> int:
        return len(self._generators)

    def backward(self, batch: Stacked) -> tuple[Tensor, Tensor]:
        """Losses [K] and logits [K, B, C], [K] where nothing is classified; gradients are where parameters have them.

        Raises what torch does where it has no rule for stacked weights.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for value in self.values.values():
            value.grad = None
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no rule under vmap: it runs device by device
            losses, logits = self._losses(dict(self.values), self.buffers, *batch)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        return losses.detach(), logits.detach()

    @torch.no_grad()
    def unstack(self, place: int, device: Halted) -> None:
        """Set a device's values and random numbers to those at its place."""
        every: dict[str, Tensor] = {**self.values, **self.buffers}
        device.values[:] = [
            every[name][place].detach().clone() if name in every else self._shared[name] for name in self._names
        ]
        device.random.set_state(self._generators[place].get_state())

    @torch.no_grad()
    def keep_first(self, count: int) -> None:
        """Go on with the first ``count`` devices."""
        for value in self.values.values():
            value.grad = None
            value.data = value.data[:count]
        self.buffers = {name: value[:count] for name, value in self.buffers.items()}
        assert isinstance(self.optimizer, SGD | AdamW)  # noqa: S101 - others are refused
        self.optimizer.keep_first(count)
        del self._generators[count:]


def part_of(name: str) -> str:
    """The part that a tensor of the stack belongs to: of "model._parts.<part>.…"."""
    return name.split(".")[2] if name.startswith("model._parts.") else ""


_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}


class _EachItsOwn(TorchFunctionMode):
    """Operations taken device by device: random numbers, each by its device's generator, and convolutions.

    Convolutions of several devices as one grouped convolution take two to three times as long on a CPU. Pooling is of
    all rows at once, which vmap does twice.
    """

    def __init__(self, place: Tensor, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._place = place  # of the device, which vmap holds [K] of
        self._generators = generators

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        known = kwargs or {}
        if func in _CONVOLUTIONS:
            return _apart(func, *args, **known)
        if func is F.linear and args[0].dim() > 2:  # else a device's weights are copied for each of its samples
            x, *rest = args
            return func(x.flatten(0, -2), *rest, **known).unflatten(0, x.shape[:-1])
        if func is F.max_pool2d:
            work = partial(_of_rows, lambda rows: func(rows, *args[1:], **known))
            return _Outside.apply(work, args[0])  # type: ignore[no-untyped-call]
        if func is F.dropout:
            return self._dropout(*args, **known)
        if func in {torch.rand, torch.randint}:
            return self._drawn(lambda by: func(*args, **known, generator=by))
        return func(*args, **known)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        shape, dtype = x.shape, x.dtype
        kept = self._drawn(lambda by: torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=by).div_(1 - p))
        return x * kept

    def _drawn(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        found: Tensor = _Outside.apply(  # type: ignore[no-untyped-call]
            lambda *_: torch.stack([draw(by) for by in self._generators]), self._place
        )
        return found


def _apart(
    convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
) -> Tensor:
    """A convolution of each device's input by its weights; where these are one's for all, of all rows at once."""

    def run(dims: Sequence[int | None], *given: Any) -> Tensor:
        if dims[1] is None and dims[2] is None:
            return _of_rows(lambda rows: convolve(rows, *given[1:], *more, **named), dims, *given)
        each = (repeat(v) if v is None or dim is None else v.unbind(dim) for v, dim in zip(given, dims, strict=True))
        return torch.stack([convolve(*own, *more, **named) for own in zip(*each, strict=False)])

    found: Tensor = _Outside.apply(run, x, weight, bias)  # type: ignore[no-untyped-call]
    return found


def _of_rows(work: Callable[[Tensor], Tensor], dims: Sequence[int | None], x: Tensor, *_: object) -> Tensor:
    """A function of the rows of all devices at once."""
    rows = x.movedim(dims[0] or 0, 0)
    found = work(rows.flatten(0, 1))
    return found.reshape(*rows.shape[:2], *found.shape[1:])


class _Outside(torch.autograd.Function):
    """A function of stacked values [K, …] amid one of each device's; one of its values has to be stacked."""

    @staticmethod
    def forward(run: Callable[..., Tensor], *given: Tensor | None) -> Tensor:
        raise RuntimeError("a value that all devices have in common is not stacked")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept: torch differentiates what ``vmap`` runs."""

    @staticmethod
    def vmap(
        info: object, in_dims: tuple[int | None, ...], run: Callable[..., Tensor], *given: Tensor | None
    ) -> tuple[Tensor, int]:
        """[K, …]."""
        return run(in_dims[1:], *given), 0


def batches_of(training: Training, rng: np.random.Generator) -> Iterator[Batch]:
    """One epoch's batches, as a device draws them by itself."""
    rows = mixed_rows(training.usable, training.job.hyper.batch_size, rng)
    return training_batches(training.dataset, rows, own_modalities(training.job, training.dataset), "cpu")


def _every_batch(training: Training) -> Iterator[tuple[int, Batch]]:
    """(epoch, batch) of a round."""
    for epoch in range(1, training.job.hyper.epochs + 1):
        for batch in batches_of(training, training.rng):
            yield epoch, batch


def take_steps(devices: Sequence[Halted], flops: float) -> None:
    """Every step of devices that may be taken together, in place of each one's own: ``Training.taken``.

    ``flops``: of a device's step. A device whose loss is not finite, or whose ``on_progress`` raises, ends there, and
    the others go on.
    """
    order = sorted(devices, key=lambda one: -one.training.planned)
    stack, errors = Stack(order), dict[int, EdgeFLError]()
    streams = [_every_batch(one.training) for one in order]
    for step in range(order[0].training.planned):
        count = sum(one.training.planned > step for one in order)
        if count < len(stack):
            for place in range(count, len(stack)):
                stack.unstack(place, order[place])
            stack.keep_first(count)
        if len(errors.keys() & set(range(count))) == count:
            break
        began = time.perf_counter()
        epochs, batches = zip(*map(next, streams[:count]), strict=True)
        batch = stacked(batches)
        losses, logits = stack.backward(batch)
        stack.optimizer.step()
        # Without a term that classifies there are no logits.
        right = (logits.argmax(2) == batch.labels).sum(1).tolist() if logits.ndim > 1 else [None] * count
        share = (time.perf_counter() - began) / count
        for place, loss in enumerate(losses.tolist()):
            one = order[place].training
            one.compute_s += share
            if place not in errors and (error := _noted(one, epochs[place], loss, right[place])) is not None:
                errors[place] = error
    for place, device in enumerate(order):
        if place < len(stack):
            stack.unstack(place, device)
        device.training.taken = Taken(flops * len(device.training.loss), errors.get(place))


def _noted(training: Training, epoch: int, loss: float, right: int | None) -> EdgeFLError | None:
    """Note a device's step; the error that ends its steps."""
    if not np.isfinite(loss):
        return training.diverged(loss)
    training.loss.append(loss)
    if right is not None:
        training.correct += right
        training.labelled += training.job.hyper.batch_size
    try:
        training.on_progress(epoch, len(training.loss), training.planned, loss)
    except EdgeFLError as error:
        return error
    return None
