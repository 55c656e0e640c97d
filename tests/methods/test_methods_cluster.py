"""Relationship graph, clusters by sketches, and what devices send for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn.metrics.pairwise import cosine_similarity

from edgefl.aggregation.mean import MisfitError, layout_of
from edgefl.aggregation.pieces import inner_products, pieces, weight_sizes
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.methods import cluster
from edgefl.methods.apromfl.relationship import relationship
from edgefl.methods.cluster import WIDTH, features_of
from edgefl.methods.mmic.sketches import UNIT, _coordinates, lsh, sketch
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.registry import signature


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def f32(*rows) -> np.ndarray:
    return np.array(rows, np.float32)


# ---------------------------------------------------------------- relationship graph


def mapping(seed: int) -> dict[str, np.ndarray]:
    draw = rng(seed)
    return {
        "1.weight": draw.normal(size=(3, 4)).astype(np.float32),
        "1.bias": draw.normal(size=3).astype(np.float32),
        "2.running_mean": draw.normal(size=3).astype(np.float32) * 1e4,
        "2.running_var": draw.normal(size=3).astype(np.float32) ** 2 * 1e4,
        "2.num_batches_tracked": np.array(seed * 1000),
        "3.weight": draw.normal(size=(2, 2)).astype(np.float32),
    }


def loaders(**tensors):
    return {name: lambda name=name: tensors[name] for name in tensors}


def test_two_equal_mappings_and_one_across():
    """cos = 1 with itself and its equal, 0 across: row a is e, e, 1 over 2e + 1; row c is 1, 1, e over e + 2."""
    given_ = loaders(b={"w": f32(0, 3)}, a={"w": f32(0, 5)}, c={"w": f32(2, 0)})
    weights = relationship(given_)
    e = np.e
    assert list(weights) == ["a", "b", "c"]
    assert weights["a"] == pytest.approx({"a": e / (2 * e + 1), "b": e / (2 * e + 1), "c": 1 / (2 * e + 1)}, abs=1e-9)
    assert weights["c"] == pytest.approx({"a": 1 / (e + 2), "b": 1 / (e + 2), "c": e / (e + 2)}, abs=1e-9)


def test_weights_are_those_of_scikit_learn_and_scipy_and_buffers_do_not_count():
    devices = {f"d{i}": mapping(i) for i in range(4)}
    flat = [np.concatenate([m["1.weight"].ravel(), m["1.bias"], m["3.weight"].ravel()]) for m in devices.values()]
    expected = softmax(cosine_similarity(flat), axis=1)
    weights = relationship(loaders(**devices))
    np.testing.assert_allclose([list(row.values()) for row in weights.values()], expected, atol=1e-6)
    for row in weights.values():
        assert sum(row.values()) == pytest.approx(1, abs=1e-12)
    assert relationship(loaders(**dict(reversed(devices.items())))) == weights


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_pieces_hold_every_element_once_within_the_budget(limit, sizes):
    layout = layout_of({f"t{i}": np.zeros((size, 2), np.float32) for i, size in enumerate(sizes)})
    sets = list(pieces(weight_sizes(layout), limit))
    seen = [(name, i) for held in sets for name, first, end in held for i in range(first, end)]
    assert seen == [(f"t{i}", k) for i, size in enumerate(sizes) for k in range(2 * size)]
    widths = [sum(end - first for _, first, end in held) for held in sets]
    assert all(width == limit for width in widths[:-1])
    assert all(0 < width <= limit for width in widths)


def test_a_small_budget_loads_more_often_and_changes_nothing():
    devices = {f"d{i}": mapping(i) for i in range(3)}
    calls = []

    def load(name):
        calls.append(name)
        return devices[name]

    counted = {name: lambda name=name: load(name) for name in devices}
    _, whole = inner_products(counted)
    assert len(calls) == 1 + 3  # the layout, then each once
    calls.clear()
    names, piecewise = inner_products(counted, budget_bytes=8 * 8 * 3)  # 8 of 3 + 12 + 4 elements at a time
    assert len(calls) == 1 + 3 * 3
    assert names == sorted(devices)
    np.testing.assert_allclose(piecewise, whole, rtol=1e-12)
    calls.clear()
    np.testing.assert_allclose(inner_products(counted, budget_bytes=1)[1], whole, rtol=1e-12)
    assert len(calls) == 1 + 19 * 3


def test_one_holder_is_its_own_and_nobody_is_nothing():
    assert relationship(loaders(a=mapping(1))) == {"a": {"a": 1.0}}
    assert relationship({}) == {}


def test_a_mapping_of_zeros_is_like_nothing():
    weights = relationship(loaders(a={"w": f32(0, 0)}, b={"w": f32(1, 0)}))
    assert weights["a"] == {"a": 0.5, "b": 0.5}
    assert weights["b"]["b"] == pytest.approx(np.e / (np.e + 1))
    small = relationship(loaders(a={"w": f32(0, 1e-9)}, b={"w": f32(1e-9, 0)}))
    assert small["b"]["b"] == pytest.approx(np.e / (np.e + 1))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [({"w": f32(1, 2, 3)}, "shape"), ({"v": f32(1, 2)}, "names"), ({"w": f32(1, np.nan)}, "not_finite")],
)
def test_a_mapping_that_does_not_fit_is_refused_with_its_device(tensors, reason):
    with pytest.raises(MisfitError, match="device 'b': ") as caught:
        relationship(loaders(a={"w": f32(1, 2)}, b=tensors))
    assert caught.value.reason == reason


# ---------------------------------------------------------------- sketches


def test_one_direction_parts_positive_from_negative():
    """Three samples at +1, one at -1: every row holds 3/4 and 1/4, in units of 1/32767: 24575.25 and 8191.75."""
    found = sketch(f32([1], [1], [-1], [1]), rows=5, bits=3)["sketch"]
    assert found.shape == (5, 8)
    assert found.dtype == np.int16
    for row in found:
        (a, b) = np.flatnonzero(row)
        assert a + b == 7  # opposite signs in every bit
        assert sorted(row[[a, b]].tolist()) == [8192, 24575]


def test_samples_share_a_bucket_as_often_as_their_angle_tells():
    """One bit differs with probability angle/π (Goemans and Williamson 1995); of 4000 rows, 3 deviations are 0.024."""
    for degrees in (20, 60, 120):
        x = f32([1, 0], [np.cos(np.radians(degrees)), np.sin(np.radians(degrees))])
        apart = (sketch(x, rows=4000, bits=1)["sketch"] > 0).all(axis=1).mean()
        assert apart == pytest.approx(degrees / 180, abs=0.025)
    x = f32([1, 0], [0, 1])  # bits are independent: both agree with probability 1/4
    assert (sketch(x, rows=4000, bits=2)["sketch"] > 0).sum(axis=1).mean() == pytest.approx(2 - 0.25, abs=0.025)


def test_a_sketch_ignores_order_and_length_and_is_the_same_everywhere():
    x = rng(1).normal(size=(50, 6)).astype(np.float32)
    one = sketch(x, rows=4, bits=5)["sketch"]
    assert (sketch(x[::-1], rows=4, bits=5)["sketch"] == one).all()
    assert (sketch(x * rng(2).uniform(0.5, 9, (50, 1)), rows=4, bits=5)["sketch"] == one).all()
    assert (sketch(np.concatenate([x, x]), rows=4, bits=5)["sketch"] == one).all()
    assert (sketch(x, rows=4, bits=5, seed=1)["sketch"] != one).any()
    np.testing.assert_allclose(one.sum(axis=1), UNIT, atol=16)  # 32 buckets, half a unit each


def test_a_full_sketch_fits_a_mebibyte_and_travels_unchanged():
    tensors = sketch(rng(3).normal(size=(20, 4)))
    data = encode_part(tensors)
    assert tensors["sketch"].shape == (100, 4096)
    assert 819_200 < len(data) < 2**20
    assert (decode_part(data)["sketch"] == tensors["sketch"]).all()
    assert (decode_part(encode_part(tensors, "f16"))["sketch"] == tensors["sketch"]).all()


def test_samples_of_zeros_fall_into_the_first_bucket():
    assert sketch(np.zeros((3, 2)), rows=2, bits=2)["sketch"].tolist() == [[32767, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("features", "rows", "bits"),
    [
        (np.zeros((0, 2)), 2, 2),
        (np.zeros((2, 0)), 2, 2),
        (np.zeros(3), 2, 2),
        (np.full((2, 2), np.inf), 2, 2),
        (np.array([[np.nan, 1.0]]), 2, 2),
    ],
)
def test_what_cannot_be_sketched_is_refused(features, rows, bits):
    with pytest.raises(DataError, match="signature needs"):
        sketch(features, rows, bits)


def population(kind: int, seed: int) -> np.ndarray:
    centre = rng(kind).normal(size=8) * 3
    return centre + rng(100 + seed).normal(size=(40, 8))


def test_devices_of_one_population_are_together():
    kinds = {"e": 0, "a": 1, "d": 0, "b": 2, "c": 1, "f": 2}
    sketches = {d: sketch(population(kind, i), rows=20, bits=6) for i, (d, kind) in enumerate(kinds.items())}
    assert lsh(sketches, rng(), clusters=3) == {"a": 0, "b": 1, "c": 0, "d": 2, "e": 2, "f": 1}
    assert lsh(dict(reversed(sketches.items())), rng(), clusters=3.0) == lsh(sketches, rng(), clusters=3)


def test_distances_between_sketches_are_kept_and_shares_are_what_counts():
    """Shares (1, 0), (0.9, 0.1) and (0, 1), whatever the totals: two clusters, the first two together."""
    counts = {"a": {"sketch": f32([5, 0])}, "b": {"sketch": f32([90, 10])}, "c": {"sketch": f32([0, 1])}}
    assert lsh(counts, rng(), clusters=2) == {"a": 0, "b": 0, "c": 1}
    points = _coordinates(sorted(counts), counts)
    gaps = [np.linalg.norm(points[i] - points[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    np.testing.assert_allclose(gaps, [2**0.5 * 0.1, 2**0.5, 2**0.5 * 0.9], atol=1e-6)


def test_equal_sketches_are_one_cluster_however_many_are_asked_for():
    one, two = sketch(population(0, 1), 5, 4), sketch(population(1, 2), 5, 4)
    assert lsh({"a": one, "b": two, "c": one, "d": one}, rng(), clusters=8) == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert lsh({"a": one}, rng(), clusters=8) == {"a": 0}
    assert lsh({}, rng(), clusters=8) == {}


# ---------------------------------------------------------------- features


def dataset(present: dict[str, list[bool]], **modalities) -> Dataset:
    count = len(next(iter(modalities.values())))
    flags = {m: np.array(present.get(m, [True] * count)) for m in modalities}
    arrays = {m: np.asarray(v) * flags[m].reshape(-1, *[1] * (np.ndim(v) - 1)) for m, v in modalities.items()}
    arrays = {m: v.astype(np.float32 if v.dtype.kind == "f" else np.int64) for m, v in arrays.items()}
    return Dataset(arrays, flags, None, (), [str(i) for i in range(count)])


def test_features_are_a_fixed_projection():
    """A unit value projects to the first row of the matrix seeded by the name, over √2.

    The numbers are pinned: devices with another numpy, whose stream of normal numbers differed, could not be compared.
    """
    found = features_of(dataset({}, acc=[[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]]), 3)
    expected = rng([0, *b"acc"]).standard_normal((2, 3), np.float32)[0] / 2**0.5
    np.testing.assert_allclose(found, [expected, [0, 0, 0], 2 * expected], atol=1e-6)
    np.testing.assert_allclose(found[0], [0.3705578, -1.3811777, 0.6928233], atol=1e-6)
    assert found.dtype == np.float32
    other = features_of(dataset({}, acc=[[1.0, 0.0]]), 3, seed=1)
    assert not np.allclose(other[0], expected)
    single = rng([0, *b"acc"]).standard_normal((1, 1), np.float32)
    np.testing.assert_allclose(features_of(dataset({}, acc=[[3.0]]), 1), 3 * single, atol=1e-6)


def test_a_signature_is_that_of_the_features_with_the_seed_of_the_run():
    data = dataset({}, acc=rng(1).normal(size=(9, 4)))
    data = replace(data, labels=np.arange(9) % 2, label_names=("a", "b"))
    features = features_of(data, WIDTH, 7)
    assert features.shape == (9, 256)
    made = signature("sketch").sign(data, 2, 7)["sketch"]
    assert (made == sketch(features, seed=7)["sketch"]).all()


def test_modalities_add_up_and_an_absent_one_adds_nothing():
    acc, gyro = rng(1).normal(size=(3, 2, 4)), rng(2).normal(size=(3, 5))
    present = {"acc": [True, False, True], "gyro": [True, True, False]}
    both = features_of(dataset(present, acc=acc, gyro=gyro), 6)
    one, two = features_of(dataset(present, acc=acc), 6), features_of(dataset(present, gyro=gyro), 6)
    np.testing.assert_allclose(both, one + two, atol=1e-6)
    np.testing.assert_array_equal(one[1], 0)
    np.testing.assert_allclose(both[1], two[1], atol=1e-6)
    assert not np.allclose(features_of(dataset({}, other=acc), 6), features_of(dataset({}, acc=acc), 6))
    noisy = dataset(present, acc=acc)
    noisy.modalities["acc"][1] = 7  # what an absent row holds does not matter
    np.testing.assert_allclose(features_of(noisy, 6), one, atol=1e-6)


def test_a_modality_counts_by_its_root_mean_square_not_by_its_length():
    """A projected coordinate has the variance mean(x²): 4 here, for 50 values and for 5,000 (two blocks)."""
    for length in (50, 5000):
        found = features_of(dataset({}, acc=np.full((1, length), 2.0)), 4000)
        assert (found**2).mean() == pytest.approx(4, rel=0.1)  # 3 standard deviations are 0.27
    x = rng(3).normal(size=(2, 5000))
    matrix = rng([0, *b"acc"]).standard_normal((5000, 4), np.float32)
    np.testing.assert_allclose(features_of(dataset({}, acc=x), 4), x @ matrix / 5000**0.5, atol=1e-5)


def test_samples_read_a_few_at_a_time_have_the_features_of_all_at_once(monkeypatch: pytest.MonkeyPatch):
    data = dataset(
        {"acc": [True, False, True, True, True]}, acc=rng(1).normal(size=(5, 4)), text=[[5], [9], [5], [0], [7]]
    )
    whole = features_of(data, 6)
    monkeypatch.setattr(cluster, "_SAMPLES", 2)
    np.testing.assert_allclose(features_of(data, 6), whole, atol=1e-6)


def test_a_text_is_the_words_in_it():
    texts = dataset({}, text=[[5, 9, 0, 0], [9, 5, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0], [5 + 2**15, 0, 0, 0]])
    found = features_of(texts, 6)
    table = rng([0, *b"text"]).standard_normal((10, 6), np.float32)  # the first rows are the same in any larger one
    np.testing.assert_allclose(found[0], (table[5] + table[9]) / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    np.testing.assert_allclose(found[2], table[5], atol=1e-6)
    np.testing.assert_array_equal(found[3], 0)
    np.testing.assert_array_equal(found[4], found[2])
