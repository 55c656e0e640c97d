"""Selection by the Banzhaf index (MMiC, arXiv 2505.06911, equations 17 and 18).

Within each cluster:  probability of i  ~  exp(temperature * core_i / selected_i), where core_i counts the rounds in
which i was core (``edgefl.aggregation.history``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.aggregation.history import Memory
from edgefl.methods.select import at_random, by_cluster, count_of
from edgefl.registry import DEVICE_SHARE, Option, register
from edgefl.roles import Select


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

    def draw(names: Sequence[str], count: int) -> list[str]:
        keys = np.array([scores[name] for name in names]) + rng.gumbel(size=len(names))
        return sorted(names[i] for i in np.argsort(-keys)[:count])

    return by_cluster(list(scores), count_of(len(scores), share), rng, memory, draw)


BANZHAF = {
    "share": DEVICE_SHARE,
    "warmup_rounds": Option(100, "rounds, or periods, whose draw is even", least=0),
    "warmup": Option("clusters", "among whom it is even: in each cluster, or all devices", ("clusters", "all")),
    "temperature": Option(2.0, "how strongly the index decides: probability ∝ exp(temperature · index)", least=0),
}
register(
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
