"""Selections of devices: their options."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgefl.registry import DeviceShare, Options, Select, register


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


register(
    Select("all", "every eligible device", default=True),
    Select("random", "a random share of them", Random, partial=True),
    Select(
        "banzhaf",
        "drawn by how often a device decided whether its round's return beat the global model's (MMiC)",
        Banzhaf,
        per_round=True,
        partial=True,
    ),
    Select(
        "banzhaf_sampled",
        "the same by the sampled Banzhaf value of the last round's returns",
        Sampled,
        per_round=True,
        partial=True,
    ),
)
