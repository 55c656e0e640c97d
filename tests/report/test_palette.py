"""The palette seen with other eyes: colours that stand side by side stay apart, dark and light.

Dichromacy by the matrices of Machado, Oliveira and Fernandes (IEEE TVCG 15(6), 2009, severity 1), on linear RGB;
differences in CIELAB (CIE 1976), of which about 2.3 is just noticeable.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_charts import CHARTS, layers

from edgefl.report import fleet_plots
from edgefl.report.charts import PALETTE, Chart

_ROWS = {
    "protanopia": "0.152286 1.052583 -0.204868; 0.114503 0.786281 0.099216; -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968; 0.280085 0.672501 0.047413; -0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779; -0.078411 0.930809 0.147602; 0.004733 0.691367 0.303900",
}
MATRICES = {"trichromacy": np.eye(3)} | {
    name: np.array([[float(one) for one in row.split()] for row in rows.split(";")]) for name, rows in _ROWS.items()
}
GREY = np.tile([0.2126, 0.7152, 0.0722], (3, 1))
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ @ np.ones(3)
#: Least difference of two colours that tell something by themselves.
DISTINCT = 15
#: Channels by which marks of two colours differ as well, so that they may look alike in grey.
OTHERS = ("shape", "fill", "strokeDash", "strokeWidth")


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one: str, other: str, eyes: np.ndarray) -> float:
    return float(np.linalg.norm(lab(eyes @ linear(one)) - lab(eyes @ linear(other))))


def test_the_simulation_knows_what_is_confused() -> None:
    red, green = "#b00000", "#4d6b00"
    assert apart(red, green, MATRICES["trichromacy"]) > 60
    assert apart(red, green, MATRICES["deuteranopia"]) < 20
    assert apart("#000000", "#ffffff", GREY) == pytest.approx(100, abs=0.1)


class Pair(NamedTuple):
    """Two kinds of marks of one chart: their colours' names, and whether another channel tells them apart too."""

    one: str
    other: str
    marked: bool


def kinds(channel: dict[str, Any]) -> list[tuple[str, str]]:
    """Each value of a channel's scale and its look."""
    held = channel.get("scale", {})
    return (
        [(str(a), str(b)) for a, b in zip(held.get("domain", ()), held.get("range", ()), strict=True)]
        if "range" in held
        else []
    )


def pairs(chart: Chart) -> dict[tuple[str, str], Pair]:
    """Every two kinds that a colour scale of the chart has, by their words."""
    views = list(layers(chart.spec()))
    named = {light: name for name, (light, _) in PALETTE.items()}
    looks: dict[str, dict[str, set[tuple[str, str]]]] = {}  # field -> kind -> its looks in other channels
    for view, _ in views:
        for channel in OTHERS:
            for kind, look in kinds(view["encoding"].get(channel, {})):
                own = looks.setdefault(view["encoding"][channel]["field"], {})
                own.setdefault(kind, set()).add((channel, look))
    found = {}
    for view, _ in views:
        colour = view["encoding"].get("color", {})
        own = looks.get(colour.get("field", ""), {})
        for (a, one), (b, other) in itertools.combinations(kinds(colour), 2):
            found[a, b] = Pair(named[one], named[other], own.get(a) != own.get(b))
    return found


#: Every two kinds of every chart but the steps of the heat map, which have a test of their own.
PAIRS = [
    pytest.param(pair, id=f"{chart.name}-{a}-{b}")
    for chart in CHARTS
    if chart.name != "stages-of-devices"
    for (a, b), pair in pairs(chart).items()
]


def test_the_pairs_are_those_of_every_chart_with_colours() -> None:
    drawn = {chart.name for chart in CHARTS if pairs(chart)}
    assert drawn == {"memory", "timeline", "saving", "accuracy", "loss", "stages-of-devices"}
    assert len(PAIRS) > 20


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", MATRICES)
@pytest.mark.parametrize("pair", PAIRS)
def test_colours_of_one_chart_stay_apart(pair: Pair, eyes: str, theme: int) -> None:
    far = apart(PALETTE[pair.one][theme], PALETTE[pair.other][theme], MATRICES[eyes])
    assert far > DISTINCT or (pair.marked and far > 4), far


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("pair", PAIRS)
def test_in_grey_kinds_of_a_chart_differ_by_lightness_or_by_their_form(pair: Pair, theme: int) -> None:
    assert pair.marked or apart(PALETTE[pair.one][theme], PALETTE[pair.other][theme], GREY) > DISTINCT


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_in_grey_activities_differ_by_three_pixels_or_by_lightness(theme: int) -> None:
    named = {light: name for name, (light, _) in PALETTE.items()}
    for (one, thick), (other, thin) in itertools.combinations(fleet_plots._LOOK.values(), 2):
        far = apart(PALETTE[named[one]][theme], PALETTE[named[other]][theme], GREY)
        assert abs(thick - thin) >= 3 or far > DISTINCT, (named[one], named[other])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", [*MATRICES.values(), GREY], ids=[*MATRICES, "grey"])
def test_the_heat_map_s_steps_grow_evenly_whatever_the_eyes(eyes: np.ndarray, theme: int) -> None:
    steps = [lab(eyes @ linear(PALETTE[f"h{n}"][theme]))[0] for n in range(5)]
    differences = np.diff(steps) * (-1 if theme == 0 else 1)
    assert min(differences) > 6


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_and_marks_can_be_read_on_the_card(theme: int) -> None:
    def luminance(name: str) -> float:
        return float(GREY[0] @ linear(PALETTE[name][theme]))

    for name in ("ink", "muted", "c1", "c2", "c3", "c4", "c5", "warn"):
        low, high = sorted((luminance(name), luminance("card")))
        assert (high + 0.05) / (low + 0.05) > 4.5, name  # WCAG 2, AA
