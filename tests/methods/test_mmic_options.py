"""What MMiC's paper and its authors' code do differently, each an option."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share
from test_methods_server import FOUR_BY_THREE

from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import Memory, Track
from edgefl.data.dataset import Dataset
from edgefl.errors import ProtocolError
from edgefl.methods.mmic import banzhaf, sketches
from edgefl.methods.mmic.portfolio import portfolio
from edgefl.methods.mmic.zero_input import complete, completed_counts
from edgefl.models.spec import EncoderSpec
from edgefl.protocol.messages import MAX_SIGNATURE_BYTES
from edgefl.protocol.tensors import encode_part
from edgefl.storage.objects import ObjectStore
from edgefl.training.batches import make_batch, unmixed_rows

FIGURES = ("measured", "predicted")
ENCODERS = {m: EncoderSpec() for m in "ab"}


def test_in_percent_points_the_variance_weighs_a_hundred_times_as_much() -> None:
    """Returns .1 and -.1: cov = (.1^2 + .2^2) / 1 = .05, gamma = (.05 + .1) / 2; in points (500 + 10) / 2 = 255."""
    memory = Memory(rounds=2, devices={"a": Track(returns={1: 0.1, 2: -0.1})})
    for unit, gamma in (("fraction", 0.075), ("percent", 255.0)):
        changed, record = portfolio(memory, {"a": 0}, {"a": 1.0}, unit=unit)
        assert record["momentum"]["gamma"] == pytest.approx(gamma)  # type: ignore[index]
        assert changed["beta"] == pytest.approx(0.9 + np.tanh(gamma) / 10)


def test_a_warm_up_over_all_devices_knows_no_clusters() -> None:
    """4 of 12 in four clusters of three: inside clusters always two of each of two."""

    def clusters(warmup: str, seed: int) -> int:
        options = {"share": 1 / 3, "warmup_rounds": 100, "warmup": warmup}
        rng = np.random.default_rng(seed)
        drawn = banzhaf.banzhaf(sorted(FOUR_BY_THREE.devices), rng, FOUR_BY_THREE, **options)
        return len({name[0] for name in drawn})

    assert {clusters("clusters", seed) for seed in range(40)} == {2}
    assert {clusters("all", seed) for seed in range(40)} == {2, 3, 4}


# ---- sketches on joining


def test_a_projected_sketch_keeps_distances() -> None:
    """Of ten devices' sketches all distances are within 15 % of the whole sketches' (deviation 4 %)."""
    whole = [sketches.sketch(np.random.default_rng(i).normal(i, 3, (60, 8)), seed=5)["sketch"] for i in range(10)]
    sent = [sketches.projected(one, 5)["sketch"] for one in whole]
    shares = [(one / one.sum(axis=1, keepdims=True)).ravel() for one in whole]
    for i, j in itertools.combinations(range(10), 2):
        assert np.linalg.norm(sent[i] - sent[j]) == pytest.approx(np.linalg.norm(shares[i] - shares[j]), rel=0.15)
    assert len(encode_part({"sketch": sent[0]})) < MAX_SIGNATURE_BYTES
    for wrong in (np.zeros(7, np.float32), np.full(sketches.SENT, 1e3, np.float32), np.zeros(sketches.SENT)):
        with pytest.raises(ProtocolError):
            sketches.check_projected({"sketch": wrong})
    assert sketches.lsh_joining({}, np.random.default_rng(0), clusters=2) == {}


def test_devices_that_joined_are_clustered_once_before_they_train(ram_path: Path) -> None:
    """Two of six train a round: all six are in the first round's clusters, which stay; no signature is uploaded."""
    settings = ["training.batch_size=6", "training.rounds=[0, 3]", "evaluate=stage"]
    slots = ["slots.cluster={lsh_joining: {clusters: 2}}", "slots.select={banzhaf: {share: 0.3, warmup: all}}"]
    plan = plan_of(ram_path, "mmic", "ab", 6, [*settings, *slots])
    shares = {f"d{i}": share(30, {"a": 1.0, "b": 0.7} if i % 2 else {"a": 1.0}, seed=i) for i in range(6)}
    report = run_fleet(ram_path, plan, shares)
    first = report.rounds[0].record["clusters"]
    assert sorted(first) == sorted(shares)
    assert (
        len({first[f"d{i}"] for i in (0, 2, 4)} | {2 + first[f"d{i}"] for i in (1, 3, 5)}) == 2
    )  # by their modalities
    assert all(row.record["clusters"] == first for row in report.rounds)
    assert not any("signature_up_bytes" in row.measured for row in report.assignments)


def test_a_signature_that_is_none_costs_a_device_its_cluster_alone(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    right = encode_part({"sketch": np.ones(sketches.SENT, np.float32)})
    slots = {"cluster": {"lsh_joining": {}}}
    terms = RoundTerms(signatures={"a": right, "b": b"no part", "c": encode_part({"sketch": np.ones(3, np.float32)})})
    state, record = aggregate_round([], store, {}, slots, terms)
    assert record["clusters"] == {"a": 0}
    assert [(one["device"], one["reason"]) for one in record["refused"]] == [("b", "malformed"), ("c", "malformed")]
    again, record = aggregate_round([], store, state, slots, RoundTerms(signatures={"a": right}))
    assert record["clusters"] == {"a": 0}
    assert again.keys() == state.keys()
    assert "clusters" not in aggregate_round([], store, {}, {"cluster": {"lsh": {}}}, terms)[1]  # nobody asked


# ---- zeros at the input


def lacking() -> Dataset:
    """Three samples: the second lacks b."""
    values = {m: np.ones((3, 2, 1), np.float32) for m in "ab"}
    values["b"][1] = 0
    present = {"a": np.ones(3, bool), "b": np.array([True, False, True])}
    return Dataset(values, present, np.array([0, 1, 0]), ("x", "y"), ["0", "1", "2"])


def test_zeros_at_the_input_are_a_modality_like_any_other() -> None:
    done = complete(lacking(), ENCODERS).dataset
    batch = make_batch(done, np.arange(3), ["a", "b"], "cpu")
    assert (batch.rows, batch.complete) == ({"a": None, "b": None}, 2)
    assert batch.inputs["b"].flatten(1).tolist() == [[1, 1], [0, 0], [1, 1]]  # type: ignore[union-attr]
    assert completed_counts({"": 3, "a": 3, "b": 2, "c": 0}, ENCODERS) == {"": 3, "a": 3, "b": 3, "c": 0}
    assert complete(lacking().subset([1, 2]), {"a": ENCODERS["a"]}).dataset.has("b").tolist() == [False, True]


def test_which_samples_were_whole_is_still_known() -> None:
    done = complete(lacking(), ENCODERS).dataset
    assert done.complete(["a", "b"]).tolist() == [True, False, True]
    assert done.subset([1, 2]).complete(["a", "b"]).tolist() == [False, True]
    rows = unmixed_rows(done, np.arange(3), ["a", "b"], 1, np.random.default_rng(0))
    assert sorted(int(row[0]) for row in rows) == [0, 1, 2]


@pytest.mark.slow
def test_a_run_with_zeros_at_the_input_costs_and_mends_as_told(ram_path: Path) -> None:
    """All rows pass both encoders: more FLOPs than zeros at the projection, as predicted; layers are still mended."""
    settings = ["training.batch_size=6", "training.rounds=[0, 3]", "evaluate=stage", "slots.select=all"]
    spent = {}
    for missing in ("zero", "zero_input"):
        folder = ram_path / missing
        folder.mkdir()
        plan = plan_of(folder, "mmic", "ab", 4, [*settings, f"slots.missing={missing}"])
        report = run_fleet(folder, plan, {f"d{i}": share(40, {"a": 1.0, "b": 0.5}, seed=i) for i in range(4)})
        done = [row for row in report.assignments if row.status == "done"]
        spent[missing], told = (sum(getattr(row, key)["flops"].value or 0.0 for row in done) for key in FIGURES)
        assert spent[missing] == pytest.approx(told, rel=0.03 if missing == "zero_input" else 0.15)
        assert any("donors" in one for row in report.rounds for one in row.record["repaired"].values())
    assert spent["zero_input"] > 1.15 * spent["zero"]
