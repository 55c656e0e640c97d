"""What stands in for a missing modality at inference is what the recipe trained with."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from training_fixture import CROSS_ENTROPY, SHAPE, dataset, job, model_spec, parts_of, stages_of

from edgefl import registry
from edgefl.data.dataset import Dataset
from edgefl.errors import ModelError
from edgefl.methods.mmic.reconstruction import stand_in as reconstruction
from edgefl.models.parts import load_part
from edgefl.models.spec import JointSpec, ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job
from edgefl.plan.stages import restrict
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.roles import StandIn
from edgefl.training.batches import Batch
from edgefl.training.evaluate import Criteria, evaluate, judge
from edgefl.training.fill import AtHand, Made, fill
from edgefl.training.forward import auxiliary_of
from edgefl.training.local_evaluation import local_evaluation
from edgefl.training.step import run_forward

RECONSTRUCTION = {**CROSS_ENTROPY, "reconstruction": {"weight": 1.0}}
ALONE = dataset(9, {"b": list(range(9))})


def spec_with(**changes: object) -> ModelSpec:
    whole = model_spec(modalities=str(changes.pop("modalities", "ab")))
    return msgspec.structs.replace(whole, joint=JointSpec(8, 2, 1, shared=True), **changes)


def made_of(spec: ModelSpec, **slots: object) -> Job:
    return job(spec, stages_of(spec)[-1], **slots)


def loaded(made: Job, parts: dict) -> StagedModel:
    model = build(made.model, made.stage.present)
    for name in made.stage.present:
        load_part(model, name, parts[name])
    return model.eval()


def some_tables() -> dict[str, ClassMeans]:
    rng = np.random.default_rng(5)
    return {m: ClassMeans(rng.normal(size=(3, 6)).astype(np.float32), np.ones(3, np.float32)) for m in "ab"}


def trained_loss(made: Job, parts: dict, data: Dataset) -> float:
    """The cross-entropy training computes for samples that have only a."""
    batch = Batch(
        len(data), {"a": torch.from_numpy(data.modalities["a"])}, {"a": None}, torch.from_numpy(data.labels), complete=0
    )
    with torch.no_grad():
        model = loaded(made, parts)
        done = run_forward(model, made, batch, auxiliary_of(made, model, parts, {}))
        return float(F.cross_entropy(done.forward.logits, batch.labels))


@pytest.mark.parametrize("fusion", ["concat", "mean", "joint"])
@pytest.mark.parametrize(
    ("missing", "mask"),
    [
        ({"zero": {}}, "zero"),
        ({"completion": {"generator": "nearest"}}, "zero"),
        ({"prototype": {"by": "match"}}, "prototype"),
        ({"reconstruction": {}}, "reconstruction"),
    ],
    ids=["zero", "completion", "prototype", "reconstruction"],
)
def test_a_sample_with_one_modality_is_answered_as_it_was_trained(fusion: str, missing: dict, mask: str):
    rebuilt = "reconstruction" in missing
    spec = spec_with(fusion=fusion, reconstruction=rebuilt)
    prototypes = {"class_mean": {}} if "prototype" in missing else {"none": {}}
    made = made_of(spec, missing=missing, prototypes=prototypes, objective=RECONSTRUCTION if rebuilt else CROSS_ENTROPY)
    parts = parts_of(made) | ({"prototypes": to_tensors(some_tables())} if "prototype" in missing else {})
    wanted = trained_loss(made, parts, ALONE)
    # By the recipe's own stand-in:
    found = local_evaluation(made, loaded(made, parts), ALONE, parts, "received")
    assert found["received_loss"] == pytest.approx(wanted, abs=1e-5)
    tables = some_tables() if mask == "prototype" else {}
    by_mask = judge(loaded(made, parts), ALONE, made.stage.depth, tables, ["a"], Criteria(mask=mask))
    assert by_mask["loss"] == pytest.approx(wanted, abs=1e-5)
    if mask != "zero":
        zeros = judge(loaded(made, parts), ALONE, made.stage.depth, tables, ["a"], Criteria(mask="zero"))
        assert abs(zeros["loss"] - wanted) > 1e-4


@pytest.mark.parametrize(
    "options",
    [{"match": "l1"}, {"match": "l2", "k": 2}, {"temperature": 0.5}, {"match": "classifier"}],
    ids=["l1", "l2 of two", "softer", "classifier"],
)
def test_prototypes_are_matched_in_training_as_the_recipe_does_at_inference(options: dict):
    prototypes = {"class_mean": options}
    made = made_of(model_spec(), missing={"prototype": {"by": "match"}}, prototypes=prototypes)
    parts = parts_of(made) | {"prototypes": to_tensors(some_tables())}
    wanted = trained_loss(made, parts, ALONE)
    found = local_evaluation(made, loaded(made, parts), ALONE, parts, "received")
    assert found["received_loss"] == pytest.approx(wanted, abs=1e-5)
    plain = judge(loaded(made, parts), ALONE, made.stage.depth, some_tables(), ["a"], Criteria(mask="prototype"))
    same = options == {"match": "classifier"}  # its networks are trained in the last round: cosine till then
    assert (abs(plain["loss"] - wanted) < 1e-5) == same


class Telling:
    """A model whose networks predict what they are given."""

    def reconstruct(self, modality: str, given: torch.Tensor) -> torch.Tensor:
        return given


def test_a_reconstruction_is_of_what_each_row_has():
    """Row 0 has b and c, (2 + 6) / 2; row 1 c alone; where nothing is said of c, all have it."""
    full = {
        "a": torch.zeros(2, 1),
        "b": torch.tensor([[2.0], [0.0]]),
        "c": torch.tensor([[6.0], [8.0]], requires_grad=True),
    }
    b = torch.tensor([True, False])
    for has, expected in (({"b": b}, [4.0, 8.0]), ({"b": b, "c": ~b}, [2.0, 8.0]), ({}, [4.0, 4.0])):
        made = reconstruction("a", AtHand(full, has, Telling()))  # type: ignore[arg-type]
        assert made.values.flatten().tolist() == expected
        assert (made.counted.tolist(), made.values.requires_grad) == ([True, True], False)
    alone = reconstruction("a", AtHand({"a": full["a"]}, {}, Telling()))  # type: ignore[arg-type]
    assert (alone.values.tolist(), alone.counted.tolist()) == ([[0.0], [0.0]], [False, False])


def test_an_outside_stand_in_fills_in_training_and_evaluation_alike(monkeypatch: pytest.MonkeyPatch):
    def ones(modality: str, given: AtHand) -> Made:
        return Made(torch.ones_like(given.zeros()), given.rows(True))

    assert "ones" not in registry.methods("missing")
    own = StandIn("ones", "ones", make=ones, offered=lambda model, tables: True)
    monkeypatch.setitem(registry._methods["missing"], "ones", own)
    made = made_of(spec_with(fusion="mean"), missing={"ones": {}})
    parts = parts_of(made)
    found = local_evaluation(made, loaded(made, parts), ALONE, parts, "received")
    assert found["received_loss"] == pytest.approx(trained_loss(made, parts, ALONE), abs=1e-5)
    zeros = judge(loaded(made, parts), ALONE, made.stage.depth, {}, ["a"], Criteria(mask="zero"))
    assert abs(zeros["loss"] - found["received_loss"]) > 1e-4
    rows = evaluate(made.model, made.stage, parts, ALONE, Criteria())
    assert {row.missing for row in rows} == {"zero", "ones"}


def test_a_reconstruction_by_hand():
    # r_b from a alone: W2 gelu(W1 r_a + c1) + c2; of three modalities, c from the mean of a and b
    spec = spec_with(reconstruction=True, modalities="abc")
    made = made_of(spec, objective=RECONSTRUCTION)
    parts = parts_of(made)
    model = loaded(made, parts)
    r = {m: np.random.default_rng(i).normal(size=(4, 6)).astype(np.float32) for i, m in enumerate("abc")}

    def mlp(m: str, x: np.ndarray) -> np.ndarray:
        w = parts[f"reconstruct/{m}"]
        hidden = x @ w["0.weight"].T + w["0.bias"]
        return F.gelu(torch.from_numpy(hidden)).numpy() @ w["2.weight"].T + w["2.bias"]

    def made(*given: str) -> dict[str, Made]:
        with torch.no_grad():
            return fill(reconstruction, AtHand({m: torch.from_numpy(r[m]) for m in given}, {}, model)).made

    alone = made("a")
    assert set(alone) == {"b", "c"}
    np.testing.assert_allclose(alone["b"].values, mlp("b", r["a"]), atol=1e-6)
    (c,) = made("a", "b").values()
    np.testing.assert_allclose(c.values, mlp("c", (r["a"] + r["b"]) / 2), atol=1e-6)
    assert made(*r) == {}


def test_the_evaluation_shows_reconstruction_of_a_model_that_has_the_parts():
    spec = spec_with(reconstruction=True)
    made = made_of(spec, objective=RECONSTRUCTION)
    parts, data = parts_of(made), dataset(9)
    rows = evaluate(spec, made.stage, parts, data, Criteria())
    shown = [(row.available, row.missing) for row in rows if row.metric == "accuracy"]
    assert shown == [
        (("a", "b"), "none"),
        *((tuple(m), mask) for m in "ab" for mask in ("zero", "reconstruction")),
    ]
    model = loaded(made, parts)
    with torch.no_grad():
        r = model.project("b", model.encode("b", torch.from_numpy(data.modalities["b"])))
        logits = model.classify(model.fuse({"a": model.reconstruct("a", r), "b": r}))
    expected = float((logits.argmax(1).numpy() == data.labels).mean())
    (row,) = [row for row in rows if (row.available, row.missing, row.metric) == (("b",), "reconstruction", "accuracy")]
    assert row.value == pytest.approx(expected)
    both = {**parts, "prototypes": to_tensors(some_tables())}
    masks = {row.missing for row in evaluate(spec, made.stage, both, data, Criteria(prototypes=True))}
    assert masks == {"none", "zero", "prototype", "oracle", "reconstruction"}


def test_a_model_without_the_parts_can_not_reconstruct():
    made = made_of(model_spec())
    with pytest.raises(ModelError, match="reconstruct/b"):
        judge(loaded(made, parts_of(made)), ALONE, made.stage.depth, {}, ["a"], Criteria(mask="reconstruction"))


def test_a_device_that_lacks_a_modality_is_judged_with_what_its_recipe_makes_of_it():
    spec = spec_with(reconstruction=True)
    made = made_of(spec, missing={"reconstruction": {}}, objective=RECONSTRUCTION)
    parts = parts_of(made)
    only_a = msgspec.structs.replace(made, stage=restrict(made.stage, ["a"]))
    found = local_evaluation(only_a, loaded(only_a, parts), ALONE, parts, "trained")
    assert found["trained_loss"] == pytest.approx(trained_loss(made, parts, ALONE), abs=1e-5)


def test_joint_fusion_alone_sees_no_encoded_zeros_and_none_of_what_is_absent():
    # FedMVP's zero mask: the tokens at hand and one token, the stand-in layer's bias, for the modality that is absent.
    spec = spec_with(fusion="joint")
    made = made_of(spec, missing={"completion": {"generator": "nearest"}})
    parts = parts_of(made)
    parts["fusion"] = {key: value + 0.1 for key, value in parts["fusion"].items()}
    data = dataset(9)
    silent = Dataset(
        {"a": data.modalities["a"], "b": np.zeros((9, *SHAPE), np.float32)},
        {"a": data.present["a"], "b": np.ones(9, bool)},
        data.labels,
        data.label_names,
        data.ids,
    )
    model = loaded(made, parts)
    alone = judge(model, ALONE, made.stage.depth, {}, ["a", "b"], Criteria())
    assert judge(model, silent, made.stage.depth, {}, ["a", "b"], Criteria())["loss"] != pytest.approx(alone["loss"])
    rows = evaluate(spec, made.stage, parts, data, Criteria())
    figures = {(row.available, row.missing, row.metric): row.value for row in rows}
    assert figures[("a",), "zero", "accuracy"] == alone["accuracy"]  # b, which the test set has, is not looked at
    weights = dict(parts["fusion"])
    weights["inputs.1.stand_in.weight"] = weights["inputs.1.stand_in.weight"] + 1
    weights["inputs.1.tokens.weight"] = weights["inputs.1.tokens.weight"] + 1
    same = judge(loaded(made, {**parts, "fusion": weights}), ALONE, made.stage.depth, {}, ["a"], Criteria())
    assert same["loss"] == alone["loss"]
    weights["inputs.1.stand_in.bias"] = weights["inputs.1.stand_in.bias"] + np.arange(8, dtype=np.float32)
    assert judge(loaded(made, {**parts, "fusion": weights}), ALONE, made.stage.depth, {}, ["a"], Criteria()) != alone
