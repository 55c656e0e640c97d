"""The server's momentum from the risk and return of the clusters' metrics (MMiC, arXiv 2505.06911, equations 19 to 22).

cov_ij = sum_t (alpha_i,t - mean_i,t-1)(alpha_j,t - mean_j,t-1) / (T - 1),  mean_i,t-1 the mean of i's returns before t
(0 before the first), over the rounds that the cluster's devices have in common;  sigma_m = sum_ij w_i w_j cov_ij;
gamma_m = risk * sigma_m - (1 - risk) * A_m;
beta* = beta + tanh(max(0, sum_m w_m gamma_m)) / temperature, which takes the place of Adagrad's beta.
tanh is not scale free: in percent points, the unit of the authors' code, whose risk is another one, returns are 100
times as large as in fractions and variances 10,000 times (docs/decisions/0059).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.history import Memory, coalition_return
from edgefl.errors import ModelError, Problem
from edgefl.methods.fedopt import ADAGRAD, fedadagrad
from edgefl.registry import Option, Recipe, register
from edgefl.roles import Optimise

Floats = npt.NDArray[np.float64]
#: Of one cluster, in the record; "return" is A_m.
Figures = TypedDict(
    "Figures",
    {"weight": float, "return": float, "risk": float, "gamma": float, "rounds": int, "devices": list[str]},
)


#: Returns of the unit in one of accuracy.
UNITS = {"fraction": 1.0, "percent": 100.0}


def covariance(returns: Floats) -> Floats:
    """Covariances [N, N] of the returns [T, N], rounds in order, around their running means; 0 when T < 2."""
    rounds, devices = returns.shape
    if rounds < 2:
        return np.zeros((devices, devices))
    counts = np.arange(1, rounds)[:, None]  # [T - 1, 1]
    means = np.vstack([np.zeros((1, devices)), np.cumsum(returns[:-1], axis=0) / counts])  # [T, N]
    deviations = returns - means
    found: Floats = deviations.T @ deviations / (rounds - 1)
    return found


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
    unit: str = "fraction",
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
    scale = UNITS[unit]
    clusters = {str(m): _figures(memory, devices, weights, risk, scale) for m, devices in sorted(members.items())}
    total = sum(figures["weight"] for figures in clusters.values())
    for figures in clusters.values():
        figures["weight"] /= total
    gamma = sum(figures["weight"] * figures["gamma"] for figures in clusters.values())
    beta = portfolio_momentum(beta, gamma, temperature)
    record = {"beta": beta, "gamma": float(gamma), "clusters": clusters, "left_out": left_out}
    return {"beta": beta}, {"momentum": record}


def _figures(memory: Memory, devices: list[str], weights: Mapping[str, float], risk: float, scale: float) -> Figures:
    """One cluster's figures; ``weight`` is its members' sum, not yet renormalised over the clusters."""
    tracks = {d: {t: scale * value for t, value in memory.devices[d].returns.items()} for d in devices}
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


_OPTIONS = ADAGRAD | {
    "risk": Option(0.5, "weight of risk against return", least=0, most=1),
    "temperature": Option(10.0, "what the correction is divided by; beta + 1/temperature is at most 1", least=1),
    "unit": Option("fraction", "unit of the returns: fractions of 1, or percent points (the authors' code)", (*UNITS,)),
}
register(
    Optimise(
        "fedadagrad_mpo",
        "Adagrad whose momentum follows the risk of the groups' returns (MMiC, eqs 19-22)",
        _OPTIONS,
        conflicts=_bounded,
        per_round=True,
        step=fedadagrad,
        adjust=portfolio,
        returns=True,
    )
)
