"""Aggregation at its edges: caps, misfits and merges by hand, and every reason that the record gives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from test_aggregation import previous, read, store, tensors, update  # noqa: F401 - fixtures

from edgefl.aggregation import aggregate, history
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import Memory, note_round
from edgefl.aggregation.mean import (
    BLOCK,
    MisfitError,
    WeightedMean,
    capped,
    check,
    check_finite,
    factor,
    faded,
    layout_of,
    moved,
    proportional,
    stored_layout,
)
from edgefl.aggregation.prototype_merge import merge_prototypes
from edgefl.aggregation.weights import SIGNATURES, RoundContext, absent_from, assign, shares_of, sign
from edgefl.errors import StoreError
from edgefl.protocol.tensors import encode_part
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.records import ObjectRef
from edgefl.registry import Choice, Signature, choose
from edgefl.roles import Cluster

F32 = np.float32


def vector(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, F32)}


# --- shares


def test_what_is_above_the_cap_goes_to_the_others_in_proportion() -> None:
    assert capped({"a": 0.6, "b": 0.3, "c": 0.1}, 0.5) == pytest.approx({"a": 0.5, "b": 0.375, "c": 0.125})
    # 0.45 for a lifts b from 0.4 to 0.44; at 0.42 both are capped
    assert capped({"a": 0.5, "b": 0.4, "c": 0.1}, 0.42) == pytest.approx({"a": 0.42, "b": 0.42, "c": 0.16})
    assert capped({"a": 0.5, "b": 0.25, "c": 0.25}, 0.5) == {"a": 0.5, "b": 0.25, "c": 0.25}
    third = {name: pytest.approx(1 / 3) for name in "abc"}
    assert capped({"a": 0.8, "b": 0.1, "c": 0.1}, 0.2) == third, "less than one over their number"
    assert capped({"a": 0.9, "b": 0.1}, 0.5) == {"a": 0.9, "b": 0.1}, "of two none is bounded"
    assert capped({"a": 0.9, "b": 0.1}, 1.0) == {"a": 0.9, "b": 0.1}
    assert capped({"a": 1.0}, 0.5) == {"a": 1.0}
    assert capped({}, 0.5) == {}


def test_shares_are_in_proportion_to_amounts_above_zero() -> None:
    assert list(proportional({"b": 3, "a": 1, "c": 0, "d": -2}).items()) == [("a", 0.25), ("b", 0.75)]
    assert proportional({"a": 0}) == {}


def test_those_that_keep_a_part_hold_samples_of_its_modality() -> None:
    trained = {
        "a": {"acc/stage1": 5, "acc/stage2": 5},
        "b": {"acc/stage1": 4, "acc/embed": 7, "gyro/stage1": 9},
        "c": {"gyro/stage2": 9},
        "d": {"acc/stage1": 0},
    }
    assert absent_from("acc/stage2", trained) == {"b": 7}
    assert absent_from("task", trained) == {}, "only stages of encoders are left out"


# --- the mean


def test_a_mean_renormalises_over_what_was_taken() -> None:
    mean = WeightedMean()
    mean.add(0.25, vector(4.0, 0.0))
    mean.add(0.25, vector(0.0, 8.0))
    np.testing.assert_array_equal(mean.result()["w"], [2.0, 4.0])


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_a_mean_is_f32_whatever_was_sent(kind: type) -> None:
    mean = WeightedMean()
    for weight, value in ((0.25, 1.0), (0.75, 3.0)):
        mean.add(weight, {"w": np.full(2, value, kind)})
    assert (mean.result()["w"].dtype, mean.result()["w"].tolist()) == (F32, [2.5, 2.5])


def test_groups_are_drawn_by_the_seed_of_the_run(store) -> None:  # noqa: F811
    """A cluster's number is the first draw here; who has one already keeps it while no signature is new."""

    def group(signatures, rng, *, base):
        return {device: base + int(rng.integers(2**31)) for device in signatures}

    ref = store.put(encode_part({"sketch": np.ones(2, np.int16)}))
    slot = Choice(Cluster("drawn", "", group=group), {"base": 1})
    signed = {f"{SIGNATURES}a": ref}
    assert assign(slot, signed, store, Memory(), 7) == {"a": 1 + int(np.random.default_rng(7).integers(2**31))}
    assert assign(slot, signed, store, Memory(devices={"a": history.Track(cluster=0)}), 7) == {"a": 0}
    assert assign(slot, {}, store, Memory(), 7) == {}


def test_a_part_that_the_store_lost_is_named_by_its_file(store) -> None:  # noqa: F811
    gone = ObjectRef("e" * 64, 5)
    with pytest.raises(StoreError) as caught:
        stored_layout(store, gone)
    assert str(store.path(gone.id)) in caught.value.message


def test_a_part_larger_than_a_block_is_added_throughout() -> None:
    mean = WeightedMean()
    for value in (1.0, 3.0):
        mean.add(0.5, {"w": np.full((2, BLOCK), value, F32)})
    assert (mean.result()["w"] == 2.0).all()


@pytest.mark.parametrize(
    ("other", "reason", "text"),
    [
        ({}, "names", "it lacks tensor 'a' and 1 more"),
        ({"a": np.zeros(2, F32)}, "names", "it lacks tensor 'n'"),
        ({"a": np.zeros(2, F32), "n": np.zeros(1), "y": 1, "x": 1}, "names", "it has unknown tensor 'x' and 1 more"),
        ({"a": np.zeros((2, 1), F32), "n": np.zeros(1, int)}, "shape", "tensor 'a' is [2, 1], expected [2]"),
        ({"a": np.zeros(2, int), "n": np.zeros(1, int)}, "dtype", "tensor 'a' is int64, expected float"),
        ({"a": np.zeros(2, F32), "n": np.zeros(1, F32)}, "dtype", "tensor 'n' is float32, expected integer"),
    ],
)  # fmt: skip
def test_a_misfit_says_which_tensor_and_why(other: dict[str, np.ndarray], reason: str, text: str) -> None:
    layout = layout_of({"n": np.zeros(1, int), "a": np.zeros(2, F32)})
    assert list(layout.items()) == [("a", ((2,), True)), ("n", ((1,), False))]
    with pytest.raises(MisfitError) as caught:
        check(other, layout)
    assert (caught.value.reason, caught.value.message) == (reason, text)
    assert caught.value.remedy == "The device and the coordinator must build the same model."


def test_a_value_that_cannot_be_calculated_with_is_named_with_its_place() -> None:
    check_finite({"a": np.array([1e18], F32), "n": np.array([2**62])})
    broken = np.zeros((2, 3), F32)
    broken[1, 2], broken[1, 0] = np.inf, np.nan
    with pytest.raises(MisfitError, match=r"^tensor 'b' holds NaN or infinity: nan at \[1, 0\], and 1 more$") as caught:
        check_finite({"a": np.ones(1, F32), "b": broken})
    assert caught.value.reason == "not_finite"
    large = np.ones((2, 3), F32)
    large[0, 1] = -3e19
    with pytest.raises(MisfitError, match=r"^tensor 'a' holds -3e\+19 at \[0, 1\]: its sum of squares") as caught:
        check_finite({"a": large})
    assert caught.value.reason == "range"


# --- updates of earlier states


def test_a_late_change_is_damped_and_added_to_the_present() -> None:
    assert (factor(0, 0.5), factor(3, 0.5), factor(1, 2.0)) == (1.0, 0.5, 0.25)
    names = ("w", "bn.running_mean", "bn.num_batches_tracked", "n")

    def part(*values: float) -> dict[str, np.ndarray]:
        return {name: np.array([v], F32 if name != "n" else int) for name, v in zip(names, values, strict=True)}

    load = moved(
        lambda: part(5, 5, 5, 5), lambda: part(1, 1, 1, 1), lambda: part(10, 9, 9, 9), 0.5, layout_of(part(0, 0, 0, 0))
    )
    # 10 + 0.5 (5 - 1); averages go half of the way from 9 to 5; integers are the device's
    assert {name: float(value[0]) for name, value in load().items()} == {
        "w": 12.0, "bn.running_mean": 7.0, "bn.num_batches_tracked": 7.0, "n": 5.0,
    }  # fmt: skip
    with pytest.raises(MisfitError):
        moved(lambda: vector(1.0), lambda: vector(1.0), lambda: vector(1.0), 0.5, layout_of(vector(1.0, 2.0)))()


def test_a_late_change_is_calculated_in_f32() -> None:
    start, trained, now = ({"w": np.array([value])} for value in (1.0, 5.0, 10.0))  # f64
    (found,) = moved(lambda: trained, lambda: start, lambda: now, 0.5, layout_of(now))().values()
    assert (found.dtype, found.tolist()) == (F32, [12.0])


def test_late_prototypes_weigh_less_by_their_counts() -> None:
    table = to_tensors({"acc": ClassMeans(np.ones((2, 3), F32), np.array([2.0, 4.0], F32))})
    late = from_tensors(faded(lambda: table, 0.5)())["acc"]
    np.testing.assert_array_equal(late.counts, [1.0, 2.0])
    np.testing.assert_array_equal(late.means, np.ones((2, 3)))


# --- prototypes


def of(*rows: float, counts: tuple[float, ...] = (1.0, 1.0), width: int = 1) -> ClassMeans:
    return ClassMeans(np.repeat(np.array(rows, F32)[:, None], width, axis=1), np.array(counts, F32))


def merged(before: dict | None = None, options: dict | None = None, **devices: dict[str, ClassMeans] | None):
    loaders = {
        name: (lambda tables=tables: to_tensors(tables) if tables is not None else vector(1.0))
        for name, tables in devices.items()
    }
    slot = choose("prototypes", {"prototypes": {"class_mean": options or {}}})
    load = (lambda: to_tensors(before)) if before is not None else None
    return merge_prototypes(loaders, load, slot, np.random.default_rng(0))


def test_prototypes_are_means_by_counts_with_shares_by_table() -> None:
    devices = {
        "a": {"acc": of(1.0, 2.0, counts=(3.0, 1.0)), "gyro": of(5.0, 5.0)},
        "b": {"acc": of(5.0, 4.0, counts=(1.0, 3.0))},
    }
    by_class = from_tensors(merged(options={"weighting": "class"}, **devices).tensors)
    np.testing.assert_allclose(by_class["acc"].means, [[2.0], [3.5]])
    out = merged(**devices)
    np.testing.assert_allclose(from_tensors(out.tensors)["acc"].means, [[3.0], [3.0]])
    assert out.weights == {
        "devices": {"a": 0.6, "b": 0.4},
        "tables": {"acc": {"a": 0.5, "b": 0.5}, "gyro": {"a": 1.0}},
    }
    assert (out.refused, out.kept) == ({}, "")


def test_prototypes_of_another_shape_are_refused_whole() -> None:
    out = merged(
        a={"acc": of(1.0, 2.0)}, b={"acc": of(1.0, 2.0)}, c={"acc": of(1.0, 2.0, width=2), "gyro": of(1.0, 1.0)}
    )
    assert out.refused == {"c": ("shape", "table 'acc' is [2, 2], expected [2, 1]")}
    assert out.weights == {"devices": {"a": 0.5, "b": 0.5}, "tables": {"acc": {"a": 0.5, "b": 0.5}}}
    out = merged({"acc": of(0.0, 0.0, width=2)}, a={"acc": of(1.0, 2.0)}, b={"acc": of(1.0, 2.0, width=2)})
    assert out.refused == {"a": ("shape", "table 'acc' is [2, 1], expected [2, 2]")}, "the state's shape counts"


def test_prototypes_of_which_none_can_be_used_stay_and_say_why() -> None:
    out = merged({"acc": of(0.0, 0.0)}, a=None, b={"acc": of(1.0, 1.0, width=3)})
    assert (out.tensors, out.weights, out.kept) == (
        None,
        {},
        "no device sent usable prototypes",
    )
    assert {device: reason for device, (reason, _) in out.refused.items()} == {"a": "malformed", "b": "shape"}


def test_a_table_that_no_device_sent_stays_as_it_was() -> None:
    out = merged({"gyro": of(7.0, 8.0)}, a={"acc": of(1.0, 2.0)})
    assert set(from_tensors(out.tensors)) == {"acc", "gyro"}
    np.testing.assert_array_equal(from_tensors(out.tensors)["gyro"].means, [[7.0], [8.0]])


def test_a_table_of_no_samples_gives_no_shares() -> None:
    out = merged(a={"acc": of(1.0, 1.0, counts=(0.0, 0.0))})
    assert out.weights == {"devices": {"a": 0.0}, "tables": {"acc": {"a": 0.0}}}


# --- reasons in the record


def test_a_part_whose_devices_are_all_refused_says_so(store, previous) -> None:  # noqa: F811
    bad = {"w": np.full(3, np.nan, F32)}
    state, record = aggregate_round([update(store, "a", 5, task=bad)], store, previous)
    assert state["task"] == previous["task"]
    assert record["kept"] == {"task": "every device that trained it was refused"}
    assert record["parts"] == {}


def test_a_part_that_the_model_does_not_have_is_refused_from_all_that_sent_it(store, previous) -> None:  # noqa: F811
    detail = "the model has no such part"
    updates = [update(store, name, 5, strange=tensors(1.0)) for name in "ba"]
    state, record = aggregate_round(updates, store, previous)
    refused = {"part": "strange", "reason": "unknown_part", "detail": detail}
    assert record["refused"] == [{"device": name, **refused} for name in "ab"]
    assert (record["kept"], record["parts"]) == ({"strange": detail}, {})
    assert "strange" not in state


def test_a_step_that_overflows_refuses_those_that_led_to_it(store, previous, monkeypatch) -> None:  # noqa: F811
    def step(known, before, mean):
        return {name: value * F32(1e30) if value.dtype == F32 else value for name, value in mean.items()}, None

    monkeypatch.setattr(aggregate.history, "server_step", lambda *_: step)
    state, record = aggregate_round([update(store, "a", 5, task=tensors(2.0))], store, previous)
    assert state["task"] == previous["task"]
    assert record["kept"] == {"task": "its new values cannot be calculated with"}
    (refused,) = record["refused"]
    assert (refused["device"], refused["part"], refused["reason"]) == ("a", "task", "range")
    assert refused["detail"].startswith("of the new part tensor '")


def test_who_was_refused_before_a_step_overflowed_stays_on_record(store, previous, monkeypatch) -> None:  # noqa: F811
    def step(known, before, mean):
        return {name: value * F32(1e30) if value.dtype == F32 else value for name, value in mean.items()}, None

    monkeypatch.setattr(aggregate.history, "server_step", lambda *_: step)
    bad = {**tensors(1.0), "weight": np.full((2, 3), np.nan, F32)}
    updates = [update(store, name, 5, task=values) for name, values in (("a", bad), ("b", tensors(2.0)))]
    _, record = aggregate_round(updates, store, previous)
    assert [(one["device"], one["reason"]) for one in record["refused"]] == [("a", "not_finite"), ("b", "range")]


def test_the_record_names_each_slot_s_choice_and_options(store, previous) -> None:  # noqa: F811
    recipe = {"weight": {"samples": {}}, "combine": {"mean": {"absent": "keep"}}}
    _, record = aggregate_round([update(store, "a", 5, task=tensors(2.0))], store, previous, recipe)
    assert record["combine"] == {"choice": "mean", "absent": "keep"}
    assert record["weight"]["choice"] == "samples"
    assert {"cluster", "repair", "weight", "combine", "optimise", "prototypes"} <= record.keys()
    assert (record["refused"], record["ignored"], record["kept"]) == ([], {}, {})
    assert "stale" not in record
    assert "clusters" not in record
    assert record["parts"] == {"task": {"devices": {"a": 1.0}}}


def test_a_device_s_share_is_capped_by_the_terms(store, previous) -> None:  # noqa: F811
    updates = [
        update(store, name, samples, task=tensors(value))
        for name, samples, value in (("a", 90, 0.0), ("b", 5, 10.0), ("c", 5, 10.0))
    ]
    _, record = aggregate_round(updates[:2], store, previous, terms=RoundTerms(largest_share=0.6))
    assert record["parts"]["task"]["devices"] == pytest.approx({"a": 90 / 95, "b": 5 / 95}), "of two none is"
    state, record = aggregate_round(updates, store, previous, terms=RoundTerms(largest_share=0.6))
    assert record["parts"]["task"]["devices"] == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2})
    made = read(store, state)
    name = next(name for name, value in made.items() if value.dtype == F32)
    np.testing.assert_allclose(made[name], np.full_like(made[name], 4.0), rtol=1e-6)


def weighed(part: str, small: str = "average", own: bool = False, **counts: int):
    context = RoundContext(dict.fromkeys(counts, 1), {"a": 0, "b": 0, "c": 1}, {}, own, small, 1.0)
    return shares_of(part, counts, choose("weight", {"weight": {"samples": {}}}), context, lambda device: {}, {})


def test_each_audience_has_its_shares() -> None:
    everyone = {"a": 0.25, "b": 0.25, "c": 0.5}
    assert weighed("task", a=1, b=1, c=2) == {"": everyone}
    assert weighed("task", own=True, a=1, b=1, c=2) == {"": everyone, "#0/": {"a": 0.5, "b": 0.5}, "#1/": {"c": 1.0}}
    assert weighed("task", own=True, a=1, b=1, z=2) == {
        "": {"a": 0.25, "b": 0.25, "z": 0.5},
        "#0/": {"a": 0.5, "b": 0.5},
    }
    for small in ("average", "largest", "ensemble"):
        assert weighed("task", small, a=0, b=0) == weighed("match/acc", small, a=0, b=0) == {}
    alone = {"@a/": {"a": 1.0}, "@b/": {"b": 1.0}}
    assert weighed("match/acc", small="ensemble", a=1, b=3) == {"": {"a": 0.25, "b": 0.75}, **alone}


def test_likeness_weighs_those_that_trained_the_part() -> None:
    context = RoundContext({}, {}, {"a": 0.2, "b": 0.5, "c": 0.3}, False, "average", 1.0)
    slot = choose("weight", {"weight": {"cka": {}}})
    assert shares_of("task", {"c": 4, "a": 1, "b": 0}, slot, context, lambda device: {}, {}) == {
        "": {"a": 0.4, "c": 0.6}
    }


def test_a_participant_that_measures_nothing_keeps_what_it_measured_before() -> None:
    memory = Memory()
    for metrics, received in (({"a": 1.0}, {"a": 2.0}), ({}, {}), ({"a": 4.0}, {"a": 2.5})):
        memory = note_round(memory, metrics, received, {"a": 1.0})
    track = memory.devices["a"]
    assert (track.metric, track.received, track.returns, track.selected) == (4.0, 2.5, {1: -1.0, 3: 3.0}, 3)
    assert memory.gains == {history.NO_CLUSTER: 0.5}, "since it was last measured"


@pytest.mark.parametrize(
    ("combine", "value", "devices", "networks"),
    [
        ("average", 2.0, {"a": 0.75, "b": 0.25}, {"match/acc": 1.0}),  # (30 x 1 + 10 x 5) / 40
        ("largest", 1.0, {"a": 1.0}, {"match/acc": 1.0}),
        ("ensemble", 2.0, {"a": 0.75, "b": 0.25}, {"@a/match/acc": 0.75, "@b/match/acc": 0.25}),
    ],
)
def test_small_networks_are_combined_as_the_recipe_says(
    store,  # noqa: F811
    combine: str,
    value: float,
    devices: dict[str, float],
    networks: dict[str, float],
) -> None:
    """They are trained once: no step of the server's optimiser, and no cluster has its own."""
    before = {"match/acc": store.put(encode_part(tensors(-1.0)))}
    updates = [update(store, name, n, **{"match/acc": tensors(v)}) for name, n, v in (("a", 30, 1.0), ("b", 10, 5.0))]
    recipe = {
        "prototypes": {"class_mean": {"combine": combine}},
        "optimise": {"momentum": {"lr": 0.5}},
        "cluster": {"lsh": {"models": "own"}},
    }
    state, record = aggregate_round(updates, store, before, recipe)
    assert read(store, state, "match/acc")["weight"][0, 0] == value
    assert record["parts"].pop("match/acc") == {"devices": devices}
    assert history.load(store, state).networks == {"match/acc": networks}
    alone = {f"@{name}/match/acc": v for name, v in (("a", 1.0), ("b", 5.0))} if combine == "ensemble" else {}
    assert {key: read(store, state, key)["weight"][0, 0] for key in record["parts"]} == alone
    assert state.keys() == {"match/acc", history.KEY, *alone}


@pytest.mark.parametrize(("models", "expected"), [("own", {"#0/task": 20.0, "#3/task": 30.0}), ("shared", {})])
def test_a_cluster_s_own_model_goes_on_from_where_it_was(
    store,  # noqa: F811
    models: str,
    expected: dict[str, float],
) -> None:
    """Half a step towards a's 30 and b's 60: everyone's from 0 to 45 / 2, cluster 0's from 10, cluster 3's is new."""
    memory = Memory(1, {}, {name: history.Track(cluster=cluster) for name, cluster in (("a", 0), ("b", 3))})
    before = {"task": store.put(encode_part(tensors(0.0))), "#0/task": store.put(encode_part(tensors(10.0)))}
    before |= dict.fromkeys(
        (history.KEY, *(f"{SIGNATURES}{name}" for name in "ab")), store.put(msgspec.json.encode(memory))
    )
    updates = [update(store, name, 5, task=tensors(value)) for name, value in (("a", 30.0), ("b", 60.0))]
    recipe = {"cluster": {"lsh": {"models": models}}, "optimise": {"momentum": {"lr": 0.5, "beta": 0.0}}}
    state, record = aggregate_round(updates, store, before, recipe)
    assert {key: read(store, state, key)["weight"][0, 0] for key in record["parts"]} == {"task": 22.5, **expected}


def test_of_devices_with_as_many_samples_the_first_by_name_is_the_largest(store) -> None:  # noqa: F811
    before = {"match/acc": store.put(encode_part(tensors(-1.0)))}
    updates = [update(store, name, 5, **{"match/acc": tensors(v)}) for name, v in (("b", 5.0), ("a", 1.0))]
    recipe = {"prototypes": {"class_mean": {"combine": "largest"}}}
    _, record = aggregate_round(updates, store, before, recipe)
    assert record["parts"] == {"match/acc": {"devices": {"a": 1.0}}}


def test_an_update_may_have_twice_the_bytes_of_the_part_and_a_mebibyte(store) -> None:  # noqa: F811
    large = {"w": np.zeros(2**18, F32)}  # 1 MiB
    before = {"task": store.put(encode_part(large))}
    most = 2 * before["task"].size + 2**20
    padding = most - len(encode_part({**large, "x": np.zeros(0, np.int8)}))
    fitting, one_more = ({**large, "x": np.zeros(count, np.int8)} for count in (padding - 2**10, padding + 2**10))
    reasons = []
    for tensors_sent in (fitting, one_more):
        _, record = aggregate_round([update(store, "a", 5, task=tensors_sent)], store, before)
        reasons.append((record["refused"][0]["reason"], record["refused"][0]["detail"]))
    size = len(encode_part(one_more))
    assert reasons == [
        ("names", "it has unknown tensor 'x'"),
        ("malformed", f"its object has {size} bytes, at most {most} can be right"),
    ]


def test_a_signature_that_the_recipe_does_not_ask_for_is_refused_and_not_kept(store, previous) -> None:  # noqa: F811
    updates = [update(store, "a", 5, task=tensors(1.0), signature={"sketch": np.ones((2, 2), np.int16)})]
    for recipe, detail in (
        ({}, "a signature that no device was asked for"),
        ({"cluster": {"lsh": {}}}, "not one tensor 'sketch', int16 [100, 4096], but 'sketch' int16 [2, 2]"),
    ):
        state, record = aggregate_round(updates, store, previous, recipe)
        assert record["refused"] == [{"device": "a", "part": "signature", "reason": "malformed", "detail": detail}]
        assert record["parts"].keys() == {"task"}
        assert state.keys() == {*previous, history.KEY}


def test_a_signature_of_numbers_that_are_none_is_refused_whatever_its_method_checks(store) -> None:  # noqa: F811
    anything = Signature("any", lambda *_: {}, lambda _: {}, lambda tensors: None)
    slot = Choice(Cluster("open", "", signature=anything), {})
    values = {"a": 1.0, "b": np.nan}
    updates = [update(store, name, 5, signature={"x": np.full(2, value, F32)}) for name, value in values.items()]
    found, refused = sign(slot, updates, store)
    assert found == {f"{SIGNATURES}a": updates[0].manifest["signature"]}
    assert {name: reason for name, (reason, _) in refused.items()} == {"b": "malformed"}


def test_the_momentum_of_a_round_is_made_of_its_clusters(store, previous) -> None:  # noqa: F811
    tracks = {name: history.Track(metric=0.5, cluster=cluster) for name, cluster in (("a", 0), ("b", 3))}
    memory = store.put(msgspec.json.encode(Memory(1, {}, tracks)))
    before = {**previous, history.KEY: memory} | dict.fromkeys((f"{SIGNATURES}{name}" for name in tracks), memory)
    updates = [
        replace(update(store, name, samples, task=tensors(1.0)), metrics={history.TRAINED: score})
        for name, samples, score in (("a", 3, 0.75), ("b", 1, 0.25))
    ]
    recipe = {"cluster": {"lsh": {}}, "optimise": {"fedadagrad_mpo": {"risk": 0.0}}}
    state, record = aggregate_round(updates, store, before, recipe)
    assert record["clusters"] == {"a": 0, "b": 3}
    told = record["momentum"]["clusters"]
    assert {key: (one["devices"], one["weight"], one["return"]) for key, one in told.items()} == {
        "0": (["a"], 0.75, 0.25),
        "3": (["b"], 0.25, -0.25),
    }
    assert record["momentum"]["gamma"] == -0.125  # 0.75 (-0.25) + 0.25 (0.25)
    assert {name: one.returns for name, one in history.load(store, state).devices.items()} == {
        "a": {2: 0.25},
        "b": {2: -0.25},
    }
