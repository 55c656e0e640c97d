"""What the coordinator refuses on arrival: malformed signatures, and whatever could stop the relationship graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from coordinator_fixture import a_plan
from test_coordinator_runner import played, values

from coordinator.runtime.evaluator import Evaluator, Request
from coordinator.runtime.validate_update import Rules, check_update
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.weights import SIGNATURES, wanted
from edgefl.data.dataset import Dataset
from edgefl.errors import ProtocolError
from edgefl.methods.cluster import WIDTH
from edgefl.methods.mmic.sketches import BITS, ROWS, UNIT, check_sketch, sketch
from edgefl.models.checkpoints import initial_parts
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.plan.job import RunPlan
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Refusal
from edgefl.registry import method, methods, signature
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore

Tensors = dict[str, np.ndarray]


def features(rows: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float32)


def counts(value: int = 8, rows: int = ROWS, buckets: int = 2**BITS) -> np.ndarray:
    return np.full((rows, buckets), value, np.int16)  # 8 = UNIT / 4096: a sample in every bucket


SKETCHES: dict[str, tuple[Tensors, str]] = {
    "nothing": ({}, "but nothing"),
    "another name": ({"bases": counts()}, "'bases' int16"),
    "one more tensor": ({"sketch": counts(), "more": counts()}, "not one tensor 'sketch'"),
    "another shape": ({"sketch": counts(rows=ROWS - 1)}, r"\[99, 4096\]"),
    "floats": ({"sketch": counts().astype(np.float32)}, "float32"),
    "a count below 0": ({"sketch": np.where(np.arange(2**BITS) == 5, -1, counts()).astype(np.int16)}, "count of -1"),
    "an empty row": ({"sketch": np.where(np.arange(ROWS)[:, None] == 5, 0, counts()).astype(np.int16)}, "sums to 0"),
}


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_what_devices_make_is_a_signature_in_every_encoding(encoding: str) -> None:
    made = sketch(features())
    check_sketch(decode_part(encode_part(made, encoding), finite=True))
    check_sketch({"sketch": counts()})


def test_a_signature_that_no_recipe_asks_for_is_refused() -> None:
    assert signature("sketch").name == "sketch"
    for name in ("", "bases"):  # bases: of a method that is not installed
        with pytest.raises(ProtocolError, match="no device was asked for"):
            signature(name)


def test_the_smallest_device_has_rows_that_count() -> None:
    check_sketch(sketch(features(1)))
    assert sketch(features(1))["sketch"].max() == UNIT


@pytest.mark.parametrize("fault", SKETCHES)
def test_what_is_no_sketch_is_named(fault: str) -> None:
    tensors, message = SKETCHES[fault]
    with pytest.raises(ProtocolError, match=message):
        check_sketch(tensors)


def test_what_is_wanted_is_what_the_recipes_clusters_are_made_of() -> None:
    assert {name: wanted({"cluster": {name: {}}}) for name in methods("cluster")} == {
        "none": "",
        "lsh": "sketch",
        "lsh_joining": "",  # with the hello
    }
    assert wanted({}) == wanted({"cluster": {}}) == ""


@pytest.mark.parametrize("fault", ["an empty row", "another shape", "bytes", "nobody asked"])
def test_a_malformed_signature_is_refused_on_arrival_and_the_round_goes_on(tmp_path: Path, fault: str) -> None:
    report = RunReport()
    wrong = b"no part" if fault == "bytes" else encode_part(SKETCHES.get(fault, ({"sketch": counts()}, ""))[0])
    right = encode_part(sketch(features()))
    server = {} if fault == "nobody asked" else {"cluster": {"lsh": {"clusters": 2.0}}}

    async def script(scene) -> None:
        nonlocal report
        await scene.device("a", beside={"signature": wrong})
        await scene.device("b", beside={"signature": right} if server else {})
        report = await scene.coordinator(a_plan(server=server))

    scene = played(tmp_path, script)
    told = {(a.device, a.status) for a in report.assignments}
    assert (report.status, told) == ("done", {("a", "rejected"), ("a", "quarantined"), ("b", "done")})
    refusals = [a.refusal for a in report.assignments if (a.device, a.status) == ("a", "rejected")]
    assert {r.reason for r in refusals if r is not None} == {"malformed"}
    assert all(r is not None and r.detail.startswith("part signature: ") for r in refusals)
    assert np.allclose(values(scene, "task"), 10 * 6 + 3)  # "task" is part 6: what b adds in three rounds
    if server:
        assert report.rounds[0].record["clusters"] == {"b": 0}


# The aggregation by itself, whose record names what it left out


def signed(store: ObjectStore, device: str, value: float, signature: Tensors) -> UpdateInfo:
    parts = {"task": {"w": np.full(2, value, np.float32)}, "signature": signature}
    manifest = {part: store.put(encode_part(tensors)) for part, tensors in parts.items()}
    return UpdateInfo(device, manifest, {"task": 10})


def test_the_aggregation_leaves_out_the_signature_and_counts_the_rest_of_the_update(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    previous = {"task": store.put(encode_part({"w": np.zeros(2, np.float32)}))}
    updates = [signed(store, "a", 1.0, {"sketch": counts(0)}), signed(store, "b", 3.0, {"sketch": counts()})]
    state, record = aggregate_round(updates, store, previous, {"cluster": {"lsh": {}}})
    assert [key for key in state if key.startswith(SIGNATURES)] == [SIGNATURES + "b"]
    assert record["clusters"] == {"b": 0}
    assert [(r["device"], r["part"], r["reason"]) for r in record["refused"]] == [("a", "signature", "malformed")]
    assert decode_part(store.read(state["task"].id))["w"].tolist() == [2.0, 2.0]
    # A better signature in a later round is taken.
    state, record = aggregate_round(
        [signed(store, "a", 1.0, {"sketch": counts()})], store, state, {"cluster": {"lsh": {}}}
    )
    assert set(record["clusters"]) == {"a", "b"}


MISFITS: dict[str, tuple[bytes, str]] = {
    "names": (encode_part({"v": np.ones(2, np.float32)}), "names"),
    "shape": (encode_part({"w": np.ones(3, np.float32)}), "shape"),
    "dtype": (encode_part({"w": np.ones(2, np.int64)}), "dtype"),
    "not finite": (encode_part({"w": np.full(2, np.inf, np.float32)}), "not_finite"),
    "bytes": (b"no part", "malformed"),
}


@pytest.mark.parametrize("fault", MISFITS)
@pytest.mark.parametrize("odd", ["a", "z"])  # the first device, and the last
def test_a_misfit_has_no_place_in_the_relationship_graph_and_ends_nothing(tmp_path: Path, fault: str, odd: str) -> None:
    store = ObjectStore(tmp_path)
    data, reason = MISFITS[fault]
    previous = {"head/acc": store.put(encode_part({"w": np.zeros(2, np.float32)}))}
    good = encode_part({"w": np.array([3, 4], np.float32)})
    manifests = {d: {"head/acc": store.put(data if d == odd else good)} for d in ("m", "n", odd)}
    refusal = check_update(store, manifests[odd], previous, Rules())
    assert refusal is not None  # so it never gets as far as this:
    assert refusal.reason in {reason, "malformed"}
    updates = [UpdateInfo(device, manifest, {"head/acc": 10}) for device, manifest in manifests.items()]
    state, record = aggregate_round(updates, store, previous, {"weight": {"relationship": {}}})
    assert record["parts"]["@m/head/acc"]["devices"] == {"m": 0.5, "n": 0.5}
    assert f"@{odd}/head/acc" not in state
    assert [(r["device"], r["part"], r["reason"]) for r in record["refused"]] == [(odd, "head/acc", reason)]


def test_when_nobody_fits_the_graph_is_empty_and_the_part_stays(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    previous = {"head/acc": store.put(encode_part({"w": np.zeros(2, np.float32)}))}
    updates = [UpdateInfo("a", {"head/acc": store.put(b"no part")}, {"head/acc": 10})]
    state, record = aggregate_round(updates, store, previous, {"weight": {"relationship": {}}})
    assert state["head/acc"] == previous["head/acc"]
    assert "@a/head/acc" not in state
    assert record["kept"] == {"head/acc": "every device that trained it was refused"}


# Likeness of models (slot weight: cka): finite weights can still give outputs that are no numbers


def test_a_diverged_model_has_no_likeness_and_ends_nothing(tmp_path: Path) -> None:
    encoder = EncoderSpec(input_shape=(8, 2), width=8, depth=1, heads=2, patch=4)
    spec = ModelSpec({"a": encoder}, 1, HeadSpec(8, 4), 8, 2, ("x", "y"))
    stage = method("schedule", "end_to_end").stages(spec, [1], "auto")[0]
    rows = np.random.default_rng(0).normal(size=(6, 8, 2)).astype(np.float32)
    data = Dataset({"a": rows}, {"a": np.ones(6, bool)}, np.arange(6) % 2, ("x", "y"), [str(i) for i in range(6)])
    data.save_npz(tmp_path / "test.npz")
    store = ObjectStore(tmp_path / "objects")
    parts = dict(initial_parts(spec, 0))
    good = {part: store.put(encode_part(tensors)) for part, tensors in parts.items()}
    huge = {name: np.full_like(value, 3e38) for name, value in parts["fusion"].items()}
    models = {"a": good, "b": good | {"fusion": store.put(encode_part(huge))}, "c": good}
    refused = check_update(store, models["b"], good, Rules())  # what had come before this was checked is still weighed
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.detail.split(":")[0]) == ("range", "part fusion")
    plan = RunPlan(model=spec, stages=(stage,), server={"weight": {"cka": {}}}, test=str(tmp_path / "test.npz"))
    weights = Evaluator().similarity(Request(plan, str(tmp_path / "objects"), models=models))
    assert weights == pytest.approx({"a": 0.5, "c": 0.5})
    updates = [UpdateInfo(device, {"task": model["task"]}, {"task": 10}) for device, model in models.items()]
    _, record = aggregate_round(updates, store, good, {"weight": {"cka": {}}}, terms=RoundTerms(similarity=weights))
    assert record["parts"]["task"]["devices"] == pytest.approx({"a": 0.5, "c": 0.5})
    assert [(r["device"], r["part"], r["reason"]) for r in record["refused"]] == [("b", "model", "not_finite")]
