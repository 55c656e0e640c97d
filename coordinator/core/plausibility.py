"""Implausible figures of a device: kept with their reason, without a value, so that no report calls them measured.

A device may report what it likes. What is far from the prediction, below what any trainer takes, or below zero says
nothing of its work; it teaches the planner nothing and is in no sum. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from edgefl.records import FIGURES, Figure, Figures
from edgefl.report.units import quantity

#: Predicted from the model alone, and right within a factor of two where they were measured: beyond this they are not
#: of this round. Seconds and joules are predicted for the device's kind, which may be another machine.
PREDICTED = ("step_peak_bytes", "flops")
FACTOR = 1000.0
#: No trainer is below: an interpreter takes more memory, a message more seconds.
LEAST = {"process_peak_bytes": 2.0**20, "wall_s": 1e-5, "compute_s": 1e-6}
#: Above which no loss of a model that trains is; figures in f32 go on to 3e38, and would be the round's mean.
LARGEST_METRIC = 1e9


def plausible(figures: Figures, predicted: Figures) -> tuple[Figures, list[str]]:
    """The figures, implausible ones without a value; and a text on each implausible one."""
    found, odd = dict(figures), []
    for name, figure in figures.items():
        if figure.value is not None and (why := _doubt(name, figure.value, predicted)):
            found[name] = msgspec.structs.replace(figure, value=None, reason=f"implausible: {why}")
            odd.append(f"{name.removesuffix('_bytes').removesuffix('_s').replace('_', ' ')} {why}")
    return found, odd


def likely(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that can be."""
    return {name: value for name, value in metrics.items() if abs(value) <= LARGEST_METRIC}


def _doubt(name: str, value: float, predicted: Figures) -> str:
    text = _words(name, value)
    if not math.isfinite(value):
        return text
    if name == "temperature_c":
        return ""
    if value < 0:
        return text
    least = LEAST.get(name, 0.0)
    if value < least:
        return f"{text}, no trainer is below {_words(name, least)}"
    plan = predicted.get(name, Figure()).value if name in PREDICTED else None
    if plan and not plan / FACTOR <= value <= plan * FACTOR:
        return f"{text}, {_words(name, plan)} predicted"
    return ""


def _words(name: str, value: float) -> str:
    unit = FIGURES.get(name, "")
    return quantity(value, unit) if math.isfinite(value) else f"{value} {unit}"
