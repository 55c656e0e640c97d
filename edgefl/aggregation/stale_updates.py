"""Updates made from an earlier state: FedBuff (Nguyen et al., AISTATS 2022, arXiv 2106.06639).

x_next = x + sum_k p_k s_k (y_k - x_b(k)),  s_k = (1 + tau_k)^-alpha, where x_b is the state that device k started from
and tau_k the number of rounds closed since. p_k is the recipe's weight (the paper: 1/K), and sums to 1; s_k damps the
change and is not made up for by the others. As y'_k = x + s_k (y_k - x_b) the update joins the mean like any other;
for tau 0 that is y_k itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgefl.aggregation.mean import BUFFERS, Layout, Tensor, Tensors, check
from edgefl.prototypes.table import COUNT

Load = Callable[[], Tensors]


def factor(staleness: int, alpha: float) -> float:
    """s, for an update made from the state ``staleness`` rounds ago."""
    return float((1 + staleness) ** -alpha)


def moved(load: Load, base: Load, now: Load, weight: float, layout: Layout) -> Load:
    """Gives a device's part as if it had been trained from the present state, its change damped by ``weight``.

    ``load``: as trained, ``base``: as the device received it, ``now``: the present state. Buffers, which are averages
    already, go towards the device's own; integers are the device's. What does not fit raises MisfitError.
    """

    def moving() -> Tensors:
        trained = load()
        check(trained, layout)
        start, present = base(), now()
        return {name: _moved(name, value, start[name], present[name], weight) for name, value in trained.items()}

    return moving


def _moved(name: str, trained: Tensor, start: Tensor, present: Tensor, weight: float) -> Tensor:
    if not np.issubdtype(trained.dtype, np.floating):
        return trained
    origin = present if name.endswith(BUFFERS) else start  # a variance must not become negative
    change = np.subtract(trained, origin, dtype=np.float32)
    change *= np.float32(weight)
    change += present
    return change


def faded(load: Load, weight: float) -> Load:
    """Gives a device's prototype tables with counts that weigh ``weight`` of what they did."""
    return lambda: {
        name: value * np.float32(weight) if name.endswith(COUNT) else value for name, value in load().items()
    }
