"""What a report states of a run: who took part and who did not, why, and whether the run still goes on."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import msgspec
from ledger_fixture import ledger_in
from report_fixture import START, assignment, round_row, run_report
from rich.console import Console

from coordinator.ledger.ledger import Ledger
from edgefl.api.runs import read_run, read_runs
from edgefl.cli.show import runs_table
from edgefl.plan.job import RunPlan
from edgefl.records import Refusal
from edgefl.report import decisions, rounds, units
from edgefl.report.grid import Grid, print_grid
from edgefl.report.writers import print_report, to_html
from edgefl.run_records import AssignmentRow, BundleRow, DeviceRow, EventRow, RunReport
from edgefl.storage.disk import hold_directory

EVERYBODY = "Every device took part in every round."
STAGES = range(1, 6)


def terminal(report: RunReport, width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_report(report, console, verbose=True)
    return console.export_text()


def shown(grid: Grid, width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_grid(grid, console)
    return console.export_text()


def fleet(*others: str, tell: dict[tuple[int, int], list[EventRow]] | None = None) -> RunReport:
    """Five stages of two rounds that gpu-box and nobody else trains; ``tell``: events before a round begins."""
    rounds, rows = [], []
    events = [EventRow(START, "run_started"), EventRow(START, "device_joined", device="gpu-box")]
    for stage, number in itertools.product(STAGES, range(2)):
        rows.append(assignment("gpu-box", stage, number))
        rounds.append(round_row(stage, number, rows[-1:]))
        events += (tell or {}).get((stage, number + 1), [])
        events.append(EventRow(START, "round_started", stage, number + 1, data={"participants": ["gpu-box"]}))
    devices = tuple(DeviceRow(name) for name in ("gpu-box", *others))
    return RunReport(
        run="lab2", status="done", devices=devices, rounds=tuple(rounds), assignments=tuple(rows), events=tuple(events)
    )


def joined(device: str) -> EventRow:
    return EventRow(START, "device_joined", device=device)


def left(device: str) -> EventRow:
    return EventRow(START, "device_left", device=device, data={"reason": "offline"})


# Who took part


def test_everybody_took_part_is_said_only_where_it_is_so() -> None:
    assert EVERYBODY in terminal(fleet())
    away = fleet("p3", tell={(1, 1): [joined("p3")], (1, 2): [left("p3")]})
    assert EVERYBODY not in terminal(away)
    assert EVERYBODY not in to_html(away)


def test_a_device_that_was_offline_is_told_with_the_rounds_and_stages() -> None:
    asked = AssignmentRow(device="p3", stage=1, round=1, attempt=1, status="done")
    report = fleet("p3", tell={(1, 1): [joined("p3")], (1, 2): [left("p3")]})
    report = msgspec.structs.replace(report, assignments=(*report.assignments, asked))
    text = terminal(report)
    line = next(row for row in text.splitlines() if row.startswith("p3 ") and "offline" in row)
    assert line.split() == ["p3", "offline", "9", "/", "10", "1", "(round", "2),", "2–5"]
    assert "offline" in to_html(report)
    assert "p3: offline, not offered in 9 of 10 rounds (stages 1 (round 2), 2–5)." in to_html(report)


def test_a_device_that_comes_back_or_never_came_is_told_by_stage() -> None:
    back = {(1, 1): [joined("p3"), left("p3")], (3, 2): [joined("p3")]}
    lines = terminal(fleet("p3", "p4", tell=back)).splitlines()
    assert any(row.split() == ["p3", "offline", "5", "/", "10", "1–2,", "3", "(round", "1)"] for row in lines)
    assert any(row.split() == ["p3", "not", "chosen", "5", "/", "10", "3", "(round", "2),", "4–5"] for row in lines)
    assert any(row.split() == ["p4", "not", "connected", "yet", "10", "/", "10", "1–5"] for row in lines)


def test_a_device_that_a_slot_did_not_draw_is_told_so() -> None:
    report = fleet("p3", tell={(1, 1): [joined("p3")]})
    report = msgspec.structs.replace(report, config={"recipe": {"select": {"random": {"share": 0.5}}}})
    assert "not chosen (select: random)" in terminal(report)


def test_who_was_at_work_on_an_earlier_round_is_told_so() -> None:
    report = fleet("p3", tell={(1, 1): [joined("p3")]})
    events = tuple(
        msgspec.structs.replace(event, data={**event.data, "behind": ["p3"]})
        if event.kind == "round_started"
        else event
        for event in report.events
    )
    assert "at work on an earlier round" in terminal(msgspec.structs.replace(report, events=events))


def test_after_a_restart_a_device_is_there_once_it_has_said_so() -> None:
    tell = {(1, 1): [joined("p3")], (4, 1): [EventRow(START, "run_started"), joined("gpu-box")]}
    report = fleet("p3", tell=tell)
    assert any("offline" in row and "4–5" in row for row in terminal(report).splitlines())


# Why


def test_a_device_s_own_words_are_in_the_text_and_not_in_a_tooltip_alone() -> None:
    error = Refusal("error", detail="IndexError: index out of range in self")
    memory = Refusal("ceiling", 26.4 * 2**20, 24 * 2**20, "B", "trainer stopped at its memory ceiling")
    rows = tuple(
        AssignmentRow(device="p1", stage=1, round=n, attempt=1, status="declined", refusal=why)
        for n, why in enumerate((error, memory), start=1)
    )
    report = RunReport(devices=(DeviceRow("p1"),), assignments=rows)
    grid = decisions.refusals(report)
    assert next(row[4].text for row in grid.rows) == "training failed: IndexError: index out of range in self"
    assert grid.footnotes == ("trainer stopped at its memory ceiling",)
    body = to_html(report).split("<body>")[1]
    for words in ("IndexError: index out of range in self", "trainer stopped at its memory ceiling"):
        assert f">{words}" in body.replace("training failed: ", "").replace("</b> ", "</b>")


def test_things_are_counted_without_decimals() -> None:
    assert units.quantity(40.0, "samples") == "40 samples"
    assert units.quantity(16, "rounds") == "16 rounds"
    assert units.quantity(1234567.0, "samples") == "1,234,567 samples"
    assert units.quantity(12.5, "s") == "12.5 s"


# How it stands


def test_a_run_that_no_coordinator_holds_is_interrupted(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "r1"
    with Ledger(ledger_in(directory)) as ledger:
        ledger.create(RunPlan(run="r1", name="first"), {}, {}, at=START)
    with hold_directory(directory):
        assert read_run(directory).status == "running"
        assert [run.status for run in read_runs(tmp_path / "runs")[0]] == ["running"]
    assert [run.status for run in read_runs(tmp_path / "runs")[0]] == ["interrupted"]
    report = read_run(directory)
    assert report.status == "interrupted"
    page = to_html(report)
    assert '<span class="badge interrupted">interrupted</span>' in page
    assert "still going on" not in page
    assert f"--resume {report.run}" in page
    assert "interrupted" in terminal(report)


def test_a_failed_run_says_why_on_top() -> None:
    told = EventRow(START, "run_failed", data={"text": "attempt 3 got 1 of 2 updates it needs"})
    report = msgspec.structs.replace(run_report(), status="failed", events=(told,))
    assert "The run failed: attempt 3 got 1 of 2 updates it needs" in terminal(report)
    assert "The run failed: attempt 3 got 1 of 2 updates it needs" in to_html(report)


# The list of runs


def test_ids_and_paths_are_never_broken_and_a_start_is_told_as_an_age() -> None:
    ids = ["lab-20261123-030517", "three-sensors-with-a-name-20261123-030517"]
    found = [RunReport(run=one, name="lab", recipe="lw-fedmml-clip", status="done", started_at=START) for one in ids]
    text = shown(runs_table(found, "runs", START + 750), 80)
    assert all(one in text for one in ids)
    assert text.count("12 min ago") == 2
    assert max(map(len, text.splitlines())) <= 80
    path = "bundles/accelerometer+gyroscope+pressure/complete/model.onnx"
    assert path in shown(rounds.bundles(RunReport(bundles=(BundleRow("all", path, ("acc",), 1),))), 80)


def test_ages_have_one_unit() -> None:
    ages = [units.ago(seconds) for seconds in (-3, 59, 60, 750, 3600, 47 * 3600, 48 * 3600, 9e6)]
    assert ages[:4] == ["just now", "just now", "1 min ago", "12 min ago"]
    assert ages[4:] == ["1 h ago", "47 h ago", "2 days ago", "104 days ago"]


def test_devices_that_a_draw_leaves_out_are_one_row() -> None:
    """Seven of them, in one to ten rounds; being offline keeps a row of its own."""
    names = [f"q{n}" for n in range(6)]
    tell = {(1, 1): [*map(joined, names), joined("p3")], (1, 2): [left("p3")]}
    report = fleet("p3", *names, tell=tell)
    part = tuple(AssignmentRow(name, stage, 1, 1, "done") for name in names[:2] for stage in range(1, 6))
    report = msgspec.structs.replace(report, assignments=(*report.assignments, *part))
    rows = [[cell.text for cell in row] for row in decisions.not_offered(report).rows]
    assert rows == [["p3", "offline", "9 / 10", "1 (round 2), 2–5"], ["7 devices", "not chosen", "1 to 10 / 10", ""]]
