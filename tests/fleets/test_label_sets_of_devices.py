"""A fleet whose devices have label sets of their own: who trains which classifier, what it costs, what is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from memory_fleet import NAMES, SHAPES, run_fleet, share, state_of

from device_agent.trainer import local_trainer
from edgefl.api.export_run import export_run, final_state, with_labels
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, DataError, ExportError
from edgefl.export.runtime import find_bundles, load_bundle
from edgefl.models.spec import part_names
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.plan.packed_sizes import object_bytes
from edgefl.protocol.tensors import decode_part
from edgefl.prototypes.table import COUNT
from edgefl.run_records import RunReport
from edgefl.training.local_round import Halting, RoundResult, begin_round

SHAPE, SIZE = ("@shape:x", "@shape:y", "@shape:z"), ("@size:large", "@size:small")
#: In no set's order, so that places in the run's names and in a classifier's rows differ.
EVERY = (SIZE[0], *SHAPE, SIZE[1])
AVERAGED = {"objective": {"cross_entropy": {}, "margin": {}}, "prototypes": "none", "weight": "samples"}


def of_shape(rows: int, modalities: str, seed: int) -> Dataset:
    return replace(share(rows, dict.fromkeys(modalities, 1.0), seed=seed), label_names=SHAPE)


def of_size(rows: int, modalities: str, seed: int) -> Dataset:
    data = share(rows, dict.fromkeys(modalities, 1.0), seed=seed)
    return replace(data, labels=np.where(np.asarray(data.labels) == 2, 0, 1), label_names=SIZE)


def both(one: Dataset, other: Dataset, names: tuple[str, ...] = EVERY) -> Dataset:
    """The samples of both, labels of either set."""
    one, other = one.relabelled(names), other.relabelled(names)
    values = {m: np.concatenate([one.modalities[m], other.modalities[m]]) for m in one.modalities}
    labels = np.concatenate([one.labels, other.labels])
    count = len(labels)
    return Dataset(values, {m: np.ones(count, bool) for m in values}, labels, names, [str(i) for i in range(count)])


FLEET = {
    "a-1": of_shape(30, "a", seed=1),
    "a-2": of_shape(18, "a", seed=2),
    "b": of_size(24, "b", seed=3),
    "pairs": replace(share(24, {"a": 1.0, "b": 1.0}, seed=4), labels=np.full(24, -1), label_names=EVERY),
}


def plan_of(place: Path, slots: dict[str, Any], names: tuple[str, ...] = EVERY, recipe: str = "apromfl") -> RunPlan:
    test = both(of_shape(30, "ab", seed=8), of_size(20, "ab", seed=9))
    test.save_npz(place / "test.npz")
    encoder = {"kind": "sensor", "width": 8, "depth": 2, "heads": 2, "patch": 4}
    fields = {
        "name": "tiny",
        "seed": 3,
        "recipe": recipe,
        "slots": slots,
        "data": {"test": str(place / "test.npz")},
        "model": {
            "stages": 1,
            "encoders": dict.fromkeys("ab", encoder),
            "head": {"width": 12, "out": 8, "norm": "none"},
        },
        "training": {"rounds": [2], "batch_size": 6, "holdout": 0.2, "epochs": 5, "lr": {"head": 0.02}},
        "round": {"devices": 4, "join_s": 20},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(fields))
    config, chosen = load_run(str(place / "run.yaml"))
    shapes = {m: SHAPES[m] for m in "ab"}
    return compile_run(config, chosen, run="tiny", shapes=shapes, label_names=names, test=str(place / "test.npz"))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunPlan, RunReport, list[RoundResult]]:
    """A run that averages classifiers too, and what each device sent."""
    place, sent = tmp_path_factory.mktemp("sets"), []

    def recorded(*given: Any, **named: Any) -> Halting[RoundResult]:
        result = yield from begin_round(*given, **named)
        parts = {p: {name: np.array(value) for name, value in one.items()} for p, one in result.parts.items()}
        sent.append(replace(result, parts=parts))
        return result

    plan = plan_of(place, AVERAGED)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_trainer, "begin_round", recorded)
        report = run_fleet(place, plan, FLEET)
    return place, plan, report, sent


def test_each_set_is_a_part_that_its_devices_train(averaged: Any) -> None:
    place, plan, report, sent = averaged
    assert {"task/shape", "task/size"} < set(plan.stages[0].trained)
    assert "task" not in plan.stages[0].trained
    for row in report.assignments:
        assert row.status == "done"
        assert row.measured["payload_up_bytes"].value == row.predicted["payload_up_bytes"].value
        assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=1e-6)
    trained = {row.device: {p for p in row.trained if p.startswith("task")} for row in report.assignments}
    assert trained == {"a-1": {"task/shape"}, "a-2": {"task/shape"}, "b": {"task/size"}, "pairs": set()}
    last = [one for one in sent[-4:] if any(p.startswith("task") for p in one.parts)]
    store, state = state_of(place)
    for part, counts in (("task/shape", [24, 15]), ("task/size", [20])):
        own = sorted((one for one in last if part in one.parts), key=lambda one: -one.samples[part])
        assert [one.samples[part] for one in own] == counts
        held = decode_part(store.read(state[part].id))
        assert held["weight"].shape == (3 if part == "task/shape" else 2, 8)
        for name, value in held.items():
            mean = sum(np.float32(n / sum(counts)) * one.parts[part][name] for n, one in zip(counts, own, strict=True))
            np.testing.assert_array_equal(value, mean)


def test_each_set_is_judged_on_samples_with_a_label_of_it(averaged: Any) -> None:
    _, _, report, _ = averaged
    whole = {row.metric: row.value for row in report.evaluations if row.round == 2 and len(row.available) == 2}
    assert whole["accuracy"] == pytest.approx((30 * whole["accuracy_shape"] + 20 * whole["accuracy_size"]) / 50)
    assert min(whole["accuracy_shape"], whole["accuracy_size"]) > 0.6
    assert any(metric.endswith("recall_at_1") for metric in whole)
    metrics = {row.device: row.metrics for row in report.assignments}
    assert metrics["a-1"]["trained_accuracy"] > 0.5
    assert "trained_accuracy" not in metrics["pairs"]


def test_the_state_that_bundles_are_made_of_has_one_set(averaged: Any) -> None:
    state = final_state(averaged[0] / "run")
    one = with_labels(state, "size")
    assert part_names(one.plan.model)[-1] == "task/size"
    assert one.plan.model.label_names == SIZE
    assert set(state.stage.present) - set(one.stage.present) == {"task/shape"}
    with pytest.raises(ExportError, match="no label set 'shapes': it has shape, size"):
        with_labels(state, "shapes")


@pytest.mark.slow
def test_bundles_answer_one_set_each(averaged: Any) -> None:
    place, _, report, _ = averaged
    rows = export_run(place / "run").rows
    assert [row.name for row in rows] == [f"{s}/{m}" for s in ("shape", "size") for m in ("a", "b", "a+b")]
    with pytest.raises(ExportError, match="holds 2 folders of bundles") as raised:
        find_bundles(place / "run" / "bundles")
    assert str(place / "run" / "bundles" / "size") in str(raised.value.remedy)
    told = {row.metric: row.value for row in report.evaluations if row.round == 2 and len(row.available) == 2}
    test = Dataset.load_npz(place / "test.npz")
    for space, labels in (("shape", NAMES), ("size", ("large", "small"))):
        bundle = load_bundle(place / "run" / "bundles" / space / "a+b")
        own = test.relabelled(bundle.manifest.labels)
        known = np.asarray(own.labels) >= 0
        answers = bundle.predict(own.modalities)
        assert set(answers.labels) <= set(labels)
        assert np.mean(answers.classes[known] == own.labels[known]) == pytest.approx(told[f"accuracy_{space}"])
        assert own.label_words(int(np.flatnonzero(known)[0])) in labels
    said: list[str] = []
    one = export_run(place / "run", labels="size", output=place / "one", say=said.append).rows
    assert [row.name for row in one] == ["a", "b", "a+b"]
    assert not any("task/shape" in line for line in said)
    assert [row.name for row in export_run(place / "run", labels="size").rows] == ["size/a", "size/b", "size/a+b"]
    assert sorted(path.name for path in (place / "run" / "bundles").iterdir()) == ["shape", "size"]


def test_aprom_makes_prototypes_of_the_devices_own_sets(ram_path: Path) -> None:
    plan = plan_of(ram_path, {})
    report = run_fleet(ram_path, plan, FLEET)
    for row in report.assignments:
        assert row.measured["payload_up_bytes"].value == row.predicted["payload_up_bytes"].value
    up = {row.device: row.measured["payload_up_bytes"].value for row in report.assignments}
    _, state = state_of(ram_path)
    for device, m, classes in (("a-1", "a", 3), ("b", "b", 2)):  # rows of its own set alone, and no classifier
        assert up[device] == state[f"head/{m}"].size + object_bytes(tables(m, classes))


def tables(m: str, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {m: ("F32", (rows, 8)), m + COUNT: ("F32", (rows,))}


def test_a_device_with_both_sets_answers_each_sample_in_its_own(ram_path: Path) -> None:
    """Classes of the other set have no part in a sample's loss and answer; unlabelled samples none in either."""
    mixed = both(of_shape(18, "a", seed=1), of_size(18, "a", seed=2))
    plan = plan_of(ram_path, AVERAGED)
    report = run_fleet(ram_path, plan, {**FLEET, "a-1": mixed})
    row = next(row for row in report.assignments if row.device == "a-1" and row.round == 2)
    assert {"task/shape", "task/size"} < set(row.trained)
    assert row.samples["task/shape"] + row.samples["task/size"] == row.samples["head/a"] == 29
    assert row.metrics["loss"] < np.log(5)


@pytest.mark.parametrize(
    ("slots", "names", "said"),
    [
        ({"prototypes": "class_mean", "weight": "samples", "objective": {"cross_entropy": {}}}, EVERY, "a row a class"),
        ({}, ("@shape:x", "y"), "'@shape:x' says its label set, and 'y' says none"),
        ({}, tuple(f"@s{i}:x" for i in range(33)), "at most 32"),
    ],
)
def test_what_has_no_meaning_is_refused(ram_path: Path, slots: Any, names: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(ram_path, slots, names)
    assert said in str(raised.value)


def test_a_device_of_an_unknown_set_is_refused_by_name(ram_path: Path) -> None:
    odd = replace(FLEET["a-2"], label_names=("@shapes:x", "@shapes:y", "@shapes:z"))
    report = run_fleet(ram_path, plan_of(ram_path, AVERAGED), {**FLEET, "a-2": odd})
    refusals = {row.refusal and row.refusal.detail for row in report.assignments if row.device == "a-2"}
    assert refusals == {"its labels are of the set shapes, the model knows shape, size"}


def test_an_unknown_class_of_a_known_set_is_an_error() -> None:
    with pytest.raises(DataError, match="@shape:y, @shape:z; it knows"):
        of_shape(6, "a", seed=1).relabelled(("@shape:x", *SIZE))
