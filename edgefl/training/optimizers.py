"""SGD with momentum and AdamW (arXiv 1711.05101), with the bare memory they need.

The same arithmetic as torch.optim's (a test compares them step by step). Ours because the first step of torch's own
optimisers imports torch._dynamo and sympy: 67 MiB and two seconds for every device, measured with torch 2.13 on a CPU,
which is a quarter of a warm trainer. One temporary the size of a parameter, none kept.

    sgd:    m <- mu m + g + wd p;  p <- p - lr m
    adamw:  p <- (1 - lr wd) p;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
            p <- p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

BETAS = (0.9, 0.999)
EPS = 1e-8


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate and a weight decay."""

    parameters: tuple[torch.nn.Parameter, ...]
    lr: float
    weight_decay: float = 0.0


class Optimizer(Protocol):
    """What a training step needs."""

    groups: tuple[Group, ...]

    def step(self) -> None:
        """Change every parameter that has a gradient."""
        ...


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Every parameter, in order."""
    return [parameter for group in optimizer.groups for parameter in group.parameters]


@dataclass
class SGD:
    """Stochastic gradient descent; ``momentum`` 0 keeps no state."""

    groups: tuple[Group, ...]
    momentum: float = 0.0
    _mean: dict[torch.nn.Parameter, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self) -> None:
        """p <- p - lr m."""
        for group in self.groups:
            for parameter in group.parameters:
                if parameter.grad is None:
                    continue
                change = parameter.grad
                if group.weight_decay:
                    change = change.add(parameter, alpha=group.weight_decay)
                if self.momentum:
                    if parameter in self._mean:
                        change = self._mean[parameter].mul_(self.momentum).add_(change)
                    else:
                        change = self._mean[parameter] = change.clone()
                parameter.add_(change, alpha=-group.lr)


@dataclass
class AdamW:
    """Adam with decoupled weight decay."""

    groups: tuple[Group, ...]
    _steps: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    _state: dict[torch.nn.Parameter, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient, with bias correction by its own number of updates."""
        for group in self.groups:
            for parameter in group.parameters:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.nn.Parameter, gradient: Tensor, group: Group) -> None:
        if parameter not in self._state:
            self._state[parameter] = (torch.zeros_like(parameter), torch.zeros_like(parameter))
        step = self._steps[parameter] = self._steps.get(parameter, 0) + 1
        mean, square = self._state[parameter]
        first, second = BETAS
        parameter.mul_(1 - group.lr * group.weight_decay)
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        divisor = square.sqrt().div_(math.sqrt(1 - second**step)).add_(EPS)
        parameter.addcdiv_(mean, divisor, value=-group.lr / (1 - first**step))
