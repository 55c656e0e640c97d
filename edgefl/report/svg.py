"""How plots are drawn: matplotlib to inline SVG that takes its colours from the page, so that it follows the theme.

matplotlib draws with stand-in colours; each is replaced by a CSS variable afterwards. Text stays text.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

#: CSS variable -> the colour matplotlib draws with. None is used twice and none occurs in matplotlib's own output.
INKS: dict[str, str] = {
    "--ink": "#010101",
    "--muted": "#020202",
    "--line": "#030303",
    "--band": "#040404",
    "--paper": "#050505",
    "--c0": "#060600",
    "--c1": "#060601",
    "--c2": "#060602",
    "--c3": "#060603",
    "--c4": "#060604",
    "--c5": "#060605",
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
    "xtick.color": INKS["--line"],
    "ytick.color": INKS["--line"],
    "xtick.labelcolor": INKS["--muted"],
    "ytick.labelcolor": INKS["--muted"],
    "grid.color": INKS["--line"],
    "grid.linewidth": 0.5,
    "text.color": INKS["--ink"],
    "legend.frameon": False,
    "legend.labelcolor": INKS["--ink"],
}


@dataclass(frozen=True)
class Plot:
    """One drawn figure: SVG markup, and what it shows in a sentence."""

    svg: str
    caption: str


def figure(width: float, height: float) -> Any:
    """An empty figure of ``width`` x ``height`` inches that places its contents without overlap."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style() -> Any:
    """A context in which figures are made with this module's style; matplotlib's own settings stay as they are."""
    import matplotlib as mpl

    return mpl.rc_context(STYLE)


def whole_numbers() -> Any:
    """Ticks on whole numbers only: rounds and stages."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, nbins=18, min_n_ticks=1)


def svg(drawn: Any, name: str) -> str:
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
