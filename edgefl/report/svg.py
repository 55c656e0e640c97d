"""Figures of matplotlib as inline SVG that takes its colours from the page, so that it follows the theme.

matplotlib draws with stand-in colours; each is replaced by a CSS variable afterwards. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@dataclass(frozen=True)
class Plot:
    """One drawn figure: SVG markup, and a caption of one sentence."""

    svg: str
    caption: str


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
