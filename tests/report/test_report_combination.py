"""What a report says of updates that the slot combine left out, scaled down or trimmed."""

from __future__ import annotations

from typing import Any

from edgefl.report.combination import left_out
from edgefl.run_records import RoundRow, RunReport


def rounds(*records: dict[str, Any], status: str = "done") -> RunReport:
    rows = tuple(RoundRow(1, i, 1, status, 0.0, 1.0, ("a", "b"), {}, one) for i, one in enumerate(records, start=1))
    return RunReport(run="r", rounds=rows)


def cells(report: RunReport) -> dict[str, list[str]]:
    return {row[0].text: [cell.text for cell in row[1:]] for row in left_out(report).rows}


def test_each_device_has_its_rounds_and_factors() -> None:
    """b was left out once, and late with a half of its change; a was scaled to 0.2 and 0.4: 0.3."""
    first = {"screened": {"factors": {"a": 0.2, "b": 0.0}}}
    second = {"screened": {"factors": {"a": 0.4, "b~1": 0.5}}}
    assert cells(rounds(first, second)) == {"a": ["0", "2", "0.300", ""], "b": ["1", "1", "0.500", ""]}


def test_trimmed_shares_are_means_over_parts_and_rounds() -> None:
    record = {"parts": {"p": {"trimmed": {"a": 0.5, "b": 0.0}}, "q": {"trimmed": {"a": 1.0}}, "r": {"devices": {}}}}
    assert {device: row[3] for device, row in cells(rounds(record)).items()} == {"a": "75.0", "b": "0"}


def test_a_round_in_which_nothing_could_be_left_out_says_why() -> None:
    grid = left_out(rounds({"screened": {"factors": {}, "note": "Of 2 none."}}, {"screened": {"factors": {}}}))
    assert "In 1 of 2 rounds: Of 2 none." in grid.notes
    assert [row[0].text for row in grid.rows] == ["a", "b"]


def test_a_mean_has_no_such_table() -> None:
    assert not left_out(rounds({"parts": {"p": {"devices": {"a": 1.0}}}})).rows
    assert not left_out(rounds({"screened": {"factors": {"a": 0.0}}}, status="failed")).rows
