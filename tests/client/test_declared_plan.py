"""Runs whose model only devices can build: stages, places, null predictions, and what such a run cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edgefl
from coordinator.runtime.evaluator import Evaluator, Request
from edgefl.budget.fit import place
from edgefl.budget.stage_cost import OWN_CODE
from edgefl.client import save
from edgefl.config.profiles import load_run
from edgefl.errors import ConfigError, ModelError
from edgefl.models.checkpoints import initial_parts
from edgefl.plan.compile import compile_run
from edgefl.plan.job import Candidate, Decline, Job, Placement, RunPlan
from edgefl.pricing.round_price import Pricer
from edgefl.records import Budget, Capabilities, Refusal, Speed
from edgefl.storage.objects import ObjectStore

#: Bytes of each part's object: three linear maps of 16 x 16 + 16 numbers, with a header.
PARTS = {"one": ["0"], "two": ["1"], "head": ["2"]}


@pytest.fixture
def initial(tmp_path: Path) -> str:
    torch.manual_seed(0)
    save(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), PARTS, tmp_path / "initial.safetensors")
    return str(tmp_path / "initial.safetensors")


def planned(initial: str, **more: Any) -> RunPlan:
    fields = {"name": "own", "model": {"own": initial}, "training": {"rounds": [1, 2]}, **more}
    config, recipe = load_run(fields)
    return compile_run(config, recipe, run="r", shapes={})


@pytest.mark.parametrize(
    ("schedule", "trained"),
    [
        ("end_to_end", [["one", "two", "head"]]),
        ("layerwise", [["one", "head"], ["two", "head"]]),
        ("progressive", [["one", "head"], ["one", "two", "head"]]),
        ("freeze", [["one", "two", "head"], ["two", "head"]]),
    ],
)
def test_stages_train_declared_parts_in_their_order(initial: str, schedule: str, trained: list[list[str]]) -> None:
    plan = planned(initial, slots={"schedule": schedule})
    assert [list(stage.trained) for stage in plan.stages] == trained
    assert {stage.present for stage in plan.stages} == {("one", "two", "head")}, "the code runs the whole model"
    assert sum(stage.rounds for stage in plan.stages) == 3
    assert plan.hypers[0].lr["head"] == 1e-3


def test_each_stage_has_its_rounds_and_rates(initial: str) -> None:
    rates = {"rounds": [2, 1], "lr": {"head": [0.1, 0.2]}}
    plan = planned(initial, slots={"schedule": "layerwise"}, training=rates)
    assert [(stage.rounds, hyper.lr["head"]) for stage, hyper in zip(plan.stages, plan.hypers, strict=True)] == [
        (2, 0.1),
        (1, 0.2),
    ]
    with pytest.raises(ModelError, match=r"training\.rounds has 3 entries, and the parts one, two, head make 2 stages"):
        planned(initial, slots={"schedule": "layerwise"}, training={"rounds": [1, 1, 1]})


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": {"stages": 3}}, "model.stages"),
        ({"data": {"test": "test.npz"}}, "data.test"),
        ({"training": {"optimizer": "sgd"}}, "training.optimizer"),
        ({"training": {"clip_norm": 1.0}}, "training.clip_norm"),
        ({"training": {"holdout": 0.2}}, "training.holdout"),
        ({"training": {"lr": {"encoder": 0.1}}}, "training.lr.encoder"),
        ({"slots": {"objective": {"cross_entropy": {}, "proximal": {}}}}, "slots.objective"),
        ({"slots": {"prototypes": "class_mean"}}, "slots.prototypes"),
        ({"slots": {"fusion": "mean"}}, "slots.fusion"),
        ({"slots": {"missing": "ignore"}}, "slots.missing"),
        ({"slots": {"weight": "cka"}}, "slots.weight"),
        ({"slots": {"schedule": "mixed"}}, "slots.schedule"),
        ({"slots": {"pace": "plateau"}}, "slots.pace"),
        ({"recipe": "pmcmfl"}, "slots.prototypes"),
        ({"model": {"own": "absent.safetensors"}}, "model.own"),
    ],
)
def test_what_needs_edgefls_own_training_is_refused_by_its_setting(
    initial: str, fields: dict[str, dict[str, Any]], path: str
) -> None:
    model = {"own": initial, **fields.pop("model", {})}
    training = {"rounds": [1], **fields.pop("training", {})}
    with pytest.raises(ConfigError) as error:
        planned(initial, model=model, training=training, **fields)
    assert path in [problem.path for problem in error.value.problems], error.value.message


def test_a_run_file_as_resolved_is_a_run_file_again(initial: str) -> None:
    plan = planned(initial, recipe="fedadam", transfer={"up": "int8"}, rounds="async")
    config, recipe = load_run(plan.config["run"])
    assert compile_run(config, recipe, run="r", shapes={}) == plan


@pytest.mark.parametrize("recipe", ["end_to_end", "fedadam", "fedyogi", "fedmedian", "multi-krum", "dp-fedavg"])
def test_recipes_that_take_updates_as_tensors_have_own_code(initial: str, recipe: str) -> None:
    assert planned(initial, recipe=recipe, round={"devices": 8}).stages[0].trained == ("one", "two", "head")


def test_privacy_refuses_statistics_in_the_declared_parts(tmp_path: Path) -> None:
    save(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {"all": [""]}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"model.own: has all: 1\.(num_batches_tracked|running_mean)"):
        planned(str(tmp_path / "a.safetensors"), recipe="dp-fedavg", training={"rounds": [1]})


def test_a_path_is_relative_to_the_run_file(initial: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: own\nmodel: {own: initial.safetensors}\ntraining: {rounds: [1]}\n")
    assert load_run(str(tmp_path / "run.yaml"))[0].model.own == initial


def test_a_model_is_encoders_or_own_code(initial: str) -> None:
    for model in ({}, {"own": initial, "encoders": {"a": {"kind": "sensor"}}}):
        with pytest.raises(ConfigError, match=r"model\.encoders: give one at least, or model\.own, and not both"):
            load_run({"name": "x", "model": model, "training": {"rounds": [1] * 6}})


def test_commands_without_the_devices_say_who_trains_it(initial: str) -> None:
    fields = {"name": "own", "model": {"own": initial}, "training": {"rounds": [1]}}
    for call in (edgefl.plan_run, edgefl.run):
        with pytest.raises(ConfigError, match=r"model\.own: is trained by code and data of the devices") as error:
            call(fields)
        assert "edgefl-agent run --trainer" in error.value.remedy


def placed(plan: RunPlan, sizes: dict[str, int], candidate: Candidate, stage: int = 0) -> Placement:
    before = plan.stages[stage - 1] if stage else None
    return place(
        Job(plan.model, plan.stages[stage], plan.hypers[stage], plan.slots), candidate, sizes, Pricer(), before=before
    )


def test_bytes_are_predicted_and_the_rest_is_null_with_its_reason(initial: str) -> None:
    plan = planned(initial, slots={"schedule": "layerwise"})
    fast = Capabilities(speed=Speed(flops=1e9, down_bytes=1000, up_bytes=1000, power_w=5.0))
    placement = placed(plan, {"one": 1000, "two": 2000, "head": 300}, Candidate("d", fast), 1)
    assert placement.refusal is None
    for name in ("step_peak_bytes", "flops"):
        assert placement.predicted[name].value is None
        assert placement.predicted[name].reason == OWN_CODE
    assert placement.predicted["payload_up_bytes"].value == 2300, "what the second stage trains"
    assert not {"compute_s", "wall_s", "energy_j"} & placement.predicted.keys(), "of the transfer alone they were wrong"
    assert placement.cost.entering_down_bytes == 1300, "what the first trained; part two is as it was"


def test_budgets_hold_by_bytes_and_by_what_a_device_has_measured(initial: str) -> None:
    plan, sizes = planned(initial), {"one": 1000, "two": 2000, "head": 300}
    short = placed(plan, sizes, Candidate("d", budget=Budget(payload_bytes=6599)))
    assert (short.refusal.reason, short.refusal.needed) == ("payload", 6600.0)
    assert placed(plan, sizes, Candidate("d", budget=Budget(payload_bytes=6600))).refusal is None
    small = placed(plan, sizes, Candidate("d", budget=Budget(step_memory_bytes=5299)))
    assert (small.refusal.reason, small.refusal.needed) == ("step_memory", 5300.0), "the parts alone, and one in hand"
    counted = placed(plan, sizes, Candidate("d", budget=Budget(flops=1e9)))
    assert (counted.refusal.reason, counted.refusal.allowed) == ("flops", 1e9), "not taken for zero, nor passed over"
    measured = Refusal("ceiling", 9e6, 8e6, "B")
    again = placed(plan, sizes, Candidate("d", declined=(Decline(0, 16, False, measured),)))
    assert again.refusal == measured, "no smaller batch of own code is known, so it is not asked again in this stage"


def test_the_run_begins_with_the_files_tensors(initial: str, tmp_path: Path) -> None:
    plan = planned(initial)
    manifest = Evaluator().initial_parts(Request(plan, str(ObjectStore(tmp_path / "objects").root)))
    assert list(manifest) == ["one", "two", "head"]
    torch.manual_seed(9)
    save(nn.Sequential(nn.Linear(2, 2)), {"other": [""]}, initial)
    with pytest.raises(ModelError, match="has the parts other, and the run was planned with one, two, head"):
        list(initial_parts(plan.model))
