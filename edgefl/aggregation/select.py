"""Who trains a round, among the devices that are eligible and present.

MMiC, arXiv 2505.06911, equations 17 and 18:  probability of i  ~  exp(temperature * core_i / selected_i), where core_i
counts the rounds in which i was core (``edgefl.aggregation.coalition``).
The published index counts swings of the one coalition that took part; ``banzhaf_values`` is the Banzhaf value of A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.aggregation.memory import Memory


def everyone(devices: Sequence[str], rng: np.random.Generator, memory: Memory | None = None) -> list[str]:
    """All devices, sorted."""
    return sorted(devices)


def at_random(
    devices: Sequence[str],
    rng: np.random.Generator,
    memory: Memory | None = None,
    *,
    share: float = 1.0,
    devices_max: float = 0,
) -> list[str]:
    """A uniform draw without replacement, sorted.

    ``share`` of the devices (0..1, rounded up), at most ``devices_max`` (0: no limit). The draw depends on
    the generator and the set of names, not on their order. At least one device when there is any.
    """
    names = sorted(devices)
    count = min(_count(len(names), share), int(devices_max) or len(names))
    return sorted(names[i] for i in rng.choice(len(names), size=count, replace=False)) if names else []


def probabilities(core: Mapping[str, int], selected: Mapping[str, int], temperature: float) -> dict[str, float]:
    """device -> probability to be drawn first, sum 1. A device that never took part has the ratio 0."""
    scores = _scores(core, selected, temperature)
    top = max(scores.values(), default=0.0)  # else exp overflows from a temperature of 710 on
    odds = {name: math.exp(score - top) for name, score in scores.items()}
    total = sum(odds.values())
    return {name: value / total for name, value in odds.items()}


def banzhaf(
    devices: Sequence[str],
    rng: np.random.Generator,
    memory: Memory,
    *,
    share: float = 0.5,
    warmup_rounds: float = 100,
    temperature: float = 2.0,
) -> list[str]:
    """``share`` of the devices (rounded up), drawn without replacement by ``probabilities``, sorted.

    A uniform draw in the first ``warmup_rounds`` rounds.
    """
    if memory.rounds < warmup_rounds:
        return at_random(devices, rng, share=share)
    tracks = {name: memory.devices.get(name) for name in devices}
    core = {name: track.core if track else 0 for name, track in tracks.items()}
    selected = {name: track.selected if track else 0 for name, track in tracks.items()}
    return _draw(_scores(core, selected, temperature), _count(len(devices), share), rng)


def banzhaf_sampled(
    devices: Sequence[str],
    rng: np.random.Generator,
    memory: Memory,
    *,
    share: float = 0.5,
    warmup_rounds: float = 100,
    temperature: float = 2.0,
    samples: float = 128,
) -> list[str]:
    """As ``banzhaf``, by the sampled Banzhaf value of the last round's returns instead of the share of core rounds.

    A device without a return in the last round has the value 0. ``temperature`` is per unit of the metric.
    """
    if memory.rounds < warmup_rounds:
        return at_random(devices, rng, share=share)
    last = {name: t for name, t in memory.devices.items() if memory.rounds in t.returns and t.weight > 0}
    values = banzhaf_values(
        {name: track.weight for name, track in last.items()},
        {name: track.returns[memory.rounds] for name, track in last.items()},
        rng.random((int(samples), len(last))) < 0.5,
    )
    return _draw({name: temperature * values.get(name, 0.0) for name in devices}, _count(len(devices), share), rng)


def banzhaf_values(
    weights: Mapping[str, float], returns: Mapping[str, float], coalitions: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """device -> mean over the coalitions S of A_{S with i} - A_{S without i}, where A of nobody is 0.

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


def _scores(core: Mapping[str, int], selected: Mapping[str, int], temperature: float) -> dict[str, float]:
    return {name: temperature * (core[name] / selected[name] if selected[name] else 0.0) for name in sorted(core)}


def _count(devices: int, share: float) -> int:
    """How many make ``share`` of the devices, rounded up; at least one when there is any."""
    return min(devices, max(1, math.ceil(share * devices - 1e-9)))  # 0.1 * 30 is 3.0000000000000004 in floating point


def _draw(scores: Mapping[str, float], count: int, rng: np.random.Generator) -> list[str]:
    """``count`` names without replacement, each next one with probability ~ exp(score) among those left, sorted.

    The largest of score + Gumbel noise are such a draw (Yellott 1977), also where exp(score) would be 0 or infinite.
    """
    names = sorted(scores)
    keys = np.array([scores[name] for name in names]) + rng.gumbel(size=len(names))
    return sorted(names[i] for i in np.argsort(-keys)[:count])
