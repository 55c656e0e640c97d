"""Bundles that make an absent modality from the one at hand, as the recipe trained it."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export_fixture import Exported, sensor, some_state, stage_of, two_sensors, windows

from coordinator.core.moves import SavedRound
from coordinator.ledger.ledger import Ledger
from edgefl.api.export_run import export_run
from edgefl.cli.main import main
from edgefl.data.dataset import Dataset
from edgefl.errors import ExportError
from edgefl.export import parity
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MODEL_FILE, Manifest, input_ports, read_manifest
from edgefl.export.drafts import Draft, TrainedState
from edgefl.export.graph import BundleGraph
from edgefl.export.runtime import load_bundle
from edgefl.methods.mmic.reconstruction import stand_in as reconstruction
from edgefl.methods.stand_ins import zero
from edgefl.models.spec import JointSpec, ModelSpec
from edgefl.plan.job import RunPlan, Slots
from edgefl.protocol.tensors import encode_part
from edgefl.storage.objects import ObjectStore
from edgefl.training.evaluate import Criteria, evaluate

_KEPT: list[tempfile.TemporaryDirectory] = []


def small(**changes: object) -> ModelSpec:
    encoders = {"acc": sensor(depth=1), "gyro": sensor(depth=1, input_shape=(10, 2))}
    return two_sensors(encoders=encoders, stages=1, reconstruction=True, **changes)


@functools.cache
def rebuilt() -> Exported:
    spec = small()
    model, parts = some_state(spec, prototypes=False)
    _KEPT.append(tempfile.TemporaryDirectory(prefix="edgefl-bundles-"))
    directory = Path(_KEPT[0].name) / "bundles"
    rows = export_bundles(TrainedState(spec, stage_of(spec, 1), parts), directory, mask="reconstruction")
    return Exported(spec, model, parts, directory, rows)


def labelled(count: int) -> Dataset:
    arrays = windows(rebuilt().spec, count)
    labels = np.arange(count) % 4
    ids = [f"w{i}" for i in range(count)]
    return Dataset(arrays, {m: np.ones(count, bool) for m in arrays}, labels, rebuilt().spec.label_names, ids)


@pytest.mark.slow
def test_a_bundle_of_one_modality_reconstructs_the_other():
    for given, absent in (("acc", "gyro"), ("gyro", "acc")):
        manifest = read_manifest(rebuilt().directory / given)
        assert (manifest.mask, manifest.masks, manifest.absent) == ("reconstruction", ("reconstruction",), (absent,))
        assert (manifest.tables, manifest.top_k, manifest.capacity) == ((), 0, 0)
        assert [one.mask for one in manifest.parity] == ["reconstruction"] * 2
        assert manifest.max_difference <= 1e-4
        x = windows(rebuilt().spec, 5)[given]
        model = rebuilt().model
        with torch.no_grad():
            r = model.project(given, model.encode(given, torch.from_numpy(x)))
            logits = model.classify(model.fuse({given: r, absent: model.reconstruct(absent, r)})).numpy()
        found = load_bundle(rebuilt().directory / given).predict({given: x})
        np.testing.assert_allclose(found.logits, logits, atol=1e-5)
        assert found.matched == {}
    complete = read_manifest(rebuilt().directory / "acc+gyro")
    assert (complete.mask, complete.fills) == ("reconstruction", ("acc", "gyro"))
    assert {given for one in complete.parity for given in one.given} == {"acc", "gyro", "acc+gyro"}
    with pytest.raises(ExportError, match="does not offer the mask 'zero'; it offers reconstruction"):
        load_bundle(rebuilt().directory / "acc").predict({"acc": np.zeros((1, 12, 3))}, mask="zero")


@pytest.mark.slow
def test_a_bundle_answers_as_often_right_as_the_evaluation_says():
    data, made = labelled(20), rebuilt()
    rows = evaluate(made.spec, stage_of(made.spec, 1), made.parts, data, Criteria())
    for m in made.spec.encoders:
        (told,) = [r.value for r in rows if (r.available, r.missing, r.metric) == ((m,), "reconstruction", "accuracy")]
        answers = load_bundle(made.directory / m).predict({m: data.modalities[m]}).classes
        assert (answers == data.labels).mean() == pytest.approx(told)


def checked(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, change: Callable[[BundleGraph], None]) -> tuple:
    """The parity check of a graph before its export."""
    model, _ = some_state(spec, prototypes=False)
    inputs, axes = input_ports(spec, ("acc",))
    right, graph = (BundleGraph(model, 1, ("acc",), reconstruction) for _ in "ab")
    manifest = Manifest(inputs=inputs, axes=axes, masks=("reconstruction",))
    change(graph)

    def answer(_: object, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            found = graph((torch.from_numpy(feeds["acc"]),), (), ())
        return dict(zip(("logits", "probabilities"), (f.numpy() for f in found), strict=True))

    monkeypatch.setattr(parity, "run", answer)
    return parity.check(None, right, manifest, {}, 1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"fusion": "mean"}, {"fusion": "joint", "joint": JointSpec(8, 2, 1)}], ids=["mlp", "mean", "joint"]
)
def test_a_graph_that_leaves_the_absent_one_out_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict):
    def zeros(graph: BundleGraph) -> None:
        graph.make = zero

    for one in checked(monkeypatch, small(**changes), lambda _: None):
        assert one.mask == "reconstruction"
        assert max(one.differences.values()) < 1e-6
    with pytest.raises(ExportError, match=r"acc: '\w+' differs by .* \(mask reconstruction"):
        checked(monkeypatch, small(**changes), zeros)


def test_a_graph_that_reconstructs_from_something_else_is_refused(monkeypatch: pytest.MonkeyPatch):
    def other(graph: BundleGraph) -> None:
        graph.make = lambda m, given: reconstruction(
            m, replace(given, full={n: 0.99 * r for n, r in given.full.items()})
        )

    with pytest.raises(ExportError, match=r"'logits' differs by .* \(mask reconstruction"):
        checked(monkeypatch, small(), other)


def test_a_model_without_the_networks_is_refused(tmp_path: Path):
    spec = two_sensors()
    _, parts = some_state(spec, prototypes=False)
    with pytest.raises(ExportError, match="the model cannot make the stand-ins reconstruction"):
        export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "b", mask="reconstruction")
    assert list(tmp_path.iterdir()) == []


def a_run(place: Path, slots: Slots) -> Path:
    spec, stage = rebuilt().spec, stage_of(rebuilt().spec, 1)
    store = ObjectStore(place / "objects")
    manifest = {name: store.put(encode_part(tensors)) for name, tensors in rebuilt().parts.items()}
    with Ledger(place / "ledger.sqlite") as ledger:
        ledger.create(RunPlan(run="r1", name="r1", model=spec, stages=(stage,), slots=slots), manifest, {}, 1.0)
        ledger.commit("r1", [SavedRound(1, 1, 1, "done", manifest=manifest)], [], 2.0)
    return place


def test_a_run_is_exported_with_what_its_recipe_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def known(draft: Draft, *_rest: object) -> bytes:
        assert draft.graph.make is reconstruction
        return (rebuilt().directory / draft.manifest.name / MODEL_FILE).read_bytes()

    rebuilt()  # before what writes it is replaced
    monkeypatch.setattr("edgefl.export.tracing.to_onnx", known)
    done = export_run(a_run(tmp_path / "one", Slots(missing={"reconstruction": {}})))
    assert done.mask == "reconstruction"
    # The parts alone, for a term of the objective, are not what stands in.
    monkeypatch.setattr("edgefl.export.bundle.export_bundles", lambda *_args, **_options: [])
    assert export_run(a_run(tmp_path / "two", Slots(missing={"zero": {}}))).mask == "zero"
    assert export_run(a_run(tmp_path / "three", Slots(missing={"zero": {}})), mask="reconstruction").rows == []


def test_predict_names_what_stands_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = labelled(3)
    data.present["gyro"][0] = False
    data.save_npz(tmp_path / "x.npz")
    for words in ([], ["--mask", "reconstruction"]):
        with pytest.raises(SystemExit) as ended:
            main(["predict", str(rebuilt().directory), str(tmp_path / "x.npz"), *words])
        assert not ended.value.code
        out = " ".join(capsys.readouterr().out.split())
        assert "Absent modalities are filled in by reconstruction (given acc)." in out
    with pytest.raises(SystemExit):
        main(["predict", str(rebuilt().directory), str(tmp_path / "x.npz"), "--format", "json"])
    told = json.loads(capsys.readouterr().out)["by_bundle"]
    assert {name: one["mask"] for name, one in told.items()} == {"acc": "reconstruction", "acc+gyro": "none"}
