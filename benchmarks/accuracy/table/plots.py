"""The plots of the table: accuracy against bytes, and how it falls with the missing rate; one SVG a task each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.table import measures
from benchmarks.accuracy.table.collect import Outcome, Results
from benchmarks.accuracy.table.grid import Grid
from benchmarks.common.plotting import save, style

#: Drawn in colour; the others are grey.
_SYSTEMS = {
    "lw-fedmml": "#0072b2",
    "prog-fedmml": "#56b4e9",
    "pmcmfl": "#d55e00",
    "apromfl": "#cc79a7",
    "fedmvp": "#009e73",
    "mmic": "#a08000",
    "fedavg": "#000000",
    "clip-lw": "#0072b2",
    "clip-prog": "#56b4e9",
    "apromfl-retrieval": "#cc79a7",
    "clip-fedavg": "#000000",
    "mixed-apromfl": "#cc79a7",
    "mixed-fedavg": "#000000",
}
#: Of more methods than these the grey ones have no names beside their points: they would lie over each other.
_NAMED = 8
#: Baselines with names.
_GREYS = ("#8c8c8c", "#4d4d4d", "#c2a385")


def draw(grid: Grid, runs: Results, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Write them; task -> (file, what it shows)."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, list[tuple[str, str]]] = {}
    with style():
        for task in grid.tasks:
            rows = [row for row in runs.rows if row.task == task and not row.error]
            if not rows:
                continue
            kind = grid.tasks[task].get("metric", "accuracy")
            measure, name = _measure(kind)
            save(_against_bytes(rows, measure, name), folder / f"{task}-bytes.svg")
            title = grid.tasks[task]["title"]
            drawn[task] = [(f"{task}-bytes.svg", f"{title}: {name} against payload at the highest missing rate")]
            by_rate = folder / f"{task}-missing.svg"
            by_rate.unlink(missing_ok=True)
            if len({row.rate for row in rows}) > 1:
                save(_by_rate(rows, measure, name), by_rate)
                drawn[task].append((by_rate.name, f"{title}: {name} by missing rate"))
    return drawn


def _measure(kind: str) -> tuple[measures.Measure, str]:
    return {
        "accuracy": (measures.as_trained, "accuracy as trained, %"),
        "rsum": (measures.known_rsum, "RSum, known concepts"),
        "mixed": (measures.own_accuracy, "own accuracy, %"),
    }[kind]


def _against_bytes(rows: Sequence[Outcome], measure: measures.Measure, name: str) -> Any:
    figure, axes = _figure(name, "payload of all devices, MiB")
    highest = max(row.rate for row in rows)
    few = len(_methods(rows)) <= _NAMED  # then the baselines have names, too, and so must differ
    others = [method for method in _methods(rows) if method not in _SYSTEMS] if few else []
    for start, marker in (("scratch", "o"), ("pretrained", "D")):
        for method in _methods(rows):
            own = [r for r in rows if (r.method, r.start, r.rate) == (method, start, highest)]
            at, cost = measures.summary(own, measure), measures.summary(own, measures.payload_mib)
            if at is None or cost is None:
                continue
            colour = _SYSTEMS.get(method, _GREYS[others.index(method) % len(_GREYS)] if method in others else "#999999")
            named = method in _SYSTEMS or few
            text = method if start == "scratch" else f"{method}, pretrained"
            axes.errorbar(
                cost.mean,
                at.mean,
                yerr=at.deviation,
                fmt=marker,
                color=colour,
                mfc=colour if start == "pretrained" else "white",
                ms=5,
                lw=0.8,
                label=text if named else None,
                zorder=2 if named else 1,
            )
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
    return figure


def _by_rate(rows: Sequence[Outcome], measure: measures.Measure, name: str) -> Any:
    figure, axes = _figure(name, "missing rate, %")
    rates = sorted({row.rate for row in rows})
    for start, line in (("scratch", "-"), ("pretrained", "--")):
        for method in _methods(rows):
            own = [r for r in rows if (r.method, r.start) == (method, start)]
            points = [(rate, measures.summary([r for r in own if r.rate == rate], measure)) for rate in rates]
            known = [(100 * rate, found) for rate, found in points if found is not None]
            if len(known) < 2:
                continue
            coloured = method in _SYSTEMS
            axes.errorbar(
                [x for x, _ in known],
                [found.mean for _, found in known],
                yerr=[found.deviation for _, found in known],
                ls=line,
                color=_SYSTEMS.get(method, "#cccccc"),
                lw=1.4 if coloured else 0.7,
                label=(method if start == "scratch" else f"{method}, pretrained") if coloured else None,
                zorder=2 if coloured else 1,
            )
    axes.set_xticks([100 * rate for rate in rates])
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
    return figure


def _methods(rows: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(row.method for row in rows))


def _figure(y: str, x: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3, lw=0.5)
    return figure, axes
