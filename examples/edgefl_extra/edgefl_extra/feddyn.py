"""FedDyn (Acar et al., ICLR 2021, arXiv 2111.04263): dynamic regularisation against drift between unlike devices.

Device k, of m, in round t:  min over θ of  L_k(θ) - <g_k, θ> + α/2 ‖θ - θ^{t-1}‖²;  then  g_k -= α (θ_k - θ^{t-1}).
Server:  h^t = h^{t-1} - α/m sum over the round's devices P of (θ_k - θ^{t-1});  θ^t = mean over P of θ_k - h^t / α.

g_k, the gradient of L_k at the device's last model, stays on the device (``keep``), h in the server's step; both begin
at 0. The mean is over devices, not samples (weight ``equal``). Adapted: m is the number of devices that have taken part
so far, unless it is given; a part that not all train has the h of those who do, for the same share |P| / m.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from edgefl.aggregation.mean import BUFFERS
from edgefl.errors import Problem
from edgefl.registry import Option, Recipe, chosen, register
from edgefl.roles import Objective, Optimise, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.aggregation.history import Memory
    from edgefl.aggregation.mean import Tensors
    from edgefl.training.forward import Forward

ALPHA = Option(0.1, "α, strength of the regularisation; the same in objective and optimise", least=1e-6)


def loss(forward: Forward, *, alpha: float) -> Tensor:
    """- <g_k, θ> + α/2 ‖θ - θ^{t-1}‖²."""
    total, kept = forward.nothing(), forward.auxiliary.kept["feddyn"]
    for name, (parameter, received) in forward.auxiliary.received.items():
        total = total + 0.5 * alpha * (parameter - received).square().sum() - (kept[name] * parameter).sum()
    return total


def keep(kept: np.ndarray, received: np.ndarray, trained: np.ndarray, *, alpha: float) -> np.ndarray:
    """g_k after a round."""
    return kept - alpha * (trained - received)


def share(
    history: Memory, clusters: Mapping[str, int], weights: Mapping[str, float], *, devices: float
) -> tuple[dict[str, float], dict[str, object]]:
    """|P| / m of the round, for ``step``."""
    part = len(weights) / (devices or len(history.devices))
    return {"part": part}, {"feddyn": {"part": part}}


def step(
    state: Tensors | None, previous: Tensors, combined: Tensors, *, alpha: float, part: float = 1.0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """θ^t and h^t; ``combined``: the mean over P; ``part``: |P| / m."""
    following, carried = dict(combined), {}
    for name, mean in combined.items():
        if np.issubdtype(mean.dtype, np.floating) and not name.endswith(BUFFERS):
            before = np.zeros_like(mean) if state is None else state[name]
            carried[name] = np.asarray(before - alpha * part * (mean - previous[name]), np.float32)
            following[name] = np.asarray(mean - carried[name] / alpha, np.float32)
    return following, carried


def equal(samples: Mapping[str, int], modalities: Mapping[str, int]) -> dict[str, float]:
    """The same weight for each device with samples."""
    there = [device for device, count in samples.items() if count > 0]
    return dict.fromkeys(there, 1 / len(there)) if there else {}


def together(recipe: Recipe) -> list[Problem]:
    """The term and the step are halves of one method, of one α."""
    halves = {
        role: [one.options["alpha"] for one in chosen(role, recipe[role]) if one.name == "feddyn"]
        for role in ("objective", "optimise")
    }
    if halves["objective"] == halves["optimise"]:
        return []
    text = f"feddyn needs its other half with the same alpha; set objective: {{feddyn: {{alpha: {ALPHA.default}}}}}"
    return [Problem("objective", f"{text}, beside its task, and the same in optimise")]


TERM = Objective(
    "feddyn",
    "the device's own gradient, as last known, is taken off (FedDyn, arXiv 2111.04263)",
    {"alpha": ALPHA},
    loss=loss,
    keep=keep,
    conflicts=together,
)
STEP = Optimise(
    "feddyn",
    "the mean less h / α, the drift so far (FedDyn, arXiv 2111.04263)",
    {"alpha": ALPHA, "devices": Option(0, "m, devices of the fleet; 0: those that took part so far", least=0)},
    step=step,
    adjust=share,
    conflicts=together,
    per_round=True,
)
EQUAL = Weight("equal", "all devices count alike", weigh=equal)
register(TERM, STEP, EQUAL)
