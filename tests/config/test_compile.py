"""A run file and the data's shapes to a resolved run, or every fault at once."""

from __future__ import annotations

import msgspec
import pytest

from edgefl.config.settings import RunConfig
from edgefl.config.slots import RecipeFile
from edgefl.encoder_kinds import OWN
from edgefl.errors import ConfigError
from edgefl.plan.compile import compile_run
from edgefl.plan.job import LowMemoryOptimizer

SHAPE = (16, 3)


def run_config(**changes) -> RunConfig:
    fields = {
        "name": "mine",
        "model": {"stages": 3, "encoders": {"a": {"kind": "sensor"}, "b": {"kind": "sensor"}}},
        "training": {"rounds": [1, 2, 3], "lr": {"encoder": [0.1, 0.2, 0.3], "head": 0.5}},
    }
    return RunConfig.model_validate({**fields, **changes})


def compiled(recipe: dict | None = None, shapes=None, label_names=("x", "y"), **changes):
    made = RecipeFile.model_validate({"name": "made", **(recipe or {})})
    shapes = {"a": SHAPE, "b": SHAPE} if shapes is None else shapes
    return compile_run(run_config(**changes), made, run="r", shapes=shapes, label_names=label_names)


def test_a_run_is_compiled_with_every_size_and_rate_resolved():
    plan = compiled({"schedule": "layerwise"})
    assert plan.model.encoders["a"].input_shape == SHAPE
    assert plan.model.encoders["a"].width == OWN["sensor"].sizes["tiny"]["width"]
    assert (plan.model.classes, plan.model.label_names) == (2, ("x", "y"))
    assert [h.lr for h in plan.hypers] == [{"encoder": e, "head": 0.5} for e in (0.1, 0.2, 0.3)]
    assert plan.hypers[0].weight_decay == {"encoder": 0.01, "head": 1e-6}
    assert plan.policy.devices == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=type(plan)) == plan


def test_a_stage_of_mixed_takes_its_own_rate():
    plan = compiled({"schedule": "mixed"})
    assert [(stage.depth, h.lr["encoder"]) for stage, h in zip(plan.stages, plan.hypers, strict=True)] == [
        (3, 0.1), (3, 0.2), (3, 0.3),
    ]  # fmt: skip


def test_a_stage_of_freeze_takes_its_own_rate_though_all_have_the_whole_depth():
    plan = compiled({"schedule": "freeze"})
    assert [(stage.depth, h.lr["encoder"]) for stage, h in zip(plan.stages, plan.hypers, strict=True)] == [
        (3, 0.1), (3, 0.2), (3, 0.3),
    ]  # fmt: skip


def test_end_to_end_takes_the_last_of_the_rates():
    plan = compiled()
    assert [h.lr["encoder"] for h in plan.hypers] == [0.3]
    assert plan.stages[0].rounds == 6


def test_the_fleet_is_waited_for_unless_told_otherwise():
    fleet = [{"name": "p"}, {"name": "q"}]
    assert compiled(fleet=fleet).policy.devices == 2
    assert compiled(fleet=fleet, round={"devices": 1}).policy.devices == 1


def test_faults_of_the_model_are_told_at_once_with_path_and_choices():
    encoders = {"a": {"kind": "sensor", "size": "tinny"}, "c": {"kind": "vision", "size": "tiny"}}
    with pytest.raises(ConfigError) as raised:
        compiled(model={"stages": 3, "encoders": encoders}, label_names=())
    told = {p.path: p.message for p in raised.value.problems}
    assert told["model.encoders.a.size"] == (
        "kind sensor has no size 'tinny'; did you mean 'tiny'? valid: tiny, small, base"
    )
    assert "it has: a, b" in told["model.encoders.c"]
    assert "needs labels" in told["data"]


def test_a_model_that_does_not_fit_the_data_or_itself():
    odd = {"a": {"kind": "sensor", "depth": 4}, "b": {"kind": "vision", "width": 7}}
    with pytest.raises(ConfigError) as raised:
        compiled(model={"stages": 3, "encoders": odd})
    assert {p.path for p in raised.value.problems} == {
        "model.encoders.a.depth",
        "model.encoders.b.width",
        "model.encoders.b.input_shape",
    }


def test_samples_of_several_labels_take_no_method_that_goes_by_one():
    names = ("&x", "&y")
    assert compiled(label_names=names).model.label_names == names
    for slots, text in (
        ({"prototypes": "class_mean"}, "class_mean goes by the one class of a sample"),
        ({"objective": ["cross_entropy", "ram"]}, "ram goes by the one class of a sample"),
    ):
        model = {"stages": 3, "encoders": {"a": {"kind": "sensor"}, "b": {"kind": "sensor"}}, "fusion_width": 64}
        compiled(slots, model=model)
        with pytest.raises(ConfigError, match=text):
            compiled(slots, model=model, label_names=names)


def test_clip_needs_two_modalities_and_no_labels():
    plan = compiled({"objective": "clip"}, label_names=())
    assert plan.model.classes == 0
    with pytest.raises(ConfigError, match="objective clip needs two modalities or more"):
        compiled({"objective": "clip"}, model={"stages": 3, "encoders": {"a": {"kind": "sensor"}}})


def test_the_lean_optimiser_has_rates_of_its_own():
    lean = {"optimizer": "sgd", "lr": {"encoder": [0.4, 0.5, 0.6], "head": 2.0}}
    training = {"rounds": [1, 1, 1], "lr": {"encoder": 0.1, "head": 0.5}, "lean": lean, "precision": "bf16"}
    plan = compiled({"schedule": "layerwise"}, training=training)
    assert [h.low_memory_optimizer for h in plan.hypers] == [
        LowMemoryOptimizer("sgd", {"encoder": e, "head": 2.0}) for e in (0.4, 0.5, 0.6)
    ]
    assert {(h.optimizer, h.precision, h.low_memory) for h in plan.hypers} == {("adamw", "bf16", False)}
    assert compiled().hypers[0].low_memory_optimizer is None
    lean["lr"]["encoder"] = [0.4, 0.5]
    with pytest.raises(ConfigError, match=r"training\.lean\.lr\.encoder: has 2 entries"):
        faultless(training)
    for own, other in (("adafactor", "sgd"), ("adafactor", "adafactor"), ("sgd", "sgd")):
        values = {"rounds": [1, 1, 1], "optimizer": own, "lean": {"optimizer": other, "lr": {}}}
        with pytest.raises(ConfigError, match=f"keeps no less than {own}"):
            faultless(values)


def faultless(training: dict) -> None:
    if problems := run_config(training=training).conflicts():
        raise ConfigError("mine", problems)


def test_poverty_is_read_from_an_optimiser_that_keeps_it():
    mean = {"repair": {"poverty": {}}}
    exact = {"repair": {"poverty": {"form": "exact"}}}
    for field, training in (
        ("training.optimizer", {"rounds": [1, 1, 1], "optimizer": "adafactor"}),
        ("training.lean.optimizer", {"rounds": [1, 1, 1], "lean": {"optimizer": "adafactor", "lr": {}}}),
    ):
        with pytest.raises(ConfigError, match=f"{field}: adafactor does not keep"):
            compiled(mean, training=training)
        assert compiled(exact, training=training)
    assert compiled(mean, training={"rounds": [1, 1, 1], "lean": {"optimizer": "sgd", "lr": {}}})
