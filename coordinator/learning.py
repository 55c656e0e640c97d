"""What a device's rounds teach about its predictions: measured / predicted, by figure. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgefl.plan.values import Placement
from edgefl.records import Figures

#: The figures that are corrected: what the budget is checked by, and what time and energy follow from.
LEARNED = ("step_peak_bytes", "flops", "compute_s", "energy_j")
#: How much the newest round counts (as an exponent): after four rounds what was thought before counts a sixteenth.
NEWEST = 0.5
#: A ratio beyond these says more of a disturbed measurement than of the device.
LEAST, MOST = 0.25, 4.0


def learned(
    factors: Mapping[str, float], placement: Placement, predicted: Figures, measured: Figures
) -> dict[str, float]:
    """``factors`` after a round whose ``predicted`` figures hold ``placement.factors``, and what it took."""
    found = dict(factors)
    for name in LEARNED:
        told, was = measured.get(name), predicted.get(name)
        if told is None or was is None or not _usable(told.value) or not _usable(was.value):
            continue
        plain = float(was.value or 0.0) / placement.factors.get(name, 1.0)
        ratio = min(MOST, max(LEAST, float(told.value or 0.0) / plain))
        before = found.get(name, 1.0)
        found[name] = before * (ratio / before) ** NEWEST
    return found


def _usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0
