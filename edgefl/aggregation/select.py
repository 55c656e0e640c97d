"""Who trains a round, among the devices that are eligible and present."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def everyone(devices: Sequence[str], rng: np.random.Generator) -> list[str]:
    """All devices, sorted."""
    return sorted(devices)


def at_random(
    devices: Sequence[str], rng: np.random.Generator, *, share: float = 1.0, devices_max: float = 0
) -> list[str]:
    """A uniform draw without replacement, sorted.

    ``share`` of the devices (0..1, rounded up), at most ``devices_max`` (0: no limit). The draw depends on
    the generator and the set of names, not on their order. At least one device when there is any.
    """
    names = sorted(devices)
    count = max(1, math.ceil(share * len(names) - 1e-9))  # 0.1 * 30 is 3.0000000000000004 in floating point
    count = min(count, len(names), int(devices_max) or len(names))
    return sorted(names[i] for i in rng.choice(len(names), size=count, replace=False)) if names else []
