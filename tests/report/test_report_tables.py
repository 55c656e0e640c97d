"""Tables of a run: questions of who reads the bill, each one query, answered as the page answers them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from fleet_fixture import share
from report_fixture import MIB, NO_ENERGY, run_report

import edgefl
from edgefl.cli import main
from edgefl.records import Budget, Figure, Traffic
from edgefl.report import bills, resources, rounds, story, units
from edgefl.report.tables import COLUMNS, table
from edgefl.report.totals import totals
from edgefl.report.waits import waits
from edgefl.report.writers import to_html
from edgefl.run_records import DeviceRow, EndToEnd, EventRow, RunReport

BOTH = ("acc", "gyro")
FIELDS: dict[str, Any] = {
    "name": "tables",
    "recipe": "lw-fedmml",
    "model": {
        "stages": 2,
        "encoders": {m: {"kind": "sensor", "width": 16, "depth": 2, "heads": 2, "patch": 4} for m in BOTH},
        "head": {"width": 16, "out": 8, "dropout": 0.0},
        "fusion_width": 16,
    },
    "training": {"rounds": [1, 1], "batch_size": 8},
    "fleet": [
        {"name": "wide", "groups": ["night"], "budget": {"step_memory_bytes": "64 MiB", "payload_bytes": "1 MiB"}},
        {"name": "narrow", "budget": {"flops": 60e6, "memory_bytes": "100 GiB"}},
        {"name": "none", "budget": {"payload_bytes": "4 KiB"}},
    ],
}


class Ran(NamedTuple):
    report: RunReport
    page: str
    folder: Path


def verb(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([str(word) for word in words])
    assert not ended.value.code


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A small run, its page as text, and its tables in each format."""
    place = tmp_path_factory.mktemp("tables")
    share(60, *BOTH, seed=5).save_npz(place / "all.npz")
    fields = {**FIELDS, "data": {"source": place / "all.npz"}}
    run = edgefl.run(fields, directory=place / "runs", export=False, page=False)
    for form in ("csv", "parquet"):
        verb("report", run.directory, "--format", form, "--tables", "-o", place / form)
    verb("report", run.directory, "--format", "json", "-o", place / "run.json")
    report = edgefl.load_report(run.directory).record
    verb("report", run.directory, "--static", "--html", place / "page.html")
    text = re.sub(r"<[^>]+>", " ", (place / "page.html").read_text(encoding="utf-8"))
    return Ran(report, " ".join(html.unescape(text).split()), place)


@pytest.fixture(params=["csv", "parquet", "json"])
def read(request: pytest.FixtureRequest, ran: Ran) -> Callable[[str], Any]:
    """Reader of a table as a data frame."""
    pd = pytest.importorskip("pandas")
    if request.param == "csv":
        return lambda name: pd.read_csv(ran.folder / "csv" / f"{name}.csv", keep_default_na=False, na_values=[""])
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
        return lambda name: pd.read_parquet(ran.folder / "parquet" / f"{name}.parquet")
    return lambda name: pd.DataFrame(json.loads((ran.folder / "run.json").read_text())["tables"][name])


def test_which_device_is_closest_to_its_limit_and_in_what(ran: Ran, read: Callable[[str], Any]) -> None:
    budgets = read("budgets")
    most = budgets.loc[budgets.share.astype(float).idxmax()]
    tightest = story.tightest(ran.report)
    assert tightest is not None
    assert float(most.share) == pytest.approx(tightest.share) == pytest.approx(float(most.measured) / most.allowed)
    used, allowed = (units.quantity(float(most[name]), most.unit) for name in ("measured", "allowed"))
    what = {"payload_bytes": "payload of a round", "flops": "FLOPs of a round"}[most.budget]
    where = f"in stage {most.stage}, round {most['round']}."
    assert f"Tightest budget: {most.device}, {what}, {used} of {allowed} {where}" in ran.page


def test_what_end_to_end_would_have_cost_in_total(ran: Ran, read: Callable[[str], Any]) -> None:
    whole = read("totals").set_index("figure").end_to_end.astype(float)
    told = re.search(r"end to end, predicted for the same device rounds: (.*?)\.\s[A-Z]", ran.page)
    assert told is not None
    memory, flops, payload, joules = told[1].split(", ", 3)
    assert memory == f"{units.quantity(whole.step_peak_bytes, 'B')} of step memory at most"
    assert flops == units.quantity(whole.flops, "FLOP")
    assert payload == f"{units.quantity(whole.payload_bytes, 'B')} of payload"
    assert joules.startswith("joules not known")
    trained = sum(row.status == "done" for row in ran.report.assignments)
    assert trained == 4
    assert whole.flops == pytest.approx(sum(2 * ran.report.end_to_end[name].flops for name in ("wide", "narrow")))


def test_joules(ran: Ran, read: Callable[[str], Any]) -> None:
    row = read("totals").set_index("figure").loc["energy_j"]
    if row.measured == row.measured and row.measured is not None:  # a machine with a sensor
        assert f"{units.quantity(row.measured, 'J')}" in ran.page
    else:
        assert f"joules not known ({row.reason.partition(':')[0]}); end to end, predicted" in ran.page


def test_why_a_device_was_refused(ran: Ran, read: Callable[[str], Any]) -> None:
    refused = read("refusals")
    first = refused[refused.device == "none"].iloc[0]
    assert (first.reason, float(first.allowed), first.unit, first.decided_by) == ("payload", 4096, "B", "plan")
    assert units.quantity(float(first.needed), "B") in ran.page


def test_which_round_was_slow_and_why(ran: Ran, read: Callable[[str], Any]) -> None:
    rounds = read("rounds")
    slow = rounds.loc[rounds.seconds.astype(float).idxmax()]
    told = f"{slow.waited_for}: {slow.waited_on} {units.seconds(float(slow.waited_s))}"
    assert slow.waited_for in {"wide", "narrow"}
    assert re.search(rf"{re.escape(units.number(float(slow.seconds)))} {re.escape(told)}", ran.page), told


def test_bytes_of_a_month(ran: Ran, read: Callable[[str], Any]) -> None:
    devices = read("devices").set_index("device")
    month = 30 * devices.wire_bytes.astype(float) / MIB  # of a fleet that has waited for less than ten minutes
    told = re.search(r"wide (\S+) (\S+) (\S+) \d{4}-", ran.page)
    assert told is not None
    assert 30 * float(told[1]) == pytest.approx(month.wide, rel=0.01)
    assert told[2] == units.number(float(devices.link_bytes.wide) / MIB)
    assert told[3] == units.number(float(devices.idle_bytes.wide) / MIB)
    assert devices.idle_month_bytes.isna().all()
    assert (devices.idle_month_reason == "waited for less than ten minutes without a run").all()


def test_the_pages_question_on_a_month_has_a_figure_or_the_reason(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "tables").symlink_to(ran.folder / "csv")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippet = (
        (Path(__file__).parents[2] / "docs/report.md")
        .read_text(encoding="utf-8")
        .rpartition("```python\n")[2]
        .partition("```")[0]
    )
    exec(compile(snippet, "docs/report.md", "exec"), names)  # noqa: S102 - the page's own example
    shown = dict(zip(names["devices"].device, names["month"], strict=True))
    assert shown["wide"] == "waited for less than ten minutes without a run"
    assert not names["month"].isna().any()


def test_accuracy_by_round_and_modality(ran: Ran, read: Callable[[str], Any]) -> None:
    scores = read("scores")
    last = scores[(scores.metric == "accuracy") & (scores.given == "acc") & (scores["mask"] == "zero")].iloc[-1]
    assert re.search(rf"acc alone (— )?{100 * float(last.value):.1f}", ran.page)
    assert len(scores[["stage", "round"]].drop_duplicates()) == 2


def test_a_table_has_its_columns_and_rows_in_every_format(ran: Ran, read: Callable[[str], Any]) -> None:
    for name in COLUMNS.keys() - {"figures"}:
        types, rows = table(ran.report, name)
        found = read(name)
        assert list(found.columns) == list(types)
        assert len(found) == len(rows) > 0, name
        assert {len(row) for row in rows} == {len(types)}


# Worked out by hand


def test_every_kind_of_budget_has_a_row_and_the_one_that_is_not_measured_its_reason() -> None:
    every = dict.fromkeys(Budget.__struct_fields__, 100)
    device = msgspec.structs.replace(run_report().devices[0], budget=Budget(**every))
    row = run_report().assignments[0]
    rows = table(RunReport(run="r", devices=(device,), assignments=(row,)), "budgets").rows
    found = {line[6]: dict(zip(COLUMNS["budgets"], line, strict=True)) for line in rows}
    assert found.keys() == set(Budget.__struct_fields__)
    payload = row.measured["payload_up_bytes"].value + row.measured["payload_down_bytes"].value  # type: ignore[operator]
    assert (found["payload_bytes"]["measured"], found["payload_bytes"]["share"]) == (payload, payload / 100)
    step = row.predicted["step_peak_bytes"].value
    assert found["memory_bytes"]["predicted"] == step + 231 * MIB  # type: ignore[operator]
    assert (found["disk_bytes"]["measured"], found["disk_bytes"]["reason"] != "") == (None, True)
    assert (found["energy_j"]["measured"], found["energy_j"]["reason"]) == (None, NO_ENERGY)


def test_the_wider_of_two_memory_budgets_may_be_the_closer_one() -> None:
    row = run_report().assignments[0]  # a step of a few MiB in a process of 231 and these
    budget = Budget(step_memory_bytes=100 * MIB, memory_bytes=1000 * MIB)
    device = msgspec.structs.replace(run_report().devices[0], budget=budget)
    used = max(resources.uses(device, row))
    assert (used.what, used.share) == ("process memory", row.measured["process_peak_bytes"].value / (1000 * MIB))  # type: ignore[operator]


def test_totals_add_up_and_peaks_do_not() -> None:
    rows = run_report().assignments[:2]
    priced = {row.device: EndToEnd(96 * MIB, 4e9, 8 * MIB, energy_j=5.0) for row in rows}
    del priced["nano"]
    found = {
        one.name: one for one in totals(msgspec.structs.replace(run_report(), assignments=rows, end_to_end=priced))
    }
    assert [row.device for row in rows] == ["orin-nano", "nano"]
    steps = [row.measured["step_peak_bytes"].value for row in rows]
    assert found["step_peak_bytes"].measured.value == max(filter(None, steps))
    assert found["step_peak_bytes"].end_to_end.value == 96 * MIB
    assert (found["flops"].end_to_end.value, found["energy_j"].end_to_end.value) == (4e9, 5.0)
    assert found["flops"].end_to_end.reason == "without 1 of 2 rounds: no price of this end to end"
    both = sum(row.measured[name].value or 0 for row in rows for name in ("payload_up_bytes", "payload_down_bytes"))
    assert found["payload_bytes"].measured.value == both
    assert found["energy_j"].measured == Figure(None, "measured", "", NO_ENERGY)


def test_the_share_of_a_price_that_leaves_out_devices_is_not_said() -> None:
    priced = {name: EndToEnd(96 * MIB, 4e9, 8 * MIB) for name in ("orin-nano", "nano", "gpu-box", "tiny")}
    whole = bills.fleet_totals(msgspec.structs.replace(run_report(), end_to_end=priced))
    assert whole.rows[1][-1].text.endswith("×")
    del priced["nano"]
    part = bills.fleet_totals(msgspec.structs.replace(run_report(), end_to_end=priced))
    assert (part.rows[1][4].text[:1], part.rows[1][-1].text) == ("≥", "")


def test_a_month_is_so_many_runs_and_the_waiting_at_its_measured_rate() -> None:
    base = run_report()
    traffic = Traffic(bytes=9 * MIB, seconds=7200.0, idle_bytes=MIB // 24, idle_s=3600.0)
    first, second, *_ = base.devices
    first = msgspec.structs.replace(first, capabilities=msgspec.structs.replace(first.capabilities, traffic=traffic))
    report = msgspec.structs.replace(base, devices=(first, second))
    found = [dict(zip(COLUMNS["devices"], row, strict=True)) for row in table(report, "devices").rows]
    both = sum(
        figure.value or 0.0
        for row in base.assignments
        if row.device == first.device and row.measured
        for figure in (row.measured["wire_up_bytes"], row.measured["wire_down_bytes"])
    )
    assert found[0]["wire_bytes"] == pytest.approx(both)
    assert (found[0]["link_bytes"], found[0]["idle_month_bytes"]) == (9 * MIB, pytest.approx(30 * MIB, rel=1e-4))
    assert [found[1][name] for name in ("link_bytes", "idle_bytes", "idle_s", "idle_month_bytes")] == [None] * 4
    grid = rounds.devices(report)
    names = {column.label: cell for column, cell in zip(grid.columns, grid.rows[0], strict=True)}
    month = 30 * (found[0]["wire_bytes"] / MIB) + found[0]["idle_month_bytes"] / MIB
    shown = [names[f"bytes on the link: {name}"].text for name in ("in this run", "waiting, a month")]
    assert 30 * float(shown[0]) + float(shown[1]) == pytest.approx(month, rel=0.01)
    assert names["bytes on the link: since its start"].text == "9.00"
    assert rounds.idle_month(Traffic(5000, 60.0, 5000, 59.0)) is None, "a handshake is no month"


def waiting(*events: EventRow, **changes: object) -> str:
    """What the first round of the fixture's run waited for; it begins at 12 s and takes 7.4 s."""
    base = run_report()
    start, first = base.started_at, base.rounds[0]
    joined = [EventRow(start, "device_joined", device=device.device) for device in base.devices]
    at = [EventRow(start + e.at, e.kind, e.stage, e.round, e.device, e.data) for e in events]
    begun = EventRow(first.started_at, "round_started", 1, 1, data={"participants": list(first.participants)})
    rows = tuple(msgspec.structs.replace(row, **changes) if row.device == "nano" else row for row in base.assignments)
    told = sorted((*joined, begun, *at), key=lambda event: event.at)
    return waits(msgspec.structs.replace(base, events=tuple(told), assignments=rows))[1, 1].text


def update(at: float, device: str) -> EventRow:
    return EventRow(at, "update", 1, 1, device)


EARLY = [update(15.0, device) for device in ("orin-nano", "gpu-box", "tiny")]


def test_a_round_waits_for_its_last_device_and_what_took_that_longest() -> None:
    assert waiting(*EARLY, update(19.0, "nano")) == "nano: upload 4.14 s"  # 2.86 s from offer to update, of the 7
    assert waiting(*EARLY, update(15.2, "nano")) == "nano: download and preparation 1.85 s"


def test_a_link_that_was_gone_is_said_from_the_last_sign_of_life_on() -> None:
    silent = EventRow(18.0, "device_left", device="nano", data={"reason": "silent for 5 s"})
    back = EventRow(19.0, "device_joined", device="nano")
    assert waiting(*EARLY, silent, back, update(19.2, "nano")) == "nano: link gone 6.00 s"
    willed = EventRow(18.0, "device_left", device="nano", data={"reason": "offline"})
    assert waiting(*EARLY, willed, back, update(19.2, "nano")) == "nano: upload 3.34 s"  # before and after it


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"payload_down_bytes": Figure(3e6), "compute_s": Figure(1.5)}, "nano: transfer 5.90 s"),
        ({"payload_down_bytes": Figure(3e6), "compute_s": Figure(6.0)}, "nano: training 6.00 s"),
        ({"payload_down_bytes": Figure(3e6), "compute_s": Figure(reason="not trained")}, "nano: transfer 7.40 s"),
        ({}, "nano: no answer 7.40 s"),
    ],
)
def test_a_late_device_is_told_by_what_it_moved_and_trained(figures: dict[str, Figure], said: str) -> None:
    assert waiting(*EARLY, status="late", measured=figures) == said


def test_an_evaluation_has_its_seconds_and_a_device_that_never_came_is_not_away() -> None:
    base = run_report()
    events = (*base.events, EventRow(base.rounds[0].ended_at + 2.5, "evaluated", 1, 1))  # type: ignore[operator]
    report = msgspec.structs.replace(base, events=events, devices=(*base.devices, DeviceRow("later")))
    assert waits(report)[1, 1].evaluation_s == pytest.approx(2.5)
    assert waits(report)[1, 2].evaluation_s is None
    assert "away" not in to_html(report, interactive=False).replace("taken away", "")
