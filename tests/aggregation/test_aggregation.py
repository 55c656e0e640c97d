"""Aggregation: the mean by hand, who is left out and why, the slots, and memory that does not grow with the fleet."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import Memory, UpdateInfo
from edgefl.aggregation.mean import MisfitError, WeightedMean
from edgefl.aggregation.server_state import shared
from edgefl.errors import ConfigError, ModelError, StoreError
from edgefl.methods import select
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.records import ObjectRef
from edgefl.registry import choose, methods
from edgefl.roles import ROLES
from edgefl.storage.objects import ObjectStore


@pytest.fixture
def store(tmp_path):
    return ObjectStore(tmp_path / "objects")


def tensors(value: float, *, steps: int = 0) -> dict[str, np.ndarray]:
    return {"weight": np.full((2, 3), value, np.float32), "steps": np.array([steps], np.int64)}


def update(store: ObjectStore, device: str, samples: int, **parts: dict[str, np.ndarray]) -> UpdateInfo:
    manifest = {part: store.put(encode_part(value)) for part, value in parts.items()}
    return UpdateInfo(device, manifest, dict.fromkeys(parts, samples))


def read(store: ObjectStore, manifest, part: str = "task") -> dict[str, np.ndarray]:
    return decode_part(store.read(manifest[part].id))


@pytest.fixture
def previous(store):
    return {part: store.put(encode_part(tensors(-1))) for part in ("fusion", "task")}


# The mean


def weighted_mean(pairs):
    mean = WeightedMean()
    for weight, values in pairs:
        mean.add(weight, values)
    return mean.result()


def test_the_mean_is_weighted_by_hand_and_buffers_come_from_the_first():
    mean = weighted_mean([(3, tensors(1, steps=7)), (1, tensors(5, steps=9))])
    np.testing.assert_array_equal(mean["weight"], np.full((2, 3), 2, np.float32))  # (3 x 1 + 1 x 5) / 4
    assert mean["steps"].tolist() == [7]
    assert mean["weight"].dtype == np.float32


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(-1e3, 1e3)), min_size=1, max_size=8))
def test_the_mean_lies_between_the_extremes_and_equals_that_of_float64(pairs):
    mean = weighted_mean([(weight, {"x": np.float32([value])}) for weight, value in pairs])["x"][0]
    values = [value for _, value in pairs]
    assert min(values) - 1e-2 <= mean <= max(values) + 1e-2
    assert mean == pytest.approx(np.average(values, weights=[weight for weight, _ in pairs]), abs=1e-2)


def test_parts_of_one_layout_are_added_in_one_piece_to_the_same_bits():
    """In one piece, and tensor by tensor: weights, a buffer between them, whole numbers, an empty tensor."""
    draw = np.random.default_rng(3)
    parts = [
        {
            "a.weight": draw.normal(size=(7, 5)).astype(np.float32),
            "a.running_mean": draw.normal(size=5).astype(np.float32),
            "a.num_batches_tracked": np.array(5 + number),
            "b": np.zeros((0, 3), np.float32),
            "c.weight": draw.normal(size=(3,)).astype(np.float32),
        }
        for number in range(4)
    ]
    weights = [0.1, 0.25, 0.3, 0.35]
    apart, together = WeightedMean(), WeightedMean()
    for weight, part in zip(weights, parts, strict=True):
        apart.add(weight, part)
        views = decode_part(encode_part(part), copy=False)
        assert len(views.runs) == 1
        together.add(weight, views)
    one, other = apart.result(), together.result()
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) and one[name].shape == other[name].shape for name in one)
    assert one["a.num_batches_tracked"] == other["a.num_batches_tracked"] == 5


def test_in_one_piece_a_misfit_is_named_as_ever_and_changes_nothing():
    good = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    mean = WeightedMean()
    for _ in range(2):
        mean.add(0.5, decode_part(encode_part(good), copy=False))
    with pytest.raises(MisfitError, match="tensor 'b' holds NaN"):
        mean.add(0.5, decode_part(encode_part(good | {"b": np.array([1, np.nan], np.float32)}), copy=False))
    with pytest.raises(MisfitError, match="'b' is \\[3\\], expected"):
        mean.add(0.5, decode_part(encode_part(good | {"b": np.ones(3, np.float32)}), copy=False))
    half = {name: value / 2 for name, value in good.items()}
    mean.add(0.0, half)  # of another form: tensor by tensor, to the same sums
    assert all(np.array_equal(value, good[name]) for name, value in mean.result().items())


def test_a_mean_of_nothing_is_an_error():
    with pytest.raises(ModelError, match="nothing"):
        weighted_mean([])
    with pytest.raises(ModelError, match="nothing"):
        weighted_mean([(0.0, tensors(1))])


@pytest.mark.parametrize(
    ("other", "reason", "names"),
    [
        ({"weight": np.zeros((2, 3), np.float32)}, "names", "lacks tensor 'steps'"),
        ({**tensors(1), "extra": np.zeros(1)}, "names", "unknown tensor 'extra'"),
        ({**tensors(1), "weight": np.zeros((3, 2), np.float32)}, "shape", r"'weight' is \[3, 2\], expected \[2, 3\]"),
        ({**tensors(1), "weight": np.zeros((2, 3), np.int64)}, "dtype", "'weight' is int64, expected float"),
        ({**tensors(1), "weight": np.float32([[0, 0, 0], [0, np.nan, 0]])}, "not_finite", "'weight'"),
    ],
)
def test_a_misfit_is_named_and_changes_nothing(other, reason, names):
    mean = WeightedMean()
    mean.add(1, tensors(4))
    with pytest.raises(MisfitError, match=names) as caught:
        mean.add(1, other)
    assert caught.value.reason == reason
    np.testing.assert_array_equal(mean.result()["weight"], tensors(4)["weight"])


# A round


def test_each_part_is_the_mean_over_the_devices_that_trained_it(store, previous):
    updates = [
        update(store, "a", 30, task=tensors(1), fusion=tensors(7)),
        update(store, "b", 10, task=tensors(5)),
    ]
    state, record = aggregate_round(updates, store, previous)
    assert read(store, state)["weight"][0, 0] == 2  # (30 x 1 + 10 x 5) / 40
    assert read(store, state, "fusion")["weight"][0, 0] == 7
    assert record["parts"] == {
        "fusion": {"devices": {"a": 1.0}},
        "task": {"devices": {"a": 0.75, "b": 0.25}},
    }
    assert (record["refused"], record["ignored"], record["kept"]) == ([], {}, {})
    assert record["weight"] == {"choice": "samples"}
    assert json.loads(json.dumps(record)) == record


def test_parts_nobody_sent_keep_their_object(store, previous):
    state, _ = aggregate_round([update(store, "a", 1, task=tensors(3))], store, previous)
    assert state["fusion"] == previous["fusion"]
    assert set(shared(state)) == set(previous)
    assert shared(aggregate_round([], store, previous)[0]) == previous


def test_a_device_without_samples_is_ignored_and_recorded(store, previous):
    updates = [update(store, "a", 5, task=tensors(1)), update(store, "b", 0, task=tensors(9))]
    state, record = aggregate_round(updates, store, previous)
    assert read(store, state)["weight"][0, 0] == 1
    assert record["parts"]["task"] == {"devices": {"a": 1.0}}
    assert record["ignored"] == {"task": ["b"]}


def test_when_nobody_has_samples_the_part_stays_and_the_record_says_so(store, previous):
    state, record = aggregate_round([update(store, "a", 0, task=tensors(9))], store, previous)
    assert shared(state) == previous
    assert record["kept"] == {"task": "no device trained it on any sample"}
    assert record["parts"] == {}


def test_a_misfitting_device_is_refused_for_that_part_and_the_others_go_on(store, previous):
    updates = [
        update(store, "a", 60, task={"weight": np.zeros((9, 9), np.float32), "steps": np.zeros(1, np.int64)}),
        update(store, "b", 30, task=tensors(1), fusion=tensors(float("inf"))),
        update(store, "c", 10, task=tensors(5), fusion=tensors(2)),
    ]
    state, record = aggregate_round(updates, store, previous)
    assert read(store, state)["weight"][0, 0] == pytest.approx(2)
    assert record["parts"]["task"]["devices"] == pytest.approx({"b": 0.75, "c": 0.25})
    assert record["parts"]["fusion"]["devices"] == {"c": 1.0}
    found = [(entry["device"], entry["part"], entry["reason"]) for entry in record["refused"]]
    assert found == [("b", "fusion", "not_finite"), ("a", "task", "shape")]
    assert "[9, 9], expected [2, 3]" in record["refused"][1]["detail"]


def test_bytes_that_are_no_part_and_parts_the_model_lacks_are_refused(store, previous):
    updates = [
        UpdateInfo("a", {"task": store.put(b"not a part")}, {"task": 4}),
        update(store, "b", 4, other=tensors(1)),
        UpdateInfo("c", {"fusion": ObjectRef("../../etc/passwd", 3)}, {"fusion": 4}),
        UpdateInfo("d", {"fusion": store.put(bytes(2**21))}, {"fusion": 4}),
    ]
    state, record = aggregate_round(updates, store, previous)
    assert shared(state) == previous
    found = {(entry["device"], entry["reason"]) for entry in record["refused"]}
    assert found == {("a", "malformed"), ("b", "unknown_part"), ("c", "malformed"), ("d", "malformed")}
    assert "2097152 bytes, at most" in str(record["refused"])  # and was never read into memory
    assert set(record["kept"]) == {"fusion", "other", "task"}


def test_a_lost_object_is_the_stores_fault_not_the_devices(store, previous):
    missing = UpdateInfo("a", {"task": ObjectRef("0" * 64, 10)}, {"task": 4})
    with pytest.raises(StoreError):
        aggregate_round([missing], store, previous)
    with pytest.raises(StoreError, match="read"):
        aggregate_round([update(store, "a", 4, task=tensors(1))], store, {"task": ObjectRef("0" * 64, 10)})


def test_a_device_named_twice_is_an_error(store, previous):
    one = update(store, "a", 1, task=tensors(1))
    with pytest.raises(ValueError, match="twice"):
        aggregate_round([one, one], store, previous)


def test_the_result_is_the_same_to_the_bit_in_any_order_of_arrival(store, previous):
    generator = np.random.default_rng(0)
    updates = [
        update(store, f"d{n}", n + 1, task={**tensors(0), "weight": generator.normal(size=(2, 3)).astype(np.float32)})
        for n in range(9)
    ]
    states = {
        aggregate_round([updates[i] for i in generator.permutation(9)], store, previous)[0]["task"].id for _ in "abc"
    }
    assert len(states) == 1


def test_f16_updates_are_averaged_in_f32(store, previous):
    objects = [store.put(encode_part(tensors(value), "f16")) for value in (1.0, 1.0 + 2**-10)]
    updates = [UpdateInfo(name, {"task": ref}, {"task": 1}) for name, ref in zip("ab", objects, strict=True)]
    state, _ = aggregate_round(updates, store, previous)
    assert read(store, state)["weight"][0, 0] == np.float32(1 + 2**-11)


def means(rows: list[list[float]], counts: list[float]) -> ClassMeans:
    return ClassMeans(np.array(rows, np.float32), np.array(counts, np.float32))


def test_prototypes_are_merged_by_their_counts_and_absent_classes_stay(store, previous):
    old = {"acc": means([[9], [8], [7]], [1, 1, 1]), "gyro": means([[6]], [1])}
    before = {**previous, "prototypes": store.put(encode_part(to_tensors(old)))}
    updates = [
        update(store, "a", 0, prototypes=to_tensors({"acc": means([[2], [0], [0]], [2, 1, 0])})),
        update(
            store, "b", 0, prototypes=to_tensors({"acc": means([[0], [5], [0]], [0, 1, 0]), "fused": means([[1]], [4])})
        ),
        update(store, "c", 0, prototypes=to_tensors({"acc": means([[2, 2]], [5])})),
    ]
    state, record = aggregate_round(updates, store, before, {"prototypes": {"class_mean": {}}})
    merged = read(store, state, "prototypes")
    assert merged["acc"].tolist() == [[2], [1.25], [7]]  # class 1: (3 x 0 + 1 x 5) / 4; class 2: as before
    assert merged["fused"].tolist() == [[1]]
    assert merged["gyro"].tolist() == [[6]]
    assert record["parts"]["prototypes"]["tables"] == {"acc": {"a": 0.75, "b": 0.25}, "fused": {"b": 1.0}}
    assert record["parts"]["prototypes"]["devices"] == {"a": 3 / 8, "b": 5 / 8}
    assert [(entry["device"], entry["reason"]) for entry in record["refused"]] == [("c", "shape")]
    by_class, _ = aggregate_round(updates, store, before, {"prototypes": {"class_mean": {"weighting": "class"}}})
    assert read(store, by_class, "prototypes")["acc"].tolist() == [[2], [2.5], [7]]


def test_without_a_previous_table_one_odd_device_does_not_refuse_the_rest(store, previous):
    odd = update(store, "a", 0, prototypes=to_tensors({"acc": means([[1, 1]], [1])}))
    others = [update(store, name, 0, prototypes=to_tensors({"acc": means([[4]], [1])})) for name in "bc"]
    state, record = aggregate_round([odd, *others], store, previous)
    assert read(store, state, "prototypes")["acc"].tolist() == [[4]]
    assert [entry["device"] for entry in record["refused"]] == ["a"]
    for pair in ([odd, others[0]], [others[0], odd]):  # one against one: the first by name, whoever came first
        assert aggregate_round(pair, store, previous)[1]["parts"]["prototypes"]["devices"] == {"a": 1.0}


def test_malformed_prototypes_leave_the_state_without_them(store, previous):
    bad = update(store, "a", 0, prototypes={"acc": np.zeros((2, 2), np.float32)})
    state, record = aggregate_round([bad], store, previous)
    assert shared(state) == previous
    assert record["refused"][0]["detail"].endswith("has no counts")
    assert record["kept"] == {"prototypes": "no device sent usable prototypes"}


def test_memory_does_not_grow_with_the_number_of_devices(tmp_path):
    rows = 2048  # 512 KiB a part, so that the records of 40 devices are small beside it

    def peak(devices: int) -> int:
        store = ObjectStore(tmp_path / str(devices))
        previous = {"task": store.put(encode_part({"w": np.zeros((rows, 64), np.float32)}))}
        updates = [
            update(
                store,
                f"d{n:02}",
                n + 1,
                task={"w": np.full((rows, 64), n, np.float32)},
                prototypes=to_tensors({"acc": means(np.full((64, 64), n).tolist(), [1.0] * 64)}),
            )
            for n in range(devices)
        ]
        tracemalloc.start()
        try:
            aggregate_round(updates, store, previous)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)  # imports and caches
    few, many = peak(3), peak(40)
    assert many == pytest.approx(few, rel=0.04)
    assert many < 3.5 * rows * 64 * 4  # the sum and two more: one device's bytes and scaled tensor, or the encoding


# Slots


@pytest.mark.parametrize(("role", "name"), [(role, name) for role in ROLES for name in methods(role)])
def test_every_method_can_be_chosen_by_name(role, name):
    choice = choose(role, {role: {name: {}}})
    assert choice.name == name
    assert choice.options == {option: spec.default for option, spec in methods(role)[name].options.items()}


SERVER = {
    "cluster": ("group",),
    "select": ("draw",),
    "prototypes": ("merge",),
    "repair": ("mend", "unlikely"),
    "weight": ("weigh", "similarity", "personal"),
    "optimise": ("step", "adjust"),
}


#: (role, method, option, default) where a function itself takes the option; the others are read around it.
TAKEN = [
    (role, name, option, takes[option].default)
    for role, words in SERVER.items()
    for name in methods(role)
    for function in (getattr(methods(role)[name], word) for word in words)
    if function not in (None, sorted)
    for takes in (inspect.signature(function).parameters,)
    for option in methods(role)[name].options
    if option in takes and takes[option].default is not inspect.Parameter.empty
]


def test_functions_of_three_roles_have_defaults_of_options():
    assert {role for role, *_ in TAKEN} >= {"select", "prototypes", "optimise"}


@pytest.mark.parametrize(("role", "name", "option", "default"), TAKEN)
def test_a_method_s_functions_have_the_defaults_that_its_options_are_documented_with(role, name, option, default):
    assert default == methods(role)[name].options[option].default


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"select": {"randm": {}}}, "unknown method 'randm'; choose one of: all, banzhaf, random"),
        ({"select": {"random": {"shares": 1}}}, "select.random.shares: unknown option; choose from: share"),
        ({"select": {"all": {"share": 1}}}, "select.all.share: unknown option; choose from: no options"),
        ({"select": {"all": {}, "random": {}}}, "exactly one method, got all, random"),
    ],
)
def test_a_wrong_choice_lists_what_there_is(recipe, message):
    with pytest.raises(ConfigError, match=message):
        choose("select", recipe)


def test_selection_is_seeded_sorted_and_never_empty():
    devices = [f"d{n}" for n in range(10)]

    def draw(names: list[str], seed: int = 1, **options: float) -> list[str]:
        return select.at_random(names, np.random.default_rng(seed), **options)

    chosen = draw(devices, share=0.3)
    assert len(chosen) == 3
    assert chosen == sorted(chosen) == draw(devices[::-1], share=0.3)
    assert {tuple(draw(devices, seed, share=0.3)) for seed in range(9)} != {tuple(chosen)}
    assert draw(devices, share=1.0) == devices
    assert len(draw(devices, share=0.001)) == 1
    assert draw([], share=1.0) == []
    assert choose("select", {}).method.draw(devices[::-1], np.random.default_rng(0), Memory()) == devices
    random = choose("select", {"select": {"random": {}}})
    half = random.bind(random.method.draw)(devices, np.random.default_rng(0), Memory())
    assert len(half) == 5


def test_aggregation_loads_no_torch():
    program = "import sys, edgefl.aggregation.aggregate; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
