"""Chart of prediction errors by figure and stage."""

from __future__ import annotations

from statistics import median

from edgefl.report import resources
from edgefl.report.charts import BLUE, LINE, MUTED, NARROW, Chart, Spec, Values, field, layer, tips
from edgefl.report.crowds import MANY, QUANTILES, quantile
from edgefl.run_records import RunReport

#: Ratio from which a prediction counts as off.
_OFF = 1.25
#: Figures of which prediction and measurement are compared, with the words of their panels.
_COMPARED = {
    "step_peak_bytes": "step memory",
    "flops": "FLOPs",
    "payload_up_bytes": "payload sent",
    "payload_down_bytes": "payload received",
}


def prediction(report: RunReport) -> Chart | None:
    """Chart of measured divided by predicted for each device and stage, a panel per figure."""
    values: Values = []
    for (device, stage), every in resources.by_device_and_stage(report).items():
        rows = [row for row in every if row.status == "done"]
        for name, title in _COMPARED.items():
            measured, predicted = resources.measured(name, rows), resources.predicted(name, rows)
            if measured.value and predicted.value and not measured.reason:
                values.append(
                    {"what": title, "device": device, "stage": stage, "ratio": measured.value / predicted.value}
                )
    if not values:
        return None
    if crowd := len({row["device"] for row in values}) > MANY:
        values = _quantiles(values)
    ratios = [row["ratio"] for row in values]
    domain = [min(0.75, *ratios) * 0.97, max(1.33, *ratios) * (1.03 if max(ratios) <= _OFF else 1.25)]
    titles = [title for title in _COMPARED.values() if any(row["what"] == title for row in values)]
    middle = median(row["stage"] for row in values)
    for title in titles:
        worst = max((row for row in values if row["what"] == title), key=lambda row: row["ratio"])
        if worst["ratio"] > _OFF:
            worst["before" if worst["stage"] > middle else "after"] = worst["device"]

    def build(width: int) -> Spec:
        columns = min(len(titles), 2 if width == NARROW else 4)
        x = field("stage", "O", "stage", axis={"labelAngle": 0, "labelOverlap": True})
        y = field("ratio", "Q", "actual ÷ predicted", scale={"type": "log", "base": 2, "domain": domain})
        y["scale"]["nice"] = False
        y["axis"] = {"values": [0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 4], "format": "~r"}
        tip = [*tips(device="device", stage="stage"), field("ratio", "Q", "actual ÷ predicted", format=".3f")]
        dots = {"x": x, "y": y, "tooltip": tip}
        one = {"y": {"datum": 1, "type": "quantitative"}}
        band = {"y": {"datum": 1 / _OFF, "type": "quantitative"}, "y2": {"datum": _OFF}}
        names = [
            layer("text", {**dots, "text": {"field": side}}, where=f"isValid(datum.{side})", align=align, dx=dx, dy=-10)
            for side, align, dx in (("before", "right", 5), ("after", "left", -5))
            if any(side in row for row in values)
        ]
        return {
            "data": {"values": values},
            "facet": field("what", "N", sort=titles),
            "columns": columns,
            "spec": {
                "width": (width - 66) // columns - 18,
                "height": 100 if width == NARROW else 130,
                "layer": [
                    layer("rect", band, values=[{}], color=LINE, opacity=0.45),
                    layer("rule", one, values=[{}], color=MUTED, strokeDash=[4, 3]),
                    layer("point", dots, color=BLUE, size=46, strokeWidth=1.6, filled=False, opacity=0.9),
                    *names,
                ],
            },
        }

    dots = "A circle is a quantile of the devices" if crowd else "A circle is a device"
    caption = (
        f"{dots} in a stage; actual is measured memory, counted FLOPs and bytes. 1 is exact, above it the device "
        "needed more than predicted. Shaded: within a quarter; beyond it, the furthest off is named."
    )
    return Chart("prediction", "How far predictions were off", caption, build)


def _quantiles(values: Values) -> Values:
    """Quantiles over devices of each figure and stage, for large fleets."""
    found: Values = []
    for what, stage in dict.fromkeys((row["what"], row["stage"]) for row in values):
        here = [row["ratio"] for row in values if (row["what"], row["stage"]) == (what, stage)]
        found += [
            {"what": what, "stage": stage, "device": name, "ratio": quantile(here, share)}
            for name, share in QUANTILES.items()
        ]
    return found
