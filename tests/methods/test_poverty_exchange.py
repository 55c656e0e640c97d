"""One-layer exchange: which layers are asked of whom, and what each device is lent, worked by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.aggregation.history import KEY, Memory, PeriodMember, Track, UpdateInfo, load, note
from edgefl.aggregation.layer_round import exchange_layers, exchangeable_layers
from edgefl.aggregation.server_state import without_passing
from edgefl.methods.mmic.layer_exchange import ask
from edgefl.models.spec import LAYERS
from edgefl.plan.periods import HEADER_BYTES, ends, exchangeable
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import ObjectRef
from edgefl.registry import Member
from edgefl.storage.objects import ObjectStore

P, Q = "a/stage1|w.weight", "b/stage1|w.weight"
PARTS = ("a/stage1", "b/stage1")


def member(layer: str = "", change: float = 0.0, cluster: int = 0, parts=PARTS, largest: str = P) -> Member:
    return Member(cluster, layer, change, parts, largest)


def test_a_cluster_is_asked_for_its_most_changed_layer_of_those_that_two_train():
    members = {"x": member(P, 0.2), "y": member(Q, 0.5), "z": member(), "other": member(P, 9.0, cluster=1)}
    assert ask(members, layers=1) == {"x": (Q,), "y": (Q,), "z": (Q,), "other": ()}, "one alone is asked for nothing"
    assert ask(members, layers=2)["x"] == (Q, P)
    lacking = members | {"x": member(P, 0.2, parts=("a/stage1",)), "z": member(parts=("a/stage1",))}
    found = ask(lacking, layers=1)
    assert found == {"x": (P,), "y": (P,), "z": (P,), "other": ()}, "y alone trains b"
    assert ask(members, layers=0) == dict.fromkeys(members, ())


def test_where_no_poverty_layer_is_known_the_largest_is_asked_for():
    assert ask({"x": member(), "y": member()}, layers=1) == {"x": (P,), "y": (P,)}
    assert ask({"x": member(), "y": member(P, 0.1, largest=Q)}, layers=1) == {"x": (P,), "y": (P,)}
    assert ask({"x": member(largest=""), "y": member(largest="")}, layers=1) == {"x": (), "y": ()}


def test_a_period_ends_with_its_length_and_with_its_stage():
    assert [number for number in range(1, 11) if ends(number, 10, 4)] == [4, 8, 10]
    assert all(ends(number, 3, 1) for number in range(1, 4))


def test_a_layer_above_a_twentieth_of_what_is_trained_never_travels_alone():
    shapes = {"a/stage1": {"w.weight": (10, 10), "bias": (10,), "table": (10, 10), "one.weight": (10,)}}
    size = 400 + HEADER_BYTES
    assert exchangeable(shapes, 20 * size) == {"a/stage1|w.weight": size}
    assert exchangeable(shapes, 20 * size - 1) == {}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def put(store: ObjectStore, **layers: float) -> ObjectRef:
    names = {"P": P, "Q": Q}
    return store.put(encode_part({names[n]: np.full((2, 2), value, np.float32) for n, value in layers.items()}))


def sent(store: ObjectStore, device: str, weight: int, layers: dict[str, float], **told) -> UpdateInfo:
    manifest = {LAYERS: put(store, **layers)} if layers else {}
    told = {"complete": False, "layer": P, "poverty_change": 1.0, "retained": f"base of {device}"} | told
    return UpdateInfo(device, manifest, dict.fromkeys(PARTS, weight), {"received_score": 0.5}, **told)


def exchanged(store: ObjectStore, updates: list[UpdateInfo], memory: Memory | None = None, **options):
    """(device -> the value that it is lent, the record, the memory)."""
    state = {KEY: store.put(msgspec.json.encode(memory))} if memory is not None else {}
    recipe = {"repair": {"poverty": {"exchange": "layer", **options}}, "cluster": {"none": {}}}
    made, record = exchange_layers(updates, store, state, recipe)
    lent = {key: decode_part(store.read(ref.id)) for key, ref in made.items() if key.endswith(f"/{LAYERS}")}
    values = {key[1:].partition("/")[0]: {n: float(t[0, 0]) for n, t in one.items()} for key, one in lent.items()}
    return values, record, load(store, made)


def knows(**layers: str) -> Memory:
    return Memory(devices={device: Track(layer=layer) for device, layer in layers.items()})


def test_a_layer_comes_from_complete_devices_by_their_samples(store: ObjectStore):
    """Equation 11: (30 x 1 + 10 x 5) / 40 = 2."""
    updates = [
        sent(store, "poor", 20, {"P": 9.0}),
        sent(store, "whole-1", 30, {"P": 1.0}, complete=True, layer=""),
        sent(store, "whole-2", 10, {"P": 5.0}, complete=True, layer=""),
    ]
    values, record, _ = exchanged(store, updates, knows(poor=P))
    assert values == {"poor": {P: 2.0}}
    told = record["repaired"]
    assert told["poor"]["donors"] == ["whole-1", "whole-2"]
    assert told["poor"]["sent"] == updates[0].manifest[LAYERS].id != told["poor"]["lent"]
    assert told["whole-1"] == {"kept": "it trained with complete data and needs no repair"}


def test_without_complete_devices_it_comes_from_the_less_affected_else_from_all_that_sent_it(store: ObjectStore):
    updates = [
        sent(store, "most", 10, {"P": 8.0}, poverty_change=3.0),
        sent(store, "less", 10, {"P": 2.0}, poverty_change=1.0),
    ]
    values, record, _ = exchanged(store, updates, knows(most=P, less=P))
    assert values == {"most": {P: 2.0}, "less": {P: 5.0}}, "the least affected gets the mean of both"
    assert record["repaired"]["less"]["donors"] == ["less", "most"]
    values, _, _ = exchanged(store, updates, knows(most=P, less=P), donors="complete")
    assert values == {"most": {P: 5.0}, "less": {P: 5.0}}


def test_who_is_less_affected_is_told_by_the_layer_that_is_replaced(store: ObjectStore):
    """The change of 3 is of Q: whether the other's P changed less is not known, so P is the mean of both."""
    updates = [
        sent(store, "moved-on", 10, {"P": 8.0}, layer=Q, poverty_change=3.0),
        sent(store, "less", 10, {"P": 2.0}, poverty_change=1.0),
    ]
    values, record, _ = exchanged(store, updates, knows(**{"moved-on": P, "less": P}))
    assert values["moved-on"] == {P: 5.0}
    assert record["repaired"]["moved-on"]["donors"] == ["less", "moved-on"]


def test_a_device_without_samples_of_it_lends_no_layer(store: ObjectStore):
    """It would weigh nothing, and a mean of nothing ended the run."""
    updates = [
        sent(store, "poor", 10, {"P": 9.0}),
        sent(store, "empty", 0, {"P": 1.0}, complete=True, layer=""),
    ]
    values, record, _ = exchanged(store, updates, knows(poor=P))
    assert values == {}
    assert "kept" in record["repaired"]["poor"]


def test_the_authors_donors_are_all_with_another_layer_or_none(store: ObjectStore):
    updates = [
        sent(store, "poor", 10, {"P": 9.0}),
        sent(store, "other", 10, {"P": 2.0}, layer=Q),
        sent(store, "whole", 10, {"P": 4.0}, complete=True, layer=""),
        sent(store, "same", 10, {"P": 8.0}),
    ]
    values, record, _ = exchanged(store, updates, knows(poor=P, other=Q, same=P), donors="cluster")
    assert values == {"poor": {P: 3.0}, "same": {P: 3.0}}
    assert record["repaired"]["poor"]["donors"] == ["other", "whole"]


def test_a_device_whose_layer_nobody_was_asked_for_keeps_its_own(store: ObjectStore):
    updates = [sent(store, "x", 10, {"P": 1.0}), sent(store, "y", 10, {"P": 3.0}), sent(store, "z", 10, {"P": 5.0})]
    values, record, _ = exchanged(store, updates, knows(x=P, y=Q, z=P))
    assert set(values) == {"x", "z"}
    assert record["repaired"]["y"] == {"kept": f"its poverty layer {Q} was not asked for"}
    alone = [sent(store, "x", 10, {"P": 1.0}), sent(store, "y", 10, {})]
    values, record, _ = exchanged(store, alone, knows(x=P))
    assert values == {}
    assert record["repaired"]["y"] == {"kept": "it was asked for no layer"}
    assert "kept" in record["repaired"]["x"]


def test_a_device_of_one_modality_has_no_poverty_layer_and_is_lent_none(store: ObjectStore):
    """None of its batches is complete, so that no layer of it is equation 11's p; it may lend its own."""
    updates = [sent(store, "lone", 10, {"P": 1.0}, layer=""), sent(store, "y", 10, {"P": 3.0})]
    values, record, _ = exchanged(store, updates)
    assert values == {"y": {P: 2.0}}
    assert record["repaired"]["lone"] == {"kept": "no batch that lacks modalities came after a complete one"}


def test_a_layer_of_an_earlier_stage_is_no_need(store: ObjectStore):
    updates = [sent(store, "x", 10, {"P": 1.0}), sent(store, "y", 10, {"P": 3.0})]
    values, _, _ = exchanged(store, updates, knows(x="frozen/stage1|w.weight", y=P))
    assert set(values) == {"x", "y"}


def test_what_the_next_round_needs_is_in_the_state(store: ObjectStore):
    """And the model's returns are measured against what the period began with."""
    updates = [sent(store, "x", 10, {"P": 1.0}), sent(store, "y", 10, {"P": 3.0}, retained="")]
    _, record, memory = exchanged(store, updates)
    goes_on = PeriodMember("base of x", record["repaired"]["x"]["lent"], 0.5)
    assert memory.period == {"x": goes_on}, "y is of a release that retains nothing"
    assert (memory.rounds, memory.devices["x"].layer, memory.devices["x"].change) == (0, P, 1.0)
    later = UpdateInfo("x", {}, {"task": 10}, {"received_score": 0.9, "trained_score": 0.8})
    after = note(memory, [later], {})
    assert after.devices["x"].received == 0.5
    assert after.period == {}, "a whole exchange ends the period"


def test_lent_layers_are_gone_from_the_next_state(store: ObjectStore):
    state = {"a/stage1": ObjectRef("1"), f"@x/{LAYERS}": ObjectRef("2"), "@x/poverty": ObjectRef("3")}
    assert set(without_passing(state)) == {"a/stage1", "@x/poverty"}


def test_candidates_are_of_the_stage_that_is_trained(store: ObjectStore):
    parts = {"a/stage1": (30, 30), "b/stage1": (8, 8), "frozen": (4, 4)}
    state = {part: store.put(encode_part({"w.weight": np.zeros(shape, np.float32)})) for part, shape in parts.items()}
    state["rest"] = store.put(encode_part({"bias": np.zeros(20_000, np.float32)}))
    found = exchangeable_layers(store, state, ["a/stage1", "b/stage1", "rest", "not there"])
    assert set(found) == {"a/stage1|w.weight", "b/stage1|w.weight"}
    assert set(exchangeable_layers(store, state, ["a/stage1", "b/stage1"])) == set()
