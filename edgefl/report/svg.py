"""The look of the plots, and matplotlib's figures as inline SVG that takes its colours from the page, dark or light.

matplotlib draws with stand-in colours; each is replaced by a CSS variable afterwards. Text stays text. No two curves of
a plot look alike: a subset of the modalities has a colour, a mask a dash and a marker.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: (modalities given, mask for the others).
Curve = tuple[tuple[str, ...], str]
#: Keywords of matplotlib.
Look = dict[str, Any]
_Dash = str | tuple[float, tuple[float, ...]]

#: CSS variable -> the colour matplotlib draws with. None is used twice and none occurs in matplotlib's own output.
INKS: dict[str, str] = {
    "--ink": "#010101",
    "--muted": "#020202",
    "--line": "#030303",
    "--band": "#040404",
    "--paper": "#050505",
    **{f"--c{n}": f"#06060{n}" for n in range(6)},
    "--warn": "#060606",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edgefl",  # the same figures give the same file
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": INKS["--line"],
    "axes.labelcolor": INKS["--muted"],
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.titlecolor": INKS["--ink"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    **{f"{axis}tick.color": INKS["--line"] for axis in "xy"},
    **{f"{axis}tick.labelcolor": INKS["--muted"] for axis in "xy"},
    "grid.color": INKS["--line"],
    "grid.linewidth": 0.5,
    "text.color": INKS["--ink"],
    "legend.frameon": False,
    "legend.labelcolor": INKS["--ink"],
}


_COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5")
_DASHES: tuple[_Dash, ...] = ("solid", (0, (3, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = ("s", "o", "^", "D", "v", "P", "X")
#: Dash and marker of the masks, in the order of the registry: the first, zeros, is dashed and hollow.
_USUAL: tuple[tuple[_Dash, str], ...] = ((_DASHES[1], "o"), ("solid", "s"), ("solid", "^"))
_COMPLETE: Look = {"color": INKS["--c0"], "linewidth": 2.2, "linestyle": "solid", "marker": "o", "markersize": 4}


class Plot(NamedTuple):
    """One drawn figure: SVG markup, and a caption of one sentence."""

    svg: str
    caption: str


def looks(found: Iterable[Curve], masks: Iterable[str]) -> dict[Curve, Look]:
    """The look of each curve; no two have the same colour, dash and marker. ``masks``: all there are, in order."""
    every = list(found)
    complete = next((curve for curve in every if curve[1] == "none"), None)
    looks = {} if complete is None else {complete: _COMPLETE}
    others = [curve for curve in every if curve != complete]
    order = list(dict.fromkeys(given for given, _ in others))
    of_mask = dict(zip(masks, _USUAL, strict=False))
    taken: set[tuple[str, _Dash, str]] = set()
    for given, mask in others:
        colour = _COLOURS[order.index(given) % len(_COLOURS)]
        choices = [*([of_mask[mask]] if mask in of_mask else []), *itertools.product(_DASHES, _MARKERS)]
        dash, marker = next(choice for choice in choices if (colour, *choice) not in taken)
        taken.add((colour, dash, marker))
        looks[given, mask] = _look(colour, dash, marker)
    return looks


def panel_looks(shown: Sequence[str], masks: Iterable[str]) -> list[Look]:
    """The look of each mask's curve where each subset has a panel of its own: a colour a mask."""
    order = sorted(set(shown)).index
    of_mask = dict(zip(masks, _USUAL, strict=False))
    usual = [of_mask.get(mask, ("solid", _MARKERS[order(mask) % len(_MARKERS)])) for mask in shown]
    return [_look(_COLOURS[order(mask) % len(_COLOURS)], *look) for mask, look in zip(shown, usual, strict=True)]


def _look(colour: str, dash: _Dash, marker: str) -> Look:
    hollow = {"mfc": "none", "linewidth": 1.3, "markersize": 3} if dash != "solid" else {}
    return {"color": INKS[colour], "linewidth": 1.6, "linestyle": dash, "marker": marker, "markersize": 3.2, **hollow}


@contextmanager
def figure(height: float) -> Iterator[Figure]:
    """An empty figure of the page's width and ``height`` inches, drawn with ``STYLE`` inside the context."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        yield Figure(figsize=(10.6, height), layout="constrained")


def svg(drawn: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element: scalable, ids prefixed by ``name``, colours as CSS variables."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for variable, colour in INKS.items():
        text = text.replace(colour, f"var({variable})")
    return re.sub(r'\b(width|height)="[0-9.]+pt" ?', "", text, count=2)
