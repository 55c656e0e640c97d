"""Rates that fall over a run: by hand, alike for every schedule, and in each device's offer."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_fleet import plan_of

from coordinator.core.assignments import offer_for
from coordinator.core.moves import SendOffer
from coordinator.core.state import State
from edgefl.config.settings import TrainingConfig
from edgefl.errors import ConfigError
from edgefl.plan.falling_rates import factor_at
from edgefl.plan.job import Hyper, Placement, RateFall, RunPlan, Stage
from edgefl.records import Attempt

COSINE, STEP = RateFall("cosine"), RateFall("step", rounds=3, factor=0.5)


def plan(*rounds: int, fall: RateFall) -> RunPlan:
    stages = tuple(Stage(index=i, rounds=count, trained=("task",)) for i, count in enumerate(rounds, start=1))
    return RunPlan(stages=stages, lr_fall=fall)


def curve(made: RunPlan) -> list[float]:
    return [factor_at(made, stage.index, n) for stage in made.stages for n in range(1, stage.rounds + 1)]


def test_cosine_by_hand():
    # of four rounds, 0, 1/4, 1/2 and 3/4 of pi are over: (1 + 1, 1 + sqrt(1/2), 1 + 0, 1 - sqrt(1/2)) / 2
    half = math.sqrt(0.5)
    assert curve(plan(4, fall=COSINE)) == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2])


def test_steps_by_hand():
    assert curve(plan(2, 5, fall=STEP)) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(("rounds", "stages"), [((6,), "one"), ((1, 0, 5), "staged")])
def test_a_warm_up_by_hand_and_then_the_fall_over_the_other_rounds(rounds, stages):
    """Two rounds of warm-up: 1/3, 2/3. Of the other four 0, 1/4, 1/2 and 3/4 of pi are over."""
    half = math.sqrt(0.5)
    rise = [1 / 3, 2 / 3]
    falls = {
        "none": [1.0] * 4,
        "cosine": [1.0, (1 + half) / 2, 0.5, (1 - half) / 2],
        "step": [1.0, 1.0, 1.0, 0.5],
    }
    for kind, fall in falls.items():
        made = plan(*rounds, fall=RateFall(kind, rounds=3, factor=0.5, warmup=2))
        assert curve(made) == pytest.approx([*rise, *fall]), (kind, stages)


def test_a_device_is_offered_the_rates_of_the_warm_up_again_after_a_restart(tmp_path):
    settings = ["training.rounds=[2, 2]", "training.lr_warmup=3", "training.lr={encoder: 0.4, head: 1.0}"]
    made = plan_of(tmp_path, "end_to_end", "ab", 1, settings)
    placement = Placement("d", made.stages[0], made.hypers[0])
    restarted = msgspec.json.decode(msgspec.json.encode(made), type=RunPlan)
    for plan_, tried in ((made, 1), (restarted, 2)):
        offer = offer_for(SendOffer("d", Attempt("tiny", 1, 2, tried), placement, 1.0), {}, State(plan_))
        assert offer.job.hyper.lr == {"encoder": 0.2, "head": 0.5}


def test_a_warm_up_that_does_not_end_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="4 rounds of 4: give fewer"):
        plan_of(tmp_path, "end_to_end", "ab", 1, ["training.rounds=[2, 2]", "training.lr_warmup=4"])


def test_rates_printed_for_batches_of_256_are_scaled_to_the_batch(tmp_path):
    """LW-FedMML's Table III at the batches of 16 it has for ADVANCE: a sixteenth, stage by stage (arXiv 2407.15426)."""
    settings = ["training.rounds=[1, 1]", "training.batch_size=16", "training.lr={encoder: [1e-7, 5e-5], head: 1e-4}"]
    settings.append("training.lean={optimizer: sgd, lr: {encoder: 0.5, head: 0.5}}")
    plain = plan_of(tmp_path, "lw-fedmml", "ab", 1, settings)
    scaled = plan_of(tmp_path, "lw-fedmml", "ab", 1, [*settings, "training.lr_scale=batch"])
    assert [one.lr for one in plain.hypers] == [{"encoder": 1e-7, "head": 1e-4}, {"encoder": 5e-5, "head": 1e-4}]
    assert [one.lr for one in scaled.hypers] == [
        {"encoder": 6.25e-9, "head": 6.25e-6},
        {"encoder": 3.125e-6, "head": 6.25e-6},
    ]
    assert [one.low_memory_optimizer for one in scaled.hypers] == [one.low_memory_optimizer for one in plain.hypers]
    whole = plan_of(tmp_path, "lw-fedmml", "ab", 1, [*settings, "training.lr_scale=batch", "training.batch_size=256"])
    assert [one.lr for one in whole.hypers] == [one.lr for one in plain.hypers]


def test_without_a_fall_nothing_changes():
    assert curve(plan(2, 5, fall=RateFall())) == [1.0] * 7


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.sampled_from([COSINE, STEP]))
def test_a_staged_run_has_the_rates_of_one_with_a_single_stage(rounds: list[int], fall: RateFall):
    found = curve(plan(*rounds, fall=fall))
    assert found == curve(plan(sum(rounds), fall=fall))
    assert found == sorted(found, reverse=True)
    assert 0.0 < found[-1] <= found[0] == 1.0


def test_the_closing_round_is_none_of_the_run_s():
    made = plan(2, 2, fall=COSINE)
    closing = Stage(index=3, rounds=1, trained=("match/a",))
    with_it = RunPlan(stages=(*made.stages, closing), lr_fall=COSINE)
    assert curve(with_it) == [*curve(made), 1.0]


def test_what_a_device_is_offered_has_the_round_s_rates(tmp_path):
    settings = ["training.rounds=[2, 2]", "training.lr_fall=cosine", "training.lr={encoder: 0.25, head: 1.0}"]
    made = plan_of(tmp_path, "end_to_end", "ab", 1, settings)
    placement = Placement("d", made.stages[0], made.hypers[0])
    rates = [
        offer_for(SendOffer("d", Attempt("tiny", 1, n, tried), placement, 1.0), {}, State(made)).job.hyper.lr
        for n, tried in ((1, 1), (3, 1), (3, 2))
    ]
    assert rates == [{"encoder": 0.25, "head": 1.0}, *[{"encoder": 0.125, "head": 0.5}] * 2]
    assert made.hypers[0] == placement.hyper  # the plan keeps the rates as they were set


def test_the_low_memory_optimiser_s_rates_fall_alike(tmp_path):
    lean = "training.lean={optimizer: sgd, lr: {encoder: 0.5, head: 0.5}}"
    made = plan_of(tmp_path, "end_to_end", "ab", 1, ["training.rounds=[2, 2]", "training.lr_fall=cosine", lean])
    low = Hyper(optimizer="sgd", lr={"encoder": 0.5, "head": 0.5}, low_memory=True)
    sent = SendOffer("d", Attempt("tiny", 1, 3, 1), Placement("d", made.stages[0], low), 1.0)
    assert offer_for(sent, {}, State(made)).job.hyper.lr == {"encoder": 0.25, "head": 0.25}


@pytest.mark.parametrize(
    "value",
    ["linear", {"cosine": {"rounds": 3}}, {"step": {}}, {"step": {"rounds": 3}}, {"none": {}, "cosine": {}}, {},
     {"step": {"rounds": 0, "factor": 0.5}}, {"step": {"rounds": 2.5, "factor": 0.5}},
     {"step": {"rounds": 3, "factor": 1.5}}, {"step": {"rounds": 3, "factor": 0}}],
    ids=str,
)  # fmt: skip
def test_what_is_no_fall_is_refused(value):
    with pytest.raises(ValueError, match=r"takes one choice|Input should be|between 0 and 1"):
        TrainingConfig.model_validate({"rounds": [1], "lr_fall": value})


def test_a_run_file_s_fault_is_told_with_its_place(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.lr_fall"):
        plan_of(tmp_path, "end_to_end", "ab", 1, ["training.lr_fall={step: {rounds: 3, factor: 2}}"])
