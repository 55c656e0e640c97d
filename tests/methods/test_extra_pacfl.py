"""The example package's clusters by principal angles (PACFL): the angles, the linkage, and what devices send for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from extra_fixture import extra
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import subspace_angles
from scipy.spatial.distance import squareform
from sklearn.decomposition import TruncatedSVD
from test_methods_cluster import dataset, f32, population, rng

from edgefl.errors import DataError, ModelError, ProtocolError
from edgefl.methods.cluster import WIDTH, features_of
from edgefl.plan.packed_sizes import object_bytes
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.prototypes.kmeans import renumber

module = extra("pacfl")
average_linkage, bases, check_bases, pacfl = (module.average_linkage, module.bases, module.check_bases, module.pacfl)
smallest_angle, RANK = module.smallest_angle, module.RANK
ORACLES = {
    case["id"]: case for case in json.loads((Path(__file__).parents[1] / "oracles/oracles.json").read_text())["cases"]
}


# ---------------------------------------------------------------- principal angles


def line(degrees: float) -> dict[str, np.ndarray]:
    return {"class.0": np.array([[np.cos(np.radians(degrees))], [np.sin(np.radians(degrees))], [0.0]])}


def test_the_hand_computed_angle():
    case = ORACLES["angle-1"]
    u1, u2 = (np.array(case["inputs"][name], np.float64) for name in ("u1", "u2"))
    assert smallest_angle(u1, u2) == pytest.approx(case["expect"], abs=1e-6)
    assert smallest_angle(u2, u1) == pytest.approx(case["expect"], abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_angles_are_those_of_scipy(seed):
    draw = rng(seed)
    q1, q2 = (np.linalg.qr(draw.normal(size=(12, r)))[0] for r in (3, 2))
    assert smallest_angle(q1, q2) == pytest.approx(np.degrees(subspace_angles(q1, q2).min()), abs=1e-6)
    assert smallest_angle(q1, q1 @ np.linalg.qr(draw.normal(size=(3, 3)))[0]) == pytest.approx(0, abs=1e-5)


def test_no_angle_without_directions():
    with pytest.raises(ModelError, match=r"\[3, 0\] and \[3, 1\]"):
        smallest_angle(np.zeros((3, 0)), np.zeros((3, 1)))
    with pytest.raises(ModelError, match="no angle"):
        smallest_angle(np.zeros((2, 1)), np.zeros((3, 1)))


def test_lines_are_joined_by_their_mean_angle():
    """Lines at 0°, 20° and 60°: the first two join at 20; the third is 60 and 40 away, 50 in the mean."""
    devices = {"c": line(0), "a": line(60), "b": line(20)}
    assert pacfl(devices, threshold=19.9) == {"a": 0, "b": 1, "c": 2}
    assert pacfl(devices, threshold=20.1) == {"a": 0, "b": 1, "c": 1}
    assert pacfl(devices) == pacfl(devices, threshold=30) == pacfl(devices, threshold=49.9) == {"a": 0, "b": 1, "c": 1}
    assert pacfl(devices, rng(), threshold=50.1) == {"a": 0, "b": 0, "c": 0}
    assert pacfl(devices, threshold=0, clusters=2) == {"a": 0, "b": 1, "c": 1}
    assert pacfl(devices, threshold=90, clusters=2) == {"a": 0, "b": 0, "c": 0}


def test_a_span_is_that_of_all_classes_together():
    """Bases (1, 0, 0) and (1, 1, 0)/√2 span the plane, though they are not orthogonal: (0, 1, 0) lies in it."""
    s = 0.5**0.5
    both = {"class.0": f32([1], [0], [0]), "class.4": f32([s], [s], [0])}
    across = {"class.1": f32([0], [1], [0])}
    up = {"class.1": f32([0], [0], [1])}
    assert pacfl({"a": both, "b": across, "c": up}, threshold=1) == {"a": 0, "b": 0, "c": 1}
    twice = {"class.0": f32([1], [0], [0]), "class.1": f32([1], [1e-7], [0])}  # one direction, and rounding
    assert pacfl({"a": twice, "b": across}, threshold=80) == {"a": 0, "b": 1}


@pytest.mark.parametrize("seed", range(6))
def test_average_linkage_is_that_of_scipy(seed):
    draw = rng(seed)
    points = draw.normal(size=(12, 2))
    distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
    tree = linkage(squareform(distances), "average")
    for threshold in (0.1, 0.5, 1.0, 2.0, 9.0):
        expected = renumber(fcluster(tree, threshold, "distance"))
        assert average_linkage(distances, threshold).tolist() == expected.tolist()
    for clusters in (1, 3, 6, 12):
        expected = renumber(fcluster(tree, clusters, "maxclust"))
        assert average_linkage(distances, 0.0, clusters).tolist() == expected.tolist()
    np.testing.assert_array_equal(distances.diagonal(), 0)  # the input stays as it was


def test_equal_distances_are_joined_at_the_threshold_itself():
    assert average_linkage(np.array([[0, 2], [2, 0]]), 2).tolist() == [0, 0]
    assert average_linkage(np.zeros((0, 0)), 1).tolist() == []
    assert pacfl({}) == {}
    assert pacfl({"a": line(3)}) == {"a": 0}


def test_bases_that_are_none_are_refused_with_their_device():
    good = line(0)
    for bad in (
        {},
        {"x": np.zeros(3)},
        {"x": np.full((3, 1), np.nan)},
        {"x": np.zeros((3, 1))},
        {"x": np.zeros((3, 0))},
    ):
        with pytest.raises(ProtocolError, match="device 'b' sent"):
            pacfl({"a": good, "b": bad})
    with pytest.raises(ProtocolError, match="'b' has bases of width 2, 'a' of 3"):
        pacfl({"a": good, "b": {"x": f32([1], [0])}})


# ---------------------------------------------------------------- bases


def test_the_basis_of_a_class_is_its_main_direction():
    """Class 2 lies on the first axis: one direction, though two are asked for. Class 0 spans two axes, 1 nothing."""
    x = f32([3, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0] * 6, [9] * 6)
    found = bases(x, np.array([2, 2, 0, 0, 1, -1]), 4, 2)
    assert sorted(found) == ["class.0", "class.2"]
    np.testing.assert_allclose(np.abs(found["class.2"]), [[1], [0], [0], [0], [0], [0]], atol=1e-6)
    np.testing.assert_allclose(np.abs(found["class.0"][:3]), [[0, 0], [1, 0], [0, 1]], atol=1e-6)
    assert found["class.0"].dtype == np.float32


def test_bases_are_those_of_scikit_learn():
    x = rng(5).normal(size=(60, 16)) * np.linspace(5, 1, 16)
    y = np.arange(60) % 2
    found = bases(x, y, 2, 3)
    for c in (0, 1):
        theirs = TruncatedSVD(3, algorithm="arpack", random_state=0).fit(x[y == c]).components_.T
        assert np.degrees(subspace_angles(found[f"class.{c}"], theirs)).max() < 1e-2
        np.testing.assert_allclose(found[f"class.{c}"].T @ found[f"class.{c}"], np.eye(3), atol=1e-6)
    assert [basis.shape for basis in bases(x, y, 2).values()] == [(16, 3), (16, 3)]


def test_bases_that_say_nothing_are_refused():
    x = rng(6).normal(size=(8, 8)).astype(np.float32)
    with pytest.raises(DataError, match="no labelled sample"):
        bases(x, None, 3)
    with pytest.raises(DataError, match="no labelled sample"):
        bases(np.zeros((2, 4)), np.array([0, 1]), 2)
    with pytest.raises(DataError, match="2 classes have 5 directions, more than half of the 8 features") as caught:
        bases(x, np.array([0, 0, 0, 0, 0, 0, 1, 1]), 2, 3)
    assert "width 10 or more" in caught.value.remedy
    assert sum(b.shape[1] for b in bases(x, np.arange(8) % 2, 2, 2).values()) == 4  # just half
    for labels, classes, rank in ((np.arange(8), 7, 1), (np.arange(7), 8, 1), (np.arange(8), 8, 0)):
        with pytest.raises(DataError, match="do not match"):
            bases(x, labels, classes, rank)


def test_devices_of_one_population_are_together():
    kinds = {"e": 0, "a": 1, "d": 0, "b": 2, "c": 1, "f": 2}
    bases_of = {d: bases(population(k, i), np.zeros(40, int), 1, 1) for i, (d, k) in enumerate(kinds.items())}
    assert pacfl(bases_of, threshold=20) == {"a": 0, "b": 1, "c": 0, "d": 2, "e": 2, "f": 1}


def test_a_signature_is_that_of_the_features_with_the_seed_of_the_run():
    data = dataset({}, acc=rng(1).normal(size=(9, 4)))
    data = replace(data, labels=np.arange(9) % 2, label_names=("a", "b"))
    made, expected = module.sign(data, 2, 7), bases(features_of(data, WIDTH, 7), data.labels, 2)
    assert made.keys() == expected.keys()
    assert all((made[name] == expected[name]).all() for name in made)


# ---------------------------------------------------------------- on arrival


def axes(first: int, count: int = RANK, width: int = WIDTH) -> np.ndarray:
    """Unit vectors ``first`` to ``first + count - 1``, an orthonormal basis."""
    return np.ascontiguousarray(np.eye(width, dtype=np.float32)[:, first : first + count])


BASES: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "nothing": ({}, "bases of 0 directions"),
    "no class": ({"klass.1": axes(0)}, "'klass.1'"),
    "a class that is no number": ({"class.-1": axes(0)}, "'class.-1'"),
    "another width": ({"class.1": axes(0, width=WIDTH - 1)}, r"\[255, 3\]"),
    "too many directions of a class": ({"class.1": axes(0, count=RANK + 1)}, r"\[256, 4\]"),
    "none of a class": ({"class.1": axes(0, count=0)}, r"\[256, 0\]"),
    "too many in all": ({f"class.{c}": axes(3 * c) for c in range(43)}, "129 directions"),
    "not orthonormal": ({"class.1": 2 * axes(0)}, "'class.1' is not orthonormal"),
    "the same twice": ({"class.1": axes(0, count=1)[:, [0, 0]]}, "'class.1' is not orthonormal"),
    "a vector": ({"class.1": axes(0)[:, 0]}, r"\[256\]"),
    "integers": ({"class.1": axes(0).astype(np.int32)}, "int32"),
    "not finite": ({"class.1": axes(0) * np.float32(np.nan)}, "not orthonormal"),
}


@pytest.mark.parametrize("encoding", ["f32", "f16"])
def test_what_devices_make_is_a_signature_in_every_encoding(encoding: str) -> None:
    x, labels = rng().normal(size=(20, WIDTH)).astype(np.float32), np.arange(20) % 4
    made = bases(x, labels, 4)
    check_bases(decode_part(encode_part(made, encoding), finite=True))
    check_bases({"class.0": axes(0), "class.41": axes(125)})
    check_bases(bases(x[:1], np.zeros(1, np.int64), 1))
    with pytest.raises(ProtocolError, match="but '"):
        check_bases({"sketch": np.ones((1, 4), np.int16)})
    labels[labels > 1] = 0
    made = bases(x, labels, 3)
    assert object_bytes(module.layout(np.bincount(labels, minlength=3).tolist())) == len(encode_part(made))


@pytest.mark.parametrize("fault", BASES)
def test_what_are_no_bases_is_named(fault: str) -> None:
    tensors, message = BASES[fault]
    with pytest.raises(ProtocolError, match=message):
        check_bases(tensors)
