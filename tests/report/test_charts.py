"""Every chart as data: its spec is Vega-Lite, its fields exist, it has units and a title, no mark is a colour alone."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import altair as alt
import msgspec
import pytest
from browser_fixture import chromium
from report_fixture import MIB, run_report

from edgefl.records import Budget
from edgefl.report import charts, crowds, model_plots
from edgefl.report.budget_plots import memory
from edgefl.report.charts import NARROW, WIDE, Chart, figure
from edgefl.report.fleet_plots import by_stage
from edgefl.report.writers import PICTURES, to_html
from edgefl.run_records import DeviceRow, EndToEnd, EvaluationRow, RunReport

REPORT = msgspec.structs.replace(
    run_report(), end_to_end={name: EndToEnd(96.0 * MIB, 4e10, 8.0 * MIB) for name in ("orin-nano", "nano", "gpu-box")}
)
CHARTS = [chart for chart in (made(REPORT) for made in PICTURES) if chart is not None]
EVERY = [pytest.param(chart, width, id=f"{chart.name}-{width}") for chart in CHARTS for width in (WIDE, NARROW)]
#: Axes of these say what they count; all others have a unit in brackets, or a ratio.
COUNTED = {"round", "stage", "round, counted through the run", "number of devices", "training loss"}


def layers(
    spec: dict[str, Any], data: dict[str, Any] | None = None
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(one view of the spec, the rows it draws)."""
    data = spec.get("data", data)
    inner = [*spec.get("layer", []), *spec.get("vconcat", []), *([spec["spec"]] if "spec" in spec else [])]
    for one in inner:
        yield from layers(one, data)
    if not inner:
        yield spec, (data or {}).get("values", [])


def test_there_is_a_chart_of_everything() -> None:
    names = ["memory", "timeline", "saving", "accuracy", "loss", "prediction", "stages-of-devices"]
    assert [chart.name for chart in CHARTS] == names


@pytest.mark.parametrize(("chart", "width"), EVERY)
def test_a_spec_is_vega_lite(chart: Chart, width: int) -> None:
    alt.Chart.from_dict(chart.spec(width), validate=True)


@pytest.mark.parametrize(("chart", "width"), EVERY)
def test_every_field_is_in_the_data(chart: Chart, width: int) -> None:
    for view, rows in layers(chart.spec(width)):
        known = {name for row in rows for name in row}
        for channel in itertools.chain.from_iterable(
            one if isinstance(one, list) else [one] for one in view["encoding"].values()
        ):
            assert channel.get("field", next(iter(known), None)) in known | {None}


@pytest.mark.parametrize(("chart", "width"), EVERY)
def test_every_axis_of_numbers_says_its_unit(chart: Chart, width: int) -> None:
    for view, _ in layers(chart.spec(width)):
        for name in ("x", "y"):
            channel = view["encoding"].get(name, {})
            if channel.get("type") == "quantitative" and "field" in channel:
                title = channel["title"]
                assert title in COUNTED or re.search(r"\((MiB|%|s|min|h)|÷|^% of", title), title


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_a_chart_has_a_title_and_a_sentence_that_reads_it(chart: Chart) -> None:
    assert chart.title[0].isupper()
    assert chart.caption.endswith(".")
    assert len(chart.caption) > 40
    assert chart.title in chart.spec()["description"]


@pytest.mark.parametrize(("chart", "width"), EVERY)
def test_no_mark_is_told_by_its_colour_alone(chart: Chart, width: int) -> None:
    views = list(layers(chart.spec(width)))
    for view, rows in views:
        colour = view["encoding"].get("color", {})
        if "field" not in colour:
            continue
        kinds = {row[colour["field"]] for row in rows if colour["field"] in row}
        others = {name for name, one in view["encoding"].items() if one != colour and isinstance(one, dict)} & {
            *("shape", "strokeDash", "strokeWidth", "text"),
        }
        alone = view.get("transform", [{}])[0].get("filter", "")
        texts = [one["encoding"]["text"] for one, _ in views if "text" in one["encoding"]]
        assert len(kinds) < 2 or others or "activity ==" in alone or texts, view


def test_legends_stand_above() -> None:
    assert charts._CONFIG["legend"]["orient"] == "top"
    assert not re.search(r'"orient": "(left|right|bottom)', json.dumps([chart.spec() for chart in CHARTS]))


@pytest.fixture(scope="module")
def outside() -> Iterator[Callable[[str], list[str]]]:
    """What of a page lies outside its picture, marks and legends, or is wider than the screen: desk and phone."""
    with chromium() as browser:

        def look(text: str) -> list[str]:
            found: list[str] = []
            for width in (1280, 390):
                page = browser.new_page(viewport={"width": width, "height": 900})
                page.set_content(text)
                if "<script>" in text:
                    for one in page.locator("figure").all():
                        one.scroll_into_view_if_needed()
                        one.locator(".vega-embed svg").wait_for()
                found += page.evaluate(_OUTSIDE)
                page.close()
            return found

        yield look


#: Script -> figure, mark and text of what is drawn beyond the edge of its picture, or over the next in a legend.
_OUTSIDE = """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const all = svg.getBoundingClientRect();
  if (!all.width) return [];
  const far = [...svg.querySelectorAll("text, path, line, rect, image")].filter((one) => {
    const box = one.getBoundingClientRect();
    const seen = box.width + box.height > 0 && getComputedStyle(one).opacity !== "0";
    const aside = box.left < all.left - 1 || box.right > all.right + 1;
    return seen && (aside || box.top < all.top - 1 || box.bottom > all.bottom + 1);
  });
  const wide = all.right > innerWidth ? [svg] : [];
  const symbols = [...svg.querySelectorAll(".role-legend-symbol path")].map((one) => one.getBoundingClientRect());
  const covering = [...svg.querySelectorAll(".role-legend-label text")].filter((one) => {
    const box = one.getBoundingClientRect();
    const level = (other) => other.top < box.bottom && other.bottom > box.top;
    return symbols.some((other) => level(other) && other.left > box.left && other.left < box.right);
  });
  far.push(...covering);
  const name = `${innerWidth} ${svg.closest("figure").id}`;
  return [...far, ...wide].map((one) => `${name} ${one.tagName} ${one.textContent.slice(0, 40)}`);
})"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "interactive", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "interactive"]
)
def test_no_mark_and_no_legend_lies_outside_the_picture(interactive: bool, outside: Callable[[str], list[str]]) -> None:
    assert outside(to_html(REPORT, interactive=interactive)) == []


def test_what_lies_outside_a_picture_is_found(outside: Callable[[str], list[str]]) -> None:
    lost = '<figure id="x"><svg width="100" height="20"><text x="90" y="15">legend</text></svg></figure>'
    assert outside(lost) == ["1280 x text legend", "390 x text legend"]


def test_data_cannot_end_the_script_it_is_in() -> None:
    evil = "</script><script>alert(1)</script>"
    chart = Chart(
        "x", "X", "Y.", lambda _: {"data": {"values": [{"a": evil}]}, **charts.layer("text", {"text": {"field": "a"}})}
    )
    markup = figure(chart)
    assert markup.count("<script") == 1
    assert markup.count("</script") == 1
    held = re.findall(r"<script[^>]*>(.*?)</script>", markup)[0]
    assert json.loads(held)["rows"] == [{"a": evil}]


# Accuracy


def with_sensors(names: tuple[str, ...], masks: tuple[str, ...]) -> RunReport:
    subsets = [some for size in range(1, len(names)) for some in itertools.combinations(names, size)]
    rows = [EvaluationRow(1, n, names, "none", "accuracy", 0.9, 10) for n in (1, 2)]
    rows += [EvaluationRow(1, n, some, mask, "accuracy", 0.5, 10) for some in subsets for mask in masks for n in (1, 2)]
    return msgspec.structs.replace(run_report(), evaluations=tuple(rows))


@pytest.mark.parametrize(
    ("names", "panels"), [(("acc", "gyro"), 2), (("acc", "gyro", "press"), 6), (("a", "b", "c", "d"), 14)]
)
def test_every_subset_has_a_panel_and_every_mask_a_label_that_none_covers(names: tuple[str, ...], panels: int) -> None:
    masks = ("zero", "prototype", "reconstruction")
    chart = model_plots.accuracy(with_sensors(names, masks))
    assert chart is not None
    rows = chart.spec()["data"]["values"]
    assert len({row["panel"] for row in rows}) == panels
    labels = [row for row in rows if "text" in row]
    domain = chart.spec()["spec"]["layer"][0]["encoding"]["y"]["scale"]["domain"]
    for panel in {row["panel"] for row in rows}:
        here = sorted(row["at_y"] for row in labels if row["panel"] == panel)
        assert [row["curve"] for row in labels if row["panel"] == panel].count("zero") == 1
        assert len(here) == len(masks) + 1
        least = (domain[1] - domain[0]) * model_plots._LABEL / model_plots._HEIGHT
        assert min(b - a for a, b in itertools.pairwise(here)) >= least - 1e-9
        assert domain[0] <= here[0] <= here[-1] <= domain[1]


def test_no_two_curves_of_a_plot_have_one_colour_and_dash() -> None:
    chart = model_plots.accuracy(with_sensors(("a", "b", "c", "d"), ("zero", "prototype", "reconstruction", "random")))
    assert chart is not None
    line, points, _ = (view["encoding"] for view, _ in layers(chart.spec()))
    for looks in (line["color"], line["strokeDash"], points["shape"]):
        assert looks["scale"]["domain"] == ["complete", "zero", "prototype", "reconstruction", "random"]
    looks = zip(line["color"]["scale"]["range"], map(str, line["strokeDash"]["scale"]["range"]), strict=True)
    assert len(set(looks)) == 5
    assert len(set(points["shape"]["scale"]["range"])) == 5


def test_the_scale_holds_what_there_is_and_no_more() -> None:
    chart = model_plots.accuracy(with_sensors(("a", "b"), ("zero",)))
    assert chart is not None
    assert chart.spec()["spec"]["layer"][0]["encoding"]["y"]["scale"]["domain"] == pytest.approx([46.8, 93.2])


# Many devices


def many(count: int) -> RunReport:
    base = next(row for row in REPORT.assignments if row.device == "nano" and row.status == "done")
    names = [f"d{number:03d}" for number in range(count)]
    rows = tuple(msgspec.structs.replace(base, device=name) for name in names)
    budgets = tuple(DeviceRow(name, budget=Budget(step_memory_bytes=(600 - n) * MIB)) for n, name in enumerate(names))
    return msgspec.structs.replace(REPORT, devices=budgets, assignments=rows, events=())


def test_of_many_devices_the_nearest_to_their_budget_are_named_below_the_quantiles() -> None:
    chart = memory(many(crowds.MANY + 5))
    assert chart is not None
    shown = list(dict.fromkeys(row["device"] for row in chart.spec()["data"]["values"]))
    assert len(shown) == crowds.WORST + len(crowds.QUANTILES)
    assert shown[0] == f"d{crowds.MANY + 4:03d}"
    assert "d000" not in shown
    assert f"of {crowds.MANY + 5} devices the {crowds.WORST} nearest to their budget, and 25 others" in chart.caption
    few = memory(many(crowds.MANY))
    assert few is not None
    assert len({row["device"] for row in few.spec()["data"]["values"]}) == crowds.MANY


def test_the_legend_of_the_memory_plot_names_only_what_is_drawn() -> None:
    free = tuple(msgspec.structs.replace(row, budget=Budget()) for row in REPORT.devices)
    for report, kinds in (
        (REPORT, ["measured", "predicted", "budget"]),
        (msgspec.structs.replace(REPORT, devices=free), ["measured", "predicted"]),
    ):
        chart = memory(report)
        assert chart is not None
        assert chart.spec()["layer"][-2]["encoding"]["color"]["scale"]["domain"] == kinds


def test_a_late_round_does_not_make_a_mean_round_cheaper() -> None:
    (first, *_) = [row for row in REPORT.assignments if row.status == "done"]
    moved = {name: first.measured[name] for name in ("payload_up_bytes", "payload_down_bytes")}
    late = msgspec.structs.replace(first, round=99, status="late", measured=moved)
    charts_of = [
        by_stage(msgspec.structs.replace(REPORT, assignments=(*REPORT.assignments, *more))) for more in ((), (late,))
    ]
    without, with_late = (chart.spec()["data"]["values"] for chart in charts_of if chart is not None)
    assert without == with_late


def test_a_quantile_is_a_value_that_is_there() -> None:
    assert [crowds.quantile([5, 1, 4, 2, 3], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1, 3, 5, 5]


def test_a_device_that_never_trained_shows_its_budget_alone() -> None:
    kept = tuple(row for row in REPORT.assignments if row.device != "tiny")
    chart = memory(msgspec.structs.replace(REPORT, assignments=kept))
    assert chart is not None
    points, labels = (
        next(iter(rows))
        for rows in ([[r for r in rows if r["device"] == "tiny"]] for _, rows in [*layers(chart.spec())][-2:])
    )
    assert [row["what"] for row in points] == ["budget"]
    assert [row["text"] for row in labels] == ["not trained"]
    assert memory(msgspec.structs.replace(REPORT, assignments=())) is None
