"""The pages of a plan and of runs compared: the sentence, the picture and the tables of the terminal, in one file."""

from __future__ import annotations

import io
import itertools
import json
import re
from html import unescape
from pathlib import Path

import altair as alt
import msgspec
import pytest
from report_fixture import MIB, run_report
from rich.console import Console
from test_charts import layers
from test_cli_read import edgefl
from test_compare import real_run
from test_plan_verdict import PROCESS, SHORT, plan, price
from test_report_pages import Outline

from edgefl.budget.fit import RunPrice
from edgefl.records import GPU, HOST, Figure, Refusal
from edgefl.report import compare_output, plan_page
from edgefl.report.charts import NARROW, WIDE, Chart
from edgefl.report.compare import Comparison, compare, grids, headline, print_all
from edgefl.report.grid import Grid
from edgefl.report.price_tables import price_grids
from edgefl.report.verdict import verdict
from edgefl.run_records import RunReport

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\"'&"


def planned() -> RunPrice:
    found = price(plan("alpha", 1), plan("beta", 1), plan("beta", 2, refusal=SHORT), plan("gamma", 1, limits=()))
    return msgspec.structs.replace(found, warnings=("no device has text",), trainer_base_bytes=8 * MIB)


def compared(count: int = 2) -> Comparison:
    first = run_report()
    settings = {**first.config, "training": {"epochs": 3, "batch_size": 16}}
    scores = [msgspec.structs.replace(row, value=row.value / 2) for row in first.evaluations]
    other = msgspec.structs.replace(first, run="other", config=settings, evaluations=tuple(scores))
    return compare([first, *[other] * (count - 1)])


def shown(page: str) -> str:
    """The text of a page outside its pictures."""
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)))


def cells(tables: list[Grid]) -> set[str]:
    return {cell.text for grid in tables for row in grid.rows for cell in row}


PAGES = [
    pytest.param(plan_page.to_html(planned(), ["Two devices are assumed."]), id="plan"),
    pytest.param(compare_output.to_html(compared()), id="compare"),
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_one_file_without_scripts_or_other_hosts(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert outline.outward == []
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe", page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'none'"
    assert len(outline.ids) == len(set(outline.ids))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_the_sentence_then_one_picture_then_the_tables(page: str) -> None:
    places = [page.index(one) for one in ("<h1>", "<figure", "<table")]
    assert places == sorted(places)
    assert page.count("<figure") == 1
    assert page.count("<svg") == 2  # for a wide page and for a narrow one
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_the_page_of_a_plan_says_what_the_terminal_says() -> None:
    text = shown(plan_page.to_html(planned(), ["Two devices are assumed."]))
    assert verdict(planned()) in text
    assert "Two devices are assumed." in text
    assert "Warning: no device has text" in text
    tables = price_grids(planned())
    assert len(tables) == 6
    assert all(grid.title in text for grid in tables)
    assert {cell for cell in cells(tables) if cell not in text} == set()


def test_the_page_of_a_comparison_says_what_the_terminal_says() -> None:
    found = compared()
    text = shown(compare_output.to_html(found))
    console = Console(record=True, width=200, file=io.StringIO())
    print_all(found, console)
    told = console.export_text()
    assert headline(found) in text
    assert told.startswith(headline(found))
    assert all(remark in text for remark in found.remarks)
    assert cells(grids(found)) == {cell for cell in cells(grids(found)) if cell in text and cell in told}


@pytest.mark.parametrize("name", [HOSTILE, "</style><img src=x onerror=alert(1)>"])
def test_names_and_settings_are_text_without_control_characters(name: str) -> None:
    rows = [plan(name, 1), plan("b", 1, refusal=Refusal("data", detail=name))]
    one = msgspec.structs.replace(planned(), name=name, devices=tuple(rows), warnings=(name,))
    other = msgspec.structs.replace(run_report(), run=name, config={"training": {"optimizer": name}}, status=name)
    for page in (plan_page.to_html(one, [name]), compare_output.to_html(compare([run_report(), other]))):
        assert name not in page
        assert "alert(1)" in page
        assert "<script" not in page
        assert "<img" not in page
        assert page.count("</style>") == 1
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", page)


def test_a_long_table_is_folded() -> None:
    many = msgspec.structs.replace(planned(), devices=tuple(plan(f"d{n}", 1, step=n) for n in range(1, 31)))
    assert "<details><summary>30 rows</summary>" in plan_page.to_html(many)
    assert "rows</summary>" not in plan_page.to_html(planned())


# The picture of a plan


def memory_of(found: RunPrice) -> dict[tuple[str, str], float]:
    chart = plan_page.memory(found)
    assert chart is not None
    return {(row["device"], row["what"]): row["mib"] for row in chart.spec()["data"]["values"]}


def test_a_plan_s_picture_holds_step_memory_against_what_each_budget_leaves_of_it() -> None:
    """PROCESS is 34 of 256 MiB, the idle trainer 8 of both: a step may take 248. SHORT is 412 of 256, of the step."""
    points = memory_of(planned())
    assert points["alpha", "predicted"] == 34 - 8
    assert points["alpha", "budget"] == 256 - 8
    assert (points["beta", "predicted"], points["beta", "budget"]) == (412, 248)  # the tighter of two budgets
    assert points["gamma", "predicted"] == 10
    assert ("gamma", "budget") not in points


def test_memory_beside_a_card_is_no_limit_of_the_step_and_other_refusals_have_no_point() -> None:
    limits = (
        msgspec.structs.replace(PROCESS, where=HOST),
        msgspec.structs.replace(SHORT, where=GPU, needed=10.0 * MIB),
    )
    payload = Refusal("payload", 9.0 * MIB, 8.0 * MIB, "B")
    found = price(plan("card", 1, limits=limits), plan("slow", 1, refusal=payload))
    assert memory_of(found) == {("card", "predicted"): 10, ("card", "budget"): 256}
    chart = plan_page.memory(found)
    assert chart is not None
    assert "Refused for another reason than memory: 1, see the table." in chart.caption
    assert plan_page.memory(price(plan("slow", 1, refusal=payload))) is None
    assert "<figure" not in plan_page.to_html(price(plan("slow", 1, refusal=payload)))


# The picture of a comparison


def picture(found: Comparison) -> Chart:
    chart = compare_output.picture(found)
    assert chart is not None
    return chart


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("count", [2, 4])
def test_the_picture_is_vega_lite_with_units_whose_fields_exist(width: int, count: int) -> None:
    for chart in (picture(compared(count)), plan_page.memory(planned())):
        assert chart is not None
        spec = chart.spec(width)
        alt.Chart.from_dict(spec, validate=True)
        for view, rows in layers(spec):
            known = {name for row in rows for name in row}
            channels = [one if isinstance(one, list) else [one] for one in view["encoding"].values()]
            used = {one["field"] for one in itertools.chain.from_iterable(channels) if "field" in one}
            assert used - known <= ({"text", "right"} if count > 2 else set())
            title = view["encoding"]["x"]["title"]
            assert re.search(r"\((MiB|%)|÷", title), title


def test_scores_are_percent_and_costs_multiples_of_the_first() -> None:
    scores, costs = picture(compared()).spec()["vconcat"]
    tried = {(row["what"], row["run"]): row for row in scores["data"]["values"]}
    whole = next(row for row in run_report().evaluations[::-1] if row.available == ("acc", "gyro"))
    assert tried["acc + gyro", "A"]["at"] == pytest.approx(100 * whole.value)
    assert tried["acc + gyro", "B"]["at"] == pytest.approx(50 * whole.value)
    assert tried["acc + gyro", "B"]["text"] == f"−{50 * whole.value:.1f}"
    assert {row["at"] for row in costs["data"]["values"]} == {1.0}
    assert {row["what"] for row in costs["data"]["values"]} >= {"step memory", "FLOPs", "payload sent"}
    assert "energy" not in {row["what"] for row in costs["data"]["values"]}  # a lower bound has no multiple


def test_many_runs_are_drawn_as_far_as_they_can_be_told_apart_and_nothing_as_zero() -> None:
    chart = picture(compared(8))
    rows = [row for panel in chart.spec()["vconcat"] for row in panel["data"]["values"]]
    assert {row["run"] for row in rows} == set("ABCDE")
    assert "The first 5 of 8 runs." in chart.caption
    assert headline(compared(8)).endswith("; 4 more in the tables.")
    sent = next(line for line in compared().lines if line.name == "payload sent")
    nothing = msgspec.structs.replace(sent, figures=(sent.figures[0], Figure(0.0)))
    found = compared()._replace(lines=tuple(nothing if line == sent else line for line in compared().lines))
    rows = picture(found).spec()["vconcat"][1]["data"]["values"]
    assert all(row["at"] > 0 for row in rows)  # a logarithmic scale has no zero


def test_runs_without_figures_are_compared_in_words() -> None:
    found = compare([RunReport(run="a"), RunReport(run="b")])
    assert compare_output.picture(found) is None
    page = compare_output.to_html(found)
    assert "No figure of these runs can be compared." in page
    assert "<svg" not in page


# The commands


def test_compare_writes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for name, sent in (("r1", 2.0 * MIB), ("r2", 1.0 * MIB)):
        real_run(runs, name, {"run": {"seed": 1}, "recipe": {}}, sent=sent, accuracy=0.8)
    asked = ("compare", "r1", "r2", "--runs", str(runs), "--html")
    code, out, told = edgefl(*asked, capsys=capsys)
    assert (code, out.startswith("B to A: accuracy 80.0 %")) == (0, True)
    assert f"wrote {runs / 'r1' / 'compare.html'}" in told
    page = (runs / "r1" / "compare.html").read_text(encoding="utf-8")
    assert "B to A: accuracy 80.0 % (+0.0 points), 0.500× the payload sent." in page
    assert edgefl(*asked, "-", capsys=capsys)[1] == page
    edgefl(*asked[:-1], "-o", str(tmp_path / "both.txt"), capsys=capsys)
    assert (tmp_path / "both.txt").read_text(encoding="utf-8").startswith("B to A: accuracy 80.0 %")


def test_plan_writes_its_page_beside_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.api.planning.price_of", lambda *_: planned())
    file = tmp_path / "pages" / "plan.html"
    code, out, told = edgefl("plan", "demo", "--html", str(file), "--format", "json", capsys=capsys)
    assert (code, f"wrote {file}" in told) == (0, True)
    assert json.loads(out)["schedule"] == "end_to_end"
    assert verdict(planned()) in shown(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("ratio", [0.83, 1.0, 1.9, 3000.0])
def test_a_picture_of_costs_has_two_ticks_and_no_mark_beyond_its_axis(ratio: float, width: int) -> None:
    found = compared()
    figures = (Figure(10.0), Figure(10.0 * ratio))
    costs = [msgspec.structs.replace(line, figures=figures) for line in found.lines if line.group == "costs"]
    chart = compare_output.picture(found._replace(lines=tuple(costs)))
    assert chart is not None
    axis = chart.spec(width)["vconcat"][-1]["layer"][1]["encoding"]["x"]
    low, high = axis["scale"]["domain"]
    ticks = axis["axis"]["values"]
    assert low <= min(1.0, ratio) <= max(1.0, ratio) <= high
    assert len([tick for tick in ticks if low <= tick <= high]) >= 2
