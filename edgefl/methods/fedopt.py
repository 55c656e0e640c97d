"""The server's step from the previous state of a part by the combined updates to the next.

FedAvgM (Hsu et al. 2019, arXiv 1909.06335):  v = beta v + D;  next = previous + lr v,  where D = combined - previous.
FedOpt (Reddi et al. 2021, arXiv 2003.00295):  m = beta m + (1 - beta) D;  next = previous + lr m / (sqrt(u) + epsilon),
Adagrad u = u + D^2;  Adam u = beta2 u + (1 - beta2) D^2;  Yogi u = u - (1 - beta2) D^2 sign(u - D^2).
No bias correction, as in the paper.

A step is ``method(state, previous, combined, *, options) -> (next, state)``. The state holds f32 tensors named
"momentum.<tensor>" and "second.<tensor>"; None before the first step and for methods without one. Adam and Yogi start
u at epsilon^2, the least that the paper admits. Adagrad starts it at 0, as MMiC does (arXiv 2505.06911, where beta
changes from round to round); its sum is not forgotten, so that a start would weigh on every later step. Buffers are
copied from ``combined``: integers, booleans and the running statistics of batch norm, which are averages already (a
step beyond the devices' variances could make one negative).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.mean import BUFFERS, Tensor, Tensors
from edgefl.errors import ModelError
from edgefl.registry import Option, register
from edgefl.roles import Optimise

Array = npt.NDArray[np.float32]
Step = tuple[dict[str, Tensor], dict[str, Tensor] | None]

MOMENTUM, SECOND = "momentum.", "second."


class Rates(NamedTuple):
    """Options that the adaptive steps have in common."""

    lr: float = 0.05
    beta: float = 0.9
    epsilon: float = 1e-3


def plain(state: Tensors | None, previous: Tensors, combined: Tensors) -> Step:
    """FedAvg: the combined tensors are the next ones."""
    return dict(combined), None


def momentum(
    state: Tensors | None, previous: Tensors, combined: Tensors, *, lr: float = 1.0, beta: float = 0.9
) -> Step:
    """FedAvgM. At beta 0 and lr 1 it is FedAvg."""
    following, carried = dict(combined), {}
    for name, delta in _changes(previous, combined).items():
        carried[MOMENTUM + name] = velocity = _f32(beta * _carried(state, MOMENTUM + name, delta, 0.0) + delta)
        following[name] = _f32(previous[name] + lr * velocity)
    return following, carried


def fedadagrad(
    state: Tensors | None,
    previous: Tensors,
    combined: Tensors,
    *,
    lr: float = 0.05,
    beta: float = 0.9,
    epsilon: float = 1e-3,
) -> Step:
    """FedAdagrad. ``beta`` may differ from round to round (MMiC's beta*)."""

    def grow(second: Array, squared: Array) -> Array:
        return second + squared

    return _adaptive(state, previous, combined, grow, 0.0, Rates(lr, beta, epsilon))


def fedadam(
    state: Tensors | None, previous: Tensors, combined: Tensors, *, beta2: float = 0.99, **rates: float
) -> Step:
    """FedAdam; ``rates``: see ``Rates``."""

    def average(second: Array, squared: Array) -> Array:
        return beta2 * second + (1 - beta2) * squared

    common = Rates(**rates)
    return _adaptive(state, previous, combined, average, common.epsilon**2, common)


def fedyogi(
    state: Tensors | None, previous: Tensors, combined: Tensors, *, beta2: float = 0.99, **rates: float
) -> Step:
    """FedYogi: the second moment moves towards the squared change by a step that does not depend on its own size."""

    def approach(second: Array, squared: Array) -> Array:
        return _f32(second - (1 - beta2) * squared * np.sign(second - squared))

    common = Rates(**rates)
    return _adaptive(state, previous, combined, approach, common.epsilon**2, common)


def _adaptive(
    state: Tensors | None,
    previous: Tensors,
    combined: Tensors,
    grown: Callable[[Array, Array], Array],
    start: float,
    rates: Rates,
) -> Step:
    """The step of Adagrad, Adam and Yogi. ``grown``: (second moment u, squared change) -> the next u."""
    lr, beta, epsilon = rates
    if not epsilon > 0:
        raise ModelError(
            f"the server's step divides by epsilon {epsilon} where nothing has changed yet",
            remedy="Set optimise's option epsilon above 0; the paper's is 0.001.",
        )
    following, carried = dict(combined), {}
    for name, delta in _changes(previous, combined).items():
        first = _f32(beta * _carried(state, MOMENTUM + name, delta, 0.0) + (1 - beta) * delta)
        second = _f32(grown(_carried(state, SECOND + name, delta, start), delta * delta))
        carried[MOMENTUM + name], carried[SECOND + name] = first, second
        following[name] = _f32(previous[name] + lr * first / (np.sqrt(second) + epsilon))
    return following, carried


def _changes(previous: Tensors, combined: Tensors) -> dict[str, Array]:
    """Server pseudo-gradient: ``combined`` minus ``previous`` for each weight, f32.

    Without integers and batch-norm statistics. Raises ModelError for a new or reshaped tensor.
    """
    changes: dict[str, Array] = {}
    for name, tensor in sorted(combined.items()):
        if not np.issubdtype(tensor.dtype, np.floating) or name.endswith(BUFFERS):
            continue
        if name not in previous or previous[name].shape != tensor.shape:
            had = list(previous[name].shape) if name in previous else "nothing"
            raise ModelError(
                f"tensor '{name}' is {list(tensor.shape)}, the server holds {had}",
                remedy="The devices and the coordinator must build the same model.",
            )
        changes[name] = np.subtract(tensor, previous[name], dtype=np.float32)
    return changes


def _carried(state: Tensors | None, name: str, like: Array, start: float) -> Array:
    if state is None or name not in state:
        return np.full_like(like, start)
    if state[name].shape != like.shape:
        raise ModelError(
            f"the server's optimiser state '{name}' is {list(state[name].shape)}, the tensor is {list(like.shape)}",
            remedy="Start the run again, or without the saved optimiser state: the model has changed.",
        )
    return _f32(state[name])


def _f32(values: npt.ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float32)


_RATE = Option(0.05, "the server's learning rate", least=0)
_BETA = Option(0.9, "share of the momentum kept from round to round", least=0, most=0.999)
ADAGRAD = {
    "lr": _RATE,
    "beta": _BETA,
    "epsilon": Option(1e-3, "added to the root of the second moment", least=1e-12),
}
_ADAM = ADAGRAD | {"beta2": Option(0.99, "share of the second moment kept", least=0, most=1)}
register(
    Optimise("plain", "it replaces it", default=True, step=plain, moves=False),
    Optimise(
        "momentum",
        "server momentum (FedAvgM, arXiv 1909.06335)",
        {"lr": _RATE._replace(default=1.0), "beta": _BETA},
        step=momentum,
    ),
    Optimise("fedadagrad", "adaptive (arXiv 2003.00295)", ADAGRAD, step=fedadagrad),
    Optimise("fedadam", "adaptive (arXiv 2003.00295)", _ADAM, step=fedadam),
    Optimise("fedyogi", "adaptive (arXiv 2003.00295)", _ADAM, step=fedyogi),
)
