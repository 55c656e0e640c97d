"""The curves of the test metric: complete input, and each subset of the modalities under each mask.

No two curves of a run look alike: a subset has a colour, a mask a dash and a marker; further subsets take further ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from edgefl.report import totals
from edgefl.report.svg import INKS
from edgefl.run_records import EvaluationRow, RunReport

#: (modalities given, mask for the others).
Curve = tuple[tuple[str, ...], str]
Points = list[tuple[int, float]]

COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5")
#: More subsets than this are a plot of their own, a panel each: 13 lines on one axis can not be told apart by eye.
MAX_TOGETHER = 3
_DASHES: tuple[Any, ...] = ("solid", (0, (3, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = ("s", "o", "^", "D", "v", "P", "X")
#: Dash and marker of each mask: what is filled in by zeros is dashed and hollow.
_OF_MASK = {"prototype": ("solid", "s"), "zero": (_DASHES[1], "o"), "reconstruction": ("solid", "^")}
_COMPLETE = {"color": INKS["--c0"], "linewidth": 2.2, "linestyle": "solid", "marker": "o", "markersize": 4}


def curves(report: RunReport, metric: str, at: Mapping[tuple[int, int], int]) -> dict[Curve, Points]:
    """Each curve's points, complete input first; ``at``: (stage, round) -> place on the axis."""
    scale = 100 if totals.is_share(metric) else 1
    found: dict[Curve, Points] = {}
    for row in sorted(report.evaluations, key=_order):
        if row.metric == metric and (row.stage, row.round) in at:
            points = found.setdefault((row.available, row.missing), [])
            points.append((at[row.stage, row.round], row.value * scale))
    return {curve: sorted(points) for curve, points in found.items()}


def _order(row: EvaluationRow) -> tuple[int, tuple[str, ...], str]:
    return -len(row.available), row.available, row.missing


def subsets(found: Iterable[Curve]) -> list[tuple[str, ...]]:
    """The sets of modalities that are given while others are filled in, the largest first."""
    return list(dict.fromkeys(available for available, mask in found if mask != "none"))


def label(curve: Curve) -> str:
    """ "acc + gyro", "acc alone, zero mask", "acc + gyro, zero mask"."""
    available, mask = curve
    name = " + ".join(available)
    if mask == "none":
        return name
    return f"{name}{' alone' if len(available) == 1 else ''}, {mask} mask"


def looks(found: Iterable[Curve]) -> dict[Curve, dict[str, Any]]:
    """How each curve is drawn; no two have the same colour, dash and marker."""
    every = list(found)
    complete = next((curve for curve in every if curve[1] == "none"), None)
    others = [curve for curve in every if curve != complete]
    order = list(dict.fromkeys(available for available, _ in others))
    colours = {available: COLOURS[index % len(COLOURS)] for index, available in enumerate(order)}
    drawn: dict[Curve, dict[str, Any]] = {complete: dict(_COMPLETE)} if complete is not None else {}
    taken: set[tuple[str, Any, str]] = set()
    for curve in others:
        colour = colours[curve[0]]
        usual = [_OF_MASK[curve[1]]] if curve[1] in _OF_MASK else []
        choices = [*usual, *itertools.product(_DASHES, _MARKERS)]
        dash, marker = next(one for one in choices if (colour, *one) not in taken)
        taken.add((colour, dash, marker))
        drawn[curve] = _look(colour, dash, marker)
    return drawn


def in_a_panel(found: Iterable[Curve]) -> dict[Curve, dict[str, Any]]:
    """How the curves of one subset are drawn where each has a panel of its own: a colour a mask."""
    masks = sorted({mask for _, mask in found})
    drawn = {}
    for curve in found:
        dash, marker = _OF_MASK.get(curve[1], ("solid", _MARKERS[masks.index(curve[1]) % len(_MARKERS)]))
        drawn[curve] = _look(COLOURS[masks.index(curve[1]) % len(COLOURS)], dash, marker)
    return drawn


def _look(colour: str, dash: Any, marker: str) -> dict[str, Any]:
    hollow = {"mfc": "none", "linewidth": 1.3, "markersize": 3} if dash != "solid" else {}
    return {"color": INKS[colour], "linewidth": 1.6, "linestyle": dash, "marker": marker, "markersize": 3.2, **hollow}
