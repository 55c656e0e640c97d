"""Charts of the model: accuracy by input modalities, and training loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.records import ORACLE
from edgefl.report import quality, units
from edgefl.report.charts import (
    DASHES,
    FILLS,
    INK,
    MUTED,
    NARROW,
    SERIES,
    SHAPES,
    Chart,
    Spec,
    Values,
    field,
    layer,
    scale,
    tips,
)
from edgefl.report.crowds import MANY
from edgefl.run_records import RunReport

#: (modalities given, mask for the others).
Curve = tuple[tuple[str, ...], str]
COMPLETE = "complete"
#: Height of a panel of the accuracy, and of a line of its labels, in pixels.
_HEIGHT, _LABEL = 120, 13
_LOSS_HEIGHT = 150
#: Devices whose lines of the loss are labelled; of more, only the fleet's is.
_NAMED = 6


def accuracy(report: RunReport) -> Chart | None:
    """Chart of the test metric over rounds: a panel per subset of modalities, a line per mask."""
    metric = quality.primary_metric(report)
    share = units.is_share(metric)
    place = {(row.stage, row.round): n for n, row in enumerate(report.rounds, start=1)}
    found: dict[Curve, dict[int, float]] = {}
    for row in report.evaluations:
        if row.metric == metric and row.missing != ORACLE and (row.stage, row.round) in place:
            number = place[row.stage, row.round]
            found.setdefault((row.available, row.missing), {})[number] = row.value * (100 if share else 1)
    if not found:
        return None
    complete = next((curve for curve in found if curve[1] == "none"), None)
    panels = sorted({given for given, mask in found if mask != "none"}, key=lambda given: (-len(given), given))
    panels = panels or [given for given, _ in found]
    known = quality.masks()
    masks = sorted({mask for _, mask in found if mask != "none"}, key=lambda mask: ([*known, mask].index(mask), mask))
    names = [*([COMPLETE] if complete else []), *masks]
    values: Values = []
    for given in panels:
        for mask in names:
            curve = found.get(complete if mask == COMPLETE and complete else (given, mask), {})
            values += [_point(given, mask, place, number, value) for number, value in sorted(curve.items())]
    every = [value for curve in found.values() for value in curve.values()]
    room = max(0.5, (max(every) - min(every)) * 0.08)
    domain = [max(0.0, min(every) - room), min(100.0, max(every) + room) if share else max(every) + room]
    last = _labels(values, domain)
    words = units.metric_words(metric)
    short = words.partition(" (")[0]
    unit = (f"{short} (%)" if share else short) + (f", from {domain[0]:.0f}" if domain[0] else "")

    def build(width: int) -> Spec:
        columns = 1 if width == NARROW else min(4, len(panels))
        panel = (width - 66) // columns - 18
        room = panel / max(40, panel - 7 * max(len(row["text"]) for row in last))  # for words, right of the lines
        x = field("round", "Q", "round", scale={"domain": [1, 1 + room * max(1, len(place) - 1)], "nice": False})
        x["axis"] = {
            "values": _ticks(len(place)),
            "format": "d",
            "grid": False,
            "labelOverlap": True,
            "labelSeparation": 4,
        }
        y = field("value", "Q", unit, scale={"domain": domain, "nice": False, "clamp": True}, axis={"tickCount": 4})
        colour = field(
            "curve",
            "N",
            legend=None,
            scale=scale(names, [MUTED if n == COMPLETE else SERIES[masks.index(n) % 5] for n in names]),
        )
        shape = field("curve", "N", legend=None, scale=scale(names, [*(["stroke"] if complete else []), *SHAPES]))
        dash = field("curve", "N", legend=None, scale=scale(names, [*([[1, 0]] if complete else []), *DASHES]))
        tip = [*tips(given="given", curve="mask", at="round"), field("value", "Q", unit, format=".1f")]
        label = {"x": x, "y": {"field": "at_y", "type": "quantitative"}, "text": {"field": "text"}, "color": colour}
        return {
            "data": {"values": values},
            "facet": field("panel", "N", sort=[_name(given) for given in panels]),
            "columns": columns,
            "spec": {
                "width": panel,
                "height": _HEIGHT,
                "layer": [
                    layer("line", {"x": x, "y": y, "color": colour, "strokeDash": dash}, strokeWidth=1.8),
                    layer(
                        "point", {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tip}, size=26, filled=True
                    ),
                    layer(
                        "text", {**label, "y": {**y, "field": "at_y"}}, where="isValid(datum.text)", align="left", dx=7
                    ),
                ],
            },
        }

    values += last
    caption = (
        f"Test {words} of the one global model, by what it is given; the lines end in what stands in for the rest. In "
        "every panel the same scale, cut where nothing lies."
    )
    return Chart("accuracy", f"{words.capitalize()} by what the model was given", caption, build)


def _name(given: Sequence[str]) -> str:
    return " + ".join(given)


def _point(
    given: tuple[str, ...], mask: str, place: Mapping[tuple[int, int], int], number: int, value: float
) -> dict[str, object]:
    stage, round_ = next(key for key, at in place.items() if at == number)
    at = f"{number} (stage {stage}, round {round_})"
    what = "everything" if mask == COMPLETE else _name(given)
    return {"panel": _name(given), "given": what, "curve": mask, "round": number, "value": round(value, 3), "at": at}


def _labels(values: Values, domain: Sequence[float], height: int = _HEIGHT, form: str = ".1f") -> Values:
    """Labels at the ends of lines, moved apart where they would overlap."""
    found: Values = []
    apart = (domain[1] - domain[0]) * _LABEL / height
    for panel in dict.fromkeys(row["panel"] for row in values):
        ends = {row["curve"]: row for row in values if row["panel"] == panel}
        lowest = domain[0] + apart / 2
        for left, row in enumerate(sorted(ends.values(), key=lambda row: row["value"]), start=1):
            highest = domain[1] - apart / 2 - apart * (len(ends) - left)
            at = min(max(row["value"], lowest), max(highest, lowest))
            lowest = at + apart
            words = {"at_y": at, "text": f"{row['curve']} {row['value']:{form}}"}
            found.append({name: row[name] for name in ("panel", "curve", "round")} | words)
    return found


def _ticks(rounds: int) -> list[int]:
    """Axis ticks: a few whole numbers from 1 to ``rounds``."""
    step = max(1, -(-rounds // 6))
    return sorted({1, *range(step, rounds + 1, step)})


def loss(report: RunReport) -> Chart | None:
    """Chart of the training loss over rounds: the fleet's and, in small fleets, each device's."""
    place = {(row.stage, row.round): n for n, row in enumerate(report.rounds, start=1)}
    values: Values = [
        {"of": "fleet", "device": "fleet", "round": place[row.stage, row.round], "loss": row.metrics["loss"]}
        for row in report.rounds
        if "loss" in row.metrics
    ]
    if not values:
        return None
    if len(report.devices) <= MANY:
        values += [
            {
                "of": "each device",
                "device": row.device,
                "round": place[row.stage, row.round],
                "loss": row.metrics["loss"],
            }
            for row in report.assignments
            if row.status == "done" and "loss" in row.metrics and (row.stage, row.round) in place
        ]
    every = [row["loss"] for row in values]
    domain = [min(0.0, *every), max(every) * 1.04 or 1.0]
    named = {row["device"] for row in values} if len(report.devices) <= _NAMED else {"fleet"}
    ends = [{"panel": "", "curve": r["device"], "round": r["round"], "value": r["loss"]} for r in values]
    last = _labels([row for row in ends if row["curve"] in named], domain, _LOSS_HEIGHT, ".2g")
    last = [{**row, "of": "fleet" if row["curve"] == "fleet" else "each device"} for row in last]

    def build(width: int) -> Spec:
        of = ("fleet", "each device")
        inner = width - 66
        words = inner / max(40, inner - 7 * max(len(row["text"]) for row in last))
        x = field("round", "Q", "round, counted through the run")
        x["scale"] = {"domain": [1, 1 + words * max(1, len(place) - 1)], "nice": False}
        x["axis"] = {
            "values": _ticks(len(place)),
            "format": "d",
            "grid": False,
            "labelOverlap": True,
            "labelSeparation": 4,
        }
        y = field("loss", "Q", "training loss", axis={"tickCount": 4}, scale={"domain": domain, "nice": False})
        colour = field("of", "N", legend=None, scale=scale(of, (INK, MUTED)))
        look: Spec = {
            "color": colour,
            "strokeDash": field("of", "N", legend=None, scale=scale(of, ([1, 0], [2, 2]))),
            "strokeWidth": field("of", "N", legend=None, scale=scale(of, (2.4, 1))),
            "detail": {"field": "device"},
        }
        dots = {"x": x, "y": y, "color": colour, "tooltip": tips(device="device", round="round", loss="loss")}
        dots["shape"] = field("of", "N", legend=None, scale=scale(of, ("circle", "diamond")))
        text = {"x": x, "y": {**y, "field": "at_y"}, "text": {"field": "text"}, "color": colour}
        return {
            **FILLS,
            "width": width,
            "height": _LOSS_HEIGHT,
            "data": {"values": values},
            "layer": [
                layer("line", {"x": x, "y": y, **look}),
                layer("point", dots, size=14, filled=True, opacity=0.7),
                layer("text", text, values=last, align="left", dx=7),
            ],
        }

    caption = "Thick: the mean over devices, weighted by samples; thin and dotted: each device's own."
    if len(report.devices) > MANY:
        caption = "The mean over devices, weighted by samples."
    return Chart("loss", "Training loss", caption, build)
