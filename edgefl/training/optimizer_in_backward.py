"""Large parameters are updated inside the backward pass, as soon as their gradient is whole; then it is given back.

The same arithmetic in another order: a parameter's gradient is whole when every operation that read it is done with
it. So gradients of heads, of the encoders and of one layer and the next are never there together. (LOMO, arXiv
2306.09782, with any optimiser.) Not with a limit on the norm of all gradients, which has to see them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from edgefl.plan.job import Job
from edgefl.registry import chosen
from edgefl.training.optimizers import TOGETHER_BYTES, Optimizer

Update = Callable[[torch.nn.Parameter], None]


def may_update_in_backward(job: Job) -> bool:
    """Whether nothing needs all gradients at once: no limit on their norm, no observer of the steps."""
    return job.hyper.clip_norm == 0 and chosen("repair", job.slots.repair)[0].method.observe is None


class OptimizerInBackward:
    """``update(parameter)`` is called inside ``backward`` for each large parameter whose gradient is ``whole``."""

    def __init__(self, parameters: list[torch.nn.Parameter], update: Update) -> None:
        self._update = update
        self._large = [p for p in parameters if p.nbytes > TOGETHER_BYTES]
        self._waiting: set[torch.nn.Parameter] = set()

    @contextmanager
    def watching(self, waiting: set[torch.nn.Parameter]) -> Iterator[None]:
        """``waiting``: parameters that a later backward pass adds to; they are not whole yet."""
        self._waiting = waiting
        handles = [p.register_post_accumulate_grad_hook(self._whole) for p in self._large]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _whole(self, parameter: Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)  # noqa: S101 - only parameters are watched
        if parameter not in self._waiting:
            self._update(parameter)
            parameter.grad = None


def optimizer_in_backward(job: Job, optimizer: Optimizer) -> OptimizerInBackward | None:
    """Updates in the backward pass by ``optimizer``; None where the job needs all gradients."""
    if not may_update_in_backward(job):
        return None
    group_of = {p: group for group in optimizer.groups for p in group.parameters}
    return OptimizerInBackward(list(group_of), lambda p: optimizer.update(p, group_of[p]))
