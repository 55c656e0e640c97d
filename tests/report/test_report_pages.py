"""A report for programs and browsers: JSON, CSV, and an HTML page that needs nothing else."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from report_fixture import MIB, NO_ENERGY, run_report

from edgefl.records import Budget, Refusal
from edgefl.report import plots
from edgefl.report.writers import CSV_COLUMNS, SCHEMA, to_csv, to_html, to_json
from edgefl.run_records import AssignmentRow, DeviceRow, RunReport


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
    assert msgspec.convert(body, RunReport, strict=False) == msgspec.convert(
        msgspec.to_builtins(report), RunReport, strict=False
    )


def test_csv_tells_figures_in_base_units_and_null_with_its_reason(report: RunReport) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert tuple(rows[0]) == CSV_COLUMNS
    energy = next(row for row in rows if row["figure"] == "energy_j" and row["device"] == "nano")
    assert (energy["measured"], energy["reason"], energy["unit"]) == ("", NO_ENERGY, "J")
    declined = next(row for row in rows if row["status"] == "declined" and row["figure"] == "step_peak_bytes")
    assert (declined["refusal"], declined["measured"]) == ("ceiling", "")
    assert float(declined["needed"]) == pytest.approx(26.4 * MIB)


def test_csv_keeps_a_refusal_without_figures() -> None:
    row = AssignmentRow(device="a", status="refused", refusal=Refusal("data", 3, 16, "samples"))
    (line_,) = list(csv.DictReader(io.StringIO(to_csv(RunReport(run="r", assignments=(row,))))))
    assert (line_["refusal"], line_["needed"], line_["allowed"], line_["figure"]) == ("data", "3", "16", "")


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


def test_html_follows_the_theme_and_has_no_stand_in_colours(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert not re.search(r"#0[1-6]0[1-6]0[0-6]", page)
    assert page.count("<svg") == 3


def test_html_shows_reasons_as_tips_and_hides_credentials(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert NO_ENERGY in outline.tips
    assert "s3cret" not in page
    assert "mqtt://127.0.0.1:41883" in page


def test_html_escapes_what_devices_say(report: RunReport) -> None:
    evil = "<script>alert(1)</script>"
    devices = tuple(msgspec.structs.replace(row, profile=evil) for row in report.devices)
    assignments = tuple(msgspec.structs.replace(row, device=evil) for row in report.assignments if row.device == "tiny")
    run = msgspec.structs.replace(
        report, name=evil, devices=devices, assignments=assignments, rounds=(), evaluations=()
    )
    text = to_html(run)
    assert "<script" not in text


def test_html_of_an_empty_run_says_so() -> None:
    text = to_html(RunReport(run="x", status="running"))
    assert "No round has started yet." in text
    assert "still going on" in text
    assert "<svg" not in text


def test_memory_plot_draws_the_devices_closest_to_their_budget(
    report: RunReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "MAX_PANELS", 2)
    many = [f"d{number:02d}" for number in range(5)]
    base = next(row for row in report.assignments if row.device == "nano" and row.status == "done")
    rows = tuple(msgspec.structs.replace(base, device=name) for name in many)
    budgets = tuple(DeviceRow(name, budget=Budget(step_memory_bytes=(30 - n) * MIB)) for n, name in enumerate(many))
    plot = plots.memory(msgspec.structs.replace(report, devices=budgets, assignments=rows))
    assert plot is not None
    assert "d04" in plot.svg
    assert "d00" not in plot.svg
    assert "Of 5 devices, the 2 closest to their budget." in plot.caption
