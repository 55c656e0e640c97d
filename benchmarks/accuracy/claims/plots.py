"""The plot of every comparison: the difference, its interval, and the bound that is claimed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.claims.judge import SMALLER, Finding
from benchmarks.common.plotting import save, style

#: Verdict -> colour and marker, told apart in grey as well.
MARKS = {"yes": ("#0072b2", "o"), "no": ("#d55e00", "s"), SMALLER: ("#b38600", "v"), "undecided": ("#8c8c8c", "D")}
#: Points of accuracy beyond which an interval is cut: a line of costs is not of this plot.
WIDEST = 30.0


def differences(findings: Sequence[tuple[str, Finding]], path: Path) -> None:
    """Draw the comparisons of accuracies, in points, into ``path`` (SVG). ``findings``: (paper, comparison)."""
    from matplotlib.figure import Figure

    rows: list[tuple[str, Finding | None]] = []
    for paper in dict.fromkeys(paper for paper, _ in findings):
        rows += [(paper, None), *((_name(one), one) for owner, one in findings if owner == paper)]
    with style():
        figure = Figure(figsize=(4.8, 1.3 + 0.18 * max(len(rows), 1)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color="#bbbbbb", lw=0.8)
        for at, (_, one) in enumerate(rows):
            if one is not None:
                _draw(axes, at, one)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
        for label, (_, one) in zip(axes.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if one is None else "normal")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set_xlabel("points, with 95 % interval")
        for name, (colour, marker) in MARKS.items():
            axes.plot([], [], marker, color=colour, label=name)
        axes.plot([], [], "o", color="#444444", mfc="white", label="hollow: no room")
        figure.legend(loc="outside upper center", ncols=2, fontsize=8)
        save(figure, path)


def _draw(axes: Any, at: int, one: Finding) -> None:
    mean, low, high = one.difference
    colour, marker = MARKS[one.verdict]
    if not math.isinf(low):
        axes.plot([max(low, -WIDEST), min(high, WIDEST)], [at, at], color=colour, lw=1.6)
    axes.plot(mean, at, marker, color=colour, mfc=colour if one.tested else "white", ms=4.5)
    axes.plot(-one.asked.margin if one.asked.lower else one.asked.margin, at, "|", color="black", ms=8)


def _name(one: Finding) -> str:
    asked = one.asked
    measure = ", recall" if "recall" in asked.measure else ", lost" if asked.falling else ""
    models = ", devices' models" if asked.measure.startswith("devices'") else ""
    return f"{asked.left} to {asked.against}, {asked.task} {asked.condition}{models}{measure}"
