"""What is told of a run of AproMFL: accuracy of the devices' own models, what no device trained, random encoders."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from export_fixture import exported, some_state, stage_of, windows
from memory_fleet import plan_of, run_fleet, share
from rich.console import Console
from test_plan_command import priced
from test_predict import edgefl

from coordinator.core.outliers import out_of_line
from coordinator.runtime.validate_update import changes_of
from edgefl.api.export_run import FinalState, _own_mask, final_state
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MODEL_FILE, read_manifest
from edgefl.export.drafts import TrainedState
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.compile import random_and_frozen, warnings_of
from edgefl.plan.job import RunPlan, Stage
from edgefl.plan.stages import with_closing
from edgefl.protocol.tensors import encode_part
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.records import ObjectRef
from edgefl.registry import method
from edgefl.report import quality
from edgefl.report.writers import print_report, to_html
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore

SMALL = ["training.batch_size=6", "training.holdout=null"]


def shown(report: RunReport) -> str:
    console = Console(width=240, record=True, file=io.StringIO())
    print_report(report, console, verbose=True)
    return console.export_text()


def test_a_run_tells_accuracy_random_encoders_and_what_no_device_trained(ram_path: Path):
    """With nothing said about a hold-out: labelled devices of one modality, and pairs without labels."""
    own = {
        "pairs": share(40, {"a": 1.0, "b": 1.0}, seed=1, labelled=False),
        "names-a": share(40, {"a": 1.0}, seed=2),
        "names-b": share(40, {"b": 1.0}, seed=3),
    }
    plan = plan_of(ram_path, "apromfl", "ab", 3, SMALL)
    assert [hyper.holdout for hyper in plan.hypers] == [0.2]
    assert plan.model.head.norm == "none"
    report = run_fleet(ram_path, plan, own)
    (warning,) = [event for event in report.events if event.kind == "warning" and event.data.get("lasting")]
    assert warning.data["text"].startswith(
        "recipe apromfl never trains encoders, and these start from random weights: a, b"
    )
    page, text = to_html(report), shown(report)
    for told in (page, text):
        assert "these start from random weights: a, b; name a checkpoint in model.encoders.a.pretrained" in told
    last = {row.device: row.metrics for row in report.assignments if row.round == 2}
    figures = [last[device]["trained_accuracy"] for device in ("names-a", "names-b")]
    assert quality.own_accuracy(report) == pytest.approx(np.mean(figures))
    assert f"Accuracy as trained: {100 * np.mean(figures):.1f} %" in text
    assert "accuracy of the devices' own models" in page.replace("&#39;", "'")
    assert final_state(ram_path / "run").untrained == ("task",)


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("apromfl", [], 0.2),
        ("local", [], 0.2),
        ("fedmvp", [], 0.0),
        ("apromfl", ["training.holdout=0"], 0.0),
        ("fedmvp", ["training.holdout=0.1"], 0.1),
    ],
)
def test_the_default_hold_out_is_for_models_that_no_one_else_can_judge(tmp_path: Path, recipe, overrides, expected):
    plan = plan_of(tmp_path, recipe, "ab", 1, [*SMALL, *overrides])
    assert {hyper.holdout for hyper in plan.hypers} == {expected}


def test_the_mappings_of_the_shipped_recipe_have_no_running_statistics(tmp_path: Path):
    plan = plan_of(tmp_path, "apromfl", "ab", 1, SMALL)
    _, parts = some_state(plan.model, prototypes=False)
    assert {name.partition(".")[2] for m in "ab" for name in parts[f"head/{m}"]} == {"weight", "bias"}


@pytest.mark.parametrize(
    ("recipe", "slots", "said"),
    [
        (
            "apromfl",
            [],
            "weight: relationship exchanges the mappings, the heads, and without them nothing is left to map",
        ),
        (
            "apromfl",
            ["slots.weight=samples", "slots.objective={margin: {}, cluster_contrast: {}}"],
            "a copy of the mapp",
        ),
    ],
)
def test_without_heads_there_is_nothing_to_map(tmp_path: Path, recipe: str, slots: list[str], said: str):
    with pytest.raises(ConfigError, match=said) as refused:
        plan_of(tmp_path, recipe, "ab", 1, ["model.head.kind=none", *slots])
    assert "set model.head.kind: mlp" in refused.value.message
    assert "model.head.kind" in refused.value.message


# ---- encoders that stay random


def spec_of(**pretrained: str) -> ModelSpec:
    encoders = {m: EncoderSpec(input_shape=(8, 2), depth=2, pretrained=name) for m, name in pretrained.items()}
    return ModelSpec(encoders, stages=2, classes=3)


@pytest.mark.parametrize(
    ("schedule", "pretrained", "named"),
    [
        ("heads", {"a": "", "b": ""}, ["a", "b"]),
        ("heads", {"a": "own.safetensors", "b": ""}, ["b"]),
        ("heads", {"a": "own.safetensors", "b": "x/y"}, []),
        ("end_to_end", {"a": "", "b": ""}, []),
        ("layerwise", {"a": "", "b": ""}, []),
        ("mixed", {"a": "", "b": ""}, []),
    ],
)
def test_which_encoders_are_random_and_never_trained(schedule, pretrained, named):
    model = spec_of(**pretrained)
    stages = method("schedule", schedule).stages(model, [1, 1], "auto")
    assert random_and_frozen(model, stages) == named
    texts = warnings_of(RunPlan(recipe="mine", model=model, stages=stages))
    assert [all(f"model.encoders.{m}.pretrained" in text for m in named) for text in texts] == [True] * bool(named)


@pytest.mark.parametrize(
    ("rounds", "suggested"),
    [
        ([15] * 6, [0, 0, 0, 10, 30, 50]),  # the paper's, of its 90
        ([10, 10, 10], [0, 7, 23]),
        ([8, 2], [0, 10]),
        ([3, 4], []),
        ([9], []),
    ],
)
def test_more_rounds_for_later_stages_are_suggested_over_pretrained_encoders(rounds, suggested):
    def texts(schedule: str, **pretrained: str) -> tuple[str, ...]:
        encoders = {m: EncoderSpec(input_shape=(8, 2), depth=len(rounds), pretrained=p) for m, p in pretrained.items()}
        model = ModelSpec(encoders, stages=len(rounds), classes=3)
        stages = with_closing(model, method("schedule", schedule).stages(model, rounds, "auto"))
        return warnings_of(RunPlan(recipe="mine", model=model, stages=stages))

    found = texts("layerwise", a="x/y", b="own.safetensors")
    assert [f"training.rounds {rounds}" in text and f"try {suggested}" in text for text in found] == [True] * bool(
        suggested
    )
    assert texts("layerwise", a="x/y", b="") == ()
    assert texts("progressive", a="x/y", b="x/y") == texts("end_to_end", a="x/y", b="x/y") == ()


def test_a_stage_without_rounds_trains_nothing():
    model = spec_of(a="")
    first, frozen = Stage(1, 2, 0, (), ("a/stage1", "task")), Stage(2, 2, 3, (), ("head/a", "task"))
    assert random_and_frozen(model, [first, frozen]) == ["a"]
    assert random_and_frozen(model, [msgspec.structs.replace(first, rounds=1), frozen]) == []


def test_the_price_of_a_run_tells_it_too(tmp_path: Path):
    (text,) = priced(tmp_path, recipe="fedmvp", slots={"fusion": {"joint": {"width": 16, "heads": 2}}}).warnings
    assert "recipe fedmvp never trains encoders, and these start from random weights: acc, gyro" in text
    assert priced(tmp_path).warnings == ()


# ---- bundles whose classifier no device trained


def test_a_part_without_tensors_is_not_called_untrained(tmp_path: Path):
    """FedMVP's heads for encoders of one width: both were warned of after every run."""
    plan = plan_of(tmp_path, "fedmvp", "ab", 1, [*SMALL, "slots.fusion={joint: {width: 8, heads: 2}}"])
    _, parts = some_state(plan.model, prototypes=False)
    store = ObjectStore(tmp_path / "objects")
    first = {part: store.put(encode_part(parts[part])) for part in plan.stages[0].present}
    assert not parts["head/a"]
    trained = {"fusion": ObjectRef("0" * 64, first["fusion"].size)}
    state = FinalState(RunReport(), plan, plan.stages[0], 1, first | trained, first)
    assert state.untrained == ("task",)


@pytest.mark.slow
def test_a_bundle_says_what_no_device_trained_and_predict_gives_no_accuracy(tmp_path: Path, capsys, monkeypatch):
    made, folder = exported(), tmp_path / "bundles"
    spec = made.spec
    files = {name: (made.directory / name / MODEL_FILE).read_bytes() for name in ("acc", "gyro", "acc+gyro")}
    # Tracing takes seconds.
    monkeypatch.setattr("edgefl.export.tracing.to_onnx", lambda draft, *_: files[draft.manifest.name])
    export_bundles(TrainedState(spec, stage_of(spec), made.parts, untrained=("task", "head/gyro")), folder, capacity=6)
    found = {name: read_manifest(folder / name).untrained for name in ("acc", "gyro", "acc+gyro")}
    assert found == {"acc": ("task",), "gyro": ("task", "head/gyro"), "acc+gyro": ("task", "head/gyro")}
    arrays = windows(spec, 4)
    data = Dataset(arrays, {m: np.ones(4, bool) for m in arrays}, np.zeros(4, np.int64), spec.label_names, list("abcd"))
    data.save_npz(tmp_path / "x.npz")
    assert edgefl("predict", folder, tmp_path / "x.npz") == 0
    said = capsys.readouterr()
    assert "no device sent an update of the classifier in these bundles" in said.err
    assert "Accuracy" not in said.out
    assert "truth" not in said.out
    assert edgefl("predict", folder, tmp_path / "x.npz", "--format", "json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["accuracy"] is None
    assert body["untrained"] == ["head/gyro", "task"]


@pytest.mark.parametrize(("recipe", "mask"), [("apromfl", "zero"), ("lw-prototypes", "both")])
def test_rows_of_clusters_are_no_mask_of_classes(tmp_path: Path, recipe: str, mask: str):
    """Ten clusters are not the model's three classes: such an export ended in an error."""
    assert _own_mask(plan_of(tmp_path, recipe, "ab", 1, SMALL), {"prototypes"}, print) == mask


def test_a_table_without_a_row_is_no_measure_for_the_other_devices(tmp_path: Path):
    """All of its rows were of too few samples; the honest other one of two was left out by a median of 0."""
    store, rows = ObjectStore(tmp_path / "objects"), np.ones((2, 3), np.float32)
    refs = {
        n: {"prototypes": store.put(encode_part(to_tensors({"a": ClassMeans(rows * n, np.full(2, n, np.float32))})))}
        for n in (0, 2)
    }
    changes = {str(n): changes_of(store, manifest, {}) for n, manifest in refs.items()}
    assert changes["0"] == {}
    assert changes["2"]["prototypes"].norm == pytest.approx(12**0.5)
    assert out_of_line(changes, 100.0) == {}


def test_a_report_without_a_global_figure_points_to_the_devices_own():
    assert quality.evaluation(RunReport()).empty == "The model has not been evaluated yet."
