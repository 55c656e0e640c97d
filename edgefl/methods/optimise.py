"""How updates become one, a weighted mean, and the server's step from the previous state of a part by it to the next.

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

MMiC's portfolio (arXiv 2505.06911, equations 19 to 22) takes beta of Adagrad from risk and return of the clusters'
metrics:  cov_ij = sum_t (alpha_i,t - mean_i,t-1)(alpha_j,t - mean_j,t-1) / (T - 1),  mean_i,t-1 the mean of i's returns
before t (0 before the first);  sigma_m = sum_ij w_i w_j cov_ij;  gamma_m = risk * sigma_m - (1 - risk) * A_m;
beta* = beta + tanh(max(0, sum_m w_m gamma_m)) / temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.history import Memory, coalition_return
from edgefl.aggregation.mean import BUFFERS, Tensor, Tensors, WeightedMean
from edgefl.errors import ModelError, Problem
from edgefl.registry import Combine, Optimise, Option, Recipe, register

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Step = tuple[dict[str, Tensor], dict[str, Tensor] | None]

MOMENTUM, SECOND = "momentum.", "second."
#: Of one cluster, in the record; "return" is A_m.
Figures = TypedDict(
    "Figures",
    {"weight": float, "return": float, "risk": float, "gamma": float, "rounds": int, "devices": list[str]},
)


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
    """D of every tensor but the buffers, f32."""
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


def covariance(returns: Floats) -> Floats:
    """Covariances [N, N] of the returns [T, N], rounds in order, around their running means; 0 when T < 2."""
    rounds, devices = returns.shape
    if rounds < 2:
        return np.zeros((devices, devices))
    counts = np.arange(1, rounds)[:, None]  # [T - 1, 1]
    means = np.vstack([np.zeros((1, devices)), np.cumsum(returns[:-1], axis=0) / counts])  # [T, N]
    deviations = returns - means
    return np.asarray(deviations.T @ deviations / (rounds - 1), dtype=np.float64)


def portfolio_momentum(beta: float, gamma: float, temperature: float) -> float:
    """beta*, which lies between beta and beta + 1/temperature. Raises ModelError when that could exceed 1."""
    if not (temperature > 0 and beta >= 0 and beta + 1 / temperature <= 1 + 1e-12):
        raise ModelError(
            f"momentum {beta} at temperature {temperature} could grow beyond 1: beta + 1/temperature must be at most 1",
            remedy="Raise optimise.fedadagrad_mpo.temperature or lower its beta.",
        )
    return min(1.0, beta + math.tanh(max(0.0, gamma)) / temperature)


def portfolio(
    memory: Memory,
    participants: Mapping[str, int],
    weights: Mapping[str, float],
    *,
    beta: float = 0.9,
    risk: float = 0.5,
    temperature: float = 10.0,
) -> tuple[dict[str, float], dict[str, object]]:
    """beta* of the round noted last in ``memory`` as an option of its Adagrad steps, and the record of the momentum.

    ``participants``: device -> cluster; ``weights``: device -> weight, any scale. A cluster's figures are those of its
    participants that have a return of this round, their risk over the rounds in which all of them have one. Clusters
    without such a participant are left out and the others' weights renormalised; none at all: beta. In the record:
    ``gamma``; ``clusters`` {cluster: {weight, return, risk, gamma, rounds, devices}}; ``left_out`` {device: reason}.
    """
    members: dict[int, list[str]] = {}
    left_out: dict[str, str] = {}
    for device, cluster in sorted(participants.items()):
        if not weights.get(device, 0.0) > 0:
            left_out[device] = "it has no weight"
        elif device not in memory.devices or memory.rounds not in memory.devices[device].returns:
            left_out[device] = "it has no return of this round"
        else:
            members.setdefault(cluster, []).append(device)
    clusters = {str(m): _figures(memory, devices, weights, risk) for m, devices in sorted(members.items())}
    total = sum(figures["weight"] for figures in clusters.values())
    for figures in clusters.values():
        figures["weight"] /= total
    gamma = sum(figures["weight"] * figures["gamma"] for figures in clusters.values())
    beta = portfolio_momentum(beta, gamma, temperature)
    record = {"beta": beta, "gamma": float(gamma), "clusters": clusters, "left_out": left_out}
    return {"beta": beta}, {"momentum": record}


def _figures(memory: Memory, devices: list[str], weights: Mapping[str, float], risk: float) -> Figures:
    """One cluster's figures; ``weight`` is its members' sum, not yet renormalised over the clusters."""
    tracks = {device: memory.devices[device].returns for device in devices}
    rounds = sorted(set.intersection(*(set(returns) for returns in tracks.values())))
    common = np.array([[tracks[device][t] for device in devices] for t in rounds])  # [T, N]
    total = sum(weights[device] for device in devices)
    shares = np.array([weights[device] / total for device in devices])
    sigma = float(shares @ covariance(common) @ shares)
    gained = coalition_return(weights, {device: tracks[device][memory.rounds] for device in devices})
    return {
        "weight": total,
        "return": gained,
        "risk": sigma,
        "gamma": risk * sigma - (1 - risk) * gained,
        "rounds": len(rounds),
        "devices": devices,
    }


def _bounded(recipe: Recipe) -> list[Problem]:
    options = recipe["optimise"]["fedadagrad_mpo"]
    if float(options["beta"]) + 1 / float(options["temperature"]) > 1:
        return [Problem("optimise", "beta + 1/temperature of fedadagrad_mpo exceeds 1; raise temperature")]
    return []


_ABSENT = Option(
    "keep",
    "devices of the round whose stage or budget left out an encoder stage of a modality that they have: they count as "
    "keeping it as it was, or are left out",
    ("keep", "leave_out"),
)
_RATE = Option(0.05, "the server's learning rate", least=0)
_BETA = Option(0.9, "share of the momentum kept from round to round", least=0, most=0.999)
_ADAGRAD = {
    "lr": _RATE,
    "beta": _BETA,
    "epsilon": Option(1e-3, "added to the root of the second moment", least=1e-12),
}
_ADAM = _ADAGRAD | {"beta2": Option(0.99, "share of the second moment kept", least=0, most=1)}
_PORTFOLIO = _ADAGRAD | {
    "risk": Option(0.5, "weight of risk against return", least=0, most=1),
    "temperature": Option(10.0, "what the correction is divided by; beta + 1/temperature is at most 1", least=1),
}
register(
    Combine("mean", "streaming weighted mean per part", {"absent": _ABSENT}, default=True, accumulate=WeightedMean),
    Optimise("plain", "it replaces it", default=True, step=plain, moves=False),
    Optimise(
        "momentum",
        "server momentum (FedAvgM, arXiv 1909.06335)",
        {"lr": _RATE._replace(default=1.0), "beta": _BETA},
        step=momentum,
    ),
    Optimise("fedadagrad", "adaptive (arXiv 2003.00295)", _ADAGRAD, step=fedadagrad),
    Optimise("fedadam", "adaptive (arXiv 2003.00295)", _ADAM, step=fedadam),
    Optimise("fedyogi", "adaptive (arXiv 2003.00295)", _ADAM, step=fedyogi),
    Optimise(
        "fedadagrad_mpo",
        "Adagrad whose momentum follows the risk of the groups' returns (MMiC, eqs 19-22)",
        _PORTFOLIO,
        conflicts=_bounded,
        per_round=True,
        step=fedadagrad,
        adjust=portfolio,
    ),
)
