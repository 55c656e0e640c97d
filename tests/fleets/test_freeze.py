"""Schedule freeze over a fleet: what it was predicted to take, and what a device short of the whole does."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_fleet import check_trained, plan_of, run_fleet, share, state_of

from coordinator.ledger.ledger import Ledger
from edgefl.plan.job import RunPlan
from edgefl.records import Budget

#: Two rounds end-to-end, then two of the last stage over its stored prefix.
FREEZE = ["slots.schedule=freeze", "training.rounds=[2, 2]", "training.lr_fall=cosine", "training.holdout=0"]
LAST = {"a/stage2", "a/norm", "head/a", "b/stage2", "b/norm", "head/b", "fusion", "task"}


def plan(directory: Path) -> RunPlan:
    return plan_of(directory, "end_to_end", "ab", 2, FREEZE)


def shares() -> dict:
    return {name: share(24, {"a": 1.0, "b": 1.0}, seed) for seed, name in enumerate(("large", "small"))}


def test_it_takes_what_was_predicted_and_trains_the_prefix_in_its_first_rounds_alone(ram_path: Path):
    made = plan(ram_path)
    report = run_fleet(ram_path, made, shares())
    assert report.status == "done"
    check_trained(ram_path, made)
    flops = {}
    for row in report.assignments:
        flops[row.stage, row.round] = row.measured["flops"].value
        assert flops[row.stage, row.round] == row.predicted["flops"].value  # the first of stage 2 fills the store
        for way in ("up", "down"):
            expected = row.predicted[f"payload_{way}_bytes"].value
            assert row.measured[f"payload_{way}_bytes"].value == pytest.approx(expected, rel=0.02)
        assert (set(row.trained) == LAST) == (row.stage == 2)
    assert flops[1, 1] == flops[1, 2] > flops[2, 1] > 1.5 * flops[2, 2]
    _, last = state_of(ram_path)
    with Ledger(ram_path / "run" / "ledger.sqlite") as ledger:
        frozen = ledger.states("tiny")[1, 2]
    for part in ("a/embed", "a/stage1", "b/embed", "b/stage1"):
        assert last[part] == frozen[part]


def test_a_device_short_of_the_whole_trains_the_last_stage_from_the_first_round(ram_path: Path):
    """Its prefix is not stored while others train it: the whole model is in memory, and is sent down every round."""
    report = run_fleet(ram_path, plan(ram_path), shares(), budgets={"small": Budget(flops=950_000)})
    trained = {(row.device, row.stage): set(row.trained) for row in report.assignments}
    assert trained["small", 1] == trained["small", 2] == trained["large", 2] == LAST
    assert trained["large", 1] > LAST
    row = next(row for row in report.assignments if (row.device, row.stage, row.round) == ("small", 1, 2))
    assert row.measured["flops"].value == row.predicted["flops"].value <= 950_000
    told = [e.data["placements"] for e in report.events if e.kind == "stage_planned" and e.stage == 1]
    (small,) = (one for placements in told for one in placements if one["device"] == "small")
    assert (small["cache"], small["depth"]) == ("", 1)
    assert small["shortened"]["reason"] == "flops"
    assert small["shortened"]["needed"] > small["shortened"]["allowed"] == 950_000
