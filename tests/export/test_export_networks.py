"""Bundles whose absent modality is found by the recipe's own metric or small networks serve as they were evaluated."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from export_fixture import Parts, sensor, some_state, some_tables, stage_of, two_sensors, windows

from coordinator.core.moves import SavedRound
from coordinator.ledger.ledger import Ledger
from edgefl.aggregation.history import KEY, Memory
from edgefl.api.export_run import export_run
from edgefl.data.dataset import Dataset
from edgefl.errors import ExportError
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import MATCHED, MODEL_FILE, WEIGHTS, read_manifest
from edgefl.export.drafts import Draft, TrainedState
from edgefl.export.runtime import load_bundle
from edgefl.models.parts import part_tensors
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import RunPlan, Slots
from edgefl.protocol.tensors import encode_part
from edgefl.prototypes.mask import Matcher
from edgefl.storage.objects import ObjectStore
from edgefl.training.evaluate import Criteria, evaluate
from edgefl.training.fill import matcher_of
from edgefl.training.matching import Networks, matching

#: PmcmFL as its recipe has it, in small.
SLOTS = Slots(missing={"prototype": {"by": "label"}}, prototypes={"class_mean": {"match": "classifier", "k": 2}})
NETWORKS: Networks = {
    f"match/{m}": {f"@{d}:match/{m}": w for d, w in (("one", 3.0), ("two", 1.0))} for m in ("acc", "gyro")
}
_KEPT: list[tempfile.TemporaryDirectory] = []


def small(kind: str = "classifier", **changes: object) -> ModelSpec:
    encoders = {"acc": sensor(depth=1, width=8), "gyro": sensor(depth=1, width=8, input_shape=(10, 2))}
    head = HeadSpec(out=8, kind="none")
    return two_sensors(encoders=encoders, stages=1, head=head, encoder_sharing="multiway", matching=kind, **changes)


def state_of(spec: ModelSpec) -> Parts:
    """Parts with two devices' networks of each modality, sure enough of something, beside their mean."""
    _, parts = some_state(spec)
    for seed, device in enumerate(("one", "two") if spec.matching != "none" else ()):
        networks = build(spec, [f"match/{m}" for m in spec.encoders], seed=seed).requires_grad_(False)
        for name in networks.parts_present:
            tensors = {key: 4 * value for key, value in part_tensors(networks, name).items()}
            parts[f"@{device}:{name}"] = tensors
    return parts


def labelled(spec: ModelSpec, count: int = 24) -> Dataset:
    arrays = windows(spec, count)
    ids = [f"w{i}" for i in range(count)]
    return Dataset(arrays, {m: np.ones(count, bool) for m in arrays}, np.arange(count) % 4, spec.label_names, ids)


@functools.cache
def pmcmfl() -> Path:
    """Bundles of the ensemble with room for two more classes."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="edgefl-bundles-"))
    directory = Path(_KEPT[-1].name) / "bundles"
    spec = small()
    matcher = matcher_of(SLOTS, NETWORKS)
    export_bundles(
        TrainedState(spec, stage_of(spec, 1), state_of(spec), matcher=matcher, networks=NETWORKS), directory, capacity=6
    )
    return directory


def told(spec: ModelSpec, slots: Slots, networks: Networks, data: Dataset) -> dict[str, float]:
    """Accuracy of each modality alone by the evaluation's prototype mask."""
    parts = state_of(spec)
    matcher, models = matching(spec, parts, slots, networks)
    rows = evaluate(spec, stage_of(spec, 1), parts, data, Criteria(prototypes=True, matcher=matcher, networks=models))
    found = [row for row in rows if row.missing == "prototype" and row.metric == "accuracy"]
    assert {row.matcher for row in found} == {matcher.metric}
    return {row.available[0]: row.value for row in found}


@pytest.mark.slow  # 20 s; what it serves is compared in test_export_match.py
def test_an_ensemble_serves_as_it_was_evaluated():
    spec, data = small(), labelled(small())
    expected = told(spec, SLOTS, NETWORKS, data)
    for m in spec.encoders:
        bundle = load_bundle(pmcmfl() / m)
        answers = bundle.predict({m: data.modalities[m]})
        assert (answers.classes == data.labels).mean() == pytest.approx(expected[m])
        (matched,) = answers.matched.values()
        assert matched.rows.shape == (24, 2)
        assert set(np.unique(matched.rows)) <= set(range(4))  # of the spare rows the classifiers know nothing
        zeros = bundle.predict({m: data.modalities[m]}, mask="zero")
        assert (next(iter(zeros.matched.values())).rows == -1).all()
        assert np.abs(zeros.logits - answers.logits).max() > 1e-3


@pytest.mark.slow
def test_the_manifest_says_what_matches():
    manifest = read_manifest(pmcmfl() / "acc")
    assert (manifest.metric, manifest.top_k, manifest.temperature, manifest.capacity) == ("classifier", 2, 1.0, 6)
    assert manifest.networks == (3.0, 1.0)
    assert [port.name for port in manifest.tables] == ["prototypes.gyro", "prototypes.gyro.valid"]
    assert {one.mask for one in manifest.parity} == {"prototype", "zero", "override"}
    assert all({MATCHED, WEIGHTS} <= set(one.differences) for one in manifest.parity)
    assert not any("one" in part or "two" in part for part in manifest.parts)  # names of devices stay at home
    complete = read_manifest(pmcmfl() / "acc+gyro")
    assert complete.networks == (3.0, 1.0, 3.0, 1.0)  # of acc and of gyro
    assert {given for one in complete.parity for given in one.given} == {"acc", "gyro", "acc+gyro"}
    data = (pmcmfl() / "acc" / MODEL_FILE).read_bytes()
    assert b"@one" not in data
    ports = [value.name for value in onnx.load_model_from_string(data).graph.input]
    assert ports == ["acc", "prototypes.gyro", "prototypes.gyro.valid"]


@pytest.mark.slow
def test_prototypes_of_what_is_at_hand_are_not_looked_at():
    bundle, x = load_bundle(pmcmfl() / "acc"), {"acc": windows(small(), 3)["acc"]}
    tables = some_tables(small(), seed=9)
    own = bundle.predict(x, prototypes={"acc": tables["acc"]})
    np.testing.assert_array_equal(own.logits, bundle.predict(x).logits)
    both = bundle.predict(x, prototypes=tables)
    assert np.abs(both.logits - own.logits).max() > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(300)  # three exports each
@pytest.mark.parametrize("match", ["prior", "l1", "l2"])
def test_every_other_metric_serves_as_it_was_evaluated(tmp_path: Path, match: str):
    spec = small("prior" if match == "prior" else "none")
    slots = msgspec.structs.replace(SLOTS, prototypes={"class_mean": {"match": match}})
    networks = NETWORKS if match == "prior" else {}
    parts, data = state_of(spec), labelled(spec)
    matcher = matcher_of(slots, networks)
    export_bundles(TrainedState(spec, stage_of(spec, 1), parts, matcher=matcher, networks=networks), tmp_path / "b")
    for m, accuracy in told(spec, slots, networks, data).items():
        assert read_manifest(tmp_path / "b" / m).metric == match
        answers = load_bundle(tmp_path / "b" / m).predict({m: data.modalities[m]})
        assert (answers.classes == data.labels).mean() == pytest.approx(accuracy)


def test_a_matcher_without_its_networks_is_refused(tmp_path: Path):
    spec = small()
    parts = state_of(spec)
    options = {"matcher": Matcher("classifier"), "networks": {"match/acc": {"@three:match/acc": 1.0}}}
    with pytest.raises(ExportError, match=r"a small network of 'acc', and the state lacks @three:match/acc"):
        export_bundles(TrainedState(spec, stage_of(spec, 1), parts, **options), tmp_path / "b")
    with pytest.raises(ExportError, match=r"a small network of 'acc', and the state holds none"):
        export_bundles(TrainedState(spec, stage_of(spec, 1), parts, matcher=Matcher("classifier")), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_is_exported_with_the_networks_of_its_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bundles = pmcmfl()  # kept for every test: made before the exporter is replaced

    def known(draft: Draft, *_rest: object) -> bytes:
        return (bundles / draft.manifest.name / MODEL_FILE).read_bytes()

    monkeypatch.setattr("edgefl.export.tracing.to_onnx", known)
    spec, stage = small(), stage_of(small(), 1)
    store = ObjectStore(tmp_path / "objects")
    manifest = {name: store.put(encode_part(tensors)) for name, tensors in state_of(spec).items()}
    memory = Memory(networks={part: dict(weights) for part, weights in NETWORKS.items()})
    manifest[KEY] = store.put(msgspec.json.encode(memory))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create(RunPlan(run="r1", name="r1", model=spec, stages=(stage,), slots=SLOTS), manifest, {}, 1.0)
        ledger.commit("r1", [SavedRound(1, 1, 1, "done", manifest=manifest)], [], 2.0)
    done = export_run(tmp_path, capacity=6)
    assert done.mask == "both"
    assert read_manifest(done.directory / "gyro").networks == (3.0, 1.0)


def test_before_its_networks_are_trained_a_recipe_matches_by_cosine():
    assert matcher_of(SLOTS, {}) == Matcher("cosine")
    assert matcher_of(SLOTS, NETWORKS) == Matcher("classifier", k=2)
