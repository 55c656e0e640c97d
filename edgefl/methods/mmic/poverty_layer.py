"""Which weight tensor missing modalities change most: the poverty layer (MMiC, arXiv 2505.06911, equations 8-10, 13).

change of p = mean |(θ_after - θ_before) / θ_before| over a step on samples that lack modalities, right after a step on
complete ones;  poverty layer = argmax_p max over epochs of the mean over such transitions.
So says the text before equation 8; that before equation 9 prints the reverse (docs/decisions/0032).
Equation 13, from the optimiser instead of copies:  SGD η|g|/|θ|,  Adam η|m̂|/(|θ|(√v̂ + ε)),  θ before the step.
D-M2: |θ| counts as at least 1e-8, and only weight tensors (two dimensions or more) are compared: a bias that starts at
zero would always win.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgefl.data.arrays import Array
from edgefl.errors import ModelError
from edgefl.lazy import torch
from edgefl.models.spec import is_scheduled
from edgefl.plan.job import Job
from edgefl.plan.stages import sent
from edgefl.registry import Observed

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.models.staged import StagedModel
    from edgefl.training.optimizers import Group, Optimizer

#: D-M2.
SMALLEST = 1e-8
#: Parameter -> "part|tensor".
Layers = Mapping["torch.nn.Parameter", str]


def weight_tensors(parts: Mapping[str, Mapping[str, Array]]) -> list[tuple[str, str]]:
    """(part, tensor) of every weight tensor (two dimensions or more), sorted: what a poverty layer's number counts."""
    return sorted((part, name) for part, tensors in parts.items() for name, value in tensors.items() if value.ndim >= 2)


def poverty_layers(job: Job, model: StagedModel) -> dict[torch.nn.Parameter, str]:
    """The weights of the parts that are sent, by parameter: "part|tensor"; in a period, those that may travel alone.

    Not tables of positions and class tokens: some start at zero and would always be those that change most (D-M2).
    """
    from edgefl.models.parts import named_parameters  # loads torch

    modules = {part: model.part(part) for part in sent(job.stage, job.slots.exchange)}
    layers = {
        parameter: f"{part}|{name}"
        for part, module in modules.items()
        for name, parameter in named_parameters(module).items()
        if parameter.ndim >= 2 and name.endswith("weight")
    }
    if job.period is None:
        return layers
    sizes = {name: parameter.numel() for parameter, name in layers.items()}
    most = sizes.get(job.period.largest, 0)
    return {parameter: name for parameter, name in layers.items() if sizes[name] <= most}


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Mean of |(after - before) / before| over all elements, a scalar (equation 8)."""
    return ((after - before).abs() / _size(before)).mean()


def sgd_change(theta: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """|η g / θ| of each element, θ before the step (D-M3)."""
    return lr * gradient.abs() / _size(theta)


def adam_change(theta: Tensor, m_hat: Tensor, v_hat: Tensor, lr: float, eps: float) -> Tensor:
    """|η m̂ / (θ (√v̂ + ε))| of each element, θ before the step (equation 13)."""
    return lr * m_hat.abs() / (_size(theta) * (v_hat.sqrt() + eps))


def exact_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean relative change of each weight tensor over a step, by name.

    ``before``: copies of the trained tensors, needed only around a step that ``PovertyObserver.due`` asks for.
    """
    return {name: float(relative_change(old, after[name].detach())) for name, old in before.items() if old.ndim >= 2}


def optimizer_changes(optimizer: Optimizer, names: Layers) -> dict[str, float]:
    """name -> mean change of the step just made, of the named weight tensors that have a gradient.

    Needs no copies: θ before the step is had from θ after it, one tensor at a time. With momentum the momentum stands
    for g; AdamW's decoupled weight decay is no part of the change, as in the equation. Raises ModelError for an
    optimiser it does not know.
    """
    return {
        names[parameter]: float(_step_change(optimizer, group, parameter).mean())
        for group in optimizer.groups
        for parameter in group.parameters
        if parameter in names and parameter.ndim >= 2 and parameter.grad is not None
    }


def _step_change(optimizer: Optimizer, group: Group, parameter: torch.nn.Parameter) -> Tensor:
    from edgefl.training.optimizers import BETAS, EPS, SGD, AdamW  # loads torch

    lr, decay = group.lr, group.weight_decay
    with torch.no_grad():
        if isinstance(optimizer, SGD):
            if optimizer.momentum:
                mean = optimizer._mean[parameter]  # noqa: SLF001 - the optimiser's state is what this reads
                return sgd_change(parameter + lr * mean, mean, lr)
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            before = (parameter + lr * gradient) / (1 - lr * decay)
            return sgd_change(before, gradient + decay * before, lr)
        if isinstance(optimizer, AdamW):
            step, (mean, square) = optimizer._steps[parameter], optimizer._state[parameter]  # noqa: SLF001 - the same
            m_hat, v_hat = mean / (1 - BETAS[0] ** step), square / (1 - BETAS[1] ** step)
            before = (parameter + lr * m_hat / (v_hat.sqrt() + EPS)) / (1 - lr * decay)
            return adam_change(before, m_hat, v_hat, lr, EPS)
    raise ModelError(
        f"the change of a step cannot be had from optimiser {type(optimizer).__name__}",
        remedy="Train with adamw or sgd, or set repair: {poverty: {form: exact}}.",
    )


def _size(theta: Tensor) -> Tensor:
    return theta.abs().clamp(min=SMALLEST)


class PovertyObserver:
    """Finds a device's poverty layer among ``layers`` while it trains; ``named``: the result has its name too.

    ``batch`` after every step, ``epoch`` after every epoch. Batches are complete (every sample has every modality) or
    not; an epoch's first batch is no transition.
    """

    def __init__(self, layers: Layers, *, exact: bool = False, named: bool = False) -> None:
        self._layers, self._exact, self._named = layers, exact, named
        self._worst: dict[str, float] = {}  # name -> max over epochs
        self._sums: dict[str, float] = {}  # name -> sum over this epoch's transitions
        self._in_epoch = 0  # this epoch's transitions, |B*|
        self._transitions = 0  # of all epochs
        self._complete = 0  # batches
        self._after_complete = False

    @property
    def copied(self) -> list[torch.nn.Parameter]:
        """Parameters of which a step holds copies: those whose change is measured exactly."""
        return list(self._layers) if self._exact else []

    @contextmanager
    def step(self, optimizer: Optimizer, complete: bool) -> Iterator[None]:
        """Measures how much the step inside, on a batch that is complete or not, changes each weight tensor."""
        due = self.due(complete)
        before = {name: p.detach().clone() for p, name in self._layers.items()} if due and self._exact else {}
        yield
        if self._exact:
            changes = exact_changes(before, {name: p for p, name in self._layers.items()})
        else:
            changes = optimizer_changes(optimizer, self._layers) if due else {}
        self.batch(complete, changes)

    def due(self, complete: bool) -> bool:
        """Whether the changes of a step on such a batch, the next one, are wanted."""
        return self._after_complete and not complete

    def batch(self, complete: bool, changes: Mapping[str, float]) -> None:
        """One step: ``changes`` (name -> change) count when it was due, and may be left empty when not.

        A tensor without a change in a transition, since it had no gradient, changed by 0 (equation 9 divides by all
        transitions of the epoch). Raises ModelError, naming the tensor, for a change that is not a finite number.
        """
        self._complete += complete
        if self.due(complete):
            self._transitions += 1
            self._in_epoch += 1
            for name, change in changes.items():
                if not math.isfinite(change):
                    raise ModelError(
                        f"weight '{name}' changed by {change} in one step: training has diverged",
                        remedy="Lower the learning rate, or set training.clip_norm.",
                    )
                self._sums[name] = self._sums.get(name, 0.0) + change
        self._after_complete = complete

    def epoch(self) -> None:
        """Close an epoch."""
        for name, total in self._sums.items():
            self._worst[name] = max(self._worst.get(name, 0.0), total / self._in_epoch)
        self._sums, self._in_epoch, self._after_complete = {}, 0, False

    @property
    def complete(self) -> bool:
        """Whether it has no poverty layer, and so can lend: complete batches, and none that lacks after them."""
        return self._complete > 0 and self._transitions == 0

    @property
    def change(self) -> float:
        """The poverty layer's change, over the epochs closed so far; 0: there is none."""
        return max(self._worst.values(), default=0.0)

    def poorest(self) -> str | None:
        """The poverty layer by the epochs closed so far, of equals the first by name; None: no transition yet."""
        return min(self._worst, key=lambda name: (-self._worst[name], name), default=None)

    def observed(self, sending: Mapping[str, Mapping[str, Array]]) -> Observed:
        """The poverty layer by the epochs closed so far, its place counted as the server counts it."""
        poorest = self.poorest() or ""
        layers = weight_tensors({part: tensors for part, tensors in sending.items() if is_scheduled(part)})
        names = [f"{part}|{name}" for part, name in layers]
        place = names.index(poorest) if poorest in names else -1  # single layers are sent by their names
        return Observed(self.complete, place, self.change, poorest if self._named else "")
