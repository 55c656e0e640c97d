"""Charts of the fleet: devices' activities over time, and their costs by stage."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.records import FIGURES
from edgefl.report import resources, timeline, units
from edgefl.report.charts import (
    BLUE,
    FILLS,
    GREEN,
    HEAT,
    INK,
    LINE,
    MUTED,
    NARROW,
    OLIVE,
    ORANGE,
    PAPER,
    PURPLE,
    WARN,
    Chart,
    Spec,
    Values,
    field,
    label_room,
    layer,
    scale,
    tips,
)
from edgefl.report.crowds import QUANTILES, how_many, quantile, rows_of
from edgefl.run_records import RunReport

#: More stages than this leave no room for numbers in the cells of the heat map.
_ROOM = 8
#: Columns of the heat map: title, figures that are added, unit.
_HEAT: dict[str, tuple[str, ...]] = {
    "step memory (MiB)": ("step_peak_bytes",),
    "FLOPs (GFLOP)": ("flops",),
    "payload both ways (MiB)": ("payload_up_bytes", "payload_down_bytes"),
    "from offer to update (s)": ("wall_s",),
}
#: Activity -> colour, thickness of its bar; before its first join a device has none.
_LOOK = {
    timeline.TRAINS: (BLUE, 16),
    timeline.FETCHES: (GREEN, 9),
    timeline.SENDS: (ORANGE, 6),
    timeline.FAILS: (PURPLE, 12),
    timeline.WAITS: (LINE, 2),
    timeline.REFUSED: (MUTED, 3),
    timeline.LEFT_OUT: (INK, 6),
    timeline.AWAY: (WARN, 12),
}


def over_time(report: RunReport) -> Chart | None:
    """Chart of each device's activities over time; of many devices also their numbers by activity."""
    spans = timeline.spans(report)
    if not spans:
        return None
    run = timeline.length(report)
    unit, size = ("h", 3600.0) if run.seconds >= 10800 else ("min", 60.0) if run.seconds >= 180 else ("s", 1.0)
    lost = {activity: dict.fromkeys((span.device for span in spans), 0.0) for activity in timeline.ACTIVITIES}
    for span in spans:
        lost[span.activity][span.device] += span.end - span.start
    every = list(dict.fromkeys(span.device for span in spans))
    worst = [lost[activity] for activity in (timeline.AWAY, timeline.REFUSED, timeline.FAILS)]
    _, shown = rows_of(every, lambda name: sum(held[name] for held in worst))
    rows: Values = [
        {
            "device": span.device,
            "activity": span.activity,
            "for": units.seconds(span.end - span.start),
            "start": round(span.start / size, 4),
            "end": round(span.end / size, 4),
            "round": f"stage {span.stage}, round {span.round}" if span.round else "",
        }
        for span in spans
        if span.device in shown and span.activity in _LOOK
    ]
    begins: dict[int, float] = {}
    for row in report.rounds:
        begins.setdefault(row.stage, (row.started_at - run.began) / size)
    done = [activity for activity in _LOOK if any(span.activity == activity for span in spans)]
    busy = timeline.busy(spans, run.seconds)
    crowd: Values = [{**row, "start": float(row["start"]) / size} for row in busy if row["activity"] in done]
    pauses: Values = [
        {"start": one.start / size, "end": one.end / size, "name": "paused", "by": one.by}
        for one in timeline.pauses(report)
    ]

    def build(width: int) -> Spec:
        x = field(
            "start",
            "Q",
            f"time since the run started ({unit})",
            scale={"domain": [0, run.seconds / size], "nice": False},
            axis={"tickCount": 4 if width == NARROW else 10, "labelOverlap": True, "labelSeparation": 8},
        )
        colour = field("activity", "N", scale=scale(done, [_LOOK[one][0] for one in done]), sort=done)
        shape = field("activity", "N", scale=scale(done, [_swatch(_LOOK[one][1]) for one in done]), sort=done)
        columns = 2 if width == NARROW else 0
        for channel in (colour, shape):
            channel["legend"] = {"columns": columns, "symbolStrokeWidth": 0, "symbolSize": 140}
        swatch, legend = {"color": colour, "shape": shape}, [{"activity": one} for one in done]  # drawn nowhere else
        tip = tips(device="device", activity="activity", round="in", **{"for": "for"})
        bars = {"x": x, "x2": {"field": "end"}, "y": field("device", "N", sort=shown), "color": colour, "tooltip": tip}
        mark = {"values": _stage_names(begins, run.seconds / size, width), "color": MUTED}
        per_device: Spec = {
            "width": width,
            "height": {"step": 24},
            "data": {"values": rows},
            "layer": [
                *(_pauses(pauses, x) if pauses else []),
                layer("rule", {"x": x}, **mark, strokeDash=[2, 3]),
                layer("text", {"x": x, "y": {"value": -6}, "text": {"field": "name"}}, **mark, align="left"),
                *(layer("bar", bars, where=f"datum.activity == '{one}'", height=_LOOK[one][1]) for one in done),
                layer("point", swatch, values=legend, where="false", filled=True, opacity=1),
            ],
        }
        if shown == every:
            return FILLS | per_device
        inner = width - label_room([*shown, *done])
        number = field("devices", "Q", None, axis=None, scale={"domain": [0, len(every)]})
        area = {"x": {**x, "axis": None}, "y": number, "tooltip": tips(activity="activity", devices="devices")}
        header = {"labelAngle": 0, "labelAlign": "left", "labelFontWeight": "normal", "labelPadding": 4}
        whole = {
            "data": {"values": crowd},
            "facet": {"row": field("activity", "N", sort=done, header=header)},
            "spacing": 5,
            "spec": {"width": inner, "height": 24, **layer("area", area, interpolate="step-after", color=BLUE)},
        }
        return {"vconcat": [whole, per_device | {"width": inner}]}

    caption = (
        "Thick: it trains; thinner: parts on their way; a line: it waits. Training is drawn in one piece, before the "
        "update: of a round only its seconds are known."
    )
    inside = sum(row.ended_at - row.started_at for row in report.rounds if row.ended_at is not None)
    between = units.seconds(max(0.0, run.seconds - inside))
    caption += (
        f" {units.seconds(inside)} in rounds; in the other {between} devices wait for the coordinator, which plans and "
        "evaluates. Seconds depend on the machine."
    )
    if shown != every:
        caption = f"Above: how many devices do what; the full height is all {len(every)}. Below, by device. {caption}"
        caption += how_many(every, shown, "longest away or without an update")
    if pauses:
        caption += " Shaded: the operator had paused the run."
    return Chart("timeline", "What each device did, over time", caption, build)


def _swatch(thickness: int) -> str:
    """SVG path of a legend symbol: a bar of this thickness, at most 16 pixels."""
    half = max(0.12, thickness / 16)
    return f"M-1,{-half:.2f}H1V{half:.2f}H-1Z"


def _stage_names(begins: Mapping[int, float], length: float, width: int) -> Values:
    """Chart rows of the stages' begins, labelled where labels do not overlap."""
    rows: Values = []
    free = -1.0
    for stage, at in begins.items():
        text = f"stage {stage}" if not rows else str(stage)
        rows.append({"start": at, "name": text if at >= free else ""})
        free = at + length * (8 * len(text)) / (width - 100) if at >= free else free
    return rows


def _pauses(pauses: Values, x: Spec) -> list[Spec]:
    """Chart layers of the operator's pauses, across all devices."""
    tip = tips(name="the run was", by="by")
    return [
        layer("rect", {"x": x, "x2": {"field": "end"}, "tooltip": tip}, values=pauses, color=OLIVE, opacity=0.25),
        layer(
            "text",
            {"x": x, "y": {"value": -19}, "text": {"field": "name"}},
            values=pauses,
            align="left",
            dx=3,
            color=OLIVE,
        ),
    ]


def by_stage(report: RunReport) -> Chart | None:
    """Heat map by device and stage: memory, compute, bytes and time of a mean round, relative to the largest."""
    cells: dict[tuple[str, str, int], float] = {}
    for (device, stage), every in resources.by_device_and_stage(report).items():
        rows = [row for row in every if row.status == "done"]
        rounds = len({row.round for row in rows})
        for title, names in _HEAT.items():
            figures = [resources.measured(name, rows).value for name in names]
            if None not in figures:
                each = 1 if names[0] in resources.PEAKS else rounds
                cells[title, device, stage] = units.scaled(sum(filter(None, figures)), FIGURES[names[0]]) / each
    if not cells:
        return None
    devices, stages = list(resources.by_device(report)), sorted({stage for _, _, stage in cells})
    largest = {title: max((v for (t, _, _), v in cells.items() if t == title), default=0.0) for title in _HEAT}
    gaps = {name: sum(("step memory (MiB)", name, stage) not in cells for stage in stages) for name in devices}
    quantiles, shown = rows_of(
        devices,
        lambda name: (
            gaps[name],
            max((v for (t, d, _), v in cells.items() if d == name and t == next(iter(_HEAT))), default=0.0),
        ),
    )
    values: Values = []
    for title in (title for title in _HEAT if largest[title]):
        for stage in stages:
            column = [cells[title, name, stage] for name in devices if (title, name, stage) in cells]
            for row in quantiles:
                values.append(
                    _cell(title, row, stage, quantile(column, QUANTILES[row]) if column else None, largest[title])
                )
            values += [_cell(title, name, stage, cells.get((title, name, stage)), largest[title]) for name in shown]

    def build(width: int) -> Spec:
        columns = 1 if width == NARROW else 4
        step = ((width - label_room([*quantiles, *shown])) / columns - 18) / len(stages)
        x = field("stage", "O", "stage", axis={"labelAngle": 0, "labelOverlap": True})
        y = field("device", "N", sort=[*quantiles, *shown])
        heat = field("level", "O", legend=None, scale=scale(range(5), HEAT))
        tip = tips(what="figure", device="device", stage="stage", text="value")
        text = {
            "x": x,
            "y": y,
            "text": {"field": "short"},
            "color": {"condition": {"test": "datum.level > 2", "value": PAPER}, "value": INK},
        }
        return {
            "data": {"values": values},
            "facet": field("what", "N", sort=list(_HEAT)),
            "columns": columns,
            "spec": {
                "width": {"step": step},
                "height": {"step": 18 if width == NARROW and len(shown) > _ROOM else 24},
                "layer": [
                    layer(
                        "rect",
                        {"x": x, "y": y, "color": heat, "tooltip": tip},
                        where="isValid(datum.level)",
                        stroke=PAPER,
                    ),
                    layer("text", {**text, "tooltip": tip}, fontSize=10.5, opacity=0 if len(stages) > _ROOM else 1),
                ],
            },
        }

    caption = (
        "A stage's largest step, and the mean of its rounds; rounds whose update does not count are left out. Stronger "
        "colour is more, each panel by itself; a dash: no round of the stage counts."
        + how_many(devices, shown, "that trained the fewest stages")
    )
    return Chart("stages-of-devices", "What each stage took of each device", caption, build)


def _cell(title: str, device: str, stage: int, value: float | None, largest: float) -> dict[str, object]:
    """One cell of the heat map; ``level``: 0 to 4 for a known value."""
    text = units.number(value)
    level = None if value is None else min(4, int(5 * value / largest))
    return {"what": title, "device": device, "stage": stage, "level": level, "text": text, "short": text}
