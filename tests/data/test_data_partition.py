"""Partition: disjoint shares that hold everything, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.data.partition import METHODS, Samples
from edgefl.data.partition import partition as share_out
from edgefl.errors import DataError


def partition(labels, groups, n, how, seed, names=None):
    count = next((len(one) for one in (labels, groups) if one is not None), 0)
    return share_out(Samples(labels, groups, count), names or [f"d{i}" for i in range(n)], how, seed)


@st.composite
def cases(draw):
    n = draw(st.integers(1, 6))
    count = draw(st.integers(n, 60))
    labels = np.array(draw(st.lists(st.integers(-1, 4), min_size=count, max_size=count)))
    groups = np.array([f"g{i % n if i < n else draw(st.integers(0, 9))}" for i in range(count)])
    alpha = draw(st.sampled_from([0.01, 0.5, 100.0]))
    return labels, groups, n, {"alpha": alpha, "minimum": draw(st.integers(1, count // n))}, draw(st.integers(0, 9))


def test_dirichlet_within_groups_never_mixes_them():
    groups, labels = np.repeat(["anna", "ben"], 40), np.tile(np.arange(4), 20)
    shares = partition(labels, groups, 6, {"dirichlet": {"alpha": 0.3, "minimum": 5, "within": 1}}, 0)
    assert [set(groups[share]) for share in shares] == [{"anna"}] * 3 + [{"ben"}] * 3
    assert sorted(np.concatenate(shares).tolist()) == list(range(80))
    assert min(len(share) for share in shares) >= 5
    with pytest.raises(DataError, match=r"5 devices .* 2 groups"):
        partition(labels, groups, 5, {"dirichlet": {"within": 1}}, 0)
    with pytest.raises(DataError, match="needs groups"):
        partition(labels, None, 6, {"dirichlet": {"within": 1}}, 0)


@pytest.mark.parametrize("method", METHODS)
@given(case=cases())
def test_shares_are_disjoint_complete_and_repeatable(method, case):
    labels, groups, n, options, seed = case
    how = {method: {"dirichlet": options, "shards": {"each": 1}}.get(method)}
    shares = partition(labels, groups, n, how, seed)
    assert len(shares) == n
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    least = options["minimum"] if method == "dirichlet" else 1
    assert min(len(share) for share in shares) >= least
    assert all((np.diff(share) > 0).all() for share in shares)
    again = partition(labels, groups, n, how, seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    if method == "natural":
        owners = [set(groups[share]) for share in shares]
        assert sum(len(owner) for owner in owners) == len(set(groups))  # no group in two shares
    if method == "uniform":
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_as_many_groups_as_devices_go_in_order():
    groups = np.array(["p2", "p1", "p3", "p1"])
    assert [s.tolist() for s in partition(None, groups, 3, {"natural": {}}, 5)] == [[1, 3], [0], [2]]


def test_a_group_goes_to_the_device_of_its_name():
    """Else the reports of device "b" would tell of the data of "a"."""
    groups = np.array(["b", "a", "c", "a"])
    shares = partition(None, groups, 3, {"natural": {}}, 5, names=["c", "a", "x"])
    assert [s.tolist() for s in shares] == [[2], [1, 3], [0]]
    fewer = partition(None, np.repeat(["a", "b", "c", "d"], [6, 3, 2, 1]), 2, {"natural": {}}, 5, names=["x", "d"])
    assert 11 in fewer[1].tolist()
    assert sorted(map(len, fewer)) == [6, 6]


def test_groups_are_spread_evenly():
    """Groups of 6, 3, 2, 1 samples on two devices: 6 | 3 + 2 + 1."""
    groups = np.repeat(["a", "b", "c", "d"], [6, 3, 2, 1])
    for seed in range(5):
        assert [len(s) for s in partition(None, groups, 2, {"natural": {}}, seed)] == [6, 6]


def test_small_alpha_skews_and_large_alpha_does_not():
    labels = np.repeat(np.arange(4), 100)

    def largest_class_share(alpha: float) -> float:
        shares = partition(labels, None, 5, {"dirichlet": {"alpha": alpha}}, 0)
        return float(np.mean([np.bincount(labels[s], minlength=4).max() / len(s) for s in shares]))

    assert largest_class_share(0.1) > 0.6
    assert largest_class_share(1000.0) < 0.35


def test_a_shard_a_class_gives_each_device_as_many_classes_and_nobody_elses():
    """FedMVP: C / 10 classes on each of 10 devices, here 6 classes on 3."""
    labels = np.tile(np.arange(6), 7)
    held = [set(labels[share].tolist()) for share in partition(labels, None, 3, {"shards": {}}, 1)]
    assert [len(own) for own in held] == [2, 2, 2]
    assert set.union(*held) == set(range(6))
    four = [set(labels[share].tolist()) for share in partition(labels, None, 4, {"shards": {}}, 1)]
    assert sorted(len(own) for own in four) == [1, 1, 2, 2]
    assert held != [set(labels[share].tolist()) for share in partition(labels, None, 3, {"shards": {}}, 2)]


def test_shards_of_equal_size_cut_classes():
    """McMahan et al.: 4 devices x 2 shards of 60 in 10 classes of 6 are 7 or 8 samples each, of two classes at most."""
    labels = np.repeat(np.arange(10), 6)
    shares = partition(labels, None, 4, {"shards": {"each": 2}}, 0)
    assert {len(share) for share in shares} <= {14, 15, 16}
    assert max(len(set(labels[share].tolist())) for share in shares) <= 4


def test_other_seeds_give_other_shares():
    labels = np.repeat(np.arange(4), 10)
    for how in ({"uniform": {}}, {"dirichlet": {"alpha": 1.0}}):
        a, b = (partition(labels, None, 2, how, seed) for seed in (0, 1))
        assert not np.array_equal(a[0], b[0])


NINE = np.zeros(9, dtype=np.int64)


@pytest.mark.parametrize(
    ("labels", "groups", "how", "message"),
    [
        (NINE, None, {"natural": {}}, "needs groups"),
        (
            NINE,
            np.array(list("aabbbbbbb")),
            {"natural": {}},
            "share of device 'gpu' would be empty: there are 2 groups",
        ),
        (NINE[:2], None, {"uniform": {}}, "share of device 'gpu' would be empty: there are 2 samples for 3 devices"),
        (NINE, None, {"dirichlet": {"minimum": 4}}, "share of device 'gpu' would be empty: 3 devices x 4 samples"),
        (None, np.array(["a"] * 9), {"dirichlet": {}}, "needs labels"),
        (NINE, None, {"dirichlet": {"alpha": 0}}, "alpha is 0"),
        (None, np.array(["a"] * 9), {"shards": {}}, "needs labels"),
        (NINE, None, {"shards": {}}, "share of device 'nano' would be empty: 1 classes"),
        (NINE, None, {"shards": {"each": 4}}, "would be empty: 3 devices x 4 shards of 9 samples"),
        (NINE, None, {"shards": {"each": 1.5}}, "each is 1.5"),
        (NINE, None, {"shards": {"each": -1}}, "each is -1"),
        (NINE, None, {"dirichlet": {"alpha": float("nan")}}, "alpha is nan"),
        (NINE, None, {"dirichlet": {"beta": 1}}, "no option beta"),
        (NINE, None, {"uniform": {"alpha": 1}}, "no option alpha"),
        (NINE, None, {"diriclet": {}}, "unknown partition diriclet"),
        (NINE, None, {}, "unknown partition"),
        (None, None, {"uniform": {}}, "there are 0 samples for 3 devices"),
    ],
)
def test_what_can_not_be_shared_is_said_with_the_way_out(labels, groups, how, message):
    with pytest.raises(DataError, match=message) as caught:
        partition(labels, groups, 3, how, 0, names=["orin", "nano", "gpu"])
    assert caught.value.remedy != DataError.remedy
