"""Fleets of any number of devices, of given kinds, for simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edgefl.config.profiles import fleet_profile
from edgefl.config.settings import SizedFleet, TraceConfig
from edgefl.errors import ConfigError, Problem
from edgefl.trace_files import read_links, read_states
from edgefl.traces import Traces, synthetic

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


def drawn_fleet(
    count: int, kinds: Sequence[DeviceKind], trace: Mapping[str, object] | None = None
) -> dict[str, object]:
    """``fleet`` of a run file: ``count`` devices, the kinds by their weights and evenly spread; ``trace``: its fields.

    Budgets of memory are taken out, since one process measures no device's memory. Raises ConfigError for a profile
    that is not there.
    """
    from edgefl.config.profiles import load_device

    found: list[dict[str, object]] = []
    for kind in kinds:
        budget = load_device(kind.profile).budget
        free = {field: None for field in _NOT_MEASURED if getattr(budget, field) is not None}
        found.append({**kind._asdict(), **({"budget": free} if free else {})})
    return {"devices": count, "kinds": found, **({"trace": dict(trace)} if trace else {})}


def traces_of(fleet: SizedFleet, trace: TraceConfig, seed: int, warn: Callable[[str], None]) -> Traces:
    """Traces of a fleet's devices. Raises ConfigError for a profile without a speed, or an unusable file."""
    for kind in fleet.kinds:
        if not fleet_profile(kind.profile, kind.budget).speed.flops:
            problem = Problem(f"profile {kind.profile}", "has no speed.flops, and a trace needs the time of a step")
            way = "Measure it by `edgefl-agent profile`, give --device another profile, or leave out the trace."
            raise ConfigError("fleet.trace", [problem], remedy=way)
    patterns = synthetic(seed, trace.needs)
    if trace.states != "synthetic":
        patterns, faults = read_states(Path(trace.states), trace.needs)
        if faults:
            warn(f"{trace.states}: {len(faults)} of its devices cannot be read and are left out; {faults[0]}")
    return Traces(fleet.names(), patterns, seed, read_links(Path(trace.links)) if trace.links else ())
