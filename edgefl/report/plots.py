"""The report's plots: what was learnt, what it took in memory, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgefl.report import curves, resources, totals, units
from edgefl.report.svg import INKS, Plot, figure, style, svg, whole_numbers
from edgefl.run_records import AssignmentRow, RunReport

#: More panels than this cannot be compared by eye; the table has them all.
MAX_PANELS = 12


def learning(report: RunReport) -> Plot | None:
    """Accuracy and loss over all rounds, stages as bands; None before the first round."""
    rounds = [(row.stage, row.round) for row in report.rounds]
    if not rounds:
        return None
    metric = totals.primary_metric(report)
    at = {key: index + 1 for index, key in enumerate(rounds)}
    with style():
        drawn = figure(10.6, 4.9)
        upper, lower = drawn.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1.7, 1)})
        _scores(upper, together(curves.curves(report, metric, at)), metric)
        _losses(lower, report, at)
        _bands(upper, lower, rounds)
        lower.grid(axis="y", alpha=0.6)
        for axes in (upper, lower):
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), handlelength=2.4)
        return Plot(svg(drawn, "learning"), f"Test {metric} and training loss over {len(rounds)} rounds.")


def together(found: Mapping[curves.Curve, curves.Points]) -> dict[curves.Curve, curves.Points]:
    """Curves of the plot over all rounds: with many subsets the fullest input alone, they have panels."""
    few = len(curves.subsets(found)) <= curves.MAX_TOGETHER
    most = max((len(available) for available, _ in found), default=0)
    return {curve: points for curve, points in found.items() if few or len(curve[0]) == most}


def subsets(report: RunReport) -> Plot | None:
    """Many subsets of the modalities, a panel each, beside the complete input; None: they stand in ``learning``."""
    metric = totals.primary_metric(report)
    at = {(row.stage, row.round): index + 1 for index, row in enumerate(report.rounds)}
    found = curves.curves(report, metric, at)
    whole = together(found)
    if len(whole) == len(found):
        return None
    names = curves.subsets(curve for curve in found if curve not in whole)
    columns = next((count for count in (4, 3, 5) if len(names) % count == 0), 4)  # the last line is full
    lines = -(-len(names) // columns)
    with style():
        drawn = figure(10.6, 0.6 + 2.0 * lines)
        grid = drawn.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axes, available in zip(grid.flat, names, strict=False):
            _subset_panel(axes, available, found, whole)
            _metric_axis(axes, metric)
        for axes in list(grid.flat)[len(names) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel(f"{metric} (%)" if totals.is_share(metric) else metric)
        for axes in list(grid.flat)[max(0, len(names) - columns) : len(names)]:
            axes.set_xlabel("round")
            axes.tick_params(labelbottom=True)
        handles = _once(axes.get_legend_handles_labels() for axes in grid.flat)
        drawn.legend(*handles, loc="outside upper left", ncols=len(handles[0]), handlelength=2.4, columnspacing=2)
        return Plot(svg(drawn, "subsets"), f"Test {metric} of the one model where only some modalities are given.")


def _subset_panel(
    axes: Any,
    available: tuple[str, ...],
    found: Mapping[curves.Curve, curves.Points],
    whole: Mapping[curves.Curve, curves.Points],
) -> None:
    for points in whole.values():
        axes.plot(*zip(*points, strict=True), color=INKS["--muted"], linewidth=1, alpha=0.7, label="complete input")
    own = [curve for curve in found if curve[0] == available and curve not in whole]
    looks = curves.in_a_panel(own)
    for curve in own:
        axes.plot(*zip(*found[curve], strict=True), label=f"{curve[1]} mask", **looks[curve])
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_title(" + ".join(available) + (" alone" if len(available) == 1 else ""), loc="left", fontweight="bold")


def _once(legends: Iterable[tuple[list[Any], list[str]]]) -> tuple[list[Any], list[str]]:
    """The entries of several panels' legends, each once."""
    entries = {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}
    return list(entries.values()), list(entries)


def memory(report: RunReport) -> Plot | None:
    """Predicted and measured step memory over the stages, one panel per device, its budget as a line."""
    cells = {
        key: (
            totals.predicted("step_peak_bytes", rows).value,
            totals.measured("step_peak_bytes", rows).value,
        )
        for key, rows in totals.by_device_and_stage(report).items()
    }
    known = {key: pair for key, pair in cells.items() if pair != (None, None)}
    if not known:
        return None
    names = list(dict.fromkeys(device for device, _ in known))
    shown = sorted(names, key=lambda name: -_closeness(report, name, known))[:MAX_PANELS]
    shown = [name for name in names if name in shown]
    stages = sorted({stage for _, stage in known})
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    with style():
        drawn = figure(10.6, 0.6 + 2.35 * lines)
        grid = drawn.subplots(lines, columns, sharex=True, squeeze=False)
        with_budget = False
        for axes, name in zip(grid.flat, shown, strict=False):
            pairs = {stage: known.get((name, stage), (None, None)) for stage in stages}
            with_budget |= _memory_panel(axes, report, name, pairs)
        for axes in list(grid.flat)[len(shown) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("step memory (MiB)")
        for axes in list(grid.flat)[max(0, len(shown) - columns) : len(shown)]:
            axes.set_xlabel("stage")
            axes.tick_params(labelbottom=True)
        values = [known[key] for key in known if key[0] in shown]
        handles = _memory_handles(
            measured=any(pair[1] is not None for pair in values),
            predicted=any(pair[0] is not None for pair in values),
            budget=with_budget,
        )
        drawn.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=2.4, columnspacing=2)
        more = f" Of {len(names)} devices, the {len(shown)} closest to their budget." if len(shown) < len(names) else ""
        return Plot(svg(drawn, "memory"), f"Peak step memory per device and stage, predicted and measured.{more}")


def spending(report: RunReport) -> Plot | None:
    """Bytes up and down, and FLOPs predicted and counted, per stage over all devices."""
    stages = sorted({row.stage for row in report.assignments if row.measured})
    if not stages:
        return None
    trained = {stage: [row for row in report.assignments if row.stage == stage and row.measured] for stage in stages}
    with style():
        drawn = figure(10.6, 2.9)
        left, right = drawn.subplots(1, 2)
        sent = [_scaled("payload_up_bytes", trained[stage], "B") for stage in stages]
        received = [_scaled("payload_down_bytes", trained[stage], "B") for stage in stages]
        _pairs(left, stages, ("sent by devices", sent, "--c2"), ("received by devices", received, "--c1"))
        left.set_ylabel("payload, all devices (MiB)")
        planned = [_scaled("flops", trained[stage], "FLOP", plan=True) for stage in stages]
        counted = [_scaled("flops", trained[stage], "FLOP") for stage in stages]
        _pairs(right, stages, ("predicted", planned, "--muted"), ("counted", counted, "--c3"))
        right.set_ylabel("compute, all devices (GFLOP)")
        return Plot(svg(drawn, "spending"), "Payload bytes and FLOPs per stage, added up over devices and rounds.")


def _scores(axes: Any, found: Mapping[curves.Curve, curves.Points], metric: str) -> None:
    """The metric of the complete input and, where there is room, of each subset of the modalities."""
    looks = curves.looks(found)
    for curve, points in found.items():
        axes.plot(*zip(*points, strict=True), label=curves.label(curve), **looks[curve])
    _metric_axis(axes, metric)
    axes.set_ylabel(f"test {metric} (%)" if totals.is_share(metric) else f"test {metric}")


def _metric_axis(axes: Any, metric: str) -> None:
    if totals.is_share(metric):
        axes.set_ylim(0, 103)
    axes.grid(axis="y", alpha=0.6)


def _losses(axes: Any, report: RunReport, at: dict[tuple[int, int], int]) -> None:
    """The fleet's training loss, and each device's own in thin lines."""
    label = "each device"
    for rows in totals.by_device(report).values():
        told = [row for row in rows if "loss" in row.metrics and row.status == "done" and (row.stage, row.round) in at]
        own = [(at[row.stage, row.round], row.metrics["loss"]) for row in told]
        if own:
            axes.plot(*zip(*own, strict=True), color=INKS["--muted"], linewidth=0.7, alpha=0.55, label=label)
            label = "_"  # one entry in the legend stands for all devices
    fleet = [(at[row.stage, row.round], row.metrics["loss"]) for row in report.rounds if "loss" in row.metrics]
    if fleet:
        heavy = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
        axes.plot(*zip(*fleet, strict=True), color=INKS["--c0"], label="fleet", **heavy)
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round, counted through the run")
    axes.xaxis.set_major_locator(whole_numbers())


def _bands(upper: Any, lower: Any, rounds: list[tuple[int, int]]) -> None:
    """Every second stage shaded; its number above."""
    stages = list(dict.fromkeys(stage for stage, _ in rounds))
    for order, stage in enumerate(stages):
        inside = [index + 1 for index, (owner, _) in enumerate(rounds) if owner == stage]
        first, last = inside[0] - 0.5, inside[-1] + 0.5
        for axes in (upper, lower):
            if order % 2 == 0:
                axes.axvspan(first, last, color=INKS["--band"], linewidth=0, zorder=0)
        name = f"stage {stage}" if order == 0 or len(stages) <= 8 else str(stage)
        place = ((first + last) / 2, 1.02)
        upper.text(*place, name, transform=upper.get_xaxis_transform(), ha="center", color=INKS["--muted"], size=8.5)
    upper.set_xlim(0.5, len(rounds) + 0.5)


def _memory_panel(axes: Any, report: RunReport, name: str, pairs: dict[int, tuple[float | None, float | None]]) -> bool:
    """One device's panel; returns whether its budget is drawn: one far above the curves is given as text alone."""
    nan = float("nan")
    stages = list(pairs)
    predicted = [nan if pair[0] is None else pair[0] / units.MIB for pair in pairs.values()]
    measured = [nan if pair[1] is None else pair[1] / units.MIB for pair in pairs.values()]
    axes.plot(stages, predicted, color=INKS["--muted"], linestyle=(0, (3, 2)), marker="o", mfc="none", markersize=5)
    axes.plot(stages, measured, color=INKS["--c1"], linewidth=1.8, marker="o", markersize=4)
    axes.grid(axis="y", alpha=0.6)
    axes.set_xlim(min(stages) - 0.5, max(stages) + 0.5)
    axes.xaxis.set_major_locator(whole_numbers())
    top = max(value for value in predicted + measured if value == value)  # nan is not equal to itself
    budget = resources.step_limit(totals.device_row(report, name))
    told = "no step budget" if budget is None else f"budget {units.mib(budget)}"
    near = budget is not None and budget / units.MIB <= 3 * top
    if near and budget is not None:
        axes.axhline(budget / units.MIB, color=INKS["--warn"], linewidth=1.2, linestyle=(0, (6, 2)))
        top = max(top, budget / units.MIB)
    axes.set_ylim(0, top * 1.15)
    axes.set_title(name, loc="left", fontweight="bold", pad=16)
    colour = INKS["--warn"] if near else INKS["--muted"]
    axes.text(0, 1.035, told, transform=axes.transAxes, color=colour, size=8)
    return near


def _memory_handles(*, measured: bool, predicted: bool, budget: bool) -> list[Any]:
    """The legend of what is drawn in any panel, and of nothing else."""
    from matplotlib.lines import Line2D

    every = (
        (measured, {"color": INKS["--c1"], "linewidth": 1.8, "marker": "o", "markersize": 4, "label": "measured"}),
        (
            predicted,
            {"color": INKS["--muted"], "linestyle": (0, (3, 2)), "marker": "o", "mfc": "none", "label": "predicted"},
        ),
        (
            budget,
            {"color": INKS["--warn"], "linewidth": 1.2, "linestyle": (0, (6, 2)), "label": "budget of the device"},
        ),
    )
    return [Line2D([], [], **look) for drawn, look in every if drawn]


def _closeness(report: RunReport, name: str, known: dict[tuple[str, int], tuple[float | None, float | None]]) -> float:
    """Largest need over budget; 0 without a budget."""
    budget = resources.step_limit(totals.device_row(report, name))
    peaks = [value for (device, _), pair in known.items() if device == name for value in pair if value is not None]
    return max(peaks) / budget if budget else 0.0


def _scaled(name: str, rows: list[AssignmentRow], unit: str, *, plan: bool = False) -> float:
    value = (totals.predicted if plan else totals.measured)(name, rows).value
    return float("nan") if value is None else units.scaled(value, unit)


def _pairs(axes: Any, stages: list[int], *series: tuple[str, list[float], str]) -> None:
    width = 0.36
    for order, (label, values, ink) in enumerate(series):
        places = [stage + (order - 0.5) * (width + 0.03) for stage in stages]
        axes.bar(places, values, width, color=INKS[ink], label=label, linewidth=0)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_xlabel("stage")
    axes.grid(axis="y", alpha=0.6)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2, handlelength=1.2)
