"""Schedules by hand: what each stage has and trains, and what a smaller device trains instead."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.models.check import encoder_of_size
from edgefl.models.spec import ModelSpec, match_parts, part_names
from edgefl.plan.job import RunPlan, Stage
from edgefl.plan.stages import drawn, draws, encoder_stage, restrict, shallower, stage_in
from edgefl.registry import method, methods

SENSOR = encoder_of_size("sensor", "tiny", (16, 3))
MODEL = ModelSpec({"a": SENSOR, "b": SENSOR}, stages=3, classes=2, label_names=("x", "y"))
HEADS = ["a/norm", "head/a", "b/norm", "head/b", "fusion", "task"]


def test_end_to_end_by_hand():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 0, 2], "auto")
    encoder = ["{}/embed", "{}/stage1", "{}/stage2", "{}/stage3", "{}/norm", "head/{}"]
    every = (*tuple(part.format(m) for m in "ab" for part in encoder), "fusion", "task")
    assert stage == Stage(index=1, depth=3, rounds=3, present=every, trained=every)


def test_progressive_by_hand():
    stages = method("schedule", "progressive").stages(MODEL, [1, 0, 2], "auto")
    assert [(s.index, s.depth, s.rounds) for s in stages] == [(1, 1, 1), (2, 2, 0), (3, 3, 2)]
    second = ["{}/embed", "{}/stage1", "{}/stage2", "{}/norm", "head/{}"]
    assert stages[1].present == (*tuple(p.format(m) for m in "ab" for p in second), "fusion", "task")
    assert all(s.trained == s.present for s in stages)


def test_layerwise_by_hand():
    stages = method("schedule", "layerwise").stages(MODEL, [0, 1, 2], "auto")
    assert stages[2].present == tuple(part_names(MODEL))
    assert set(stages[2].trained) == {"a/stage3", "b/stage3", *HEADS}
    # the first stage that has rounds trains the embeddings, which nothing has pretrained
    assert set(stages[1].trained) == {"a/embed", "b/embed", "a/stage2", "b/stage2", *HEADS}
    assert "a/embed" not in stages[0].trained


def test_freeze_by_hand():
    stages = method("schedule", "freeze").stages(MODEL, [9, 0, 27], "auto")
    (whole,) = method("schedule", "end_to_end").stages(MODEL, [9, 0, 27], "auto")
    assert [(s.index, s.depth, s.rounds) for s in stages] == [(1, 3, 9), (2, 3, 0), (3, 3, 27)]
    assert all(s.present == whole.present for s in stages)
    assert stages[0].trained == whole.trained
    assert set(stages[1].trained) == {"a/stage2", "a/stage3", "b/stage2", "b/stage3", *HEADS}
    assert set(stages[2].trained) == {"a/stage3", "b/stage3", *HEADS}


def test_the_last_stage_of_freeze_is_that_of_layerwise_with_frozen_embeddings():
    last = method("schedule", "freeze").stages(MODEL, [1, 1, 1])[-1]
    layerwise = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "frozen")[-1]
    assert (last.present, set(last.trained)) == (layerwise.present, set(layerwise.trained))


def test_heads_freeze_every_encoder_or_those_that_begin_with_a_checkpoint():
    mixed = ModelSpec({"a": msgspec.structs.replace(SENSOR, pretrained="c"), "b": SENSOR}, stages=3, classes=2)
    heads = method("schedule", "heads").stages
    behind = {"head/a", "head/b", "fusion", "task"}
    own = {"b/embed", "b/stage1", "b/stage2", "b/stage3", "b/norm"}
    (frozen,), (fresh,) = heads(mixed, [0, 0, 9]), heads(mixed, [0, 0, 9], frozen="pretrained")
    assert (set(frozen.trained), set(fresh.trained)) == (behind, behind | own)
    assert (fresh.depth, fresh.rounds, fresh.present) == (3, 9, tuple(part_names(mixed)))
    multiway = msgspec.structs.replace(mixed, encoder_sharing="multiway")
    (shared,) = heads(multiway, [1, 1, 1], frozen="pretrained")
    assert "shared/stage3" in shared.trained  # random weights, which would stay so


def test_sampled_draws_one_encoder_stage_of_all_modalities_with_what_follows_them():
    (stage,) = method("schedule", "sampled").stages(MODEL, [1, 0, 5])
    assert (stage.index, stage.depth, stage.rounds, stage.draw) == (1, 3, 6, "random")
    assert set(stage.present) == set(stage.trained) == set(part_names(MODEL))
    each = draws(stage)
    assert [set(one.trained) - set(HEADS) for one in each] == [
        {"a/embed", "b/embed", "a/stage1", "b/stage1"}, {"a/stage2", "b/stage2"}, {"a/stage3", "b/stage3"},
    ]  # fmt: skip
    assert all(set(HEADS) <= set(one.trained) and one.present == stage.present for one in each)
    assert shallower(stage) == [stage]
    (whole,) = method("schedule", "end_to_end").stages(MODEL, [1, 0, 5])
    assert draws(whole) == [whole]
    assert drawn(whole, 3, 5) == 0


def test_sampled_embeddings_by_option_and_by_pretraining():
    mixed = ModelSpec({"a": msgspec.structs.replace(SENSOR, pretrained="c"), "b": SENSOR}, stages=3, classes=2)
    for embed, expected in (("auto", {"b/embed"}), ("first_stage", {"a/embed", "b/embed"}), ("frozen", set())):
        (stage,) = method("schedule", "sampled").stages(mixed, [1, 1, 1], embed)
        assert {p for p in draws(stage)[0].trained if p.endswith("embed")} == expected
        assert not any(p.endswith("embed") for one in draws(stage)[1:] for p in one.trained)


@given(st.integers(0, 2**31), st.integers(0, 40), st.sampled_from(["random", "cyclic"]))
def test_each_draw_comes_up_once_in_as_many_rounds(seed, cycle, order):
    (stage,) = method("schedule", "sampled").stages(MODEL, [1, 1, 1], order=order)
    turns = [drawn(stage, seed, 3 * cycle + number) for number in (1, 2, 3)]
    assert sorted(turns) == [0, 1, 2]
    assert order == "random" or turns == [0, 1, 2]


def test_random_draws_follow_from_seed_and_round_in_every_release():
    (stage,) = method("schedule", "sampled").stages(MODEL, [1, 1, 1])
    assert [drawn(stage, 7, number) for number in range(1, 10)] == [1, 2, 0, 2, 1, 0, 2, 0, 1]
    orders = {tuple(drawn(stage, seed, number) for number in (1, 2, 3)) for seed in range(60)}
    assert len(orders) == 6
    plan = RunPlan(seed=7, stages=(stage,))
    assert [stage_in(plan, 1, number) for number in (1, 2, 3)] == [draws(stage)[index] for index in [1, 2, 0]]


def test_freeze_of_shared_attention_freezes_the_shared_stage_too():
    spec = msgspec.structs.replace(MODEL, encoder_sharing="multiway")
    trained = [set(s.trained) for s in method("schedule", "freeze").stages(spec, [1, 1, 1])]
    assert [{p for p in t if p.startswith("shared/")} for t in trained] == [
        {"shared/stage1", "shared/stage2", "shared/stage3"}, {"shared/stage2", "shared/stage3"}, {"shared/stage3"},
    ]  # fmt: skip


def test_layerwise_embeddings_by_option_and_by_pretraining():
    pretrained = msgspec.structs.replace(SENSOR, pretrained="some/checkpoint")
    mixed = ModelSpec({"a": pretrained, "b": SENSOR}, stages=3, classes=2)
    for embed, expected in (
        ("auto", {"b/embed"}),
        ("first_stage", {"a/embed", "b/embed"}),
        ("frozen", set()),
    ):
        stages = method("schedule", "layerwise").stages(mixed, [1, 1, 1], embed)
        assert {p for p in stages[0].trained if p.endswith("embed")} == expected
        assert not any(p.endswith("embed") for p in stages[1].trained)


def test_an_unlabelled_model_has_neither_fusion_nor_task():
    unlabelled = msgspec.structs.replace(MODEL, classes=0, label_names=())
    for schedule in methods("schedule").values():
        assert not {"fusion", "task"} & set(schedule.stages(unlabelled, [1, 1, 1], "auto")[0].present)


@given(st.sampled_from(sorted(methods("schedule"))), st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any))
def test_every_schedule_keeps_its_rounds_and_trains_only_what_is_there(name, rounds):
    stages = method("schedule", name).stages(MODEL, rounds, "auto")
    assert [s.rounds for s in stages] in (rounds, [sum(rounds)])
    assert [s.index for s in stages] == [number for number, _ in enumerate(stages, start=1)]
    for stage in stages:
        assert set(stage.trained) <= set(stage.present) <= set(part_names(MODEL))
        assert {"fusion", "task", "head/a", "head/b"} <= set(stage.trained)
    expected = set() if name == "heads" else {f"{m}/stage{k}" for m in "ab" for k in (1, 2, 3)}
    assert {p for s in stages for p in s.trained if encoder_stage(p)} == expected


def test_the_stage_of_a_part_and_of_a_modality_with_a_misleading_name():
    assert [encoder_stage(p) for p in ("a/embed", "a/stage12", "a/norm", "head/a", "fusion", "prototypes")] == [
        0, 12, None, None, None, None,
    ]  # fmt: skip
    assert encoder_stage("head/embed") is None
    assert encoder_stage("head/stage2") is None


def test_shallower_gives_up_the_input_side_first():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    kept = [sorted({n for p in s.trained if (n := encoder_stage(p)) is not None}) for s in shallower(stage)]
    assert kept == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    assert all(s.present == stage.present and set(HEADS) <= set(s.trained) for s in shallower(stage))
    last = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[2]
    assert shallower(last) == [last]


def test_restrict_leaves_out_what_belongs_to_absent_modalities():
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[1]
    own = restrict(stage, ["b"])
    assert own.present == ("b/embed", "b/stage1", "b/stage2", "b/norm", "head/b", "fusion", "task")
    assert own.trained == ("b/stage2", "b/norm", "head/b", "fusion", "task")
    assert restrict(stage, ["a", "b"]) == stage
    assert restrict(stage, []).trained == ("fusion", "task")


@pytest.mark.parametrize(
    "changes",
    [
        {"matching": "classifier"},
        {"matching": "prior"},
        {"reconstruction": True},
        {"encoder_sharing": "multiway", "reconstruction": True},
        {"fusion": "joint"},
    ],
    ids=str,
)
def test_mixed_gives_up_what_lies_beyond_its_depth_then_the_input_side(changes):
    spec = msgspec.structs.replace(MODEL, **changes)
    stages = method("schedule", "mixed").stages(spec, [1, 1, 1], "auto")
    progressive = method("schedule", "progressive").stages(spec, [1, 1, 1], "auto")
    (whole,) = method("schedule", "end_to_end").stages(spec, [1, 1, 1], "auto")
    for stage, own in zip(stages, progressive, strict=True):
        first, *others = shallower(stage)
        assert (set(first.present) - set(match_parts(spec)), first.trained) == (set(whole.trained), whole.trained)
        assert first.depth == 3
        smaller = others if stage.index < 3 else [first, *others]
        assert [(s.depth, set(s.present), set(s.trained)) for s in smaller] == [
            (s.depth, set(s.present), set(s.trained)) for s in shallower(own)
        ]


def test_mixed_ends_where_layerwise_does():
    last = [shallower(stage)[-1] for stage in method("schedule", "mixed").stages(MODEL, [1, 1, 1], "auto")]
    layerwise = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "frozen")
    assert [(s.depth, set(s.present), set(s.trained)) for s in last] == [
        (s.depth, set(s.present), set(s.trained)) for s in layerwise
    ]
