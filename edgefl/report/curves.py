"""The curves of the test metric: complete input, and each subset of the modalities under each mask.

No two curves of a plot look alike: a subset has a colour, a mask a dash and a marker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgefl.report import totals, units
from edgefl.report.svg import INKS
from edgefl.run_records import RunReport

#: (modalities given, mask for the others).
Curve = tuple[tuple[str, ...], str]
#: (place on the axis, value in the metric's unit).
Points = list[tuple[int, float]]
_Dash = str | tuple[float, tuple[float, ...]]
#: Keywords of matplotlib.
Look = dict[str, Any]

#: More subsets than this are a plot of their own, a panel each: 13 lines on one axis cannot be told apart by eye.
MAX_TOGETHER = 3
_COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5")
_DASHES: tuple[_Dash, ...] = ("solid", (0, (3, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = ("s", "o", "^", "D", "v", "P", "X")
#: Dash and marker of the masks, in the order of the registry: the first, zeros, is dashed and hollow.
_USUAL: tuple[tuple[_Dash, str], ...] = ((_DASHES[1], "o"), ("solid", "s"), ("solid", "^"))
_COMPLETE: Look = {"color": INKS["--c0"], "linewidth": 2.2, "linestyle": "solid", "marker": "o", "markersize": 4}


def places(report: RunReport) -> dict[tuple[int, int], int]:
    """(stage, round) -> its place on the axis."""
    return {(row.stage, row.round): place for place, row in enumerate(report.rounds, start=1)}


def curves(report: RunReport, metric: str) -> dict[Curve, Points]:
    """Each curve's points, complete input first."""
    at = places(report)
    scale = 100 if units.is_share(metric) else 1
    found: dict[Curve, Points] = {}
    for row in sorted(report.evaluations, key=lambda row: (-len(row.available), row.available, row.missing)):
        if row.metric == metric and (row.stage, row.round) in at:
            point = (at[row.stage, row.round], row.value * scale)
            found.setdefault((row.available, row.missing), []).append(point)
    return {curve: sorted(points) for curve, points in found.items()}


def together(found: Mapping[Curve, Points]) -> dict[Curve, Points]:
    """Curves of the plot over all rounds: with many subsets the fullest input alone, the others have panels."""
    few = len({given for given, mask in found if mask != "none"}) <= MAX_TOGETHER
    most = max((len(given) for given, _ in found), default=0)
    return {curve: points for curve, points in found.items() if few or len(curve[0]) == most}


def name_of(given: tuple[str, ...]) -> str:
    return " + ".join(given) + (" alone" if len(given) == 1 else "")


def label(curve: Curve) -> str:
    """ "acc + gyro", "acc alone, zero mask", "acc + gyro, zero mask"."""
    given, mask = curve
    return " + ".join(given) if mask == "none" else f"{name_of(given)}, {mask} mask"


def looks(found: Iterable[Curve]) -> dict[Curve, Look]:
    """The look of each curve; no two have the same colour, dash and marker."""
    every = list(found)
    complete = next((curve for curve in every if curve[1] == "none"), None)
    looks = {} if complete is None else {complete: _COMPLETE}
    others = [curve for curve in every if curve != complete]
    order = list(dict.fromkeys(given for given, _ in others))
    of_mask = _usual()
    taken: set[tuple[str, _Dash, str]] = set()
    for given, mask in others:
        colour = _COLOURS[order.index(given) % len(_COLOURS)]
        usual = [of_mask[mask]] if mask in of_mask else []
        choices = (*usual, *itertools.product(_DASHES, _MARKERS))
        dash, marker = next(choice for choice in choices if (colour, *choice) not in taken)
        taken.add((colour, dash, marker))
        looks[given, mask] = _look(colour, dash, marker)
    return looks


def panel_looks(masks: Sequence[str]) -> list[Look]:
    """The look of each mask's curve where each subset has a panel of its own: a colour a mask."""
    order = sorted(set(masks)).index
    of_mask = _usual()
    usual = [of_mask.get(mask, ("solid", _MARKERS[order(mask) % len(_MARKERS)])) for mask in masks]
    return [_look(_COLOURS[order(mask) % len(_COLOURS)], *look) for mask, look in zip(masks, usual, strict=True)]


def _usual() -> dict[str, tuple[_Dash, str]]:
    """Dash and marker of each mask that has its own."""
    return dict(zip(totals.masks(), _USUAL, strict=False))


def _look(colour: str, dash: _Dash, marker: str) -> Look:
    hollow = {"mfc": "none", "linewidth": 1.3, "markersize": 3} if dash != "solid" else {}
    return {"color": INKS[colour], "linewidth": 1.6, "linestyle": dash, "marker": marker, "markersize": 3.2, **hollow}
