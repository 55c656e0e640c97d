"""Cyclic client participation (Cho et al. 2023, arXiv 2302.03109): groups of devices train in turn.

Devices in order of name form groups of ``share`` of them; round t is trained by group t modulo their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgefl.registry import DEVICE_SHARE, register
from edgefl.roles import Select

if TYPE_CHECKING:
    import numpy as np

    from edgefl.aggregation.history import Memory


def cyclic(devices: Sequence[str], rng: np.random.Generator, memory: Memory, *, share: float = 0.5) -> list[str]:
    """The group whose turn it is after ``memory.rounds`` rounds, sorted."""
    names = sorted(devices)
    size = max(1, math.ceil(share * len(names)))
    groups = [names[first : first + size] for first in range(0, len(names), size)]
    return groups[memory.rounds % len(groups)] if groups else []


register(
    Select(
        "cyclic",
        "groups of devices in turn",
        {"share": DEVICE_SHARE},
        per_round=True,
        partial=True,
        draw=cyclic,
    )
)
