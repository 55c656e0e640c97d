"""The global model on the test set, and a device's on its own samples: which figures, and what fills the gaps."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from mask_oracle import filled as filled_in
from mask_oracle import stand_in
from sklearn.metrics import average_precision_score, f1_score, precision_recall_fscore_support, roc_auc_score
from training_fixture import CLIP, SHAPE, dataset, job, model_spec, parts_of, stages_of

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, ModelError
from edgefl.models.parts import load_part
from edgefl.models.spec import JointSpec
from edgefl.models.staged import build
from edgefl.prototypes.mask import Matcher
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.records import ORACLE
from edgefl.training.evaluate import Criteria, evaluate, judge, load_test_set
from edgefl.training.local_round import train_round
from edgefl.training.metrics import retrieval

SPEC = model_spec()
STAGE = stages_of(SPEC)[-1]
MACRO = {"macro_precision", "macro_recall", "macro_f1", "macro_auroc"}
BOTH = frozenset({"classification", "retrieval"})


def figures(rows) -> dict:
    return {(row.available, row.missing, row.metric): (row.value, row.samples) for row in rows}


def three(samples: int, absent: dict[str, list[int]], seed: int = 0) -> Dataset:
    """Samples of a, b and c."""
    whole = dataset(samples, absent, seed)
    c = np.random.default_rng(seed + 1).normal(size=(samples, *SHAPE)).astype(np.float32)
    has_c = np.ones(samples, bool)
    has_c[absent.get("c", [])] = False
    values, present = {**whole.modalities, "c": c * has_c[:, None, None]}, {**whole.present, "c": has_c}
    return Dataset(values, present, whole.labels, whole.label_names, whole.ids)


def tables(width: int = 6) -> dict[str, ClassMeans]:
    rng = np.random.default_rng(5)
    return {m: ClassMeans(rng.normal(size=(3, width)).astype(np.float32), np.ones(3, np.float32)) for m in "ab"}


def loaded(spec, stage, parts):
    model = build(spec, stage.present)
    for name in stage.present:
        load_part(model, name, parts[name])
    return model


def projections(spec, stage, parts, data, modalities="ab"):
    model = loaded(spec, stage, parts).eval()
    with torch.no_grad():
        return model, {m: model.project(m, model.encode(m, torch.from_numpy(data.modalities[m]))) for m in modalities}


def by_hand(parts, data, rows, present):
    """Accuracy when ``present`` is given and the other modality is zero."""
    model, r = projections(SPEC, STAGE, parts, data.subset(rows))
    with torch.no_grad():
        logits = model.classify(model.fuse({m: r[m] if m in present else torch.zeros_like(r[m]) for m in "ab"}))
    labels = torch.from_numpy(data.labels[rows])
    seen, chances = np.unique(labels), logits.softmax(1).numpy()
    area = np.mean([roc_auc_score(labels == c, chances[:, c]) for c in seen])
    loss = float(F.cross_entropy(logits, labels))
    return {"loss": loss, **sklearns(logits.argmax(1), labels), "macro_auroc": area}


def sklearns(answers, labels):
    """Accuracy and macro averages over the classes of ``labels``, by scikit-learn."""
    seen = np.unique(labels)
    averages = precision_recall_fscore_support(labels, answers, labels=seen, average="macro", zero_division=0)
    return {
        "accuracy": float((np.asarray(answers) == np.asarray(labels)).mean()),
        **dict(zip(("macro_precision", "macro_recall", "macro_f1"), averages[:3], strict=True)),
    }


def test_the_rows_of_a_labelled_test_set_by_hand():
    data = dataset(9, {"a": [0], "b": [1, 2]}, labels=[0, 1, 2, 0, 1, 2, -1, 0, 1])
    parts = parts_of(job(SPEC, STAGE))
    told = evaluate(SPEC, STAGE, parts, data, Criteria())
    assert [row.metric for row in told[:2]] == ["accuracy", "loss"]  # the report leads with the first
    rows = figures(told)
    conditions = [(("a", "b"), "none"), (("a",), "zero"), (("b",), "zero")]
    assert set(rows) == {(*c, name) for c in conditions for name in MACRO | {"accuracy"}} | {(*conditions[0], "loss")}
    for (available, mask), chosen in zip(
        conditions, ([3, 4, 5, 7, 8], [1, 2, 3, 4, 5, 7, 8], [0, 3, 4, 5, 7, 8]), strict=True
    ):
        for name, value in by_hand(parts, data, chosen, available).items():
            if name != "loss" or mask == "none":
                assert rows[available, mask, name] == (pytest.approx(value, abs=1e-5), len(chosen)), (available, name)


def test_several_labels_are_judged_class_by_class():
    spec = msgspec.structs.replace(SPEC, label_names=("&x", "&y", "&z"))
    data, parts = dataset(9, {"a": [0]}, labels=[0, 1, 2, 0, 1, 2, -1, 0, 1]), parts_of(job(spec, STAGE))
    sets = np.random.default_rng(1).random((9, 3)) < 0.5
    sets[6] = False
    several = replace(data, sets=sets, label_names=spec.label_names)
    rows = figures(evaluate(spec, STAGE, parts, several, Criteria()))
    known = [1, 2, 3, 4, 5, 7, 8]
    model, r = projections(SPEC, STAGE, parts, data.subset(known))
    with torch.no_grad():
        logits = model.classify(model.fuse(r))
    truth = torch.from_numpy(sets[known]).float()
    wanted = {
        "mean_average_precision": average_precision_score(sets[known], logits.numpy(), average="macro"),
        "macro_f1": f1_score(sets[known], (logits > 0).numpy(), average="macro", zero_division=0),
        "loss": float(F.binary_cross_entropy_with_logits(logits, truth) * 3),
    }
    assert {name: value for (given, _, name), (value, _) in rows.items() if given == ("a", "b")} == pytest.approx(
        wanted, abs=1e-5
    )
    own = judge(model, several, STAGE.depth, {}, ["a", "b"], Criteria())
    assert set(own) == set(wanted)


def test_a_round_learns_several_labels():
    """Class x shows in the mean of a, class y in that of b; a sample may be of both, and of neither."""
    spec = msgspec.structs.replace(model_spec(classes=2), label_names=("&x", "&y"))
    made, rng = job(spec, stages_of(spec, "end_to_end")[0], epochs=20), np.random.default_rng(0)
    sets = rng.random((96, 2)) < 0.5
    noise = {m: rng.normal(size=(96, *SHAPE)) * 0.2 for m in "ab"}
    values = {m: (each + sets[:, i, None, None]).astype(np.float32) for i, (m, each) in enumerate(noise.items())}
    there, ids = dict.fromkeys("ab", np.ones(96, bool)), [str(i) for i in range(96)]
    data = Dataset(values, there, sets.argmax(axis=1), spec.label_names, ids, sets=sets)
    trained = train_round(made, data, parts_of(made))
    rows = figures(evaluate(spec, made.stage, trained.parts, data, Criteria()))
    assert rows[("a", "b"), "none", "mean_average_precision"][0] > 0.95  # 0.5 by chance
    assert rows[("a", "b"), "none", "macro_f1"][0] > 0.8


def test_a_condition_that_no_sample_meets_has_no_rows():
    unpaired = dataset(6, {"a": [0, 1, 2], "b": [3, 4, 5]})
    rows = evaluate(SPEC, STAGE, parts_of(job(SPEC, STAGE)), unpaired, Criteria(tasks=BOTH))
    assert {(row.available, row.missing) for row in rows} == {(("a",), "zero"), (("b",), "zero")}


def test_three_modalities_are_shown_together_alone_and_in_pairs():
    spec = model_spec(modalities="abc")
    stage, data = stages_of(spec)[-1], three(9, {"c": [0, 1]})
    parts = parts_of(job(spec, stage))
    rows = figures(evaluate(spec, stage, parts, data, Criteria()))
    fewer = [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]
    assert [key[:2] for key in rows if key[2] == "accuracy"] == [
        (("a", "b", "c"), "none"),
        *((available, "zero") for available in fewer),
    ]
    model, r = projections(spec, stage, parts, data, "abc")
    with torch.no_grad():
        logits = model.classify(model.fuse({**r, "b": torch.zeros_like(r["b"])}))[2:]
    assert rows[("a", "c"), "zero", "macro_f1"] == (
        pytest.approx(sklearns(logits.argmax(1), data.labels[2:])["macro_f1"]),
        7,
    )
    without = evaluate(spec, stage, parts, dataset(6), Criteria())  # none of them has c
    assert {(row.available, row.missing) for row in without} == {
        (("a", "b"), "zero"),
        (("a",), "zero"),
        (("b",), "zero"),
    }


def test_with_prototypes_each_modality_alone_is_shown_under_both_masks():
    data = dataset(9)
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(tables())}
    rows = figures(evaluate(SPEC, STAGE, parts, data, Criteria(prototypes=True)))
    assert {(available, mask) for available, mask, metric in rows if metric == "accuracy"} == {
        (("a", "b"), "none"),
        (("a",), "zero"),
        (("a",), "prototype"),
        (("b",), "zero"),
        (("b",), "prototype"),
        (("a",), "oracle"),
        (("b",), "oracle"),
    }
    without = figures(evaluate(SPEC, STAGE, parts, data, Criteria()))
    assert {mask for _, mask, _ in without} == {"none", "zero"}


def test_a_model_that_ignores_one_modality_answers_the_same_without_it_and_by_chance_alone():
    made = job(model_spec(stages=1), stages_of(model_spec(stages=1))[0], epochs=8, batch_size=16)
    parts = train_round(made, dataset(48), parts_of(made)).parts
    width = made.model.head.out
    parts["fusion"]["0.weight"][:, width:] = 0  # the fusion no longer looks at b
    rows = figures(evaluate(made.model, made.stage, parts, dataset(48, seed=1), Criteria()))
    accuracy = {
        (available, mask): value for (available, mask, metric), (value, _) in rows.items() if metric == "accuracy"
    }
    assert accuracy[("a",), "zero"] == accuracy[("a", "b"), "none"] > 0.6
    assert accuracy[("b",), "zero"] == pytest.approx(1 / 3)  # one and the same answer to everything


def test_the_prototype_masks_are_those_of_the_library_and_of_the_true_classes():
    data, both = dataset(9), tables()
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(both)}
    rows = figures(evaluate(SPEC, STAGE, parts, data, Criteria(prototypes=True)))
    model, r = projections(SPEC, STAGE, parts, data)
    for m, other in ("ab", "ba"):
        given = {m: r[m], other: torch.from_numpy(stand_in({m: r[m].numpy()}, other, both))}
        with torch.no_grad():
            answers = model.classify(model.fuse(given)).argmax(1).numpy()
            told = model.classify(model.fuse({m: r[m], other: torch.from_numpy(both[other].means[data.labels])}))
        assert rows[(m,), "prototype", "accuracy"] == (pytest.approx((answers == data.labels).mean()), 9)
        assert rows[(m,), ORACLE, "accuracy"] == (pytest.approx(sklearns(told.argmax(1), data.labels)["accuracy"]), 9)


def test_a_test_set_that_lacks_a_modality_says_how_it_was_filled():
    whole = dataset(6)
    only = {"a": whole.modalities["a"]}
    data = type(whole)(only, {"a": whole.present["a"]}, whole.labels, whole.label_names, whole.ids)
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(tables())}
    rows = figures(evaluate(SPEC, STAGE, parts, data, Criteria(prototypes=True)))
    assert list(dict.fromkeys(key[1] for key in rows)) == ["zero", "prototype", "oracle"]
    assert [key for key in rows if key[2] == "loss"] == [(("a",), "zero", "loss")]
    assert rows[("a",), "zero", "accuracy"][0] == pytest.approx(by_hand(parts, whole, list(range(6)), "a")["accuracy"])


def test_a_model_with_one_modality_has_nothing_to_mask():
    spec = model_spec(modalities="a")
    stage = stages_of(spec)[-1]
    rows = evaluate(spec, stage, parts_of(job(spec, stage)), dataset(6), Criteria())
    assert {(row.available, row.missing) for row in rows} == {(("a",), "none")}


def test_retrieval_by_hand():
    spec = model_spec(classes=0)
    stage = stages_of(spec)[-1]
    data = dataset(6, {"a": [0], "b": [5]})
    parts = parts_of(job(spec, stage, objective=CLIP))
    rows = figures(evaluate(spec, stage, parts, data, Criteria()))
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
    assert evaluate(spec, stage, parts, unpaired, Criteria()) == []


def test_retrieval_of_three_modalities_is_that_of_every_pair_among_the_samples_that_have_both():
    spec = model_spec(classes=0, modalities="abc")
    stage, data = stages_of(spec)[-1], three(14, {"a": [0], "b": [1, 2, 3]})
    parts = parts_of(job(spec, stage, objective=CLIP))
    rows = evaluate(spec, stage, parts, data, Criteria())
    _, r = projections(spec, stage, parts, data, "abc")
    for pair, lacking in {("a", "b"): [0, 1, 2, 3], ("a", "c"): [0], ("b", "c"): [1, 2, 3]}.items():
        z = [np.delete(r[m].numpy(), lacking, axis=0) for m in pair]
        mine = [row for row in rows if row.available == pair]
        assert {row.metric: row.value for row in mine} == pytest.approx(retrieval(*pair, *z))
        assert {(row.missing, row.samples) for row in mine} == {("none", 14 - len(lacking))}
    assert len(rows) == 3 * 7


def test_a_labelled_model_is_also_judged_by_retrieval_when_asked():
    data, parts = dataset(9), parts_of(job(SPEC, STAGE))
    rows = evaluate(SPEC, STAGE, parts, data, Criteria(tasks=BOTH))
    by_label = evaluate(SPEC, STAGE, parts, data, Criteria())
    by_pair = evaluate(SPEC, STAGE, parts, data, Criteria(tasks=frozenset({"retrieval"})))
    assert rows == by_label + by_pair
    assert by_pair[0].metric == "a_to_b_recall_at_1"


def test_a_task_the_model_was_not_made_for_is_an_error():
    spec = model_spec(classes=0)
    stage = stages_of(spec)[-1]
    parts = parts_of(job(spec, stage, objective=CLIP))
    with pytest.raises(ModelError, match="without classes"):
        evaluate(spec, stage, parts, dataset(6), Criteria(tasks=BOTH))
    with pytest.raises(ModelError, match="unknown task retreival"):
        judge(loaded(spec, stage, parts), dataset(6), 3, {}, "ab", Criteria(frozenset({"retreival"})))


@pytest.mark.parametrize("mask", ["zero", "prototype"])
def test_a_device_is_judged_on_each_sample_as_it_is(mask):
    data = dataset(10, {"a": [0, 1], "b": [2, 9]}, labels=[0, 1, 2, 0, 1, 2, -1, 0, 1, 2])
    parts, both = parts_of(job(SPEC, STAGE)), tables()
    figures = judge(loaded(SPEC, STAGE, parts), data, STAGE.depth, both, ["a", "b"], Criteria(mask=mask))
    model, r = projections(SPEC, STAGE, parts, data)
    logits = []
    for i in (0, 1, 2, 3, 4, 5, 7, 8, 9):  # one by one; 6 has no label
        given = {m: r[m][i : i + 1].numpy() for m in "ab" if data.has(m)[i]}
        known = both if mask == "prototype" else {}
        filled = {m: torch.from_numpy(x) for m, x in filled_in(given, ["a", "b"], known).items()}
        with torch.no_grad():
            logits.append(model.classify(model.fuse(filled)))
    labels = torch.from_numpy(np.delete(data.labels, 6))
    wanted = {
        **sklearns(torch.cat(logits).argmax(1), labels),
        "loss": float(F.cross_entropy(torch.cat(logits), labels)),
    }
    assert figures == pytest.approx(wanted, abs=1e-5)
    assert list(figures)[:2] == ["accuracy", "loss"]


def test_a_device_without_the_other_encoder_is_judged_by_what_it_has():
    data, parts = dataset(9, {"a": [4]}), parts_of(job(SPEC, STAGE))
    only_a = build(SPEC, [name for name in STAGE.present if not (name.startswith("b/") or name == "head/b")])
    for name in only_a.parts_present:
        load_part(only_a, name, parts[name])
    figures = judge(only_a, data, STAGE.depth, {}, ["a"], Criteria(BOTH))
    wanted = by_hand(parts, data, [0, 1, 2, 3, 5, 6, 7, 8], "a")
    del wanted["macro_auroc"]  # of the coordinator's evaluation alone
    assert figures == pytest.approx(wanted, abs=1e-5)
    assert not only_a.training
    with pytest.raises(ModelError, match="head/b"):
        judge(only_a, data, STAGE.depth, {}, ["a", "b"], Criteria())


def test_a_device_has_the_recalls_of_its_pairs_and_their_mean_sum():
    spec = model_spec(modalities="abc")
    stage, data = stages_of(spec)[-1], three(12, {"b": [0, 1, 2]})
    parts = parts_of(job(spec, stage))
    figures = judge(
        loaded(spec, stage, parts), data, stage.depth, {}, ["a", "b", "c"], Criteria(frozenset({"retrieval"}))
    )
    _, r = projections(spec, stage, parts, data, "abc")
    wanted = retrieval("a", "b", r["a"][3:], r["b"][3:]) | retrieval("b", "c", r["b"][3:], r["c"][3:])
    wanted |= retrieval("a", "c", r["a"], r["c"])  # 12 pairs: the only sum, the others have 9
    assert figures == pytest.approx(wanted)
    assert figures["rsum"] > 0
    whole = judge(loaded(spec, stage, parts), three(12, {}), stage.depth, {}, ["a", "b", "c"], Criteria(BOTH))
    _, r = projections(spec, stage, parts, three(12, {}), "abc")
    sums = [retrieval(a, b, r[a], r[b])["rsum"] for a, b in (("a", "b"), ("a", "c"), ("b", "c"))]
    assert whole["rsum"] == pytest.approx(np.mean(sums))
    assert whole["accuracy"] >= 0


def test_what_the_samples_say_nothing_about_has_no_figure():
    model = loaded(SPEC, STAGE, parts_of(job(SPEC, STAGE)))
    unpaired = dataset(6, {"a": [0, 1, 2], "b": [3, 4, 5]}, labels=[-1] * 6)
    assert judge(model, unpaired, STAGE.depth, {}, ["a", "b"], Criteria(BOTH)) == {}
    bare = Dataset(unpaired.modalities, unpaired.present, None, (), unpaired.ids)
    assert judge(model, bare, STAGE.depth, {}, ["a", "b"], Criteria()) == {}
    assert judge(model, dataset(6, {"a": list(range(6))}), STAGE.depth, {}, ["a"], Criteria(BOTH)) == {}


def test_the_matcher_decides_what_fills_the_gaps():
    data, both = dataset(9), tables()
    parts = {**parts_of(job(SPEC, STAGE)), "prototypes": to_tensors(both)}
    classifier = Matcher("classifier", k=1)

    def certain(r, absent):  # whatever it is shown, class 1
        return torch.tensor([0.0, 9, 0]).expand(len(r), -1)

    networks = {m: [(1.0, certain)] for m in "ab"}
    options = {"prototypes": True, "matcher": classifier, "networks": networks}
    told = evaluate(SPEC, STAGE, parts, data, Criteria(**options))
    matchers = {row.missing: row.matcher for row in told}
    assert matchers == {"none": "", "zero": "", "prototype": "classifier", "oracle": ""}
    rows = figures(told)
    model, r = projections(SPEC, STAGE, parts, data)
    for m, other in ("ab", "ba"):
        with torch.no_grad():
            row = torch.from_numpy(both[other].means[1]).expand(9, -1)
            answers = model.classify(model.fuse({m: r[m], other: row})).argmax(1)
        assert rows[(m,), "prototype", "accuracy"] == (pytest.approx(sklearns(answers, data.labels)["accuracy"]), 9)
    lacking = dataset(9, {"b": list(range(9))})
    own = judge(
        model, lacking, STAGE.depth, both, ["a"], Criteria(mask="prototype", matcher=classifier, networks=networks)
    )
    assert own["accuracy"] == rows[("a",), "prototype", "accuracy"][0]


def test_a_labelled_model_needs_a_labelled_test_set(tmp_path):
    whole = dataset(4)
    data = type(whole)(whole.modalities, whole.present, None, (), whole.ids)
    with pytest.raises(DataError, match="no labels"):
        evaluate(SPEC, STAGE, parts_of(job(SPEC, STAGE)), data, Criteria())
    dataset(4).save_npz(tmp_path / "test.npz")
    assert len(load_test_set(str(tmp_path / "test.npz"), SPEC)) == 4
    renamed = type(whole)(whole.modalities, whole.present, whole.labels, ("x", "y", "other"), whole.ids)
    renamed.save_npz(tmp_path / "other.npz")
    with pytest.raises(DataError, match=r"other.npz.*not known to the model: other"):
        load_test_set(str(tmp_path / "other.npz"), SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_sharing": "multiway"},
        {"fusion": "joint"},
        {"fusion": "joint", "joint": JointSpec(width=8, heads=2, layers=1, shared=True)},
    ],
)
def test_modalities_that_meet_before_the_fusion_are_encoded_anew_for_every_condition(changes):
    spec = msgspec.structs.replace(model_spec(), **changes)
    stage = stages_of(spec)[-1]
    data, both = dataset(9, {"a": [0]}), tables()
    parts = {**parts_of(job(spec, stage)), "prototypes": to_tensors(both)}
    rows = figures(evaluate(spec, stage, parts, data, Criteria(prototypes=True, tasks=BOTH)))
    model = loaded(spec, stage, parts).eval()
    x = {m: torch.from_numpy(data.modalities[m]) for m in "ab"}

    def answers(given: str, kind: str, some: slice) -> torch.Tensor:
        with torch.no_grad():
            states = model.encode_batch_tokens({m: x[m][some] for m in given}, dict.fromkeys(given), 8)
            r = {m: model.project(m, model.pool_tokens(m, state)).numpy() for m, state in states.items()}
            filled = filled_in(r, ["a", "b"], both if kind == "prototype" else {})
            return model.classify(model.fuse({m: torch.from_numpy(v) for m, v in filled.items()}, tokens=states))

    labels = torch.from_numpy(data.labels)
    whole, alone = answers("ab", "none", slice(1, 9)), answers("b", "prototype", slice(0, 9))
    loss, _ = rows[("a", "b"), "none", "loss"]
    assert loss == pytest.approx(float(F.cross_entropy(whole, labels[1:])), abs=1e-5)
    assert rows[("b",), "prototype", "macro_f1"][0] == pytest.approx(sklearns(alone.argmax(1), labels)["macro_f1"])
    _, r = projections(spec, stage, parts, data)  # each by itself
    assert rows[("a", "b"), "none", "a_to_b_recall_at_5"][0] == pytest.approx(
        retrieval("a", "b", r["a"][1:], r["b"][1:])["a_to_b_recall_at_5"]
    )
    own = judge(loaded(spec, stage, parts), data, stage.depth, both, ["a", "b"], Criteria())
    mixed = torch.cat([answers("b", "zero", slice(0, 1)), whole])
    assert own["loss"] == pytest.approx(float(F.cross_entropy(mixed, labels)), abs=1e-5)


@pytest.mark.parametrize("mask", ["zero", "prototype"])
def test_a_mean_leaves_zeros_out_and_counts_prototypes(mask):
    spec = msgspec.structs.replace(model_spec(), fusion="mean")
    stage, data, both = stages_of(spec)[-1], dataset(9), tables()
    parts = parts_of(job(spec, stage))
    lacking = dataset(9, {"b": list(range(9))})
    own = judge(loaded(spec, stage, parts), lacking, stage.depth, both, ["a"], Criteria(mask=mask))
    model, r = projections(spec, stage, parts, data)
    made = torch.from_numpy(stand_in({"a": r["a"].numpy()}, "b", both))
    with torch.no_grad():
        logits = model.classify(r["a"] if mask == "zero" else (r["a"] + made) / 2)
    assert own["loss"] == pytest.approx(float(F.cross_entropy(logits, torch.from_numpy(data.labels))), abs=1e-5)
