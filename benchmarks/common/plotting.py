"""Plots of result pages: one style, one SVG a plot, the same figures give the same file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Told apart with any colour vision (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#000000", "#7a5230", "#b8b800")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edgefl",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Plots are made and saved inside."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


@contextmanager
def plot(path: Path, x: str, y: str, width: float = 7.2, height: float = 4.2) -> Iterator[Any]:
    """Axes to draw on, saved to ``path`` afterwards; ``x`` and ``y``: what is on them."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        yield axes
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Without a date, so that the same figures give the same file."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
