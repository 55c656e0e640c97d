"""Client selection: who trains a round, among the devices that are eligible and present.

all: everybody.  random: a share of them (FedAvg, arXiv 1602.05629).
Where clusters are known a draw is made inside each; ``seats`` says how many each sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from edgefl.aggregation.history import NO_CLUSTER, Memory
from edgefl.registry import DEVICE_SHARE, register
from edgefl.roles import Select
from edgefl.sequences import SortedNames

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

    def evenly(names: Sequence[str], n: int) -> list[str]:
        return sorted(names[i] for i in rng.choice(len(names), size=n, replace=False))

    return by_cluster(devices, count_of(len(devices), share), rng, memory, evenly)


def by_cluster(
    devices: Sequence[str],
    count: int,
    rng: np.random.Generator,
    memory: Memory | None,
    draw: Callable[[Sequence[str], int], list[str]],
) -> list[str]:
    """``count`` devices, drawn inside each cluster; as one group while no cluster is known. Sorted.

    ``draw``: (devices of one cluster, sorted, how many of them) -> the chosen.
    """
    groups = clusters_of(devices, memory)
    if len(groups) < 2:
        return [name for names in groups.values() for name in draw(names, count)]
    given = seats({m: len(names) for m, names in groups.items()}, count, rng)
    return sorted(name for m, names in groups.items() if given[m] for name in draw(names, given[m]))


def clusters_of(devices: Sequence[str], memory: Memory | None) -> Mapping[int, Sequence[str]]:
    """cluster -> its devices, sorted. Those whose cluster is not known yet are one group."""
    tracks = memory.devices.values() if memory is not None else ()
    if isinstance(devices, SortedNames) and all(track.cluster == NO_CLUSTER for track in tracks):
        return {NO_CLUSTER: devices}  # a crowd is not walked through
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


register(
    Select("all", "every eligible device", default=True, draw=everyone),
    Select("random", "a random share of them", {"share": DEVICE_SHARE}, partial=True, blind=True, draw=at_random),
)
