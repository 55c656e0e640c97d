"""Client selection: who trains a round, among the devices that are eligible and present.

MMiC, arXiv 2505.06911, equations 17 and 18, within each cluster:  probability of i  ~  exp(temperature * core_i /
selected_i), where core_i counts the rounds in which i was core (``edgefl.aggregation.history``).
Where clusters are known the draw, also the uniform one, is made inside each; ``seats`` says how many each sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from edgefl.aggregation.history import NO_CLUSTER, Memory
from edgefl.registry import DEVICE_SHARE, Option, register
from edgefl.roles import Select

#: Devices of a cluster that train together, where it has as many: one alone has no donor and no coalition.
TOGETHER = 2


def everyone(devices: Sequence[str], rng: np.random.Generator, memory: Memory) -> list[str]:
    """All devices, sorted."""
    return sorted(devices)


def at_random(
    devices: Sequence[str], rng: np.random.Generator, memory: Memory | None = None, *, share: float
) -> list[str]:
    """A uniform draw of ``share`` of the devices (0..1, rounded up) without replacement inside each cluster, sorted.

    It depends on the generator and the set of names, not on their order.
    """

    def evenly(names: list[str], n: int) -> list[str]:
        return sorted(names[i] for i in rng.choice(len(names), size=n, replace=False))

    return by_cluster(devices, count_of(len(devices), share), rng, memory, evenly)


def banzhaf(
    devices: Sequence[str],
    rng: np.random.Generator,
    memory: Memory,
    *,
    share: float = 0.5,
    warmup_rounds: float = 100,
    warmup: str = "clusters",
    temperature: float = 2.0,
) -> list[str]:
    """``share`` of the devices (rounded up), drawn in each cluster without replacement by ``scores_of``, sorted.

    A uniform draw in the first ``warmup_rounds`` rounds.
    """
    if memory.rounds < warmup_rounds:
        return warming_up(devices, rng, memory, share=share, warmup=warmup)
    tracks = {name: memory.devices.get(name) for name in devices}
    core = {name: track.core if track else 0 for name, track in tracks.items()}
    selected = {name: track.selected if track else 0 for name, track in tracks.items()}
    return by_scores(scores_of(core, selected, temperature), share, rng, memory)


def warming_up(
    devices: Sequence[str], rng: np.random.Generator, memory: Memory, *, share: float, warmup: str
) -> list[str]:
    """The uniform draw before returns count: inside each cluster, or over all devices."""
    return at_random(devices, rng, memory if warmup == "clusters" else None, share=share)


def scores_of(core: Mapping[str, int], selected: Mapping[str, int], temperature: float) -> dict[str, float]:
    """device -> logarithm of its odds, up to a constant. A device that never took part has the ratio 0."""
    return {name: temperature * (core[name] / selected[name] if selected[name] else 0.0) for name in sorted(core)}


def by_scores(scores: Mapping[str, float], share: float, rng: np.random.Generator, memory: Memory) -> list[str]:
    """``share`` of the devices, in each cluster without replacement, each next one with probability ~ exp(score).

    The largest of score + Gumbel noise are such a draw (Yellott 1977), also where exp(score) would be 0 or infinite.
    """

    def draw(names: list[str], count: int) -> list[str]:
        keys = np.array([scores[name] for name in names]) + rng.gumbel(size=len(names))
        return sorted(names[i] for i in np.argsort(-keys)[:count])

    return by_cluster(list(scores), count_of(len(scores), share), rng, memory, draw)


def by_cluster(
    devices: Sequence[str],
    count: int,
    rng: np.random.Generator,
    memory: Memory | None,
    draw: Callable[[list[str], int], list[str]],
) -> list[str]:
    """``count`` devices, drawn inside each cluster; as one group while no cluster is known. Sorted.

    ``draw``: (devices of one cluster, sorted, how many of them) -> the chosen.
    """
    groups = clusters_of(devices, memory)
    if len(groups) < 2:
        return [name for names in groups.values() for name in draw(names, count)]
    given = seats({m: len(names) for m, names in groups.items()}, count, rng)
    return sorted(name for m, names in groups.items() if given[m] for name in draw(names, given[m]))


def clusters_of(devices: Iterable[str], memory: Memory | None) -> dict[int, list[str]]:
    """cluster -> its devices, sorted. Those whose cluster is not known yet are one group."""
    found: dict[int, list[str]] = {}
    for name in sorted(devices):
        track = memory.devices.get(name) if memory is not None else None
        found.setdefault(track.cluster if track else NO_CLUSTER, []).append(name)
    return dict(sorted(found.items()))


def seats(sizes: Mapping[int, int], count: int, rng: np.random.Generator) -> dict[int, int]:
    """cluster -> how many of its devices train; together ``count``, or all when there are fewer.

    Systematic sampling: expected seats are in proportion to the clusters' ``sizes``, so that an even draw gives every
    device one chance. Two devices of a cluster train together where that keeps the chances (``_accompany``).
    """
    total = sum(sizes.values())
    order = sorted(m for m in sizes if sizes[m])
    order = [order[i] for i in rng.permutation(len(order))]
    start = int(rng.integers(max(total, 1)))
    ends = [(end * min(count, total) + start) // total for end in accumulate(sizes[m] for m in order)]
    given = dict.fromkeys(sizes, 0) | {m: end - before for m, before, end in zip(order, [0, *ends], ends, strict=False)}
    for m in order:
        if given[m] == 1 < sizes[m]:
            given |= _accompany(m, order, sizes, given, rng)
    return given


def _accompany(
    lone: int, order: Sequence[int], sizes: Mapping[int, int], given: Mapping[int, int], rng: np.random.Generator
) -> dict[int, int]:
    """New seats of a cluster that has one and of those it exchanges with; empty where that is not possible.

    Exchanges are drawn so that every cluster keeps its expected seats: ``n`` of two clusters' seats with probability
    1/n, else none; or, of two others with two seats, one gives both, to this one and to the third, or one takes this.
    """

    def fits(m: int, n: int) -> bool:
        return 0 <= n <= sizes[m] and (n != 1 or sizes[m] == 1)

    others = [m for m in order if m != lone and given[m] and fits(m, given[m] + 1)]
    exchanges = [
        (n, given[m] + 1 - n, m)
        for m in others
        for n in range(TOGETHER, min(sizes[lone], given[m] + 1) + 1)
        if fits(m, given[m] + 1 - n)
    ]
    if exchanges:
        n, rest, other = min(exchanges, key=lambda exchange: exchange[:2])  # the least change, another lone one first
        return {lone: n, other: rest} if rng.integers(n) == 0 else {lone: 0, other: rest + n}
    if len(others) < 2:
        return {}
    giver, taker = rng.permutation(others)[:2].tolist()  # each has two seats and room for a third
    return {lone: 2, giver: 0, taker: 3} if rng.integers(2) else {lone: 0, taker: 3}


def count_of(devices: int, share: float) -> int:
    """How many make ``share`` of the devices, rounded up; at least one when there is any."""
    return min(devices, max(1, math.ceil(share * devices - 1e-9)))  # 0.1 * 30 is 3.0000000000000004 in floating point


BANZHAF = {
    "share": DEVICE_SHARE,
    "warmup_rounds": Option(100, "rounds, or periods, whose draw is even", least=0),
    "warmup": Option("clusters", "among whom it is even: in each cluster, or all devices", ("clusters", "all")),
    "temperature": Option(2.0, "how strongly the index decides: probability ∝ exp(temperature · index)", least=0),
}
register(
    Select("all", "every eligible device", default=True, draw=everyone),
    Select("random", "a random share of them", {"share": DEVICE_SHARE}, partial=True, draw=at_random),
    Select(
        "banzhaf",
        "drawn by how often a device decided whether its round's return beat the global model's (MMiC)",
        BANZHAF,
        per_round=True,
        partial=True,
        draw=banzhaf,
        returns=True,
    ),
)
