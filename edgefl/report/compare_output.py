"""Output of a comparison of runs: JSON and CSV in base units, and an HTML page.

The page: one sentence, a picture of scores and costs against the first run, the tables.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from edgefl.report.budget_plots import log_ticks
from edgefl.report.charts import MUTED, NARROW, SERIES, SHAPES, Chart, Spec, Values, field, layer, scale, tips
from edgefl.report.compare import Comparison, grids, headline, label
from edgefl.report.compare_lines import Line, against, multiple
from edgefl.report.pages import page
from edgefl.report.writers import inert

#: Grows when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA = "edgefl.compare/1"
CSV_COLUMNS = ("label", "run", "group", "figure", "unit", "value", "ratio", "points", "kind", "source", "reason")

#: Conditions of the picture's scores; the table has all.
_SCORES = 12
#: Pixels of a row.
_ROW = 24

_Row = tuple[str | float | None, ...]


def to_json(found: Comparison) -> str:
    """Runs, figures with their ratios, settings and remarks as indented JSON; ``schema`` names its form."""
    keys = ("run", "name", "recipe", "status", "started_at", "finished_at")
    body = {
        "schema": SCHEMA,
        "runs": [
            {"label": label(index), **{key: getattr(run, key) for key in keys}} for index, run in enumerate(found.runs)
        ],
        "figures": [
            {**msgspec.to_builtins(line), "ratios": line.ratios, "points": line.points} for line in found.lines
        ],
        "settings": {setting.path: setting.values for setting in found.settings},
        "remarks": found.remarks,
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def to_csv(found: Comparison) -> str:
    """One line per run and figure, and per run and setting that differs; base units, shares of one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in _csv_rows(found):
        writer.writerow(map(inert, row))
    return out.getvalue()


def _csv_rows(found: Comparison) -> Iterator[_Row]:
    """A row of ``CSV_COLUMNS`` for each run and figure, and for each run and setting."""
    for index, run in enumerate(found.runs):
        head = (label(index), run.run)
        for line in found.lines:
            figure, change = line.figures[index], (line.ratios[index], line.points[index])
            origin = (figure.kind, figure.source) if figure.value is not None else ("missing", "")
            yield (*head, line.group, line.name, line.unit, figure.value, *change, *origin, figure.reason)
        for setting in found.settings:
            yield (*head, "settings", setting.path, "", setting.values[index], None, None, "", "", "")


def to_html(found: Comparison) -> str:
    """The page, without scripts."""
    chart = picture(found)
    runs, *tables = grids(found)
    return page(
        "brief.html.j2",
        [chart] if chart else [],
        title="Runs compared · EdgeFL",
        facts=[f"{label(index)} {run.run}" for index, run in enumerate(found.runs)],
        headline=headline(found),
        remarks=runs.notes,
        tables=[replace(runs, notes=()), *tables],
        details=[],
    )


def picture(found: Comparison) -> Chart | None:
    """Chart of the runs' scores in percent and, below, of costs as multiples of the first run's."""
    shown = min(len(found.runs), len(SERIES))
    scores = [one for one in found.lines if one.group == "scores" and one.unit == "share"][:_SCORES]
    costs = [one for one in found.lines if one.group == "costs" and one.unit != "rounds" and _known(one)]
    if not scores and not costs:
        return None

    metrics = {one.name.partition(", ")[0] for one in scores}
    metric = metrics.pop() if len(metrics) == 1 else ""

    def build(width: int) -> Spec:
        tried = _rows(scores, shown, len(metric) + 2 if metric else 0)
        took = _rows([msgspec.structs.replace(one, name=one.name.partition(", ")[0]) for one in costs], shown)
        panels = [_scores(tried, f"{metric or 'score'} (%)", width)] if tried else []
        return {"vconcat": [*panels, *([_costs(took, width)] if took else [])], "spacing": 24}

    caption = (
        "Scores, with the difference to A in points; what training took as a multiple of A's, left of 1 is less. What "
        "a run lacks is in the tables alone."
    )
    bounds = [label(n) for n in range(shown) if any(one.figures[n].value and one.figures[n].reason for one in costs)]
    if bounds:
        caption += f" Sums of {', '.join(bounds)} are lower bounds: rounds are missing in them."
    if shown < len(found.runs):
        caption += f" The first {shown} of {len(found.runs)} runs."
    return Chart("compared", "Scores and costs of the runs", caption, build)


def _known(line: Line) -> bool:
    return any(multiple(line, index) for index in range(1, len(line.figures)))


def _rows(lines: Sequence[Line], shown: int, cut: int = 0) -> Values:
    """Chart rows by figure and run; of two runs the second is labelled against the first. ``cut``: prefix of names."""
    rows: Values = []
    for line in lines:
        score = line.group == "scores"
        times = (multiple(line, index) for index in range(len(line.figures)))
        values = [figure.value for figure in line.figures] if score else list(times)
        here: Values = [
            {"what": line.name[cut:], "run": label(index), "at": 100 * value if score else value}
            for index, value in enumerate(values[:shown])
            if value is not None and (score or value > 0)
        ]
        if shown == len(here) == 2:
            here[1] |= {"text": against(line, 1), "right": max(row["at"] for row in here)}
        rows += here
    return rows


def _scores(rows: Values, title: str, width: int) -> Spec:
    marks = [row["at"] for row in rows]
    room = max(1.0, (max(marks) - min(marks)) * 0.08)
    over = {"nice": False, "zero": False, "domain": [max(0.0, min(marks) - room), min(100.0, max(marks) + room)]}
    return _panel(rows, title, width, over, {"format": ",~r", "tickCount": 3 if width == NARROW else 8})


def _costs(rows: Values, width: int) -> Spec:
    marks = [row["at"] for row in rows]
    ticks = log_ticks(marks, (1,) if width == NARROW else (1, 2, 5))
    domain = [min(marks + ticks), max(marks + ticks)]
    axis = {"values": ticks, "format": ",~r", "labelOverlap": True}
    return _panel(
        rows, "figure ÷ A's (log scale)", width, {"type": "log", "nice": False, "padding": 24, "domain": domain}, axis
    )


def _panel(rows: Values, title: str, width: int, over: Spec, axis: Spec) -> Spec:
    """Panel with one row per figure and a point per run."""
    words = 120 if width == NARROW else 220
    runs = sorted(dict.fromkeys(row["run"] for row in rows))
    sizes = [150 - 100 * index / max(1, len(runs) - 1) for index in range(len(runs))]  # around one another where equal
    y = field("what", "N", sort=None, axis={"labelLimit": words, "minExtent": words + 16})
    x = field("at", "Q", title, scale=over, axis=axis)
    look: Spec = {
        "color": field("run", "N", scale=scale(runs, SERIES)),
        "shape": field("run", "N", scale=scale(runs, SHAPES)),
        "size": field("run", "N", scale=scale(runs, sizes)),
        "tooltip": tips(what="figure", run="run", at=title),
    }
    return {
        "width": width - words - (105 if width == NARROW else 150),
        "height": {"step": _ROW},
        "data": {"values": rows},
        "layer": [
            layer("rule", {"y": y, "x": {**x, "aggregate": "min"}, "x2": {"field": "at", "aggregate": "max"}}),
            layer("point", {"y": y, "x": x, **look}, strokeWidth=2, filled=False, opacity=1),
            layer(
                "text",
                {"y": y, "x": {**x, "field": "right"}, "text": {"field": "text"}},
                where="isValid(datum.text)",
                align="left",
                dx=9,
                color=MUTED,
            ),
        ],
    }
