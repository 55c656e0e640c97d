"""Charts of budgets and predictions: memory against budget, and cost against end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import asdict

from edgefl.report import resources, story, units
from edgefl.report.charts import (
    BLUE,
    FILLS,
    INK,
    LINE,
    MUTED,
    NARROW,
    WARN,
    Chart,
    Spec,
    Values,
    field,
    layer,
    scale,
    tips,
)
from edgefl.report.crowds import QUANTILES, how_many, quantile, rows_of
from edgefl.report.refusals import refusal_text
from edgefl.run_records import RunReport

#: Kind of a point -> its colour, shape and fill.
_WHAT = {
    "measured": (BLUE, "circle", BLUE),
    "predicted": (MUTED, "circle", "transparent"),
    "budget": (WARN, "M0,-1.1V1.1", "transparent"),
}
#: Devices that the caption names with their numbers.
_NAMED = 4
_PROCESS = "process_peak_bytes"


def memory(report: RunReport) -> Chart | None:
    """Chart of each device's largest step memory, measured and predicted, beside its budget; log scale."""
    known: dict[str, dict[str, float]] = {}
    of_process: dict[str, str] = {}
    for name, rows in resources.by_device(report).items():
        held = resources.measured("step_peak_bytes", rows), resources.predicted("step_peak_bytes", rows)
        values = (held[0].value, held[1].value, resources.step_limit(resources.device_row(report, name)))
        found = {what: value / units.MIB for what, value in zip(_WHAT, values, strict=True) if value}
        if found:
            known[name] = found
        allowed, whole = resources.process_limit(resources.device_row(report, name)), resources.measured(_PROCESS, rows)
        if allowed and whole.value:
            numbers = f"{units.number(whole.value / units.MIB)} of {units.mib(allowed)}"
            of_process[name] = f"{_percent(whole.value / allowed)} of process memory ({numbers})"
    if all(found.keys() == {"budget"} for found in known.values()):
        return None
    caption = (
        "Largest step of the run: measured (circle) and predicted (hollow), within what the device may use (bar, up "
        "to the stroke). A budget of the whole process is shown without the idle trainer; its share is of the whole."
    )
    return against_budgets(known, caption, of_process)


def against_budgets(
    known: Mapping[str, Mapping[str, float]], caption: str, of_process: Mapping[str, str] = MappingProxyType({})
) -> Chart:
    """Chart of step memory against budgets; of many devices those nearest to their budget.

    ``known``: device -> MiB by the kinds of ``_WHAT``; ``of_process``: labels of devices with a process budget.
    """

    def need(name: str) -> float:
        return known[name].get("measured", known[name].get("predicted", 0.0))

    def used(name: str) -> float:
        return need(name) / known[name]["budget"] if "budget" in known[name] else 0.0

    quantiles, shown = rows_of(list(known), used)
    shown = sorted(shown, key=lambda name: (-used(name), -need(name)))
    points: Values = [{"device": name, "what": what, "mib": mib} for name in shown for what, mib in known[name].items()]
    for row in quantiles:
        for what in _WHAT:
            if every := [found[what] for found in known.values() if what in found]:
                points.append({"device": row, "what": what, "mib": quantile(every, QUANTILES[row])})
    labels: Values = [
        {"device": n, "mib": max(known[n].values()), "text": of_process.get(n) or _used(used(n), need(n))}
        for n in shown
    ]
    room = 24 + 5.4 * max((len(row["text"]) for row in labels), default=0)

    kinds = [what for what in _WHAT if any(row["what"] == what for row in points)]
    colours, shapes, fills = zip(*(_WHAT[what] for what in kinds), strict=True)
    every = [row["mib"] for row in points]
    domain = [min(every) * 0.8, max(every)]
    labels = [{**row, "left": domain[0]} for row in labels]
    points = [{**row, "from": domain[0]} if row["what"] == "budget" else row for row in points]

    def build(width: int) -> Spec:
        y = field("device", "N", sort=[*quantiles, *shown])
        x = field("mib", "Q", "step memory (MiB, log scale)", scale={"type": "log", "nice": False, "domain": domain})
        above = width == NARROW and bool(of_process)  # no room at the right
        x["scale"]["range"] = [0, {"expr": f"width - {12 if above else room:.0f}"}]
        ticks = log_ticks(every, (1, 3) if width == NARROW else (1, 2, 5))
        x["axis"] = {"values": ticks, "format": ",~r", "labelOverlap": True, "labelSeparation": 6}
        look: Spec = {
            "color": field("what", "N", scale=scale(kinds, colours)),
            "shape": field("what", "N", scale=scale(kinds, shapes)),
            "fill": field("what", "N", scale=scale(kinds, fills)),
            "tooltip": [*tips(device="device", what="figure"), field("mib", "Q", "MiB", format=".3~s")],
        }
        text = {"y": y, "x": {**x, "field": "left"} if above else x, "text": {"field": "text"}}
        allowed = layer("bar", {"y": y, "x": x, "x2": {"field": "from"}}, where="datum.what == 'budget'", color=LINE)
        allowed["mark"] |= {"height": 12, "opacity": 0.5}
        return {
            **FILLS,
            "width": width,
            "height": {"step": 40 if above else 26},
            "data": {"values": points},
            "layer": [
                *([allowed] if "budget" in kinds else []),
                layer("point", {"y": y, "x": x, **look}, size=90, strokeWidth=2, opacity=1),
                layer("text", text, values=labels, align="left", color=MUTED, **({"dy": -15} if above else {"dx": 9})),
            ],
        }

    caption += how_many(list(known), shown, "nearest to their budget")
    return Chart("memory", "Memory of each device against its budget", caption, build)


def _used(share: float, need: float) -> str:
    if not need:
        return "not trained"
    if not share:
        return "no budget"
    return f"{_percent(share)} used"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "<1 %"


#: Ticks of a decade of a logarithmic axis where there is room, or where fewer would leave one alone.
_FINE = (1, 2, 5)


def log_ticks(values: Sequence[float], per_decade: Sequence[int]) -> list[float]:
    """Ticks of a logarithmic axis: round numbers in the values' range and next to it."""
    lowest, highest = min(values), max(values)
    every = [first * 10.0**power for power in range(-3, 9) for first in per_decade]
    near = [one for one in every if lowest / 2 <= one <= highest * 2]
    return near if len(near) > 1 or len(per_decade) == len(_FINE) else log_ticks(values, _FINE)


def against_end_to_end(report: RunReport) -> Chart | None:
    """Chart of the run's memory, FLOPs and bytes relative to the predicted end-to-end run."""
    rows: Values = []
    for one in story.savings(report):
        text = (
            f"{units.quantity(one.spent, one.unit)} of {units.quantity(one.end_to_end, one.unit)}, {story.ratio(one)}"
        )
        row = {"what": one.name, "text": text, "of": "in this run", "share": 100 * one.spent / one.end_to_end}
        rows += [row, {**row, "of": "end to end, predicted", "share": 100.0}]
        if one.predicted:
            rows.append({**row, "of": "predicted for this run", "share": 100 * one.predicted / one.end_to_end})
    if not rows:
        return None
    ways = ("in this run", "predicted for this run", "end to end, predicted")

    def build(width: int) -> Spec:
        y = field("what", "N", sort=None)
        x = field(
            "share",
            "Q",
            "% of end to end",
            stack=None,
            axis={"tickCount": 5},
            scale={"domain": [0, 1.02 * max(100, *(r["share"] for r in rows))], "nice": False},
        )
        legend = {"columns": 1 if width == NARROW else 0}
        look: Spec = {
            "color": field("of", "N", scale=scale(ways, (BLUE, MUTED, INK)), legend=legend),
            "shape": field("of", "N", scale=scale(ways, ("square", "circle", "M0,-1.4V1.4")), legend=legend),
            "fill": field("of", "N", scale=scale(ways, (BLUE, "transparent", "transparent")), legend=legend),
        }
        tip = [*tips(what="what", of="figure"), field("share", "Q", "% of end to end", format=".1f")]
        own = "datum.of == 'in this run'"
        return {
            **FILLS,
            "width": width,
            "height": {"step": 46},
            "data": {"values": rows},
            "layer": [
                layer("bar", {"y": y, "x": x}, where=own, height=10, color=BLUE, opacity=0.35),
                layer("point", {"y": y, "x": x, **look, "tooltip": tip}, size=110, strokeWidth=2, opacity=1),
                layer("text", {"y": y, "x": {"value": 4}, "text": {"field": "text"}}, where=own, align="left", dy=-15),
            ],
        }

    caption = (
        "A device's largest step, measured, and its mean round, counted. End to end is the planner's price of the same "
        "run file with all parts trained at once, for the same devices and samples." + _unaffordable(report)
    )
    return Chart("saving", "Cost against training end to end", caption, build)


def _unaffordable(report: RunReport) -> str:
    """Caption on devices with budgets too small for the whole model, with limits and numbers; "" for none."""
    refused = [
        f"{name} ({refusal_text(asdict(one.refusal))})" for name, one in report.end_to_end.items() if one.refusal
    ]
    if not refused:
        return ""
    of = f"{len(refused)} of {len(report.end_to_end)} devices"
    more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
    return (
        f" In whole batches, without the planner's fallbacks to smaller steps or fewer parts, {of} could not train the "
        f"whole model, each by the first of its limits that is short: {'; '.join(refused[:_NAMED])}{more}."
    )
