"""The heads' normalisation: its default by recipe, and that every user of a head takes each of them."""

from __future__ import annotations

import msgspec
import pytest
from export_fixture import sensor, some_state, stage_of, two_sensors
from test_compile import SHAPE, run_config
from training_fixture import dataset, job, model_spec, parts_of

from edgefl.config.profiles import load_recipe, shipped
from edgefl.errors import ConfigError
from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.models.spec import HeadSpec, Norm
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.pricing.round_price import Pricer
from edgefl.registry import method
from edgefl.training.local_round import LocalState, train_round

LAYER = {
    "dp-fedavg",
    "fedadagrad",
    "fedadam",
    "fedmedian",
    "fedyogi",
    "mmic",
    "mmic-gmc",
    "mmic-layer",
    "mmic-reconstruction",
}
NORMS: tuple[Norm, ...] = ("batch", "layer", "none")


def compiled(recipe: str, slots: dict | None = None, **head: object) -> RunPlan:
    model = {"stages": 1, "encoders": {m: {"kind": "sensor", "depth": 2} for m in "ab"}, "head": {"out": 64, **head}}
    config = run_config(model={**model, "fusion_width": 64}, training={"rounds": [1]})
    shapes = dict.fromkeys("ab", SHAPE)
    return compile_run(config, load_recipe(recipe, slots), run="r", shapes=shapes, label_names=("x", "y"))


@pytest.mark.parametrize("recipe", shipped("recipes"))
def test_the_default_norm_of_every_recipe_and_batch_norm_where_a_run_file_asks_for_it(recipe: str):
    expected = "none" if recipe == "apromfl" else "layer" if recipe in LAYER else "batch"
    assert compiled(recipe).model.head.norm == expected
    if recipe in {"dp-fedavg", "mmic-layer"}:  # statistics leak; or a layer is replaced, which has others
        with pytest.raises(ConfigError, match=r"model\.head\.norm"):
            compiled(recipe, norm="batch")
    else:
        assert compiled(recipe, norm="batch").model.head.norm == "batch"


def test_a_slot_of_the_run_file_decides_as_one_of_the_recipe_does():
    assert compiled("end_to_end", {"optimise": "momentum"}).model.head.norm == "layer"
    assert compiled("fedadam", {"optimise": "plain"}).model.head.norm == "batch"
    assert compiled("mmic", {"optimise": "plain", "repair": "none"}).model.head.norm == "batch"
    assert compiled("mmic", {"optimise": "plain"}).model.head.norm == "layer"


@pytest.mark.parametrize("norm", ["layer", "none"])  # batch: in test_export
def test_a_bundle_of_either_norm_agrees_with_torch(norm: Norm, tmp_path):
    spec = two_sensors(encoders={"acc": sensor()}, head=HeadSpec(width=16, out=8, norm=norm))
    _, parts = some_state(spec)
    rows = export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "bundles")
    assert [row.max_difference <= row.tolerance for row in rows] == [True]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
def test_a_round_with_every_norm_costs_what_was_predicted(norm: Norm, schedule: str):
    spec = msgspec.structs.replace(model_spec(), head=HeadSpec(12, 6, 0.0, norm=norm))
    made = job(spec, method("schedule", schedule).stages(spec, [1] * spec.stages)[-1], cache="f32", holdout=0.25)
    data = dataset(24)
    holdout, own = data.subset(range(6)), data.subset(range(6, 24))
    result = train_round(made, own, parts_of(made), LocalState(holdout))
    priced = Pricer()(made, data.samples())
    assert result.flops == priced.flops + sum(priced.cache_fill_flops.values())
    heads = {name for part, tensors in result.parts.items() if part.startswith("head/") for name in tensors}
    assert any("running" in name for name in heads) == (norm == "batch")
