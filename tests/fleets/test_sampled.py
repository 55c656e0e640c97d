"""Schedule sampled over a fleet: what each round trains, changes and moves, and what the pages say of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_fleet import check_trained, plan_of, run_fleet, share

from coordinator.ledger.ledger import Ledger
from edgefl.plan.job import RunPlan
from edgefl.plan.stages import stage_in
from edgefl.records import Manifest
from edgefl.report.events import LiveState
from edgefl.report.shortfall import shortfalls
from edgefl.report.writers import to_html
from edgefl.run_records import RunReport

SAMPLED = ["slots.schedule=sampled", "training.rounds=[2, 2]", "training.holdout=0"]
HEADS = {"a/norm", "head/a", "b/norm", "head/b", "fusion", "task"}
FIRST, SECOND = {"a/embed", "a/stage1", "b/embed", "b/stage1"}, {"a/stage2", "b/stage2"}


def shares() -> dict:
    return {name: share(24, {"a": 1.0, "b": 1.0}, seed) for seed, name in enumerate(("one", "two"))}


def ran(directory: Path, *more: str) -> tuple[RunPlan, RunReport, dict[tuple[int, int], Manifest]]:
    made = plan_of(directory, "end_to_end", "ab", 2, [*SAMPLED, *more])
    report = run_fleet(directory, made, shares())
    assert report.status == "done"
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        return made, report, ledger.states("tiny")


def changed(before: Manifest, after: Manifest) -> set[str]:
    return {part for part in after if not part.startswith("server/") and after[part] != before.get(part)}


def test_each_round_trains_its_draw_on_all_devices_and_changes_nothing_else(ram_path: Path):
    plan, report, states = ran(ram_path)
    check_trained(ram_path, plan)
    trained = {number: {row.trained for row in report.assignments if row.round == number} for number in range(1, 5)}
    assert trained == {number: {stage_in(plan, 1, number).trained} for number in range(1, 5)}
    drawn = [set(*map(set, trained[number])) - HEADS for number in range(1, 5)]
    assert sorted(map(sorted, drawn[:2])) == sorted(map(sorted, drawn[2:])) == sorted(map(sorted, (FIRST, SECOND)))
    where = [(0, 0), *((1, number) for number in range(1, 5))]
    for own, before, after in zip(drawn, where, where[1:], strict=False):
        assert own <= changed(states[before], states[after]) <= own | HEADS


@pytest.mark.parametrize("closing", ["whole", "packed"])
def test_bytes_and_flops_are_those_of_the_draws(ram_path: Path, closing: str):
    packed = ["model.head.width=64", "model.head.out=32", "transfer.up=delta+eden4", "transfer.down=delta+eden4"]
    _, report, _ = ran(ram_path, "transfer.closing=" + closing, *(packed if closing == "packed" else []))
    for row in report.assignments:
        assert row.measured["flops"].value == row.predicted["flops"].value
        for way in ("up", "down"):
            name = f"payload_{way}_bytes"
            assert row.measured[name].value == pytest.approx(row.predicted[name].value, rel=0.02), (row.round, way)
    flops = {"a/stage1" in row.trained: row.measured["flops"].value for row in report.assignments}
    assert flops[True] > 1.1 * flops[False]  # the draw of the first encoder stage goes back through both


def test_the_pages_say_what_is_drawn(ram_path: Path):
    _, report, _ = ran(ram_path)
    page = to_html(report)
    assert "each round one encoder stage of: a/embed" in page
    assert shortfalls(report) == []  # one stage of two is what the round asks
    started = [event for event in report.events if event.kind == "round_started"]
    live = LiveState()
    lines = [live.apply(event) or "" for event in started]
    assert sum("trains embeddings + stage 1: one, two" in line for line in lines) == 2
    assert sum("trains stage 2: one, two" in line for line in lines) == 2


def test_low_rank_terms_are_drawn_in_place_of_what_they_adapt(ram_path: Path):
    lora = "model.lora={rank: 4, where: ['*/stage*']}"
    _, report, _ = ran(ram_path, lora, "training.cache=none")
    drawn = {frozenset(row.trained) - {"fusion", "task", "head/a", "head/b"} for row in report.assignments}
    assert drawn == {frozenset({f"lora/{m}/stage{k}" for m in "ab"}) for k in (1, 2)}
