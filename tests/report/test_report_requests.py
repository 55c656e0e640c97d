"""What the display and the report say of an operator's requests."""

from __future__ import annotations

from edgefl.records import Refusal
from edgefl.report import decisions, rounds
from edgefl.report.events import LiveState
from edgefl.report.writers import to_html
from edgefl.run_records import AssignmentRow, DeviceRow, EventRow, RoundRow, RunReport


def event(kind: str, device: str = "", by: str = "terminal", **data: object) -> EventRow:
    return EventRow(1.0, kind, 1, 2, device, {"by": by, **data})


def test_the_display_shows_a_pause_until_it_ends_and_who_asked() -> None:
    state = LiveState()
    assert state.apply(event("pausing")) == "the run pauses (terminal) when the open round is over"
    assert state.paused == "pausing"
    assert "paused (terminal)" in (state.apply(event("paused")) or "")
    assert state.paused == "paused"
    assert state.apply(event("resumed", by="web")) == "the run goes on (web)"
    assert state.paused == ""
    assert (state.apply(event("run_stopped", by="web", seconds=3.0)) or "").startswith("run stopped (web) after 3")
    assert state.ended == "stopped"


def test_the_display_keeps_a_device_that_is_left_out_apart_until_it_is_taken_in() -> None:
    state = LiveState()
    state.apply(event("left_out", "cam"))
    for kind in ("round_started", "device_left", "device_joined"):
        state.apply(event(kind, "cam", participants=["other"]))
        assert (state.devices["cam"].doing, state.devices["cam"].why) == ("left out", "by an operator, at a terminal")
    state.apply(event("taken_in", "cam"))
    assert state.devices["cam"].doing == "idle"


def test_the_report_says_who_stopped_the_run_and_who_was_left_out() -> None:
    part = AssignmentRow("cam", 1, 2, 1, "left_out", Refusal("left_out"))
    report = RunReport(
        run="r1",
        status="stopped",
        finished_at=5.0,
        devices=(DeviceRow("cam"),),
        rounds=(RoundRow(1, 2, 1, "done"), RoundRow(1, 3, 1, "running")),
        assignments=(part,),
        events=(event("left_out", "cam"), EventRow(2.0, "round_started", 1, 3), event("run_stopped", by="web")),
    )
    assert "The run was stopped (web) after stage 1, round 2" in rounds.standing(report)
    assert [row[3].text for row in rounds.rounds(report).rows] == ["done", "stopped"]
    (row,) = decisions.refusals(report).rows
    assert [row[3].text, row[4].text] == ["operator", "left out by the operator"]
    assert decisions.absences(report)["cam"] == {"left out by the operator (terminal)": [(1, 3)]}


def test_the_report_lists_what_the_operator_asked() -> None:
    events = (EventRow(1.0, "run_started"), EventRow(4.0, "paused", 1, 2, "", {"by": "web"}), event("left_out", "cam"))
    grid = decisions.requests(RunReport(run="r1", events=(*events, EventRow(5.0, "update", 1, 2, "cam"))))
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["3.00 s", "1", "2", "paused", "", "web"],
        ["0 s", "1", "2", "device left out", "cam", "terminal"],
    ]
    assert "What the operator asked of the run" in to_html(RunReport(run="r1", events=events))
    assert "What the operator asked of the run" not in to_html(RunReport(run="r1"))
