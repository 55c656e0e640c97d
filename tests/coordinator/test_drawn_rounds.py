"""Rounds that each train a draw of their stage: the same after a restart, when planned again, and in a prediction."""

from __future__ import annotations

from typing import Any

import pytest
import test_coordinator_machine
from coordinator_fixture import MODEL, place
from msgspec.structs import replace
from test_coordinator_machine import Play, of

from coordinator.core import moves as do
from edgefl.models.spec import part_names
from edgefl.plan.job import Candidate, Draw, Hyper, Placement, RoundPolicy, Stage
from edgefl.plan.stages import draws, stage_in
from edgefl.records import Figure, Refusal
from edgefl.run_records import AssignmentRow, EventRow

PARTS = tuple(part_names(MODEL))
STAGE = Stage(1, 2, 6, PARTS, ("acc/stage1", "acc/stage2", "task"), draw="random")
#: Bytes down of the draws, and of all that rounds draw from.
DOWN, BOUND = (30.0, 20.0), 50.0


def with_draws(stage: Stage, hyper: Hyper, candidate: Candidate) -> Placement:
    """As ``place``, with bytes that tell the draws apart."""

    def moving(one: Any, down: float) -> Any:
        sizes = {name: Figure(down, "predicted", "test") for name in ("payload_down_bytes", "payload_up_bytes")}
        cost = replace(one.cost, payload_down_bytes=int(down), joining_down_bytes=90, whole_up_bytes=70)
        return replace(one, cost=cost, predicted={**one.predicted, **sizes})

    placed = place(stage, hyper, candidate)
    each = [
        moving(Draw(one, placed.cost, placed.predicted), down) for one, down in zip(draws(stage), DOWN, strict=True)
    ]
    return replace(moving(placed, BOUND), draws=tuple(each) if placed.refusal is None else ())


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(test_coordinator_machine, "place", with_draws)
    policy = RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=20.0)
    return Play(policy, stages=(STAGE,), hypers=(Hyper(batch_size=4),), seed=5).started("a", "b")


def finish_round(play: Play, *names: str) -> list[do.Instruction]:
    for name in names:
        play.announce(name)
        play.receive(name)
    play.wait(30.0)
    play.finish_aggregate()
    return play.finish_evaluate()


def asked(play: Play) -> set[tuple[str, ...]]:
    assert play.state.open is not None
    return {one.placement.stage.trained for one in play.state.open.assignments.values()}


def down(out: list[do.Instruction]) -> dict[str, float | None]:
    rows = [row for row in of(AssignmentRow, out) if row.status == "offered"]
    return {row.device: row.predicted["payload_down_bytes"].value for row in rows}


def test_every_device_of_a_round_is_asked_for_its_draw_and_so_again_after_a_restart(play: Play) -> None:
    for number in range(1, 5):
        wanted = {stage_in(play.plan, 1, number).trained}
        assert asked(play) == wanted
        play.restart()
        assert asked(play) == wanted
        for name in "ab":
            play.hello(name, play.opened[-1])
        out = finish_round(play, "a", "b")
        (started,) = [one for one in of(EventRow, out) if one.kind == "round_started"]
        assert started.data["drawn"] == [2 if "acc/stage2" in stage_in(play.plan, 1, number + 1).trained else 1]
        assert of(do.Plan, out) == []  # one plan for all rounds


def test_a_device_that_is_planned_again_gets_the_same_draw(play: Play) -> None:
    finish_round(play, "a", "b")
    play.decline("a", Refusal("step_memory", 2.0, 1.0, "B"))
    play.finish_plan()
    assert asked(play) == {stage_in(play.plan, 1, 2).trained}
    assert play.state.open is not None
    assert {n: one.placement.hyper.micro_batch for n, one in play.state.open.assignments.items()} == {"a": 2, "b": 0}


def test_down_comes_what_the_round_before_drew_or_at_most_all_after_one_that_was_missed(play: Play) -> None:
    for number in range(2, 6):
        out = finish_round(play, "a", *("b" * (number != 4)))
        before = DOWN[draws(STAGE).index(stage_in(play.plan, 1, number - 1))]
        assert down(out) == {"a": before, "b": BOUND if number == 4 else before}
