"""Paces: when a stage ends, and the model that it ends with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from memory_fleet import plan_of, run_fleet, share

from coordinator.ledger.ledger import Ledger
from edgefl.aggregation.history import KEY
from edgefl.aggregation.pace import StageRound, StageTrack, noted
from edgefl.errors import ConfigError
from edgefl.methods.pace import by_holdouts, levels_of
from edgefl.records import ObjectRef
from edgefl.registry import Choice, Verdict, choose
from edgefl.roles import Pace

HOLDOUT = choose("pace", {"pace": {"early_stopping": {"patience": 2}}})


def rounds(*losses: dict[str, float]) -> list[StageRound]:
    return [StageRound(one) for one in losses]


def test_a_stage_is_over_after_so_many_rounds_without_a_better_model() -> None:
    falling = [{"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 2.0}, {"a": 1.1, "b": 2.1}, {"a": 1.2, "b": 2.4}]
    assert by_holdouts(rounds(*falling[:3]), patience=2) == (1, False)
    assert by_holdouts(rounds(*falling), patience=2) == (1, True)
    assert by_holdouts(rounds(*falling, {"a": 0.9, "b": 1.8}), patience=5) == (4, False)


def test_levels_are_the_losses_up_to_each_devices_own_factor() -> None:
    truth = [0.0, -0.5, -0.8, -0.7]
    losses = [{name: own * math.exp(level) for name, own in (("a", 1.0), ("b", 3.0))} for level in truth]
    found = levels_of(rounds(*losses))
    assert [found[n] - found[0] for n in range(4)] == pytest.approx(truth)


def test_devices_that_come_and_go_do_not_shift_the_levels() -> None:
    """A device of easy data that is there in one round alone would make this round the best of a mean of losses."""
    losses = [{"a": 2.0, "b": 2.0, "c": 0.2}, {"a": 1.0, "b": 1.0}, {"a": 0.9}, {"b": 0.95, "c": 0.095}]
    found = levels_of(rounds(*losses))
    assert min(found, key=lambda n: found[n]) == 2
    assert found[3] - found[1] == pytest.approx(math.log(0.95), abs=0.01)


def test_one_liar_of_four_does_not_decide() -> None:
    honest = [2.0, 1.5, 1.2, 1.0, 1.01, 1.02, 1.03]
    for lie in ([1e30] * 3 + [1e-30] + [1e30] * 3, [1e-30, *[1e30] * 6], [10.0**n for n in range(7)]):
        told = [{"a": x, "b": 2 * x, "c": 3 * x * (1 + n % 2 / 100), "liar": lie[n]} for n, x in enumerate(honest)]
        assert by_holdouts(rounds(*told), patience=3).best == 3


def test_rounds_that_share_no_device_end_nothing() -> None:
    """Seven devices in turn, whose losses all fall: what is hard for one says nothing of another's model."""
    turns = [{f"d{n % 7}": (1 + n % 7) * 0.9**n} for n in range(14)]
    assert not any(by_holdouts(rounds(*turns[:n]), patience=5).over for n in range(1, 15))


def test_a_best_round_in_hindsight_is_not_told_of_another_round_s_model() -> None:
    """Rounds are judged together, so that an earlier one can become the best whose model is not kept."""
    states = [{"task": ObjectRef(f"{n}" * 64, n)} for n in range(4)]
    verdicts = iter([Verdict(0, False), Verdict(1, False), Verdict(2, False), Verdict(1, True)])
    pace = Choice(Pace("mine", "a test's", judge=lambda rounds: next(verdicts)), {})
    track = StageTrack()
    for state in states:
        track = noted(track, pace, 1, StageRound(), state)
    assert (track.best, track.state, track.over) == (2, states[2], True)


def test_rounds_that_no_device_judged_end_nothing() -> None:
    assert by_holdouts(rounds({}, {}, {}, {}), patience=1) == (0, False)
    assert by_holdouts(rounds({"a": 1.0}, {}, {}, {"a": 0.5}), patience=1) == (3, False)


def test_the_track_keeps_the_state_of_the_best_round() -> None:
    states = [{"task": ObjectRef(f"{n}" * 64, n)} for n in range(5)]
    track = StageTrack(index=1, best=7, over=True)
    for n, loss in enumerate([1.0, 0.5, 0.6, 0.7]):
        track = noted(track, HOLDOUT, 2, StageRound({"a": loss}), states[n])
    assert (track.index, track.best, track.over, track.state) == (2, 1, True, states[1])
    planned = choose("pace", {"pace": {"planned": {}}})
    assert noted(track, planned, 2, StageRound({"a": 1.0}), states[0]) == StageTrack(), (
        "nothing is kept for a pace that waits"
    )


#: Rates by which the model becomes worse from the first rounds on.
TOO_FAST = [
    "slots.pace={early_stopping: {patience: 2}}",
    "training.lr={encoder: 0.1, head: 0.1}",
    "training.rounds=[9, 7]",
]


def fleet(directory: Path, *settings: str, recipe: str = "lw-fedmml"):
    plan = plan_of(directory, recipe, "ab", 2, [*TOO_FAST, "evaluate=stage", "training.holdout=0.3", *settings])
    report = run_fleet(directory, plan, {f"d{i}": share(40, {"a": 1.0, "b": 1.0}, seed=i) for i in range(2)})
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        return report, ledger.states("tiny")


def test_a_stage_ends_before_its_last_round_with_the_model_of_its_best(ram_path: Path) -> None:
    report, states = fleet(ram_path)
    assert report.status == "done"
    for stage, planned in ((1, 9), (2, 7)):
        rows = [row for row in report.rounds if row.stage == stage]
        told = rows[-1].record["stage"]
        assert told["over"] is (len(rows) < planned)
        if told["over"]:
            assert told["rounds"] == len(rows) == told["best"] + 3, "it was two rounds past its best, which came before"
            before = states[(stage, told["best"]) if told["best"] else max(key for key in states if key < (stage, 1))]
            last = states[stage, len(rows)]
            assert {k: r for k, r in last.items() if k != KEY} == {k: r for k, r in before.items() if k != KEY}
            (event,) = [e for e in report.events if e.kind == "stage_finished" and e.stage == stage]
            assert event.data == {"planned": planned, "best": told["best"]}
        assert {row.round for row in report.evaluations if row.stage == stage} == {len(rows)}
    assert any(len([row for row in report.rounds if row.stage == stage]) < n for stage, n in ((1, 9), (2, 7)))


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        (
            ["recipe=mmic", "slots.repair={poverty: {exchange: layer, whole_every: 4}}", "slots.select=all"],
            "exchanges single layers in most; set planned",
        ),
        (["transfer.down=delta+int8"], "set f32 there, or planned"),
        (["recipe=end_to_end", "slots.weight=own"], "devices go on from parts of their own; set planned"),
        (["slots.select={random: {share: 0.5}}"], "set slots.select: all, or pace: planned"),
        (["rounds=async"], "pace: early_stopping needs the devices of one round together"),
        (["training.holdout=0"], "pace: early_stopping goes by what devices measure"),
    ],
)
def test_a_pace_that_has_nothing_to_go_by_is_refused(tmp_path: Path, settings: list[str], culprit: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(tmp_path, "lw-fedmml", "ab", 2, [TOO_FAST[0], *settings])
    assert culprit in refused.value.message


def test_a_pace_by_hold_outs_has_some_by_default(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "lw-fedmml", "ab", 2, [TOO_FAST[0], "training.holdout=null"]).hypers[0].holdout == 0.2
