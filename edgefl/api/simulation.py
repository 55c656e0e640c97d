"""Fleets of any number of devices, of given kinds, for simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from edgefl.errors import ConfigError, Problem

#: Limits of memory, which one process with all devices measures of none.
_NOT_MEASURED = ("memory_bytes", "step_memory_bytes", "gpu_memory_bytes")


class DeviceKind(NamedTuple):
    """A device profile, and its weight among the others."""

    profile: str
    weight: float = 1.0


def kinds_of(texts: Sequence[str]) -> list[DeviceKind]:
    """Kinds of ``PROFILE[:WEIGHT]``; cpu alone for none. Raises ConfigError for a weight that is not positive."""
    found = []
    for text in texts:
        name, colon, weight = text.rpartition(":")
        try:
            kind = DeviceKind(name, float(weight)) if colon and not weight.startswith(("/", "\\")) else DeviceKind(text)
        except ValueError:
            kind = DeviceKind(name, math.nan)
        if not 0 < kind.weight < math.inf:
            problem = Problem("--device", f"{text!r} has no weight that is positive")
            raise ConfigError("the fleet", [problem], remedy="Give a profile and its weight, such as jetson-nano:3.")
        found.append(kind)
    return found or [DeviceKind("cpu")]


def drawn_fleet(count: int, kinds: Sequence[DeviceKind]) -> dict[str, object]:
    """``fleet`` of a run file: ``count`` devices, the kinds by their weights and evenly spread.

    Budgets of memory are taken out, since one process measures no device's memory. Raises ConfigError for a profile
    that is not there.
    """
    from edgefl.config.profiles import load_device

    found: list[dict[str, object]] = []
    for kind in kinds:
        budget = load_device(kind.profile).budget
        free = {field: None for field in _NOT_MEASURED if getattr(budget, field) is not None}
        found.append({**kind._asdict(), **({"budget": free} if free else {})})
    return {"devices": count, "kinds": found}
