"""A report for programs and browsers: JSON, CSV, and an HTML page that needs nothing else."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from report_fixture import MIB, NO_ENERGY, run_report

from edgefl.records import Refusal
from edgefl.report import charts
from edgefl.report.parquet import to_parquet
from edgefl.report.tables import COLUMNS
from edgefl.report.writers import SCHEMA, to_csv, to_html, to_json
from edgefl.run_records import AssignmentRow, RunReport

REFUSED = AssignmentRow(device="a", status="refused", refusal=Refusal("data", 3, 16, "samples"))


@pytest.fixture(scope="module")
def report() -> RunReport:
    return run_report()


@pytest.fixture(scope="module")
def page(report: RunReport) -> str:
    return to_html(report)


# JSON and CSV


def test_json_holds_every_row_and_comes_back(report: RunReport) -> None:
    body = json.loads(to_json(report))
    assert body.pop("schema") == SCHEMA
    assert body.pop("tables").keys() == COLUMNS.keys() - {"figures"}
    assert msgspec.convert(body, RunReport, strict=False) == msgspec.convert(
        msgspec.to_builtins(report), RunReport, strict=False
    )


def test_csv_tells_figures_in_base_units_and_null_with_its_reason(report: RunReport) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert tuple(rows[0]) == tuple(COLUMNS["figures"])
    energy = next(row for row in rows if row["figure"] == "energy_j" and row["device"] == "nano")
    assert (energy["measured"], energy["reason"], energy["unit"]) == ("", NO_ENERGY, "J")
    assert energy["kind"] == "missing"
    assert all((row["kind"] == "missing") == (row["measured"] == "") for row in rows if row["figure"])
    declined = next(row for row in rows if row["status"] == "declined" and row["figure"] == "step_peak_bytes")
    assert (declined["refusal"], declined["measured"]) == ("ceiling", "")
    assert float(declined["needed"]) == pytest.approx(26.4 * MIB)


def test_csv_keeps_a_refusal_without_figures() -> None:
    (line_,) = list(csv.DictReader(io.StringIO(to_csv(RunReport(run="r", assignments=(REFUSED,))))))
    assert (line_["refusal"], line_["needed"], line_["allowed"], line_["figure"]) == ("data", "3", "16", "")


def test_parquet_has_the_rows_of_the_csv_with_types_and_units(report: RunReport) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    evil = msgspec.structs.replace(report, run="=1+1", assignments=(*report.assignments, REFUSED))
    found = parquet.read_table(io.BytesIO(to_parquet(evil)))
    types = {field.name: str(field.type) for field in found.schema}
    assert tuple(types) == tuple(COLUMNS["figures"])
    assert {name for name, kind in types.items() if kind == "int64"} == {"stage", "round", "attempt"}
    assert {name for name, kind in types.items() if kind == "double"} == {"predicted", "measured", "needed", "allowed"}
    assert found.schema.metadata[b"edgefl.schema"] == SCHEMA.encode()
    rows, lines = found.to_pylist(), list(csv.DictReader(io.StringIO(to_csv(evil))))
    assert len(rows) == len(lines) > 100
    for row, line in zip(rows, lines, strict=True):
        assert line.pop("run") == "'" + row.pop("run")  # quotes are for spreadsheets
        typed = {
            name: (float(text) if text else None) if types[name] != "string" else text for name, text in line.items()
        }
        assert row == typed
    energy = next(row for row in rows if row["figure"] == "energy_j" and row["device"] == "nano")
    assert (energy["measured"], energy["reason"], energy["unit"]) == (None, NO_ENERGY, "J")


def test_the_same_run_gives_the_same_page(report: RunReport) -> None:
    small = msgspec.structs.replace(
        report, rounds=report.rounds[:2], evaluations=(), assignments=report.assignments[:4]
    )
    assert to_html(small) == to_html(small)


# HTML


class Outline(HTMLParser):
    """Collects ids, open tags and outward references."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.outward: list[str] = []
        self.tips: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []
        self.tips += [values["title"]] if values.get("title") else []
        for name in ("src", "href", "xlink:href"):
            target = values.get(name) or ""
            if target and not target.startswith("#"):
                self.outward.append(target)


def test_html_needs_nothing_from_outside_and_ids_are_unique(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert outline.outward == []
    assert "url(http" not in page
    assert "@import" not in page
    assert len(outline.ids) == len(set(outline.ids))


def test_html_links_lead_somewhere(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(outline.ids)


def test_html_follows_the_theme_and_names_every_colour_by_its_variable(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    body = page.split("<body>")[1].split("<script>")[0]
    assert not re.search("|".join(light for light, _ in charts.PALETTE.values()), body)
    assert body.count("<figure") == 6  # of a run without a price end to end
    assert body.count("<svg") == 12


def test_the_browser_is_told_to_fetch_nothing_and_to_run_our_script_alone(page: str) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src")
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.endswith(f"'sha256-{digest}'")


def test_a_static_page_has_the_same_pictures_and_no_script(report: RunReport, page: str) -> None:
    static = to_html(report, interactive=False)
    assert "<script" not in static
    assert "script-src 'none'" in static
    assert re.findall(r"<svg.*?</svg>", static, re.DOTALL) == re.findall(
        r"<svg.*?</svg>", page.split("<script>")[0], re.DOTALL
    )
    assert len(static) < 1_000_000 < len(page) < 2_500_000


def test_html_shows_reasons_as_tips_and_hides_credentials(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert NO_ENERGY in outline.tips
    assert "s3cret" not in page
    assert "mqtt://127.0.0.1:41883" in page


def test_html_escapes_what_devices_say(report: RunReport) -> None:
    evil = "<script>alert(1)</script>\x1b[31m"
    devices = tuple(msgspec.structs.replace(row, profile=evil) for row in report.devices)
    assignments = tuple(msgspec.structs.replace(row, device=evil) for row in report.assignments if row.device == "tiny")
    run = msgspec.structs.replace(
        report, name=evil, devices=devices, assignments=assignments, rounds=(), evaluations=()
    )
    text = to_html(run)
    assert evil not in text
    assert "alert(1)" in text
    held = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert held
    assert all(json.loads(one)["wide"] for one in held)


def test_html_of_an_empty_run_says_so() -> None:
    text = to_html(RunReport(run="x", status="running"))
    assert "No round has started yet." in text
    assert "still going on" in text
    assert "<svg" not in text
