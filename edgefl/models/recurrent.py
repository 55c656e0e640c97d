"""GRU and LSTM on shapes alone as torch computes them on a processor: all inputs mapped at once, then step by step.

On the meta device torch maps them one step at a time, and a step of training is then a third short of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, overrides

State = tuple[Tensor, ...]


class RecurrentOnShapes(overrides.TorchFunctionMode):
    """Inside, layers of meta tensors are computed so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        step = _STEPS.get(getattr(func, "__name__", ""))
        if step is None or not args[0].is_meta or isinstance(args[3], Tensor):  # packed sequences stay torch's
            return func(*args, **(kwargs or {}))
        return _layers(step, *args)


@contextmanager
def as_priced() -> Iterator[None]:
    """Inside, what a layer costs is what is predicted of it.

    oneDNN's LSTM keeps four times the memory, and its FLOPs cannot be counted: torch's own takes its place.
    """
    mkldnn: Any = torch.backends.mkldnn
    enabled, *_ = mkldnn.set_flags(_enabled=False)
    try:
        with RecurrentOnShapes():
            yield
    finally:
        mkldnn.set_flags(_enabled=enabled)


def _gru(mapped: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    (h,), (i_r, i_z, i_n) = state, mapped.unsafe_chunk(3, 1)
    h_r, h_z, h_n = F.linear(h, *weights).unsafe_chunk(3, 1)
    r, z = h_r.add_(i_r).sigmoid_(), h_z.add_(i_z).sigmoid_()
    n = i_n.add(h_n.mul_(r)).tanh_()
    return ((h - n).mul_(z).add_(n),)


def _lstm(mapped: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    i, f, g, o = F.linear(state[0], *weights).add_(mapped).unsafe_chunk(4, 1)
    c = (f.sigmoid_() * state[1]).add_(i.sigmoid_() * g.tanh_())
    return o.sigmoid_() * c.tanh(), c


_STEPS = {"gru": _gru, "lstm": _lstm}


def _layers(
    step: Callable[[Tensor, State, Sequence[Tensor]], State],
    x: Tensor,
    first: Tensor | State,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> State:
    """Arguments and results of torch's own function."""
    x, per = x.transpose(0, 1) if batch_first else x, 4 if biases else 2
    starts = [one.unbind(0) for one in ((first,) if isinstance(first, Tensor) else first)]
    ends: list[State] = []
    for layer in range(layers):
        outcomes = []
        for _ in range(1 + both):
            own = weights[len(ends) * per : (len(ends) + 1) * per]
            state, made = tuple(one[len(ends)] for one in starts), []
            for mapped in F.linear(x, *own[::2]).unbind(0):
                state = step(mapped, state, own[1::2])
                made.append(state[0])
            ends.append(state)
            outcomes.append(torch.stack(made))
        x = torch.cat(outcomes, 2) if both else outcomes[0]
        if layer + 1 < layers:
            x = F.dropout(x, dropout, train)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(one) for one in zip(*ends, strict=True)))
