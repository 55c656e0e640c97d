"""The example package's pace: perturbations by hand, and a fleet whose stages it ends over the server's own hooks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from extra_fixture import extra
from memory_fleet import plan_of, run_fleet, share

from edgefl import registry
from edgefl.aggregation.pace import StageRound
from edgefl.registry import Option
from edgefl.roles import Pace

module = extra("smartfreeze")


def test_the_perturbation_is_what_the_fading_sums_say() -> None:
    """w goes 0, 1, 0, by a = 0.5: E = 0.5, then -0.25; A = 0.5, then 0.75."""
    steps = [{"w": np.array([x], np.float32)} for x in (0.0, 1.0, 0.0)]
    first, state = module.observe(None, steps[0], steps[1], memory=0.5)
    second, state = module.observe(state, steps[1], steps[2], memory=0.5)
    assert (first, second) == ({"net": 0.5, "path": 0.5}, {"net": 0.25, "path": 0.75})
    assert {name: float(value[0]) for name, value in state.items()} == {"net/w": -0.25, "path/w": 0.75}
    rounds = [StageRound(facts={"a/stage1": one, "task": {"net": 9.0, "path": 9.0}}) for one in (first, second)]
    assert module.perturbations(rounds) == pytest.approx([1.0, 1 / 3]), "of blocks, not of the task"


def test_a_stage_is_over_when_the_line_has_been_level() -> None:
    def judged(values: list[float]) -> bool:
        rounds = [StageRound(facts={"a/stage1": {"net": value, "path": 1.0}}) for value in values]
        verdict = module.judge(rounds, window=3, slope=0.05, patience=2)
        assert verdict.best == len(values)
        return bool(verdict.over)

    falling = [1.0, 0.8, 0.6, 0.4, 0.2]
    assert [judged(falling[:n]) for n in range(1, 6)] == [False] * 5
    assert not judged([*falling, 0.2, 0.2]), "level once"
    assert judged([*falling, 0.2, 0.2, 0.21])


def test_a_fleet_trains_stages_that_it_ends(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"window": 3, "slope": 0.2, "patience": 1, "memory": 0.5}
    pace = Pace(
        "mine", "a test's", {name: Option(value, "its") for name, value in options.items()}, per_round=True,
        judge=module.judge, observe=module.observe, fewest=lambda: 3,
    )  # fmt: skip
    monkeypatch.setitem(registry._methods, "pace", dict(registry.methods("pace")))
    registry.register(pace)
    plan = plan_of(ram_path, "lw-fedmml", "ab", 2, ["slots.pace=mine", "training.rounds=[9, 9]", "training.holdout=0"])
    report = run_fleet(ram_path, plan, {f"d{i}": share(24, {"a": 1.0, "b": 1.0}, seed=i) for i in range(2)})
    assert report.status == "done"
    for stage in (1, 2):
        rows = [row for row in report.rounds if row.stage == stage]
        assert 3 <= len(rows) < 9
        assert rows[-1].record["stage"] == {"rounds": len(rows), "best": len(rows), "over": True}
