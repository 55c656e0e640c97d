"""The palette seen with other eyes: colours that stand side by side stay apart, dark and light.

Dichromacy by the matrices of Machado, Oliveira and Fernandes (IEEE TVCG 15(6), 2009, severity 1), on linear RGB;
differences in CIELAB (CIE 1976), of which about 2.3 is just noticeable.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgefl.report.charts import PALETTE

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
#: Colours that are drawn in one chart.
TOGETHER = {
    "memory": ("c1", "muted", "warn"),
    "masks": ("c1", "c2", "c3", "c4"),
    "timeline": ("c1", "c3", "c2", "line", "warn"),
}


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


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", MATRICES)
@pytest.mark.parametrize("chart", TOGETHER)
def test_colours_of_one_chart_stay_apart(chart: str, eyes: str, theme: int) -> None:
    for one, other in itertools.combinations(TOGETHER[chart], 2):
        assert apart(PALETTE[one][theme], PALETTE[other][theme], MATRICES[eyes]) > 15, (one, other)


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
