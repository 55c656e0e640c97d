"""The state of the model on the server: how a part's next values are published, and what is kept beside them."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.aggregation.history import RECEIVED, TRAINED, Memory, Track, UpdateInfo, grouped, note
from edgefl.aggregation.server_state import (
    MOST_PACKED,
    PACKED,
    RESIDUAL,
    AudiencePart,
    Published,
    fold_residuals,
    packed_parts,
    publish,
    without_passing,
)
from edgefl.plan.job import Transfer
from edgefl.protocol.messages import PackedPart
from edgefl.protocol.packing import compress
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import ObjectRef
from edgefl.storage.objects import ObjectStore

F32 = np.float32
START = {"w": np.zeros((32, 64), F32)}
NEXT = {"w": np.linspace(-1, 1, 2048, dtype=F32).reshape(32, 64)}


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def part(store: ObjectStore, tensors=START) -> AudiencePart:
    return AudiencePart("#1/task", "task", store.put(encode_part(tensors)))


def held(store: ObjectStore, ref: ObjectRef) -> np.ndarray:
    return decode_part(store.read(ref.id))["w"]


@pytest.mark.parametrize(
    "transfer",
    [
        Transfer(),
        Transfer(down=(("fusion", "int8"),)),
        Transfer(down=(("task", "f32"),)),
        Transfer(down=(("task", "int8"),), whole=True),
    ],
    ids=["no rule", "another part's rule", "as it is", "a round sent whole"],
)
def test_a_part_without_a_packing_is_what_the_recipe_makes_of_it(store: ObjectStore, transfer: Transfer) -> None:
    assert publish(store, {}, part(store), NEXT, transfer) == Published(store.put(encode_part(NEXT)), {})


@pytest.mark.parametrize("packing", ["int8", "delta+int8"])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_packed_part_is_what_devices_make_of_it_and_the_rest_comes_with_the_next(
    store: ObjectStore, packing: str, feedback: bool
) -> None:
    transfer, of = Transfer(down=(("t*", packing),)), part(store)
    made = publish(store, {}, of, NEXT, transfer, feedback=feedback)
    sent = compress(NEXT, START, packing, transfer.top)
    np.testing.assert_array_equal(held(store, made.ref), sent.reconstructed["w"])
    base = of.base.id if packing.startswith("delta") else ""
    packed = f"{PACKED}{made.ref.id}/{base}/{packing}"
    assert store.read(made.kept[packed].id) == sent.data
    assert made.kept.keys() - {packed} == ({f"{RESIDUAL}#1/task"} if feedback else set())
    assert made.whole == ""
    lost = {f"{RESIDUAL}#1/task": store.put(encode_part({"w": np.ones((32, 64), F32)}))}
    later = publish(store, lost, of, NEXT, transfer, feedback=feedback)
    target = {"w": NEXT["w"] + (1 if feedback else 0)}
    np.testing.assert_array_equal(held(store, later.ref), compress(target, START, packing, 0.1).reconstructed["w"])
    if feedback:
        missing = target["w"] - held(store, later.ref)
        np.testing.assert_allclose(held(store, later.kept[f"{RESIDUAL}#1/task"]), missing, atol=1e-6)


def test_a_part_that_its_packing_cannot_hold_is_published_whole_with_the_reason(store: ObjectStore) -> None:
    large = {"w": np.full((32, 64), 1e6, F32)}
    made = publish(store, {}, part(store), large, Transfer(down=(("task", "f16"),)))
    assert (made.ref, made.kept) == (store.put(encode_part(large)), {})
    assert "f16" in made.whole


def test_what_was_not_sent_is_folded_into_its_part_and_forgotten(store: ObjectStore) -> None:
    one, two = (store.put(encode_part({"w": np.full((2, 2), value, F32)})) for value in (1, 2))
    state = {"task": one, "#1/task": two, f"{RESIDUAL}#1/task": two, f"{RESIDUAL}gone": one, "server/memory": one}
    made = fold_residuals(store, state)
    assert made.keys() == {"task", "#1/task", "server/memory"}
    assert (held(store, made["#1/task"])[0, 0], made["task"], made["server/memory"]) == (4.0, one, one)


def test_an_offer_names_the_packed_objects_of_its_own_parts_up_to_a_limit() -> None:
    def ref(number: int) -> ObjectRef:
        return ObjectRef(f"{number:064x}", number)

    state = {
        f"{PACKED}{ref(1).id}/{ref(2).id}/delta+int8": ref(3),
        f"{PACKED}{ref(4).id}//int8": ref(5),
        "task": ref(1),
    }
    assert packed_parts(state, {"task": ref(1), "head/a": ref(4), "fusion": ref(9)}) == {
        "task": PackedPart(ref(3), ref(2).id, "delta+int8"),
        "head/a": PackedPart(ref(5), "", "int8"),
    }
    assert without_passing(state) == {"task": ref(1)}
    many = {f"part{number}": ref(1) for number in range(MOST_PACKED + 1)}
    assert list(packed_parts(state, many)) == list(many)[:MOST_PACKED]


# --- what is remembered of a round's updates


def test_an_update_is_known_by_its_device_and_staleness_and_weighs_by_its_largest_part() -> None:
    update = UpdateInfo("cam", samples={"acc/stage1": 3, "gyro/stage1": 0, "task": 5, "head/acc": 4})
    assert (update.name, update.weight, update.modalities) == ("cam", 5.0, 1)
    late = UpdateInfo("cam", samples={"acc/stage1": 1, "gyro/norm": 1}, staleness=2)
    assert (late.name, late.weight, late.modalities) == ("cam~2", 1.0, 2)
    assert (UpdateInfo("cam").weight, UpdateInfo("cam").modalities) == (0.0, 0)


def test_of_two_updates_of_a_device_the_newer_one_is_remembered() -> None:
    def measured(value: float, staleness: int) -> UpdateInfo:
        metrics = {TRAINED: value, RECEIVED: value / 2}
        return UpdateInfo("cam", samples={"task": int(10 * value)}, metrics=metrics, staleness=staleness)

    for updates in ([measured(0.5, 0), measured(0.25, 2)], [measured(0.25, 2), measured(0.5, 0)]):
        track = note(Memory(), updates, {"cam": 3}).devices["cam"]
        assert track == Track(0.5, 0.25, {1: 0.25}, 1, 1, 5.0, 3)
    silent = note(Memory(), [UpdateInfo("cam", samples={"task": 2})], {})
    assert silent == Memory(1, {}, {"cam": Track(selected=1, weight=2.0)})


def test_devices_without_a_cluster_are_left_out_of_the_groups_where_there_are_clusters() -> None:
    updates = [UpdateInfo("a"), UpdateInfo("b")]
    assert grouped(updates, {}) == {"a": 0, "b": 0}
    assert grouped(updates, {"b": 4, "z": 1}) == {"b": 4}
