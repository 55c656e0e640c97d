"""FLOPs of a round outside its steps, against what runs: local evaluation, prototypes, networks, completion."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share
from training_fixture import CLIP, CROSS_ENTROPY, dataset, job, model_spec, parts_of, with_hyper

from edgefl.budget.fit import place
from edgefl.budget.stage_cost import Priced
from edgefl.data.dataset import Dataset
from edgefl.methods.fedmvp.completion import complete, nearest
from edgefl.methods.mmic.poverty_layer import poverty_layers
from edgefl.models.spec import EncoderSpec, JointSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.patterns import patterns_of
from edgefl.plan.job import Candidate, Hyper, Job, Slots
from edgefl.plan.stages import restrict, with_closing
from edgefl.plan.training_samples import after_completion, held_out, usable_samples
from edgefl.pricing.overhead import Share
from edgefl.pricing.round_price import Pricer, price_step
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.registry import method
from edgefl.report import units
from edgefl.training.batches import split
from edgefl.training.local_round import LocalState, RoundResult, train_round

CLUSTER = {"cluster_contrast": {"weight": 1.0, "temperature": 0.07}}
MARGIN = {"margin": {"weight": 1.0, "positive": 0.8, "negative": 0.2}}
ADAPTIVE = {"adaptive": {"local_clusters": 3.0, "clusters": 2.0, "neighbours": 2.0}}
MEANS = {"class_mean": {"match": "cosine"}}


def whole(spec: ModelSpec, **changes) -> Job:
    """A job of all parts of ``spec``, as in the last stage of end-to-end training."""
    return job(spec, method("schedule", "end_to_end").stages(spec, [1] * spec.stages, "auto")[-1], **changes)


def changed(**fields) -> ModelSpec:
    return msgspec.structs.replace(model_spec(stages=2), **fields)


def joint() -> ModelSpec:
    return changed(fusion="joint", joint=JointSpec(width=8, heads=2, layers=1))


def ran(made: Job, data: Dataset, kept: RoundResult | None = None) -> float:
    """FLOPs of a second round: what the server makes of the first one is there."""
    parts = parts_of(made)
    if MEANS.keys() & made.slots.prototypes.keys():
        table = ClassMeans(np.ones((3, 6), np.float32), np.ones(3, np.float32))
        parts["prototypes"] = to_tensors({"a": table, "b": table})
    own, holdout = split(made, data, "")
    if "completion" in made.slots.missing:
        own = complete(own, made.model.encoders, nearest(own)).dataset
    return train_round(made, own, parts, LocalState(holdout, kept.kept if kept else {})).flops


MODELS = {
    "concat": changed(),
    "mean": changed(fusion="mean"),
    "multiway": changed(encoder_sharing="multiway"),
    "joint": joint(),
    "joint shared": changed(fusion="joint", joint=JointSpec(8, 2, 1, shared=True)),
}


def test_half_of_the_rounds_cost_by_hand():
    # 24 samples, a quarter apart: 6, twice tested on; 18 are 3 steps of 6. An evaluation is no step.
    made = whole(changed(), holdout=0.25)
    step = price_step(made, {"a": 6, "b": 6})[1]
    flops = Pricer()(made, dict.fromkeys(("", "a", "b"), 24))[1]
    assert held_out(made.hyper, 24) == 6
    assert 0 < flops - 3 * step < 2 * step
    assert Pricer()(with_hyper(made, holdout=0.0), dict.fromkeys(("", "a", "b"), 24))[1] == 4 * step


@pytest.mark.parametrize("name", MODELS)
def test_samples_held_out_are_tried_and_not_trained_on(name):
    made, data = whole(MODELS[name], holdout=0.25), dataset(24)
    assert Pricer()(made, data.samples())[1] == ran(made, data)


@pytest.mark.parametrize("name", ["concat", "multiway"])
def test_the_evaluation_of_samples_that_lack_a_modality(name):
    made = whole(MODELS[name], holdout=0.5, batch_size=3)
    alone = dataset(24, {"b": list(range(24))})
    here = msgspec.structs.replace(made, stage=restrict(made.stage, ["a"]))
    assert Pricer()(here, alone.samples())[1] == ran(here, alone)
    # Which of them are apart is drawn, and how many of a batch have both: the figure is that of the mean batch.
    some = dataset(24, {"b": list(range(8)), "a": list(range(16, 24))})
    assert Pricer()(made, some.samples())[1] == pytest.approx(ran(made, some), rel=0.15)


def test_pairs_are_tried_by_retrieval():
    spec = changed(classes=0, label_names=())
    made, data = whole(spec, objective=CLIP, missing={"ignore": {}}, holdout=0.25), dataset(24)
    assert Pricer()(made, data.samples())[1] == ran(made, data)


@pytest.mark.parametrize(
    "objective", [CROSS_ENTROPY, CROSS_ENTROPY | CLUSTER], ids=["tables", "tables and pseudo-labels"]
)
@pytest.mark.parametrize("holdout", [0.0, 0.25])
def test_adaptive_prototypes_are_made_once_or_with_clusters_twice(objective, holdout):
    made, data = whole(changed(), objective=objective, prototypes=ADAPTIVE, holdout=holdout), dataset(24)
    assert Pricer()(made, data.samples())[1] == ran(made, data)


@pytest.mark.parametrize("name", MODELS)
def test_class_means_cost_the_projections_and_of_complete_samples_the_fusion(name):
    made = whole(MODELS[name], missing={"zero": {}}, prototypes=MEANS, holdout=0.25)
    complete_data, data = dataset(24), dataset(24, {"b": list(range(0, 24, 2))})
    assert Pricer()(made, complete_data.samples())[1] == pytest.approx(ran(made, complete_data), rel=1e-3)
    assert Pricer()(made, data.samples())[1] == pytest.approx(ran(made, data), rel=0.08)  # which are apart is drawn


def test_heads_without_batch_norm_take_no_statistics():
    made, data = whole(MODELS["joint shared"], prototypes=ADAPTIVE, missing={"zero": {}}, holdout=0.25), dataset(24)
    asked = msgspec.structs.replace(made, slots=msgspec.structs.replace(made.slots, statistics=True))
    assert Pricer()(asked, data.samples())[1] == Pricer()(made, data.samples())[1] == ran(asked, data)


@pytest.mark.parametrize("matching", ["classifier", "prior"])
@pytest.mark.parametrize("samples", [24, 90])  # one batch, and two of unequal size
def test_the_closing_round_costs_its_small_networks_and_the_projections_they_learn_from(matching, samples):
    closing, data = closed(changed(matching=matching)), dataset(samples)
    assert Pricer()(closing, data.samples())[1] == ran(closing, data) > 0
    training = whole(changed(matching=matching), prototypes=MEANS)
    assert Pricer()(training, data.samples())[1] == ran(training, data)  # no round before it has any of them


def closed(spec: ModelSpec) -> Job:
    """The closing round of ``spec``."""
    made = whole(spec, prototypes=MEANS)
    return msgspec.structs.replace(made, stage=with_closing(spec, [made.stage])[-1])


@pytest.mark.parametrize("matching", ["classifier", "prior"])
def test_a_modality_alone_teaches_a_classifier_and_no_prior(matching):
    made = closed(changed(matching=matching))
    alone = msgspec.structs.replace(made, stage=restrict(made.stage, ["a"]))
    data = dataset(24, {"b": list(range(24))})
    assert Pricer()(alone, data.samples())[1] == ran(alone, data)
    device = Candidate("d", samples=data.samples(), class_counts=(8, 8, 8))
    placed = place(made, device, {"match/a": 9}, Pricer())
    if matching == "prior":
        assert "has none to predict" in placed.refusal.detail
    else:
        assert placed.predicted["payload_up_bytes"].value == 9


def poor(made: Job, form: str) -> Job:
    return msgspec.structs.replace(made, slots=msgspec.structs.replace(made.slots, repair={"poverty": {"form": form}}))


def test_a_personal_model_is_tried_too():
    made, data = poor(whole(changed(), holdout=0.25), "optimiser"), dataset(24)
    kept = train_round(made, data, parts_of(made))
    price = Pricer()(made, data.samples())
    assert price.flops == ran(made, data, kept)
    assert price.flops - price.personal_flops == ran(made, data) < price.flops  # the first round has none yet


def test_the_copies_of_the_exact_poverty_layer_are_in_the_peak():
    made = whole(changed())
    layers = poverty_layers(made, build(made.model, made.stage.present, device="meta"))
    weights = sum(p.numel() * 4 for p in layers)
    exact, plain = (price_step(poor(made, form), {"a": 6, "b": 6}) for form in ("exact", "optimiser"))
    assert exact[0] - plain[0] == weights > 1000
    assert exact[1] == plain[1]


def test_what_nearest_completes_is_priced_as_there():
    made = whole(joint(), missing={"completion": {"generator": "nearest"}}, holdout=0.25)
    data = dataset(24, {"b": list(range(12))})
    done = complete(data, made.model.encoders, nearest(data)).dataset
    assert Pricer()(made, data.samples())[1] == pytest.approx(ran(made, data), rel=0.05)  # which are apart is drawn
    assert after_completion(made.slots, data.samples(), made.model.encoders) == done.samples()


VISION, TEXT = EncoderSpec(kind="vision"), EncoderSpec(kind="text")


@pytest.mark.parametrize(
    ("generator", "samples", "expected"),
    [
        ("nearest", {"": 10, "p": 10, "t": 4}, {"": 10, "p": 10, "t": 10}),
        ("nearest", {"": 10, "p": 6, "t": 4}, {"": 10, "p": 6, "t": 4}),  # no sample has both
        ("nearest", {"": 10, "p": 10, "t": 0}, {"": 10, "p": 10, "t": 0}),
        ("transformers", {"": 10, "p": 6, "t": 4}, {"": 10, "p": 6, "t": 10}),
        ("transformers", {"": 10, "p": 10}, {"": 10, "p": 10, "t": 10}),
        ("diffusers", {"": 10, "p": 6, "t": 4}, {"": 10, "p": 10, "t": 4}),
        ("diffusers", {"": 10, "p": 10}, {"": 10, "p": 10}),
    ],
)
def test_what_a_generator_will_make(generator, samples, expected):
    slots = Slots(missing={"completion": {"generator": generator}})
    assert after_completion(slots, samples, {"p": VISION, "t": TEXT}) == expected
    assert after_completion(Slots(missing={"zero": {}}), samples, {"p": VISION, "t": TEXT}) == samples


def test_nearest_makes_nothing_of_a_modality_that_no_sample_has():
    encoders = {m: EncoderSpec(input_shape=(8,)) for m in "abc"}
    found = after_completion(
        Slots(missing={"completion": {"generator": "nearest"}}), {"": 10, "a": 10, "b": 4}, encoders
    )
    assert found == {"": 10, "a": 10, "b": 10}


def test_a_device_trains_the_parts_of_what_its_generator_makes():
    small = {"width": 8, "depth": 1, "heads": 2, "patch": 4}
    picture = EncoderSpec(kind="vision", input_shape=(8, 8, 3), **small)
    words = EncoderSpec(kind="text", input_shape=(4,), vocabulary=9, **small)
    spec = msgspec.structs.replace(model_spec(stages=1), encoders={"p": picture, "t": words})
    made = whole(spec)
    device = Candidate("d", samples={"": 10, "p": 10}, modalities={"p": (8, 8, 3)}, class_counts=(5, 5))
    for generator, there in (("transformers", True), ("nearest", False)):
        slots = msgspec.structs.replace(made.slots, missing={"completion": {"generator": generator}})
        placed = place(Job(spec, made.stage, made.hyper, slots), device, {}, lambda job, samples: Priced(0, 0.0))
        assert placed.refusal is None
        assert ("head/t" in placed.stage.trained) == there


def test_patterns_by_hand():
    # Of two, everybody has one: 8 + 5 - 10 have both. Of three, the rarer are assumed to lie within the others.
    assert patterns_of({"": 10, "a": 8, "b": 5}, "ab") == {("a", "b"): 3, ("a",): 5, ("b",): 2}
    assert patterns_of({"": 10, "a": 5, "b": 10}, "ab") == {("a", "b"): 5, ("b",): 5}
    three = {"": 10, "a": 5, "b": 10, "c": 2}
    assert patterns_of(three, "abc") == {("a", "b", "c"): 2, ("a", "b"): 3, ("b",): 5}
    assert patterns_of({"": 10, "a": 10}, "ab") == {("a",): 10}
    # As a device says it: two have all three, two a and c alone, and what is left of a, b has it alone.
    told = {"": 11, "a": 6, "b": 9, "c": 4, "&a&b&c": 2, "&a&c": 2}
    exact = {("a", "b", "c"): 2, ("a", "c"): 2, ("a",): 2, ("b",): 7}
    assert patterns_of(told, "abc") == exact
    assert patterns_of(told, "ab") == {("a", "b"): 2, ("a",): 4, ("b",): 7}
    share_ = Share(11, 11, 0, {p: n / 13 for p, n in exact.items()}, {})
    assert share_.having("a") == pytest.approx(6 / 13)
    assert share_.having("a", "c") == pytest.approx(4 / 13)


def test_a_data_set_counts_its_patterns_where_a_sample_lacks_a_modality():
    has = {"a": np.array([1, 1, 0, 1], np.bool_), "b": np.array([1, 0, 1, 1], np.bool_)}
    values = {m: np.zeros((4, 2, 1), np.float32) for m in has}
    data = Dataset(values, has, None, (), list("wxyz"))
    assert data.samples() == {"": 4, "a": 3, "b": 3, "&a&b": 2}
    assert patterns_of(data.samples(), "ab") == {("a", "b"): 2, ("a",): 1, ("b",): 1}
    assert units.samples(data.samples()) == "4 (a 3, b 3)"
    whole = Dataset(values, dict.fromkeys(has, np.ones(4, np.bool_)), None, (), list("wxyz"))
    assert whole.samples() == {"": 4, "a": 4, "b": 4}


def test_complete_samples_are_those_that_the_device_counts():
    """Of 10 samples 8 have a and 7 have b; nothing but the device's own count says that 6 have both."""
    told = {"": 10, "a": 8, "b": 7, "&a&b": 6}
    assert usable_samples(Slots({"cross_entropy": {}}, {"ignore": {}}), told, "ab") == 6
    assert usable_samples(Slots({"clip": {}}, {"zero": {}}), told, "ab") == 6
    assert usable_samples(Slots({"cross_entropy": {}}, {"zero": {}}), told, "ab") == 9
    completion = Slots({"cross_entropy": {}}, {"completion": {"generator": "nearest"}})
    assert not any(key.startswith("&") for key in after_completion(completion, told, model_spec().encoders))


@pytest.mark.parametrize(("holdout", "usable", "expected"), [(0.2, 30, 6), (0.0, 30, 0), (0.9, 30, 24), (0.5, 5, 0)])
def test_one_batch_at_least_is_trained_on(holdout, usable, expected):
    assert held_out(Hyper(batch_size=6, holdout=holdout), usable) == expected


def test_in_the_closing_round_the_model_comes_and_small_networks_go():
    spec = changed(matching="classifier")
    made = whole(spec)
    before, stage = with_closing(spec, [made.stage])
    device = Candidate("d", samples={"": 24, "a": 24, "b": 24}, class_counts=(8, 8, 8))
    sizes = dict.fromkeys(stage.present, 10)
    closing = msgspec.structs.replace(made, stage=stage)
    placed = place(closing, device, sizes, lambda *_: Priced(100, 2000.0), before=before)
    told = {name: figure.value for name, figure in placed.predicted.items()}
    assert placed.cost.entering_down_bytes == 10 * (len(before.trained) + 2)
    assert (told["payload_up_bytes"], told["flops"]) == (20, 2000)
    assert placed.stage.trained == ("match/a", "match/b")


# The whole way: planner, coordinator, ledger, against what the devices counted


def rows_of(directory: Path, recipe: str, shares: dict[str, Dataset], *overrides: str) -> dict:
    plan = plan_of(directory, recipe, "ab", len(shares), ["slots.select=all", *overrides])
    report = run_fleet(directory, plan, shares)
    assert report.status == "done"
    return {(row.device, row.round): row for row in report.assignments}


def off(row, figure: str) -> float:
    """Predicted over measured, less 1."""
    return row.predicted[figure].value / row.measured[figure].value - 1


@pytest.mark.slow
def test_a_fleet_with_small_networks_costs_what_was_predicted_in_every_round(ram_path: Path):
    shares = {"one": share(30, {"a": 1.0, "b": 1.0}, seed=1), "two": share(24, {"a": 1.0}, seed=2)}
    shares["three"] = share(30, {"a": 1.0, "b": 1.0}, seed=3)  # a part that one device alone trained, it has already
    plan = plan_of(ram_path, "pmcmfl", "ab", len(shares), ["slots.select=all"])
    report = run_fleet(ram_path, plan, shares)
    assert {(row.device, row.stage, row.round) for row in report.assignments} == {
        (device, *place) for device in shares for place in ((1, 1), (1, 2), (2, 1))
    }
    for row in report.assignments:
        assert abs(off(row, "flops")) < 0.01, (row.device, row.stage)
    for row in (row for row in report.assignments if row.stage == 2):
        assert abs(off(row, "payload_down_bytes")) < 0.02, row.device
        assert abs(off(row, "payload_up_bytes")) < 0.02, row.device


def test_what_makes_an_absent_modality_is_downloaded_and_priced(ram_path: Path):
    shares = {"one": share(30, {"a": 1.0, "b": 1.0}, seed=1), "two": share(30, {"a": 1.0}, seed=2)}
    rows = rows_of(ram_path, "mmic-reconstruction", shares)
    assert "reconstruct/b" not in rows["two", 2].trained
    for device in shares:
        assert off(rows[device, 2], "payload_down_bytes") == 0
        assert abs(off(rows[device, 2], "flops")) < 0.001
