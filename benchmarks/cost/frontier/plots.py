"""Accuracy against cumulated bytes and FLOPs: a row of two panels for each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accuracy.claims.judge import complete
from benchmarks.accuracy.claims.outcome import Outcome
from benchmarks.common.plotting import COLOURS, save, style
from benchmarks.cost.frontier.figures import Row, Spent, spent

_AXES: tuple[tuple[str, Callable[[Spent], float]], ...] = (
    ("MiB down and up, all devices", lambda cost: cost.mib),
    ("GFLOP, all devices", lambda cost: cost.gflop),
)
#: Marks and colours of kinds of schedules, told apart in grey too; one of a kind with other rounds has the same.
LOOKS = {
    "end-to-end": ("o", COLOURS[7]),
    "end-to-end ×3": ("o", COLOURS[6]),
    "progressive": ("v", COLOURS[3]),
    "freeze": ("s", COLOURS[4]),
    "last stage": ("^", COLOURS[5]),
    "heads": ("P", COLOURS[2]),
    "layer-wise": ("D", COLOURS[0]),
    "layer-wise ×4": ("*", COLOURS[1]),
    "layer-wise ×2": ("X", "#882255"),
}


def frontier(
    tasks: Mapping[str, tuple[Sequence[Outcome], Sequence[Row]]], kinds: Mapping[str, str], folder: Path
) -> None:
    """Draw ``frontier.svg`` into ``folder``. ``tasks``: title -> its runs and its rows; ``kinds``: method -> kind."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(6.4, 1.1 + 2.3 * max(len(tasks), 1)), layout="constrained")
        panels = figure.subplots(max(len(tasks), 1), 2, squeeze=False, sharey="row")
        for pair, (title, (runs, rows)) in zip(panels, tasks.items(), strict=False):
            for axes, (label, cost) in zip(pair, _AXES, strict=True):
                _panel(axes, runs, rows, cost, kinds)
                axes.set_xlabel(label)
            pair[0].set_title(title, loc="left", fontsize=9)
            pair[0].set_ylabel("accuracy, %")
        named: dict[str, Any] = {}
        for panel in panels[:, 0]:
            handles, labels = panel.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        shown = [kind for kind in dict.fromkeys(kinds.values()) if kind in named]
        figure.legend([named[kind] for kind in shown], shown, loc="outside upper center", ncols=3, fontsize=9)
        save(figure, folder / "frontier.svg")


def _panel(
    axes: Any,
    runs: Sequence[Outcome],
    rows: Sequence[Row],
    cost: Callable[[Spent], float],
    kinds: Mapping[str, str],
) -> None:
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_xscale("log")
    for row in rows:
        mark, colour = LOOKS[kinds[row.method]]
        curves = [one for one in runs if one.method == row.method]
        xs, ys = _mean_curve(curves, cost)
        axes.plot(xs, ys, color=colour, lw=0.7, alpha=0.4)
        size = 9 if mark == "*" else 5
        axes.errorbar(
            cost(row.total), row.last.mean, row.last.deviation, fmt=mark, color=colour, ms=size, lw=1,
            label=kinds[row.method],
        )  # fmt: skip
    best = max((row.last.mean for row in rows), default=100.0)
    least = min((row.last.mean for row in rows), default=0.0)
    axes.set_ylim(least - 12, min(100.0, best + 3))


def _mean_curve(runs: Sequence[Outcome], cost: Callable[[Spent], float]) -> tuple[list[float], list[float]]:
    """Over the runs' evaluations of the same round."""
    number = complete()
    rounds = sorted({point.round for one in runs for point in one.curve})
    xs, ys = [], []
    for n in rounds:
        points = [point for one in runs for point in one.curve if point.round == n]
        xs.append(fmean(cost(spent(point)) for point in points))
        ys.append(fmean(value for point in points if (value := number(point)) is not None))
    return xs, ys
