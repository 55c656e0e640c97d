"""Who trains a round, among the devices that are eligible and present.

MMiC, arXiv 2505.06911, equations 17 and 18, within each cluster:  probability of i  ~  exp(temperature * core_i /
selected_i), where core_i counts the rounds in which i was core (``edgefl.aggregation.history``).
The published index counts swings of the one coalition that took part; ``banzhaf_values`` is the Banzhaf value of A.
Where clusters are known the draw, also the uniform one, is made inside each; ``seats`` says how many each sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgefl.aggregation.history import NO_CLUSTER, Memory
from edgefl.registry import DeviceShare, Options, Select, register

#: Devices of a cluster that train together, where it has as many: one alone has no donor and no coalition.
TOGETHER = 2
#: (devices of one cluster, sorted, how many of them) -> the chosen.
_Draw = Callable[[list[str], int], list[str]]


class Random(Options, frozen=True):
    """Options of a uniform draw."""

    share: DeviceShare = 0.5


class Banzhaf(Options, frozen=True):
    """Options of MMiC's selection."""

    share: DeviceShare = 0.5
    warmup_rounds: Annotated[int, Meta(ge=0, description="rounds in which the draw is even")] = 100
    temperature: Annotated[
        float, Meta(ge=0, description="how strongly the index decides: probability ∝ exp(temperature · index)")
    ] = 2.0


class Sampled(Banzhaf, frozen=True):
    """Options of selection by the sampled Banzhaf value."""

    samples: Annotated[int, Meta(ge=1, description="random coalitions")] = 128


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
    """A uniform draw without replacement inside each cluster, sorted.

    ``share`` of the devices (0..1, rounded up), at most ``devices_max`` (0: no limit). The draw depends on
    the generator and the set of names, not on their order. At least one device when there is any.
    """
    count = min(_count(len(devices), share), int(devices_max) or len(devices))
    return _by_cluster(devices, count, rng, memory, lambda names, n: _evenly(names, n, rng))


def seats(sizes: Mapping[int, int], count: int, rng: np.random.Generator) -> dict[int, int]:
    """cluster -> how many of its devices train; together ``count``, or all when there are fewer.

    In proportion to the clusters' ``sizes``, but two or more of a cluster, or all of it, or none. Where the seats do
    not suffice for every cluster, those are drawn that take part; a device's chance depends little on its cluster.
    """
    total = sum(sizes.values())
    fair = {m: min(n, max(TOGETHER, n * count // total)) for m, n in sorted(sizes.items()) if n}
    odds = np.log([sizes[m] / seats for m, seats in fair.items()]) + rng.gumbel(size=len(fair))
    order = [list(fair)[i] for i in np.argsort(-odds)]
    given: dict[int, int] = {}
    left = min(count, total)
    for m in order:
        given[m] = min(fair[m], left)
        left -= given[m]
        if given[m] < min(TOGETHER, sizes[m]):  # a single seat: to a cluster that is there already
            left, given[m] = left + given[m], 0
    for _ in range(left):
        room = [m for m in order if given[m] < sizes[m]]
        least = min((m for m in room if given[m]), key=lambda m: given[m] / sizes[m], default=room[0])
        given[least] += 1
    return given


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
    """``share`` of the devices (rounded up), drawn in each cluster without replacement by ``probabilities``, sorted.

    A uniform draw in the first ``warmup_rounds`` rounds.
    """
    if memory.rounds < warmup_rounds:
        return at_random(devices, rng, memory, share=share)
    tracks = {name: memory.devices.get(name) for name in devices}
    core = {name: track.core if track else 0 for name, track in tracks.items()}
    selected = {name: track.selected if track else 0 for name, track in tracks.items()}
    scores = _scores(core, selected, temperature)
    return _by_cluster(devices, _count(len(devices), share), rng, memory, lambda some, n: _draw(scores, some, n, rng))


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
        return at_random(devices, rng, memory, share=share)
    scores = dict.fromkeys(devices, 0.0)
    last = {name: t for name, t in memory.devices.items() if memory.rounds in t.returns and t.weight > 0}
    for names in _clusters(last, memory).values():
        values = banzhaf_values(
            {name: last[name].weight for name in names},
            {name: last[name].returns[memory.rounds] for name in names},
            rng.random((int(samples), len(names))) < 0.5,
        )
        scores |= {name: temperature * value for name, value in values.items() if name in scores}
    return _by_cluster(devices, _count(len(devices), share), rng, memory, lambda some, n: _draw(scores, some, n, rng))


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


def _clusters(devices: Iterable[str], memory: Memory | None) -> dict[int, list[str]]:
    """cluster -> its devices, sorted. Those whose cluster is not known yet are one group."""
    found: dict[int, list[str]] = {}
    for name in sorted(devices):
        track = memory.devices.get(name) if memory is not None else None
        found.setdefault(track.cluster if track else NO_CLUSTER, []).append(name)
    return dict(sorted(found.items()))


def _by_cluster(
    devices: Sequence[str], count: int, rng: np.random.Generator, memory: Memory | None, draw: _Draw
) -> list[str]:
    """``count`` devices, drawn inside each cluster; as one group while no cluster is known. Sorted."""
    groups = _clusters(devices, memory)
    if len(groups) < 2:
        return [name for names in groups.values() for name in draw(names, count)]
    given = seats({m: len(names) for m, names in groups.items()}, count, rng)
    return sorted(name for m, names in groups.items() if given[m] for name in draw(names, given[m]))


def _evenly(names: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """``count`` names, each as likely as the others, sorted."""
    return sorted(names[i] for i in rng.choice(len(names), size=count, replace=False))


def _draw(scores: Mapping[str, float], names: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """``count`` of ``names`` without replacement, each next one with probability ~ exp(score) among those left, sorted.

    The largest of score + Gumbel noise are such a draw (Yellott 1977), also where exp(score) would be 0 or infinite.
    """
    keys = np.array([scores[name] for name in names]) + rng.gumbel(size=len(names))
    return sorted(names[i] for i in np.argsort(-keys)[:count])


register(
    Select("all", "every eligible device", default=True, draw=everyone),
    Select("random", "a random share of them", Random, partial=True, draw=at_random),
    Select(
        "banzhaf",
        "drawn by how often a device decided whether its round's return beat the global model's (MMiC)",
        Banzhaf,
        source="arXiv 2505.06911",
        per_round=True,
        partial=True,
        draw=banzhaf,
    ),
    Select(
        "banzhaf_sampled",
        "the same by the sampled Banzhaf value of the last round's returns",
        Sampled,
        per_round=True,
        partial=True,
        draw=banzhaf_sampled,
    ),
)
