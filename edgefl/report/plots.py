"""The report's plots: test metric and loss, memory, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from edgefl.report import quality, resources, units
from edgefl.report.svg import INKS, Curve, Look, Plot, figure, looks, panel_looks, svg
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

#: (place on the axis, value in the metric's unit).
Points = list[tuple[int, float]]
_NAN = float("nan")
#: More subsets than this are a plot of their own, a panel each: 13 lines on one axis cannot be told apart by eye.
MAX_TOGETHER = 3
#: More panels than this cannot be compared by eye; the table has them all.
MAX_PANELS = 12
_FLEET: Look = {"color": INKS["--c0"], "linewidth": 1.8, "marker": "o", "markersize": 3.5}
_MEASURED: Look = {"color": INKS["--c1"], "linewidth": 1.8, "marker": "o", "markersize": 4}
_PREDICTED: Look = {"color": INKS["--muted"], "linestyle": (0, (3, 2)), "marker": "o", "mfc": "none"}
_BUDGET: Look = {"color": INKS["--warn"], "linewidth": 1.2, "linestyle": (0, (6, 2))}


def learning(report: RunReport) -> Plot | None:
    """The test metric and the training loss over all rounds, stages as bands; None before the first round."""
    rounds = _places(report)
    if not rounds:
        return None
    metric = quality.primary_metric(report)
    with figure(4.9) as drawn:
        upper, lower = drawn.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1.7, 1)})
        found = _together(_curves(report, metric))
        look = looks(found, quality.masks())
        for (given, mask), points in found.items():
            label = " + ".join(given) if mask == "none" else f"{_name_of(given)}, {mask} mask"
            upper.plot(*zip(*points, strict=True), label=label, **look[given, mask])
        _metric_axis(upper, metric)
        upper.set_ylabel(f"test {_with_unit(metric)}")
        _losses(lower, report, rounds)
        _bands(upper, lower, list(rounds))
        lower.grid(axis="y", alpha=0.6)
        for axes in (upper, lower):
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), handlelength=2.4)
        return Plot(svg(drawn, "learning"), f"Test {metric} and training loss over {len(rounds)} rounds.")


def subsets(report: RunReport) -> Plot | None:
    """Many subsets of the modalities, a panel each, beside the complete input; None: they are in ``learning``."""
    metric = quality.primary_metric(report)
    found = _curves(report, metric)
    whole = _together(found)
    if len(whole) == len(found):
        return None
    names = list(dict.fromkeys(given for given, mask in found if mask != "none" and (given, mask) not in whole))
    columns = next((count for count in (4, 3, 5) if len(names) % count == 0), 4)  # the last line is full
    with figure(0.6 + 2.0 * -(-len(names) // columns)) as drawn:
        panels = _panels(drawn, len(names), columns, ("round", _with_unit(metric)), sharey=True)
        for axes, given in zip(panels, names, strict=True):
            for points in whole.values():
                muted: Look = {"color": INKS["--muted"], "linewidth": 1, "alpha": 0.7}
                axes.plot(*zip(*points, strict=True), **muted, label="complete input")
            own = {curve: points for curve, points in found.items() if curve[0] == given and curve not in whole}
            own_looks = panel_looks([mask for _, mask in own], quality.masks())
            for (curve, points), look in zip(own.items(), own_looks, strict=True):
                axes.plot(*zip(*points, strict=True), label=f"{curve[1]} mask", **look)
            axes.xaxis.set_major_locator(_whole_numbers())
            axes.set_title(_name_of(given), loc="left", fontweight="bold")
            _metric_axis(axes, metric)
        handles = {handle.get_label(): handle for axes in panels for handle in axes.get_legend_handles_labels()[0]}
        _legend_above(drawn, handles.values())
        return Plot(svg(drawn, "subsets"), f"Test {metric} of the one model where only some modalities are given.")


def memory(report: RunReport) -> Plot | None:
    """Predicted and measured step memory over the stages, one panel per device, its budget as a line."""
    known: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    for (device, stage), rows in resources.by_device_and_stage(report).items():
        pair = resources.predicted("step_peak_bytes", rows).value, resources.measured("step_peak_bytes", rows).value
        if pair != (None, None):
            known.setdefault(device, {})[stage] = pair
    if not known:
        return None
    budgets = {name: resources.step_limit(resources.device_row(report, name)) for name in known}

    def closeness(name: str) -> float:
        """Largest need over budget; 0 without a budget."""
        need = max(value for pair in known[name].values() for value in pair if value is not None)
        return need / budget if (budget := budgets[name]) else 0.0

    closest = sorted(known, key=closeness, reverse=True)[:MAX_PANELS]
    shown = [name for name in known if name in closest]
    stages = sorted({stage for pairs in known.values() for stage in pairs})
    columns = min(4, len(shown))
    from matplotlib.lines import Line2D

    with figure(0.6 + 2.35 * -(-len(shown) // columns)) as drawn:
        panels = _panels(drawn, len(shown), columns, ("stage", "step memory (MiB)"))
        near = False
        for axes, name in zip(panels, shown, strict=True):
            pairs = {stage: known[name].get(stage, (None, None)) for stage in stages}
            near |= _memory_panel(axes, name, pairs, budgets[name])
        values = [pair for name in shown for pair in known[name].values()]
        looks = [
            {**_MEASURED, "label": "measured"} if any(pair[1] is not None for pair in values) else {},
            {**_PREDICTED, "label": "predicted"} if any(pair[0] is not None for pair in values) else {},
            {**_BUDGET, "label": "budget of the device"} if near else {},
        ]
        _legend_above(drawn, (Line2D([], [], **look) for look in looks if look))
        more = f" Of {len(known)} devices, the {len(shown)} closest to their budget." if len(shown) < len(known) else ""
        return Plot(svg(drawn, "memory"), f"Peak step memory per device and stage, predicted and measured.{more}")


def spending(report: RunReport) -> Plot | None:
    """Bytes up and down, and FLOPs predicted and counted, per stage over all devices."""
    rows = [row for row in report.assignments if row.measured]
    stages = sorted({row.stage for row in rows})
    if not stages:
        return None

    def bars(axes: Axes, title: str, unit: str, *series: tuple[str, str, str]) -> None:
        """Two bars a stage; ``series``: label, name of the figure, colour."""
        width = 0.36
        for order, (label, name, ink) in enumerate(series):
            of = resources.predicted if label == "predicted" else resources.measured
            values = [of(name, [row for row in rows if row.stage == stage]).value for stage in stages]
            heights = [_NAN if value is None else units.scaled(value, unit) for value in values]
            places = [stage + (order - 0.5) * (width + 0.03) for stage in stages]
            axes.bar(places, heights, width, color=INKS[ink], label=label, linewidth=0)
        axes.xaxis.set_major_locator(_whole_numbers())
        axes.set_xlabel("stage")
        axes.grid(axis="y", alpha=0.6)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2, handlelength=1.2)
        axes.set_ylabel(title)

    with figure(2.9) as drawn:
        left, right = drawn.subplots(1, 2)
        sent, received = (
            ("sent by devices", "payload_up_bytes", "--c2"),
            ("received by devices", "payload_down_bytes", "--c1"),
        )
        bars(left, "payload, all devices (MiB)", "B", sent, received)
        predicted, counted = ("predicted", "flops", "--muted"), ("counted", "flops", "--c3")
        bars(right, "compute, all devices (GFLOP)", "FLOP", predicted, counted)
        return Plot(svg(drawn, "spending"), "Payload bytes and FLOPs per stage, added up over devices and rounds.")


def _places(report: RunReport) -> dict[tuple[int, int], int]:
    """(stage, round) -> its place on the axis."""
    return {(row.stage, row.round): place for place, row in enumerate(report.rounds, start=1)}


def _curves(report: RunReport, metric: str) -> dict[Curve, Points]:
    """Each curve's points, complete input first."""
    at = _places(report)
    scale = 100 if units.is_share(metric) else 1
    found: dict[Curve, Points] = {}
    for row in sorted(report.evaluations, key=lambda row: (-len(row.available), row.available, row.missing)):
        if row.metric == metric and (row.stage, row.round) in at:
            point = (at[row.stage, row.round], row.value * scale)
            found.setdefault((row.available, row.missing), []).append(point)
    return {curve: sorted(points) for curve, points in found.items()}


def _together(found: Mapping[Curve, Points]) -> dict[Curve, Points]:
    """Curves of the plot over all rounds: with many subsets the fullest input alone, the others have panels."""
    few = len({given for given, mask in found if mask != "none"}) <= MAX_TOGETHER
    most = max((len(given) for given, _ in found), default=0)
    return {curve: points for curve, points in found.items() if few or len(curve[0]) == most}


def _name_of(given: tuple[str, ...]) -> str:
    return " + ".join(given) + (" alone" if len(given) == 1 else "")


def _whole_numbers() -> MaxNLocator:
    """Ticks on whole numbers only: rounds and stages."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, nbins=18, min_n_ticks=1)


def _with_unit(metric: str) -> str:
    return f"{metric} (%)" if units.is_share(metric) else metric


def _metric_axis(axes: Axes, metric: str) -> None:
    if units.is_share(metric):
        axes.set_ylim(0, 103)
    axes.grid(axis="y", alpha=0.6)


def _panels(drawn: Figure, count: int, columns: int, labels: tuple[str, str], *, sharey: bool = False) -> list[Axes]:
    """``count`` panels in lines of ``columns``; ``labels``: of the lowest x axes, of the leftmost y axes."""
    grid = drawn.subplots(-(-count // columns), columns, sharex=True, sharey=sharey, squeeze=False)
    every = list(grid.flat)
    for axes in every[count:]:
        axes.set_visible(False)
    for axes in every[::columns]:
        axes.set_ylabel(labels[1])
    for axes in every[max(0, count - columns) : count]:
        axes.set_xlabel(labels[0])
        axes.tick_params(labelbottom=True)
    return every[:count]


def _legend_above(drawn: Figure, handles: Iterable[Artist]) -> None:
    shown = list(handles)
    drawn.legend(handles=shown, loc="outside upper left", ncols=len(shown), handlelength=2.4, columnspacing=2)


def _losses(axes: Axes, report: RunReport, at: Mapping[tuple[int, int], int]) -> None:
    """The fleet's training loss, and each device's own in thin lines."""
    label = "each device"
    for rows in resources.by_device(report).values():
        done = [row for row in rows if "loss" in row.metrics and row.status == "done" and (row.stage, row.round) in at]
        if done:
            own = [(at[row.stage, row.round], row.metrics["loss"]) for row in done]
            axes.plot(*zip(*own, strict=True), color=INKS["--muted"], linewidth=0.7, alpha=0.55, label=label)
            label = "_"  # one entry in the legend stands for all devices
    fleet = [(at[row.stage, row.round], row.metrics["loss"]) for row in report.rounds if "loss" in row.metrics]
    if fleet:
        axes.plot(*zip(*fleet, strict=True), label="fleet", **_FLEET)
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round, counted through the run")
    axes.xaxis.set_major_locator(_whole_numbers())


def _bands(upper: Axes, lower: Axes, rounds: Sequence[tuple[int, int]]) -> None:
    """Every second stage shaded; its number above."""
    stages = list(dict.fromkeys(stage for stage, _ in rounds))
    for order, stage in enumerate(stages):
        inside = [place for place, (owner, _) in enumerate(rounds, start=1) if owner == stage]
        first, last = inside[0] - 0.5, inside[-1] + 0.5
        for axes in (upper, lower):
            if order % 2 == 0:
                axes.axvspan(first, last, color=INKS["--band"], linewidth=0, zorder=0)
        name = f"stage {stage}" if order == 0 or len(stages) <= 8 else str(stage)
        middle, above = (first + last) / 2, upper.get_xaxis_transform()
        upper.text(middle, 1.02, name, transform=above, ha="center", color=INKS["--muted"], size=8.5)
    upper.set_xlim(0.5, len(rounds) + 0.5)


def _memory_panel(
    axes: Axes, name: str, pairs: Mapping[int, tuple[float | None, float | None]], budget: float | None
) -> bool:
    """One device's panel; returns whether its budget is drawn: one far above the curves is given as text alone."""
    predicted, measured = (
        [_NAN if value is None else value / units.MIB for value in values]
        for values in zip(*pairs.values(), strict=True)
    )
    axes.plot(list(pairs), predicted, markersize=5, **_PREDICTED)
    axes.plot(list(pairs), measured, **_MEASURED)
    axes.grid(axis="y", alpha=0.6)
    axes.set_xlim(min(pairs) - 0.5, max(pairs) + 0.5)
    axes.xaxis.set_major_locator(_whole_numbers())
    top = max(value for value in predicted + measured if value == value)  # nan is not equal to itself
    limit = _NAN if budget is None else budget / units.MIB
    near = limit <= 3 * top
    if near:
        axes.axhline(limit, **_BUDGET)
        top = max(top, limit)
    axes.set_ylim(0, top * 1.15)
    axes.set_title(name, loc="left", fontweight="bold", pad=16)
    text = "no step budget" if budget is None else f"budget {units.mib(budget)}"
    colour = INKS["--warn"] if near else INKS["--muted"]
    axes.text(0, 1.035, text, transform=axes.transAxes, color=colour, size=8)
    return near
