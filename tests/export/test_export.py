"""Exporting a model as ONNX bundles, and serving them."""

from __future__ import annotations

import errno
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from export_fixture import LABELS, exported, sensor, some_state, some_tables, stage_of, two_sensors, windows
from mask_oracle import filled as filled_in

from edgefl.errors import DataError, EdgeFLError, ExportError, StoreError
from edgefl.export import runtime, session
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import (
    INDEX_FILE,
    MANIFEST_FILE,
    MATCHED,
    MODEL_FILE,
    WEIGHTS,
    Index,
    read_manifest,
)
from edgefl.export.drafts import TrainedState
from edgefl.export.folder import check_target, publish, replaced
from edgefl.export.runtime import ROWS, find_bundles, load_bundle
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import HeadSpec, JointSpec, ModelSpec
from edgefl.prototypes.mask import TEMPERATURE, TOP_K
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.records import ObjectRef


def evaluated(inputs: dict[str, np.ndarray], tables: dict[str, ClassMeans], kind: str) -> np.ndarray:
    """Logits as the evaluation's, of the mask's equations in numpy."""
    model, spec = exported().model, exported().spec
    with torch.no_grad():
        given = {m: model.project(m, model.encode(m, torch.from_numpy(x))).numpy() for m, x in inputs.items()}
        filled = filled_in(given, list(spec.encoders), tables if kind == "prototype" else {})
        return model.classify(model.fuse({m: torch.from_numpy(r) for m, r in filled.items()})).numpy()


# What is written


def test_one_bundle_a_modality_and_one_for_the_complete_input():
    rows = exported().rows
    assert [row.name for row in rows] == ["acc", "gyro", "acc+gyro"]
    assert [row.modalities for row in rows] == [("acc",), ("gyro",), ("acc", "gyro")]
    for row in rows:
        assert Path(row.path).stat().st_size == row.size_bytes
        assert row.max_difference <= row.tolerance == 1e-4
    index = msgspec.json.decode((exported().directory / INDEX_FILE).read_bytes(), type=Index)
    assert [row.path for row in index.bundles] == [f"{row.name}/{MODEL_FILE}" for row in rows]
    assert [path.name for path in exported().directory.parent.iterdir()] == ["bundles"]


def test_the_manifest_describes_the_file():
    manifest = read_manifest(exported().directory / "acc")
    graph = onnx.load(str(exported().directory / "acc" / MODEL_FILE)).graph
    ports = {
        value.name: tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.output)
    }
    assert {p.name: p.shape for p in (*manifest.inputs, *manifest.tables, *manifest.outputs)} == ports
    assert manifest.inputs[0].shape == ("batch", 12, 3)
    assert not {i.name for i in graph.initializer} & ports.keys()  # so that no runtime takes an input for optional
    assert (manifest.absent, manifest.masks, manifest.mask) == (("gyro",), ("prototype", "zero"), "prototype")
    assert (manifest.labels, manifest.top_k, manifest.temperature, manifest.capacity) == (LABELS, TOP_K, TEMPERATURE, 6)
    assert (manifest.opset, manifest.ir_version) == (17, 8)
    assert {"torch", "onnx", "edgefl"} <= set(manifest.versions)


def test_parity_covers_two_batch_sizes_each_mask_and_other_tables():
    checks = read_manifest(exported().directory / "acc").parity
    assert {(one.mask, one.sizes["batch"]) for one in checks} == {
        (mask, size) for mask in ("prototype", "zero", "override") for size in (1, 5)
    }
    assert all(set(one.differences) == {"logits", "probabilities", MATCHED, WEIGHTS} for one in checks)
    complete = read_manifest(exported().directory / "acc+gyro").parity
    assert {(one.mask, one.sizes["batch"]) for one in complete} == {(one.mask, one.sizes["batch"]) for one in checks}
    assert {given for one in complete for given in one.given} == {"acc", "gyro", "acc+gyro"}


def test_the_file_holds_no_trace_of_the_machine_that_wrote_it():
    for row in exported().rows:
        data = Path(row.path).read_bytes()
        assert b".py" not in data
        assert b"stack_trace" not in data


# Serving


@pytest.mark.parametrize("modality", ["acc", "gyro"])
@pytest.mark.parametrize("mask", ["prototype", "zero"])
def test_a_single_modality_bundle_answers_as_evaluation_does(modality: str, mask: str):
    inputs = {modality: windows(exported().spec, ROWS + 3)[modality]}
    prediction = load_bundle(exported().directory / modality).predict(inputs, mask=mask)
    expected = evaluated(inputs, some_tables(exported().spec), mask)
    np.testing.assert_allclose(prediction.logits, expected, atol=1e-4)
    np.testing.assert_allclose(prediction.probabilities.sum(1), 1, atol=1e-5)
    assert prediction.labels == tuple(LABELS[c] for c in expected.argmax(1))
    other = "gyro" if modality == "acc" else "acc"
    assert set(prediction.matched) == {other}
    # rest and walk are each absent from one table, so that only run and swim can match
    assert set(np.unique(prediction.matched[other].rows)) == ({-1, 1, 2} if mask == "prototype" else {-1})


def test_the_complete_bundle_answers_as_evaluation_does():
    inputs = windows(exported().spec, 4)
    prediction = load_bundle(exported().directory / "acc+gyro").predict(inputs)
    np.testing.assert_allclose(prediction.logits, evaluated(inputs, {}, "none"), atol=1e-4)
    assert prediction.matched == {}


def test_prototypes_can_be_replaced_for_one_call():
    bundle = load_bundle(exported().directory / "acc" / MODEL_FILE)
    inputs = {"acc": windows(exported().spec, 3)["acc"]}
    before = bundle.predict(inputs).logits
    tables = some_tables(exported().spec, seed=9)
    np.testing.assert_allclose(
        bundle.predict(inputs, prototypes=tables).logits, evaluated(inputs, tables, "prototype"), atol=1e-4
    )
    assert np.abs(bundle.predict(inputs, prototypes=tables).logits - before).max() > 1e-3
    np.testing.assert_array_equal(bundle.predict(inputs).logits, before)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"acc": np.zeros((2, 11, 3))}, r"'acc' has the shape \[2, 11, 3\], the bundle takes \[batch, 12, 3\]"),
        ({"acc": np.zeros((12, 3))}, r"the shape \[12, 3\]"),
        ({"acc": np.zeros((0, 12, 3))}, r"the shape \[0, 12, 3\]"),
        ({"acc": np.full((1, 12, 3), np.nan)}, "not finite"),
        ({"acc": np.full((1, 12, 3), 1e300)}, "not finite"),
        ({"acc": np.full((1, 12, 3), "x")}, "takes numbers"),
        ({"gyro": np.zeros((1, 10, 2))}, "does not take gyro; it takes acc"),
        ({}, "needs acc"),
    ],
)
def test_input_that_does_not_fit_is_named(inputs: dict[str, np.ndarray], said: str):
    with pytest.raises(DataError, match=said):
        load_bundle(exported().directory / "acc").predict(inputs)


def test_the_complete_bundle_needs_the_same_samples_of_every_modality():
    inputs = windows(exported().spec, 3)
    with pytest.raises(DataError, match="acc 3, gyro 2"):
        load_bundle(exported().directory / "acc+gyro").predict({**inputs, "gyro": inputs["gyro"][:2]})


def test_a_mask_or_tables_the_bundle_has_not_are_refused():
    spec = exported().spec
    complete = load_bundle(exported().directory / "acc+gyro")
    with pytest.raises(ExportError, match="does not offer the mask 'reconstruction'"):
        complete.predict(windows(spec, 1), mask="reconstruction")
    large = {"acc": ClassMeans(np.ones((7, 8), np.float32), np.ones(7, np.float32))}
    with pytest.raises(DataError, match=r"\[7, 8\] do not fit the bundle 'acc', which has room for \[6, 8\]"):
        load_bundle(exported().directory / "acc").predict({"acc": np.zeros((1, 12, 3))}, prototypes=large)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported().directory / "acc", tmp_path / "acc"))


def test_a_damaged_bundle_is_refused(tmp_path: Path):
    folder = copied(tmp_path)
    data = bytearray((folder / MODEL_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / MODEL_FILE).write_bytes(data)
    with pytest.raises(ExportError, match="is damaged: sha256"):
        load_bundle(folder)
    (folder / MODEL_FILE).write_bytes(data[:-1])
    with pytest.raises(ExportError, match="bytes, its manifest says"):
        load_bundle(folder)
    (folder / MODEL_FILE).unlink()
    with pytest.raises(ExportError, match="cannot be read"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is damaged"), ('{"format": "other/9"}', "has the format 'other/9'"), ('{"opset": "x"}', "is damaged")],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str, said: str):
    folder = copied(tmp_path)
    (folder / MANIFEST_FILE).write_text(text)
    with pytest.raises(ExportError, match=said):
        load_bundle(folder)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(ExportError, match="the model holds bytes that are no protobuf"):
        session.open_session(b"not a model")
    with pytest.raises(ExportError, match="cannot load the model"):
        session.open_session(b"\x08\x09")  # a version, and no graph


def test_no_bundle_at_the_path(tmp_path: Path):
    with pytest.raises(ExportError, match="there is no bundle"):
        find_bundles(tmp_path / "nowhere")
    with pytest.raises(ExportError, match="holds no bundle"):
        find_bundles(tmp_path)
    with pytest.raises(ExportError, match="holds no bundle"):
        load_bundle(tmp_path)


def test_a_session_that_fell_back_to_the_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch):
    class FellBack:
        def __init__(self, *_args: object, **_options: object) -> None:
            pass

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession", FellBack)
    with pytest.raises(ExportError, match="cannot use cuda here: the session runs on CPUExecutionProvider"):
        session.open_session(b"", "cuda")


def test_serving_needs_no_torch():
    script = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from edgefl.export.runtime import load_bundle\n"
        "print(load_bundle(Path(sys.argv[1])).predict({'acc': np.zeros((2, 12, 3))}).labels)\n"
        "print(sorted({'torch', 'onnx', 'onnxscript', 'transformers', 'sqlalchemy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(exported().directory / "acc")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert all(label in LABELS for label in eval(answer))  # noqa: S307 - our own tuple of labels


# What can go wrong while exporting


def test_a_model_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    earlier = shutil.copytree(exported().directory, tmp_path / "bundles")

    def wrong(*_all: object) -> bytes:
        model = onnx.load(str(exported().directory / "acc" / MODEL_FILE))
        bias = next(i for i in model.graph.initializer if i.name.endswith("task.bias"))
        shifted = np.add(onnx.numpy_helper.to_array(bias), [0, 1e-3, 0, 0], dtype=np.float32)
        bias.CopyFrom(onnx.numpy_helper.from_array(shifted, bias.name))
        return model.SerializeToString()

    monkeypatch.setattr("edgefl.export.tracing.to_onnx", wrong)
    spec = exported().spec
    with pytest.raises(ExportError, match=r"acc: 'logits' differs by 0.001 between torch and onnxruntime \(mask \w+"):
        export_bundles(TrainedState(spec, stage_of(spec), exported().parts), tmp_path / "bundles", capacity=6)
    assert [path.name for path in tmp_path.iterdir()] == ["bundles"]
    assert sorted(p.name for p in earlier.iterdir()) == ["acc", "acc+gyro", "gyro", "index.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity": 3}, "a capacity of 3 has no room for 4 classes"),
        ({"mask": "mirror"}, "unknown mask 'mirror'"),
        ({"drop": "prototypes"}, "the state holds no prototypes"),
        ({"drop": "fusion"}, "the state lacks 1 parts of stage 2: fusion"),
        ({"nothing": True}, "no class has a prototype"),
        ({"narrow": True}, r"the prototypes of 'acc' are \[4, 5\], the model needs \[4, 8\]"),
    ],
)
def test_what_can_not_be_exported_is_refused_at_once(tmp_path: Path, changes: dict[str, object], said: str):
    changes = dict(changes)
    spec = exported().spec
    dropped = changes.pop("drop", "")
    parts = {name: tensors for name, tensors in exported().parts.items() if name != dropped}
    tables = from_tensors(exported().parts["prototypes"])
    if changes.pop("nothing", False):
        tables = {m: ClassMeans(t.means, np.zeros_like(t.counts)) for m, t in tables.items()}
        parts["prototypes"] = to_tensors(tables)
    if changes.pop("narrow", False):
        parts["prototypes"] = to_tensors({m: ClassMeans(t.means[:, :5], t.counts) for m, t in tables.items()})
    with pytest.raises(EdgeFLError, match=said):
        export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "bundles", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_torch_can_not_export_is_an_export_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = exported()  # kept for every test: made before the exporter is replaced
    monkeypatch.setattr("edgefl.export.tracing.exported", lambda *_args: 1 / 0)
    with pytest.raises(ExportError, match="the graph of acc cannot be exported to ONNX: division by zero"):
        export_bundles(TrainedState(made.spec, stage_of(made.spec), made.parts), tmp_path / "bundles")
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced(tmp_path: Path):
    target = tmp_path / "bundles"
    check_target(target)
    target.mkdir()
    check_target(target)
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ExportError, match="not an earlier export"):
        check_target(target)
    shutil.copytree(exported().directory, target, dirs_exist_ok=True)
    with pytest.raises(ExportError, match=r"it holds thesis\.tex"):
        check_target(target)
    (target / "thesis.tex").unlink()
    check_target(target)
    with pytest.raises(ExportError, match="not an earlier export"):
        check_target(target / INDEX_FILE)


def test_publishing_leaves_only_the_new_folder(tmp_path: Path):
    for name, text in (("bundles", "old"), (".bundles.new-1", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(text)
    publish([tmp_path / ".bundles.new-1"], [tmp_path / "bundles"])
    assert [path.name for path in tmp_path.iterdir()] == ["bundles"]
    assert (tmp_path / "bundles" / "a").read_text() == "new"


@pytest.mark.parametrize("earlier", [["bundles", "bundles-int8"], ["bundles"], []])
def test_of_two_folders_none_is_published_when_the_second_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: list[str]
):
    places = [tmp_path / "bundles", tmp_path / "bundles-int8"]
    for name in earlier:
        shutil.copytree(exported().directory, tmp_path / name)
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.name.startswith(".bundles-int8.new-") and not self.name.endswith(".old"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StoreError, match="No space left on device"), replaced(places):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == earlier
    assert all((tmp_path / name / INDEX_FILE).is_file() for name in earlier)


# Other models


@pytest.mark.parametrize("changes", [{}, {"arch": "bert", "pool": "mean", "positions": 12}], ids=["distilbert", "bert"])
def test_an_unlabelled_text_model_gives_embeddings_for_texts_of_any_length(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = encoder_of_size("text", "tiny", (9,), width=16, depth=1, vocabulary=40, **changes)
    spec = ModelSpec(encoders={"words": words}, stages=1, head=HeadSpec(width=16, out=8))
    model, parts = some_state(spec)
    ref = ObjectRef("0" * 64, 5)
    (row,) = export_bundles(
        TrainedState(spec, stage_of(spec, 1), parts, refs={"head/words": ref}), tmp_path / "b", mask="zero"
    )
    manifest = read_manifest(tmp_path / "b" / "words")
    assert (row.name, manifest.task, manifest.labels, manifest.parts) == ("words", "embed", (), {"head/words": ref})
    assert manifest.inputs[0].shape == ("batch", "words.length")
    assert {(one.sizes["batch"], one.sizes["words.length"]) for one in manifest.parity} == {(1, 4), (5, 9)}
    bundle = load_bundle(tmp_path / "b" / "words")
    ids = np.array([[1, 7, 22, 3, 9, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        expected = model.project("words", model.encode("words", torch.from_numpy(ids), 1))
    expected = (expected / expected.norm(dim=1, keepdim=True)).numpy()
    found = bundle.predict({"words": ids}).embeddings["words"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Padding changes nothing: one token and its start give the same with and without it.
    np.testing.assert_allclose(bundle.predict({"words": ids[1:, :2]}).embeddings["words"], expected[1:], atol=1e-5)
    np.testing.assert_allclose(bundle.predict({"words": ids[:, :5]}).embeddings["words"], expected, atol=1e-5)
    # Nor is it computed: short texts go together, and answers keep their order.
    widths = []

    def seen(one: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        widths.append(feeds["words"].shape[1])
        return session.run(one, feeds)

    monkeypatch.setattr(runtime, "run", seen)
    bundle = replace(bundle, rows=1)
    np.testing.assert_allclose(bundle.predict({"words": ids}).embeddings["words"], expected, atol=1e-5)
    assert widths == [manifest.axes["words.length"].minimum, 5]
    for wrong, said in ((ids + 40, "token ids"), (np.zeros((1, 10), int), "1 to 9"), (ids * 1.0, "takes token ids")):
        with pytest.raises(DataError, match=said):
            bundle.predict({"words": wrong})


@pytest.mark.slow
@pytest.mark.timeout(300)  # four exports of up to three encoders
def test_image_text_and_sound_with_one_prototype_table_missing(tmp_path: Path):
    spec = ModelSpec(
        encoders={
            "image": encoder_of_size("vision", "tiny", (8, 8, 1), width=16, depth=1),
            "words": encoder_of_size("text", "tiny", (10,), width=16, depth=1, vocabulary=50),
            "sound": encoder_of_size("audio", "tiny", (37, 20), width=16, depth=1),
        },
        stages=1,
        head=HeadSpec(width=16, out=8),
        fusion_width=12,
        classes=3,
    )
    _, parts = some_state(spec)
    tables = some_tables(spec)
    parts["prototypes"] = to_tensors({m: tables[m] for m in ("image", "words")})
    rows = export_bundles(TrainedState(spec, stage_of(spec, 1), parts), tmp_path / "b")
    assert [row.name for row in rows] == ["image", "words", "sound", "image+words+sound"]
    assert list(find_bundles(tmp_path / "b")) == [tmp_path / "b" / row.name for row in rows]
    image = load_bundle(tmp_path / "b" / "image").predict({"image": np.zeros((2, 8, 8, 1))})
    assert (image.matched["words"].rows >= 0).any()
    assert (image.matched["sound"].rows == -1).all()  # no prototypes of sounds: its mask is zero
    assert image.labels[0] in {"0", "1", "2"}


def test_convolutions_of_pictures_are_the_same_in_a_bundle(tmp_path: Path):
    image = encoder_of_size("vision", "tiny", (16, 40, 3), width=16, depth=1, arch="conv")
    spec = ModelSpec({"image": image}, 1, HeadSpec(width=16, out=8), 12, classes=3)
    _, parts = some_state(spec, prototypes=False)
    (row,) = export_bundles(TrainedState(spec, stage_of(spec, 1), parts), tmp_path / "b", mask="zero", tolerance=1e-5)
    assert load_bundle(tmp_path / "b" / row.name).predict({"image": np.zeros((2, 16, 40, 3))}).labels[0] in {
        "0",
        "1",
        "2",
    }


def test_a_model_of_one_sensor_without_prototypes_gives_one_bundle(tmp_path: Path):
    spec = two_sensors(encoders={"acc": sensor(depth=1)}, stages=1)
    model, parts = some_state(spec, prototypes=False)
    (row,) = export_bundles(TrainedState(spec, stage_of(spec, 1), parts), tmp_path / "b", mask="zero", tolerance=1e-5)
    bundle = load_bundle(tmp_path / "b" / "acc")
    assert (row.name, bundle.manifest.tables, bundle.manifest.masks) == ("acc", (), ())
    x = windows(spec, 3)
    with torch.no_grad():
        h = {"acc": model.project("acc", model.encode("acc", torch.from_numpy(x["acc"])))}
        expected = model.classify(model.fuse(h)).numpy()
    np.testing.assert_allclose(bundle.predict(x).logits, expected, atol=1e-5)
    assert math.isclose(row.tolerance, 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)  # nine exports
@pytest.mark.parametrize(
    "changes",
    [
        {"fusion": "mean"},
        {"encoder_sharing": "multiway"},
        {"fusion": "joint", "joint": JointSpec(8, 2, 1)},
        {"fusion": "joint", "joint": JointSpec(8, 2, 1, shared=True)},
    ],
    ids=["mean", "multiway", "joint", "shared"],
)
def test_the_other_ways_to_share_and_to_fuse_are_exported_too(tmp_path: Path, changes: dict[str, object]):
    spec = two_sensors(**changes)
    _, parts = some_state(spec)
    rows = export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "b")
    assert [row.name for row in rows] == ["acc", "gyro", "acc+gyro"]
    assert all(row.max_difference <= row.tolerance for row in rows)
    windows_ = windows(spec, 3)
    one = load_bundle(tmp_path / "b" / "acc").predict({"acc": windows_["acc"]})
    assert (one.matched["gyro"].rows >= 0).any()
    assert len(load_bundle(tmp_path / "b" / "acc+gyro").predict(windows_).labels) == 3
