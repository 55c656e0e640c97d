"""The global model on the test set: which rows there are, how absent modalities are filled, and retrieval."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from training_fixture import CLIP, dataset, job, model_spec, parts_of, stages_of

from edgefl.errors import DataError
from edgefl.models.build import build
from edgefl.models.state import load_part
from edgefl.prototypes.library import ClassMeans, to_tensors
from edgefl.prototypes.mask import TEMPERATURE, TOP_K, masked, prototype_mask
from edgefl.prototypes.matching import match, mix
from edgefl.training.evaluate import TestSet, evaluate
from edgefl.training.round import train_round

SPEC = model_spec()
STAGE = stages_of(SPEC)[-1]


def figures(rows) -> dict:
    return {(row.available, row.missing, row.metric): (row.value, row.samples) for row in rows}


def tables(width: int = 6) -> dict[str, ClassMeans]:
    rng = np.random.default_rng(5)
    return {m: ClassMeans(rng.normal(size=(3, width)).astype(np.float32), np.ones(3, np.float32)) for m in "ab"}


def projections(spec, stage, parts, data):
    model = build(spec, stage.present)
    for name in stage.present:
        load_part(model, name, parts[name])
    model.eval()
    with torch.no_grad():
        return model, {m: model.project(m, model.encode(m, torch.from_numpy(data.modalities[m]))) for m in "ab"}


def by_hand(parts, data, rows, present):
    """Accuracy when ``present`` is given and the other modality is zero."""
    model, r = projections(SPEC, STAGE, parts, data.subset(rows))
    with torch.no_grad():
        logits = model.classify(model.fuse({m: r[m] if m in present else torch.zeros_like(r[m]) for m in "ab"}))
    labels = torch.from_numpy(data.labels[rows])
    return float((logits.argmax(1) == labels).float().mean()), float(F.cross_entropy(logits, labels))


def test_the_rows_of_a_labelled_test_set_by_hand():
    data = dataset(9, {"a": [0], "b": [1, 2]}, labels=[0, 1, 2, 0, 1, 2, -1, 0, 1])
    parts = parts_of(job(SPEC, STAGE))
    rows = figures(evaluate(SPEC, STAGE, parts, TestSet(data), prototypes=False))
    assert set(rows) == {
        (("a", "b"), "none", "accuracy"),
        (("a", "b"), "none", "loss"),
        (("a",), "zero", "accuracy"),
        (("b",), "zero", "accuracy"),
    }
    accuracy, loss = by_hand(parts, data, [3, 4, 5, 7, 8], "ab")
    assert rows[("a", "b"), "none", "accuracy"] == (pytest.approx(accuracy), 5)
    assert rows[("a", "b"), "none", "loss"] == (pytest.approx(loss, abs=1e-5), 5)
    alone, _ = by_hand(parts, data, [1, 2, 3, 4, 5, 7, 8], "a")
    assert rows[("a",), "zero", "accuracy"] == (pytest.approx(alone), 7)
    assert rows[("b",), "zero", "accuracy"][1] == 6


def test_with_prototypes_each_modality_alone_is_shown_under_both_masks():
    data = dataset(9)
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(tables())}
    rows = figures(evaluate(SPEC, STAGE, parts, TestSet(data), prototypes=True))
    assert {(available, mask) for available, mask, metric in rows if metric == "accuracy"} == {
        (("a", "b"), "none"),
        (("a",), "zero"),
        (("a",), "prototype"),
        (("b",), "zero"),
        (("b",), "prototype"),
    }
    without = figures(evaluate(SPEC, STAGE, parts, TestSet(data), prototypes=False))
    assert {mask for _, mask, _ in without} == {"none", "zero"}


def test_a_model_that_ignores_one_modality_answers_the_same_without_it_and_by_chance_alone():
    made = job(model_spec(stages=1), stages_of(model_spec(stages=1))[0], epochs=8, batch_size=16)
    parts = train_round(made, dataset(48), parts_of(made)).parts
    width = made.model.head.out
    parts["fusion"]["0.weight"][:, width:] = 0  # the fusion no longer looks at b
    rows = figures(evaluate(made.model, made.stage, parts, TestSet(dataset(48, seed=1)), prototypes=False))
    accuracy = {
        (available, mask): value for (available, mask, metric), (value, _) in rows.items() if metric == "accuracy"
    }
    assert accuracy[("a",), "zero"] == accuracy[("a", "b"), "none"] > 0.6
    assert accuracy[("b",), "zero"] == pytest.approx(1 / 3)  # one and the same answer to everything


def test_the_prototype_mask_of_the_evaluation_is_that_of_the_library():
    data, both = dataset(9), tables()
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(both)}
    rows = figures(evaluate(SPEC, STAGE, parts, TestSet(data), prototypes=True))
    model, r = projections(SPEC, STAGE, parts, data)
    for m, other in ("ab", "ba"):
        given = {m: r[m], other: torch.from_numpy(prototype_mask(r[m].numpy(), both[m], both[other]))}
        with torch.no_grad():
            answers = model.classify(model.fuse(given)).argmax(1).numpy()
        assert rows[(m,), "prototype", "accuracy"] == (pytest.approx((answers == data.labels).mean()), 9)


def test_a_test_set_that_lacks_a_modality_says_how_it_was_filled():
    whole = dataset(6)
    only = {"a": whole.modalities["a"]}
    data = type(whole)(only, {"a": whole.present["a"]}, whole.labels, whole.label_names, whole.ids)
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(tables())}
    rows = figures(evaluate(SPEC, STAGE, parts, TestSet(data), prototypes=True))
    assert [key[:2] for key in rows] == [(("a",), "zero"), (("a",), "zero"), (("a",), "prototype")]
    assert rows[("a",), "zero", "accuracy"][0] == pytest.approx(by_hand(parts, whole, list(range(6)), "a")[0])


def test_a_model_with_one_modality_has_nothing_to_mask():
    spec = model_spec(modalities="a")
    stage = stages_of(spec)[-1]
    rows = evaluate(spec, stage, parts_of(job(spec, stage)), TestSet(dataset(6)), prototypes=False)
    assert {(row.available, row.missing) for row in rows} == {(("a",), "none")}


def test_retrieval_by_hand():
    spec = model_spec(classes=0)
    stage = stages_of(spec)[-1]
    data = dataset(6, {"a": [0], "b": [5]})
    parts = parts_of(job(spec, stage, objective=CLIP))
    rows = figures(evaluate(spec, stage, parts, TestSet(data), prototypes=False))
    _, r = projections(spec, stage, parts, data.subset([1, 2, 3, 4]))
    z = {m: F.normalize(projected, dim=1) for m, projected in r.items()}
    likeness = z["a"] @ z["b"].T
    there = float((likeness.argmax(1) == torch.arange(4)).float().mean())
    back = float((likeness.argmax(0) == torch.arange(4)).float().mean())
    assert rows == {
        (("a", "b"), "none", "a_to_b_recall_at_1"): (there, 4),
        (("a", "b"), "none", "b_to_a_recall_at_1"): (back, 4),
    }
    unpaired = dataset(4, {"a": [0, 1], "b": [2, 3]})
    assert evaluate(spec, stage, parts, TestSet(unpaired), prototypes=False) == []


def test_a_labelled_model_needs_a_labelled_test_set(tmp_path):
    whole = dataset(4)
    data = type(whole)(whole.modalities, whole.present, None, (), whole.ids)
    with pytest.raises(DataError, match="no labels"):
        evaluate(SPEC, STAGE, parts_of(job(SPEC, STAGE)), TestSet(data), prototypes=False)
    dataset(4).save_npz(tmp_path / "test.npz")
    assert len(TestSet.load(str(tmp_path / "test.npz"), SPEC).data) == 4
    renamed = type(whole)(whole.modalities, whole.present, whole.labels, ("x", "y", "other"), whole.ids)
    renamed.save_npz(tmp_path / "other.npz")
    with pytest.raises(DataError, match=r"other.npz.*not known to the model: other"):
        TestSet.load(str(tmp_path / "other.npz"), SPEC)


def test_the_mask_is_match_then_mix_and_zero_where_no_class_has_both_tables():
    own, other = tables().values()
    h = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    index, weights = match(h, own, "cosine", TOP_K, TEMPERATURE)
    np.testing.assert_allclose(prototype_mask(h, own, other), mix(index, weights, other), atol=1e-6)
    nothing = ClassMeans(other.means, np.zeros(3, np.float32))
    assert (prototype_mask(h, own, nothing) == 0).all()


def test_masked_keeps_what_is_there_and_fills_the_rest():
    r = {"b": np.ones((2, 6), np.float32)}
    both = tables()
    zeros = masked(r, ["a", "b"], both, "zero", 6)
    assert zeros["b"] is r["b"]
    assert (zeros["a"] == 0).all()
    filled = masked(r, ["a", "b"], both, "prototype", 6)
    np.testing.assert_allclose(filled["a"], prototype_mask(r["b"], both["b"], both["a"]))
    assert (masked(r, ["a", "b"], {}, "prototype", 6)["a"] == 0).all()
