"""Poisoned updates beside honest ones: clipped, rejected or taken back; nobody is blamed for a model from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_fleet import plan_of, run_fleet, share

from benchmarks.crash.poisoned import attacked, outcome_of
from edgefl.report.combination import left_out
from edgefl.report.writers import to_html
from edgefl.run_records import RunReport

OPEN = ["round.clip_change=0", "round.largest_change=0", "round.largest_share=1"]


def run(folder: Path, devices: int, factor: float, attackers: list[str], overrides: list[str]) -> RunReport:
    settings = ["training.batch_size=6", "training.rounds=[2, 1]", "evaluate=round", "training.holdout=0", *overrides]
    plan = plan_of(folder, "lw-zeros", "ab", devices, settings)
    with attacked(attackers, factor):
        return run_fleet(folder, plan, {f"d{i}": share(24, {"a": 1.0, "b": 1.0}, seed=i) for i in range(devices)})


@pytest.mark.parametrize("factor", [-50.0, pytest.param(-10.0, marks=pytest.mark.slow)])
def test_a_change_far_beyond_the_others_is_left_out_and_no_honest_device_is_blamed(
    tmp_path: Path, factor: float
) -> None:
    found = outcome_of(run(tmp_path, 5, factor, ["d0"], []), of="ab")
    assert found.rejected | found.clipped == {"d0"}
    assert found.quarantined <= {"d0"}


@pytest.mark.slow
def test_without_bounds_such_a_change_is_in_the_model(tmp_path: Path) -> None:
    report = run(tmp_path, 5, -50.0, ["d0"], OPEN)
    found = outcome_of(report, of="ab")
    assert found.rejected == found.clipped == frozenset()


def test_a_change_between_is_scaled_down_to_three_times_the_median(tmp_path: Path) -> None:
    report = run(tmp_path, 5, 5.0, ["d0"], [])
    clipped = [row.record["clipped"]["d0"] for row in report.rounds if "d0" in row.record.get("clipped", {})]
    assert clipped
    for factors in clipped:
        assert all(0 < factor < 1 for factor in factors.values())
    assert not outcome_of(report, of="ab").rejected


@pytest.mark.slow
def test_a_clean_round_has_no_clip(tmp_path: Path) -> None:
    report = run(tmp_path, 5, 1.0, [], [])
    assert all("clipped" not in row.record for row in report.rounds)


@pytest.mark.parametrize("evaluate", ["round", "stage"], ids=["by the evaluation", "by devices"])
def test_a_round_whose_model_breaks_is_taken_back_and_nobody_is_quarantined(tmp_path: Path, evaluate: str) -> None:
    """Bounds are off, and d0 sends its change times 1e18: neither evaluation nor devices can calculate with that.

    d0 is set aside in the attempt that is made instead, and honest after that.
    """
    report = run(tmp_path, 4, 1e18, ["d0/1/1"], [*OPEN, f"evaluate={evaluate}", "round.deadline_s=20"])
    assert report.status == "done"
    found = outcome_of(report, of="ab")
    assert not found.quarantined
    told = [event.data["text"] for event in report.events if event.kind == "warning"]
    (taken,) = [text for text in told if "taken back" in text]
    assert "without d0" in taken
    assert found.accuracy[-1] > 40
    again = (1, 1) if evaluate == "round" else (1, 2)
    done = [(row.stage, row.round, row.attempt) for row in report.rounds if row.status == "done"]
    assert done == [(*place, 2 if place == again else 1) for place in ((1, 1), (1, 2), (2, 1))]


@pytest.mark.parametrize("how", ["median", pytest.param("krum", marks=pytest.mark.slow)])
def test_a_flipped_change_of_usual_length_is_outvoted_and_no_device_is_blamed(tmp_path: Path, how: str) -> None:
    """The bounds let it through, d0 trains on as the others; the report has what became of it, by device."""
    report = run(tmp_path, 5, -1.0, ["d0"], [f"slots.combine={how}", "slots.weight=samples"])
    found = outcome_of(report, of="ab")
    assert not found.rejected | found.quarantined
    grid = left_out(report)
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in grid.rows}
    if how == "krum":
        assert rows.keys() == {"d0"}
        assert rows["d0"][0] == "3"
    else:
        shares = {device: float(cells[3]) for device, cells in rows.items()}
        assert max(shares, key=lambda device: shares[device]) == "d0"
    assert "Combination of the updates" in to_html(report, interactive=False)
