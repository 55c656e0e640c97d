"""Correction factors of a device's predictions: measured / predicted, by figure, learned from its rounds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgefl.plan.job import Placement
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
    """``factors`` after a usual round, whose ``predicted`` figures hold ``placement.factors``, and what it took.

    What filled a store besides is taken from its FLOPs; its memory and joules say nothing of a usual round then.
    """
    found = dict(factors)
    filling = _value(measured, "filling_flops") or 0.0
    for name in LEARNED if not filling else ("flops", "compute_s"):
        value, prediction = _value(measured, name), _value(predicted, name)
        if value is not None and name == "flops":
            value -= filling
        if value is None or prediction is None or value <= 0:
            continue
        plain = prediction / placement.factors.get(name, 1.0)
        ratio = min(MOST, max(LEAST, value / plain))
        before = found.get(name, 1.0)
        found[name] = before * (ratio / before) ** NEWEST
    return found


def _value(figures: Figures, name: str) -> float | None:
    """A figure's value where it is a measurement: above zero, and finite."""
    value = figures[name].value if name in figures else None
    return value if value is not None and math.isfinite(value) and value > 0 else None
