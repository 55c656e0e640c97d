"""Charts of the fleet: what each device did over time, and what each stage took of each device."""

from __future__ import annotations

from edgefl.records import FIGURES
from edgefl.report import resources, timeline, units
from edgefl.report.charts import (
    BLUE,
    GREEN,
    HEAT,
    INK,
    LINE,
    MUTED,
    NARROW,
    ORANGE,
    PAPER,
    PURPLE,
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
from edgefl.run_records import RunReport

#: More stages than this leave no room for numbers in the cells of the heat map.
_ROOM = 8
#: Columns of the heat map: title, figures that are added, unit.
_HEAT: dict[str, tuple[str, ...]] = {
    "step memory (MiB)": ("step_peak_bytes",),
    "compute (GFLOP)": ("flops",),
    "payload both ways (MiB)": ("payload_up_bytes", "payload_down_bytes"),
    "time of its own (s)": ("wall_s",),
}
#: Activity -> colour, thickness of its bar.
_LOOK = {
    timeline.TRAINS: (BLUE, 15),
    timeline.FETCHES: (GREEN, 8),
    timeline.SENDS: (ORANGE, 8),
    timeline.FAILS: (PURPLE, 15),
    timeline.WAITS: (LINE, 2),
    timeline.REFUSED: (MUTED, 4),
    timeline.AWAY: (WARN, 11),
}


def over_time(report: RunReport) -> Chart | None:
    """Each device over the time of the run; of many devices also how many of them do what."""
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
        if span.device in shown
    ]
    begins: dict[int, float] = {}
    for row in report.rounds:
        begins.setdefault(row.stage, (row.started_at - run.began) / size)
    stages: Values = [
        {"start": at, "name": f"stage {stage}" if not n else str(stage)} for n, (stage, at) in enumerate(begins.items())
    ]
    crowd: Values = [{**row, "start": float(row["start"]) / size} for row in timeline.busy(spans, run.seconds)]
    done = [activity for activity in timeline.ACTIVITIES if any(span.activity == activity for span in spans)]

    def build(width: int) -> Spec:
        x = field(
            "start",
            "Q",
            f"time since the run started ({unit})",
            scale={"domain": [0, run.seconds / size], "nice": False},
        )
        colour = field("activity", "N", scale=scale(done, [_LOOK[one][0] for one in done]), sort=done)
        colour["legend"] = {"symbolType": "square", "columns": 3 if width == NARROW else 0}
        tip = tips(device="device", activity="activity", round="in", **{"for": "for"})
        bars = {"x": x, "x2": {"field": "end"}, "y": field("device", "N", sort=shown), "color": colour, "tooltip": tip}
        mark = {"values": stages, "color": MUTED}
        per_device: Spec = {
            "width": width - 150,
            "height": {"step": 24},
            "data": {"values": rows},
            "layer": [
                layer("rule", {"x": x}, **mark, strokeDash=[2, 3]),
                layer("text", {"x": x, "y": {"value": -6}, "text": {"field": "name"}}, **mark, align="left"),
                *(layer("bar", bars, where=f"datum.activity == '{one}'", height=_LOOK[one][1]) for one in done),
            ],
        }
        if shown == every:
            return per_device
        number = field("devices", "Q", "number of devices", stack="zero")
        area = layer("area", {"x": x, "y": number, "color": colour, "order": {"field": "n"}}, interpolate="step-after")
        whole = {"width": width - 150, "height": 170, "data": {"values": crowd}, **area}
        return {"vconcat": [whole, per_device]}

    caption = (
        "Thick: it trains; thinner: parts on their way; a line: it waits. Training is drawn in one piece, before the "
        "update: of a round only its seconds are known." + how_many(every, shown, "longest away or without an update")
    )
    return Chart("timeline", "What each device did, over time", caption, build)


def by_stage(report: RunReport) -> Chart | None:
    """Devices by stages: memory, compute, bytes and time of a mean round, each relative to its own largest."""
    cells: dict[tuple[str, str, int], float] = {}
    for (device, stage), rows in resources.by_device_and_stage(report).items():
        rounds = len({row.round for row in rows if row.measured}) or 1
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
        step = ((width - 120) // columns - 18) / len(stages)
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
                "height": {"step": 24},
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
        "A stage's largest step, and the mean of its rounds. Darker is more, each panel by itself; a dash: no round "
        "of the stage was trained." + how_many(devices, shown, "that trained the fewest stages")
    )
    return Chart("stages-of-devices", "What each stage took of each device", caption, build)


def _cell(title: str, device: str, stage: int, value: float | None, largest: float) -> dict[str, object]:
    """One cell; ``level`` 0 to 4 of a known value."""
    text = units.number(value)
    level = None if value is None else min(4, int(5 * value / largest))
    return {"what": title, "device": device, "stage": stage, "level": level, "text": text, "short": text}
