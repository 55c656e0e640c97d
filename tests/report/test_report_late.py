"""What a report says of late updates, of updates that could not be used, and of quarantine."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.records import Refusal
from edgefl.report import decisions, rounds
from edgefl.report.events import LiveState
from edgefl.report.writers import to_html
from edgefl.run_records import AssignmentRow, DeviceRow, EventRow, RoundRow, RunReport

SHAPE = Refusal("shape", detail="part task: tensor 'w' is [3], expected [2]")
BARRED = Refusal("quarantine", 2.0, 1.0, "updates", "2 updates in a row could not be used")


def parts(**shares: float) -> dict[str, Any]:
    return {"parts": {"task": {"devices": shares}}}


def event(kind: str, device: str, number: int, **data: Any) -> EventRow:
    return EventRow(float(number), kind, 1, number, device, data)


REPORT = RunReport(
    run="r1",
    name="tiny",
    status="done",
    devices=(DeviceRow("a"), DeviceRow("b"), DeviceRow("c")),
    rounds=(
        RoundRow(1, 1, 1, "done", 0.0, 1.0, ("a",), {"loss": 1.0}, parts(a=1.0)),
        RoundRow(
            *(1, 2, 1, "done", 1.0, 2.0, ("a", "b"), {"loss": 1.0}),
            {
                **parts(a=0.5, **{"b~1": 0.5}),
                "stale": {
                    "b~1": {"device": "b", "staleness": 1, "factor": 0.7},
                    "a~3": {"device": "a", "staleness": 3, "factor": 0.5},
                },
            },
        ),
    ),
    assignments=(
        AssignmentRow("a", 1, 1, 1, "done"),
        AssignmentRow("b", 1, 1, 1, "done"),
        AssignmentRow("c", 1, 1, 1, "rejected", SHAPE),
        AssignmentRow("c", 1, 2, 1, "quarantined", BARRED),
        AssignmentRow("b", 1, 2, 1, "late", Refusal("late", 4.0, 3.0, "rounds", "its model is too old")),
    ),
    events=(
        event("rejected", "c", 1, reason="shape", detail=SHAPE.detail, needed=None, allowed=None, unit="", where=""),
        event("quarantined", "c", 1, bad=2, rounds=0, reason="shape"),
    ),
)


def test_a_round_tells_how_many_of_its_updates_were_late_and_what_they_weighed() -> None:
    grid = rounds.rounds(REPORT)
    at = [column.name for column in grid.columns].index("late updates")
    assert [row[at].text for row in grid.rows] == ["", "2, up to 3"]
    assert "b: 1 rounds, × 0.70" in grid.rows[1][at].tip
    took = [column.name for column in grid.columns].index("took part")
    assert grid.rows[1][took].text == "2 / 2", "who is in quarantine is not asked"
    plain = RunReport(rounds=REPORT.rounds[:1])
    assert "late updates" not in [column.name for column in rounds.rounds(plain).columns]
    assert not rounds.late_updates(plain).rows


def test_a_device_has_its_late_updates_added_up() -> None:
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in rounds.late_updates(REPORT).rows}
    assert rows["b"] == ["1", "1", "1.00", "1", "0.700", "1"]
    assert rows["a"] == ["3", "1", "3.00", "3", "0.500", "0"]


def test_the_coordinators_rejections_and_quarantine_stand_among_the_refusals() -> None:
    rows = [[cell.text for cell in row] for row in decisions.refusals(REPORT).rows]
    mine = [row[2:5] for row in rows if row[0] == "c"]
    assert mine == [
        ["1", "coordinator", "tensor of another shape: part task: tensor 'w' is [3], expected [2]"],
        ["2", "coordinator", "in quarantine"],
    ]
    assert {row[-1] for row in rows if row[0] == "c"} == {"quarantined"}


def test_the_page_shows_late_updates() -> None:
    page = to_html(REPORT)
    assert "Late updates" in page
    assert "in quarantine" in page


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (event("rejected", "c", 1, reason="shape", detail="part task: tensor 'w'"), "another shape: part task"),
        (
            event("rejected", "c", 1, reason="size", needed=9.0, allowed=2.0, unit="B", detail="part task: 9 bytes"),
            "part task: 9 bytes",
        ),
        (event("quarantined", "c", 1, bad=2, rounds=0), "for the rest of the run: 2 updates in a row"),
        (event("quarantined", "c", 1, bad=2, rounds=1), "for 1 round:"),
        (event("readmitted", "c", 3), "c is out of quarantine"),
        (event("round_closed", "", 1, staleness={"b": 2}, behind=["d"]), "made earlier: b (by 2) · behind: d"),
    ],
)
def test_each_event_is_a_line(told: EventRow, words: str) -> None:
    assert words in (LiveState().apply(told) or "")


def test_the_display_shows_who_is_in_quarantine_until_it_is_over() -> None:
    state = LiveState()
    state.apply(event("rejected", "c", 1, reason="shape", detail="part task"))
    assert state.devices["c"].doing == "rejected"
    state.apply(event("quarantined", "c", 1, reason="shape"))
    state.apply(event("round_started", "", 2, participants=["a"]))
    assert state.devices["c"].doing == "quarantined"
    state.apply(event("readmitted", "c", 3))
    assert state.devices["c"].doing == "idle"


def test_slots_that_did_nothing_are_left_out_of_a_round_s_words() -> None:
    did = {
        "select": {"choice": "all"},
        "cluster": {"choice": "none"},
        "repair": "none",
        "refused": [],
        "kept": {},
        "parts": {"task": {"devices": {"a": 1.0}}},
    }
    other = RoundRow(1, 2, 1, "done", record={**did, "select": {"choice": "half"}})
    grid = rounds.rounds(RunReport(run="r", rounds=(RoundRow(1, 1, 1, "done", record=did), other)))
    assert [cells[-1].text for cells in grid.rows] == ["select all", "select half"]
