"""Selection by the sampled Banzhaf value of the last round's returns, a variant of MMiC's (arXiv 2505.06911).

Value of i: the mean over random coalitions S of A_{S with i} - A_{S without i}, where A_S is the weighted mean of the
returns in S and that of no device 0. MMiC's own index counts swings of the one coalition that took part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.history import Memory
from edgefl.methods.mmic.banzhaf import BANZHAF, by_scores, warming_up
from edgefl.methods.select import clusters_of
from edgefl.registry import Option, register
from edgefl.roles import Select


def banzhaf_sampled(
    devices: Sequence[str],
    rng: np.random.Generator,
    memory: Memory,
    *,
    share: float = 0.5,
    warmup_rounds: float = 100,
    warmup: str = "clusters",
    temperature: float = 2.0,
    samples: float = 128,
) -> list[str]:
    """``share`` of the devices (rounded up), drawn in each cluster without replacement by their sampled values, sorted.

    A uniform draw in the first ``warmup_rounds`` rounds. A device without a return in the last round has the value 0.
    ``temperature`` is per unit of the metric.
    """
    if memory.rounds < warmup_rounds:
        return warming_up(devices, rng, memory, share=share, warmup=warmup)
    scores = dict.fromkeys(devices, 0.0)
    last = {name: t for name, t in memory.devices.items() if memory.rounds in t.returns and t.weight > 0}
    for names in clusters_of(last, memory).values():
        values = banzhaf_values(
            {name: last[name].weight for name in names},
            {name: last[name].returns[memory.rounds] for name in names},
            rng.random((int(samples), len(names))) < 0.5,
        )
        scores |= {name: temperature * value for name, value in values.items() if name in scores}
    return by_scores(scores, share, rng, memory)


def banzhaf_values(
    weights: Mapping[str, float], returns: Mapping[str, float], coalitions: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """device -> mean over the coalitions S of A_{S with i} - A_{S without i}, where A of no device is 0.

    Weights are above 0. ``coalitions`` [samples, N]: who is in, devices sorted by name; all 2^N of them give the exact
    Banzhaf value.
    """
    names = sorted(returns)
    w = np.array([weights[name] for name in names])
    a = np.array([returns[name] for name in names])
    values = {}
    for i, name in enumerate(names):
        inside = coalitions.astype(float)  # [samples, N]
        inside[:, i] = 0.0
        total, gained = inside @ w, inside @ (w * a)  # [samples]
        without = np.divide(gained, total, out=np.zeros_like(total), where=total > 0)
        values[name] = float(np.mean((gained + w[i] * a[i]) / (total + w[i]) - without))
    return values


register(
    Select(
        "banzhaf_sampled",
        "drawn by the sampled Banzhaf value of the last round's returns",
        BANZHAF | {"samples": Option(128, "random coalitions", least=1)},
        per_round=True,
        partial=True,
        draw=banzhaf_sampled,
        returns=True,
    )
)
