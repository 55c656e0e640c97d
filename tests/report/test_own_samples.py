"""What a report says of devices' own samples: the metrics that they measured, and no empty columns."""

from __future__ import annotations

import pytest

from edgefl.report.quality import personal
from edgefl.run_records import AssignmentRow, RunReport


@pytest.mark.parametrize(
    ("metrics", "columns", "cells"),
    [
        (
            {"received_r2": 0.25, "trained_r2": 0.5, "trained_mae": 12.0, "trained_score": 0.5},
            ["received R²", "trained R²", "trained mean absolute error"],
            ["0.250", "0.500", "12.0"],
        ),
        ({"trained_accuracy": 0.5, "trained_macro_f1": 0.25}, ["trained accuracy", "trained F1"], ["50.0", "25.0"]),
        ({"trained_a_to_b_recall_at_1": 0.5, "trained_b_to_a_recall_at_1": 1.0}, ["trained recall at 1"], ["75.0"]),
    ],
)
def test_the_columns_are_of_what_was_measured(metrics: dict[str, float], columns: list[str], cells: list[str]) -> None:
    row = AssignmentRow(device="a", stage=1, round=2, attempt=1, status="done", metrics=metrics)
    grid = personal(RunReport(run="r", assignments=(row,)))
    assert [column.name for column in grid.columns][3:] == columns
    assert [cell.text for cell in grid.rows[0]][3:] == cells
    assert any("both ways" in note for note in grid.notes) is ("recall at 1" in columns[-1])
