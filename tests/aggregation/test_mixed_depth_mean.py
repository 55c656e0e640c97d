"""A round whose devices trained different depths: what a part becomes that some of them left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.weights import absent_from
from edgefl.plan.job import Transfer
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore

#: The model: two modalities of two stages, with heads.
PARTS = ("a/stage1", "a/stage2", "head/a", "b/stage1", "b/stage2", "head/b", "task")
LEAVE_OUT = {"combine": {"mean": {"absent": "leave_out"}}}


def tensors(value: float, count: int = 0) -> dict[str, np.ndarray]:
    statistics = {"norm.running_mean": np.full(2, value, np.float32), "norm.running_var": np.full(2, value, np.float32)}
    return {"weight": np.full((2, 2), value, np.float32), **statistics, "seen": np.array([count])}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


@pytest.fixture
def before(store: ObjectStore) -> Manifest:
    return {part: store.put(encode_part(tensors(0.0))) for part in PARTS}


def update(store: ObjectStore, device: str, value: float, samples: dict[str, int], count: int = 1) -> UpdateInfo:
    manifest = {part: store.put(encode_part(tensors(value, count))) for part in samples}
    return UpdateInfo(device, manifest, samples)


def value(store: ObjectStore, state: Manifest, part: str, tensor: str = "weight") -> float:
    return float(decode_part(store.read(state[part].id))[tensor].reshape(-1)[0])


ALL = dict.fromkeys(("a/stage1", "a/stage2", "head/a", "task"), 10)
LAST = dict.fromkeys(("a/stage2", "head/a", "task"), 15)


def test_who_left_a_stage_out_counts_as_keeping_it(store: ObjectStore, before: Manifest) -> None:
    """Two of three left a/stage1 out: 10 of 40 samples moved it from 0 to 8, so that it is 2; statistics likewise."""
    updates = [
        update(store, "deep", 8.0, ALL, 7),
        update(store, "late-1", 4.0, LAST),
        update(store, "late-2", 4.0, LAST),
    ]
    state, record = aggregate_round(updates, store, before)
    assert value(store, state, "a/stage1") == 2.0
    assert value(store, state, "a/stage1", "norm.running_mean") == 2.0
    assert value(store, state, "a/stage1", "norm.running_var") == 2.0
    assert value(store, state, "a/stage1", "seen") == 0  # whole numbers that nothing trains are the server's
    assert record["parts"]["a/stage1"] == {"devices": {"deep": 0.25}, "kept": 0.75}
    assert value(store, state, "a/stage2") == 5.0  # (10 x 8 + 30 x 4) / 40
    assert record["parts"]["a/stage2"].keys() == {"devices"}
    assert record["combine"] == {"choice": "mean", "absent": "keep"}


def test_left_out_instead_one_device_replaces_the_part(store: ObjectStore, before: Manifest) -> None:
    updates = [update(store, "deep", 8.0, ALL), update(store, "late", 4.0, LAST)]
    state, record = aggregate_round(updates, store, before, LEAVE_OUT)
    assert value(store, state, "a/stage1") == 8.0
    assert record["parts"]["a/stage1"] == {"devices": {"deep": 1.0}}


def test_a_device_without_the_modality_damps_nothing(store: ObjectStore, before: Manifest) -> None:
    other = dict.fromkeys(("b/stage1", "b/stage2", "head/b", "task"), 30)
    state, record = aggregate_round([update(store, "a", 8.0, ALL), update(store, "b", 4.0, other)], store, before)
    assert value(store, state, "a/stage1") == 8.0
    assert not any("kept" in told for told in record["parts"].values())


def test_a_part_that_is_no_encoder_stage_is_never_kept(store: ObjectStore, before: Manifest) -> None:
    """A device that sends no head or task has no labels for it, or keeps its own."""
    some = dict.fromkeys(("a/stage1", "a/stage2"), 30)
    state, _ = aggregate_round([update(store, "all", 8.0, ALL), update(store, "some", 8.0, some)], store, before)
    assert value(store, state, "head/a") == value(store, state, "task") == 8.0


def test_a_refused_device_leaves_its_share_to_the_others_and_to_what_is_kept(
    store: ObjectStore, before: Manifest
) -> None:
    """Of 10, 15 and 15 samples the 10 are refused: a/stage1 stays as it was; with another 10, these have 10 of 40."""
    spoilt = update(store, "spoilt", float("nan"), ALL)
    late = [update(store, f"late-{i}", 4.0, LAST) for i in range(2)]
    state, record = aggregate_round([spoilt, *late], store, before)
    assert state["a/stage1"] == before["a/stage1"]
    assert record["kept"]["a/stage1"] == "every device that trained it was refused"
    state, record = aggregate_round([spoilt, update(store, "deep", 8.0, ALL), *late], store, before)
    assert record["parts"]["a/stage1"] == {"devices": {"deep": pytest.approx(0.25)}, "kept": pytest.approx(0.75)}
    assert value(store, state, "a/stage1") == pytest.approx(2.0)


def test_an_adaptive_step_sees_the_damped_change(store: ObjectStore, before: Manifest) -> None:
    """FedAvgM at beta 0 and rate 1 goes where the mean is."""
    recipe = {"optimise": {"momentum": {"lr": 1.0, "beta": 0.0}}}
    updates = [update(store, "deep", 8.0, ALL), update(store, "late", 4.0, {**LAST, "a/stage2": 30, "task": 30})]
    state, _ = aggregate_round(updates, store, before, recipe)
    assert value(store, state, "a/stage1") == 2.0


def test_shared_attention_is_kept_by_any_device() -> None:
    trained = {"deep": {"shared/stage1": 9, "a/stage1": 9}, "late": {"shared/stage2": 5, "b/stage2": 5}}
    assert absent_from("shared/stage1", trained) == {"late": 5}
    assert absent_from("a/stage1", trained) == {}
    assert absent_from("b/stage1", trained) == {"late": 5}
    assert absent_from("head/embed", trained) == {}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.floats(-9, 9), st.booleans()), min_size=1, max_size=6))
def test_weights_are_a_partition_and_the_part_lies_between_itself_and_the_devices(
    tmp_path_factory: pytest.TempPathFactory, devices: list[tuple[int, float, bool]]
) -> None:
    store = ObjectStore(tmp_path_factory.mktemp("store"))
    before = {part: store.put(encode_part(tensors(1.0))) for part in ("a/stage1", "a/stage2")}
    updates = [
        update(store, f"d{i}", one, {"a/stage2": count, **({"a/stage1": count} if deep else {})})
        for i, (count, one, deep) in enumerate(devices)
    ]
    state, record = aggregate_round(updates, store, before)
    for told in record["parts"].values():
        assert sum(told["devices"].values()) + told.get("kept", 0.0) == pytest.approx(1.0)
    values = [one for _, one, deep in devices if deep]
    if values:
        kept = 0.0 if all(deep for *_, deep in devices) else 1.0
        assert min([*values, kept or min(values)]) - 1e-4 <= value(store, state, "a/stage1")
        assert value(store, state, "a/stage1") <= max([*values, kept or max(values)]) + 1e-4
        total = sum(count for count, *_ in devices)
        expected = sum(count * (one if deep else 1.0) for count, one, deep in devices) / total
        assert value(store, state, "a/stage1") == pytest.approx(expected, abs=1e-4)
        assert aggregate_round(updates[::-1], store, before)[0] == state
    else:
        assert state["a/stage1"] == before["a/stage1"]


def test_what_is_not_sent_yet_of_a_damped_part_arrives_later(store: ObjectStore) -> None:
    """Of a change 5 % of the values travel a round. One of two moves the part by 1, then all send what they hold."""
    top = Transfer((("*", "delta+top"),), (("*", "delta+top"),), top=0.05)
    start = {"w": np.linspace(-0.2, 0.2, 3000, dtype=np.float32).reshape(50, 60)}
    state = {part: store.put(encode_part(start)) for part in ("a/stage1", "a/stage2")}
    for number in range(25):
        held = {part: decode_part(store.read(state[part].id)) for part in ("a/stage1", "a/stage2")}
        deep = {**held, "a/stage1": {"w": start["w"] + 1.0}} if number == 0 else held
        updates = [
            UpdateInfo("deep", {p: store.put(encode_part(t)) for p, t in deep.items()}, dict.fromkeys(deep, 5)),
            UpdateInfo("late", {"a/stage2": store.put(encode_part(held["a/stage2"]))}, {"a/stage2": 5}),
        ]
        state, record = aggregate_round(updates, store, state, terms=RoundTerms(transfer=top))
        assert record["parts"]["a/stage1"] == {"devices": {"deep": 0.5}, "kept": 0.5}
    np.testing.assert_allclose(decode_part(store.read(state["a/stage1"].id))["w"], start["w"] + 0.5, atol=0.01)
