"""K-means, local prototypes with and without labels, completion and multimodal clustering."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from training_fixture import job, model_spec

from edgefl.aggregation.prototype_merge import merge_prototypes
from edgefl.errors import ModelError
from edgefl.methods.apromfl.adaptive import complete, local_rows, partners, rows
from edgefl.plan.job import Candidate
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.prototypes import kmeans as module
from edgefl.prototypes.kmeans import kmeans, renumber
from edgefl.prototypes.pairs import by_clusters, local_pairs, normalised, pair_count
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.registry import choose


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def f32(*rows) -> np.ndarray:
    return np.array(rows, np.float32)


def table(*rows, counts=None) -> ClassMeans:
    return ClassMeans(f32(*rows), np.ones(len(rows), np.float32) if counts is None else f32(*counts))


def blobs(count: int, each: int, width: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    centres = rng(seed).normal(size=(count, width)) * 10
    owner = np.repeat(np.arange(count), each)
    return centres[owner] + spread * rng(seed + 1).normal(size=(count * each, width)), owner


# ---------------------------------------------------------------- K-means


def test_two_pairs_on_a_line():
    """0, 1 and 10, 11: centres 0.5 and 10.5, every point 0.5 away, 4 · 0.25 = 1; clusters by first appearance."""
    found = kmeans(f32([0], [10], [1], [11]), 2, rng())
    assert found.centres.tolist() == [[0.5], [10.5]]
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert found.inertia == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_inertia_is_that_of_scikit_learn(seed):
    x, owner = blobs(6, 20, 4, 1.0, seed)
    theirs = KMeans(6, n_init=10, random_state=0).fit(x)
    found = kmeans(x, 6, rng(seed))
    assert found.inertia == pytest.approx(theirs.inertia_, rel=1e-9)
    assert adjusted_rand_score(found.labels, owner) == 1
    assert found.labels.tolist() == renumber(theirs.labels_).tolist()


def test_one_start_from_good_seeds_finds_far_clusters():
    """k-means++ misses one of 12 tight clusters about never; seeds drawn evenly would nearly always."""
    x, owner = blobs(12, 5, 3, 0.01)
    for seed in range(20):
        assert adjusted_rand_score(kmeans(x, 12, rng(seed), restarts=1).labels, owner) == 1


def test_more_restarts_are_never_worse_and_sometimes_better():
    x = rng(3).normal(size=(80, 3))
    one = [kmeans(x, 9, rng(seed), restarts=1).inertia for seed in range(10)]
    four = [kmeans(x, 9, rng(seed)).inertia for seed in range(10)]  # the first of the four is the one
    assert all(b <= a for a, b in zip(one, four, strict=True))
    assert sum(four) < sum(one) * 0.98
    assert min(four) < 1.05 * KMeans(9, n_init=50, random_state=0).fit(x).inertia_


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 1000))
def test_every_point_is_with_its_nearest_centre_and_centres_are_means(count, k, seed):
    x = rng(seed).integers(-3, 4, (count, 2)).astype(float) + 1000
    found = kmeans(x, k, rng(seed))
    squares = ((x[:, None] - found.centres) ** 2).sum(-1)  # [N, K]
    own = squares[np.arange(count), found.labels]
    np.testing.assert_allclose(own, squares.min(1), atol=1e-9)
    assert found.inertia == pytest.approx(own.sum(), abs=1e-9)
    assert sorted(set(found.labels.tolist())) == list(range(len(found.centres)))
    assert len(found.centres) <= min(k, len(np.unique(x, axis=0)))
    for c, centre in enumerate(found.centres):
        np.testing.assert_allclose(centre, x[found.labels == c].mean(0), atol=1e-9)
    again = kmeans(x, k, rng(seed))
    assert again.labels.tolist() == found.labels.tolist()


def test_k_is_clamped_to_the_distinct_points():
    found = kmeans(f32([1, 2], [7, 7], [1, 2], [1, 2], [7, 7]), 4, rng())
    assert found.labels.tolist() == [0, 1, 0, 0, 1]
    np.testing.assert_allclose(found.centres, [[1, 2], [7, 7]], atol=1e-12)
    assert found.inertia == pytest.approx(0, abs=1e-20)
    assert kmeans(f32([3, 4]), 20, rng()).centres.tolist() == [[3, 4]]


def test_points_far_from_the_origin_are_told_apart():
    """At 10^8 the squares are 10^16, where numbers are 2 apart: points 1 apart need the offset taken away."""
    x = 1e8 + np.array([[0], [1], [2]] * 40)
    assert kmeans(x, 3, rng()).inertia == 0


def test_a_cluster_that_runs_empty_is_dropped():
    found = module._lloyd(np.array([[0.0], [1.0], [10.0]]), np.array([[99.0], [0.0], [8.0]]))
    assert found.centres.tolist() == [[0.5], [10.0]]
    assert found.labels.tolist() == [0, 0, 1]


def test_steps_end_with_centres_that_fit_the_labels(monkeypatch):
    monkeypatch.setattr(module, "STEPS_MAX", 1)
    x = rng(1).normal(size=(60, 2))
    found = kmeans(x, 7, rng(), restarts=1)
    for c, centre in enumerate(found.centres):
        np.testing.assert_allclose(centre, x[found.labels == c].mean(0), atol=1e-12)


@pytest.mark.parametrize(
    ("points", "k", "restarts"),
    [
        (np.zeros((0, 2)), 2, 1),
        (np.zeros(3), 2, 1),
        (f32([np.nan, 1]), 2, 1),
        (f32([1, 1]), 0, 1),
        (f32([1, 1]), 1, 0),
    ],
)
def test_what_cannot_be_clustered_is_refused(points, k, restarts):
    with pytest.raises(ModelError, match=r"cluster"):
        kmeans(points, k, rng(), restarts=restarts)


def test_renumbering_keeps_the_groups():
    assert renumber([7, 3, 7, 5, 3]).tolist() == [0, 1, 0, 2, 1]
    assert renumber([]).tolist() == []


# ---------------------------------------------------------------- local prototypes

YES = np.ones(3, bool)


def test_with_labels_prototypes_are_class_means_before_normalisation():
    """Class 0 has images (2, 0) and (4, 0): mean (3, 0), not (1, 0); its text is absent at the second sample."""
    h = {"image": f32([2, 0], [4, 0], [0, 6]), "text": f32([1, 1], [9, 9], [3, 5])}
    has = {"image": YES, "text": np.array([True, False, True])}
    tables, labels = local_pairs(h, has, [0, 0, 2], 3, rng())
    assert tables["image"].means.tolist() == [[3, 0], [0, 0], [0, 6]]
    assert tables["image"].counts.tolist() == [2, 0, 1]
    assert tables["text"].means.tolist() == [[1, 1], [0, 0], [3, 5]]
    assert tables["text"].counts.tolist() == [1, 0, 1]
    assert tables["text"].present.tolist() == [True, False, True]
    assert labels.tolist() == [0, 0, 2]


def test_samples_without_a_label_are_left_out():
    tables, labels = local_pairs({"image": f32([2, 0], [4, 0], [0, 6])}, {"image": YES}, [1, -1, 1], 2, rng())
    assert tables["image"].means.tolist() == [[0, 0], [1, 3]]
    assert labels.tolist() == [1, -1, 1]


def test_without_labels_prototypes_are_means_of_unit_embeddings_by_cluster():
    """Units: image x x y y', text y y y x. e of samples 0 and 1: (1/2, 1/2), of 2: (0, 1); 3 lacks its text.

    Two distinct points, so K = 20 is clamped to 2: pairs (x, y) of two samples and (y, y) of one.
    """
    h = {"text": f32([0, 3], [0, 1], [0, 9], [5, 0]), "image": f32([2, 0], [5, 0], [0, 1], [0, 4])}
    has = {"image": np.ones(4, bool), "text": np.array([True, True, True, False])}
    tables, labels = local_pairs(h, has, np.full(4, -1), 3, rng())
    assert tables["image"].means.tolist() == [[1, 0], [0, 1]]
    assert tables["text"].means.tolist() == [[0, 1], [0, 1]]
    assert tables["image"].counts.tolist() == tables["text"].counts.tolist() == [2, 1]
    assert labels.tolist() == [0, 0, 1, -1]


def test_clusters_are_those_of_scikit_learn_on_the_mean_embedding():
    x, owner = blobs(5, 12, 6, 0.3, 4)
    h = {"a": x.astype(np.float32), "b": np.roll(x, 2, axis=1).astype(np.float32), "c": (7 * x).astype(np.float32)}
    has = {m: np.ones(60, bool) for m in h}
    tables, labels = by_clusters(h, has, rng(), clusters=5)
    e = np.mean([normalised(v) for v in h.values()], axis=0)
    theirs = KMeans(5, n_init=10, random_state=0).fit(e)
    assert labels.tolist() == renumber(theirs.labels_).tolist()
    assert adjusted_rand_score(labels, owner) == 1
    for m, values in h.items():
        means = [normalised(values)[labels == k].mean(0) for k in range(5)]
        np.testing.assert_allclose(tables[m].means, means, atol=1e-6)
    mean_of_pairs = np.mean([tables[m].means for m in h], axis=0)  # the clusters' centres
    order = np.argsort(np.unique(theirs.labels_, return_index=True)[1])
    np.testing.assert_allclose(mean_of_pairs, theirs.cluster_centers_[order], atol=1e-5)


def test_length_of_projections_does_not_change_the_clusters():
    x, _ = blobs(3, 8, 4, 0.5, 2)
    scale = rng(5).uniform(0.1, 9, (24, 1))
    has = {"a": np.ones(24, bool)}
    plain = by_clusters({"a": x.astype(np.float32)}, has, rng(), clusters=3)
    scaled = by_clusters({"a": (x * scale).astype(np.float32)}, has, rng(), clusters=3)
    assert plain.labels.tolist() == scaled.labels.tolist()
    np.testing.assert_allclose(plain.tables["a"].means, scaled.tables["a"].means, atol=1e-6)


def test_without_a_complete_sample_there_are_tables_without_rows_and_they_travel():
    h = {"image": f32([2, 0], [0, 0]), "text": f32([0, 0], [1, 1])}
    has = {"image": np.array([True, False]), "text": np.array([False, True])}
    tables, labels = local_pairs(h, has, None, 3, rng())
    assert pair_count(tables) == 0
    assert labels.tolist() == [-1, -1]
    back = from_tensors(decode_part(encode_part(to_tensors(tables))))
    assert {m: t.means.shape for m, t in back.items()} == {"image": (0, 2), "text": (0, 2)}


def test_pairs_travel_as_tensors_of_the_prototypes_part():
    pairs = local_pairs({"image": f32([2, 0], [4, 1])}, {"image": np.ones(2, bool)}, [0, 1], 3, rng())
    tensors = to_tensors(pairs.tables)
    assert set(tensors) == {"image", "image.count"}
    back = from_tensors(decode_part(encode_part(tensors)))
    assert pair_count(back) == 3
    assert back["image"].means.tolist() == [[2, 0], [4, 1], [0, 0]]
    assert back["image"].present.tolist() == [True, True, False]


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ModelError, match=r"2 \(a\), 1 \(b\) rows are not pairs"):
        pair_count({"b": table([1, 2]), "a": table([1, 2], [3, 4])})
    with pytest.raises(ModelError, match=r"one width, not 2 \(a\), 3 \(b\)"):
        by_clusters({"a": f32([1, 2]), "b": f32([1, 2, 3])}, {"a": np.ones(1, bool), "b": np.ones(1, bool)}, rng())


# ---------------------------------------------------------------- completion and clustering on the server

E = np.e
X, Y = [1, 0], [0, 1]


def fleet() -> dict[str, dict[str, ClassMeans]]:
    """One device with the pairs (x, x) and (y, y), one with the image prototype x, not normalised, of class 1 of 2."""
    return {
        "both": {"image": table(X, Y), "text": table(X, Y)},
        "images": {"image": table([0, 0], [2, 0], counts=[0, 5])},
    }


def test_a_partner_is_the_softmax_mix_of_the_nearest_pairs_other_halves():
    """cos(x, x) = 1, cos(x, y) = 0: weights e/(e+1) = 0.7311 and 1/(e+1) = 0.2689 of the texts x and y."""
    rows = {"image": f32(X, Y, X), "text": f32(X, Y, [0, 0])}
    has = {"image": YES, "text": np.array([True, True, False])}
    whole, held = partners(rows, has)
    np.testing.assert_allclose(whole["text"], [X, Y, [E / (E + 1), 1 / (E + 1)]], atol=1e-6)
    assert held["text"].all()
    nearest, _ = partners(rows, has, neighbours=1)
    assert nearest["text"].tolist() == [X, Y, X]
    assert rows["text"][2].tolist() == [0, 0]  # the input stays as it was
    assert not has["text"][2]


def test_global_pairs_are_the_means_of_clusters_of_unit_rows():
    """O = 1 completes the third prototype to (x, x): two distinct pairs, K = 10 is clamped to them."""
    tables, record = complete(fleet(), rng(), clusters=10, neighbours=1)
    np.testing.assert_allclose(tables["image"].means, [X, Y], atol=1e-6)
    np.testing.assert_allclose(tables["text"].means, [X, Y], atol=1e-6)
    assert tables["image"].counts.tolist() == tables["text"].counts.tolist() == [2, 1]
    assert record == {
        "prototypes": 3,
        "multimodal": 2,
        "completed": {"image": 0, "text": 1},
        "lacking": {"image": 0, "text": 0},
        "skipped": "",
        "pairs": 2,
    }


def test_pairs_are_clustered_by_their_fused_embedding_as_on_a_device():
    """Fused, (x, y) and (y, x) are both (½, ½), and (x, x) is (1, 0): two clusters, the first with images x and y."""
    tables, record = complete({"d": {"image": table(X, Y, X), "text": table(Y, X, X)}}, rng(), clusters=3)
    assert record["pairs"] == 2
    assert tables["image"].counts.tolist() == [2, 1]
    np.testing.assert_allclose(tables["image"].means, [[0.5**0.5, 0.5**0.5], X], atol=1e-6)
    np.testing.assert_allclose(tables["text"].means, [[0.5**0.5, 0.5**0.5], X], atol=1e-6)


def test_one_cluster_is_the_direction_of_the_mean():
    """Images x, y, x: mean direction (2, 1)/√5. Texts x, y and the unit of (e, 1): see the test of partners."""
    tables, _ = complete(fleet(), rng(), clusters=1)
    np.testing.assert_allclose(tables["image"].means, [np.array([2, 1]) / 5**0.5], atol=1e-6)
    text = np.array([1, 1]) + np.array([E, 1]) / (E * E + 1) ** 0.5
    np.testing.assert_allclose(tables["text"].means, [text / np.linalg.norm(text)], atol=1e-6)
    assert tables["text"].counts.tolist() == [3]


def softmax(*scores: float) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum()


def test_with_three_modalities_the_cosine_is_the_mean_over_those_that_both_have():
    rows = {
        "a": f32(X, [0.6, 0.8], X, [0, 0]),
        "b": f32(X, [0, 0], Y, Y),
        "c": f32([0, 0], X, Y, [0, 0]),
    }
    has = {m: np.abs(h).sum(1) > 0 for m, h in rows.items()}
    whole, held = partners(rows, has)
    # Row 0 (a, b) lacks c: to row 1, by a alone, 0.6; to row 2, by a and b, (1 + 0)/2.
    np.testing.assert_allclose(whole["c"][0], softmax(0.6, 0.5), atol=1e-6)  # of x and y
    # Row 1 (a, c) lacks b: to row 0, by a alone, 0.6; to row 2, by a and c, (0.6 + 0)/2.
    np.testing.assert_allclose(whole["b"][1], softmax(0.6, 0.3), atol=1e-6)
    # Row 3 (b): only row 2 has b and c. Rows 0 and 2 have b and a, and the same a. Row 1 shares nothing with it.
    np.testing.assert_allclose(whole["c"][3], Y, atol=1e-6)
    np.testing.assert_allclose(whole["a"][3], X, atol=1e-6)
    assert all(flags.all() for flags in held.values())


def test_what_shares_no_modality_with_a_pair_stays_without_a_partner():
    devices = {"two": {"a": table(X), "b": table(Y)}, "other": {"c": table(X, Y)}}
    tables, record = complete(devices, rng())
    assert record["completed"] == {"a": 0, "b": 0, "c": 0}
    assert record["lacking"] == {"a": 2, "b": 2, "c": 1}
    assert record["skipped"] == ""
    assert tables["a"].counts.tolist() == [1, 0, 0]
    assert tables["c"].counts.tolist() == [0, 1, 1]


def test_without_a_multimodal_device_completion_is_skipped_and_rows_are_no_pairs():
    devices = {"i": {"image": table(X, Y, X)}, "t": {"text": table([3, 0], [0, 3])}}
    tables, record = complete(devices, rng())
    assert record["skipped"] == "no multimodal device took part"
    assert record["lacking"] == {"image": 2, "text": 3}
    assert record["completed"] == {"image": 0, "text": 0}
    assert tables["image"].counts.tolist() == [2, 1, 0, 0]
    assert tables["text"].counts.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(tables["text"].means, [[0, 0], [0, 0], X, Y], atol=1e-6)
    assert record["pairs"] == 4


def test_a_run_of_one_modality_lacks_nothing_and_no_prototypes_give_no_rows():
    _, record = complete({"i": {"image": table(X, Y)}}, rng())
    assert record["skipped"] == ""
    _, record = complete({"i": {"image": table(X)}, "t": {"text": table([0, 0], counts=[0])}}, rng())
    assert record["lacking"] == {"image": 0, "text": 1}
    assert record["skipped"] == "no multimodal device took part"
    tables, record = complete({"i": {"image": table([0, 0], counts=[0])}, "n": {}}, rng())
    assert tables["image"].means.shape == (0, 2)
    assert record["prototypes"] == record["pairs"] == 0
    tables, record = complete({}, rng())
    assert tables == record["lacking"] == {}
    assert record["prototypes"] == record["multimodal"] == record["pairs"] == 0


def many(seed: int) -> dict[str, dict[str, ClassMeans]]:
    draw = rng(seed).normal(size=(6, 4, 5)).astype(np.float32)
    return {
        "d": {"image": table(*draw[0]), "text": table(*draw[1])},
        "b": {"image": table(*draw[2], counts=[1, 0, 2, 3])},
        "c": {"text": table(*draw[3])},
        "a": {"text": table(*draw[4]), "image": table(*draw[5])},
    }


@pytest.mark.parametrize("seed", range(4))
def test_global_pairs_do_not_depend_on_the_order_or_the_scale_of_the_devices(seed):
    devices = many(seed)
    tables, record = complete(devices, rng(seed), clusters=4)
    shuffled = {name: dict(reversed(devices[name].items())) for name in reversed(devices)}
    again, record_again = complete(shuffled, rng(seed), clusters=4)
    assert record == record_again
    grown = {d: {m: ClassMeans(t.means * 7, t.counts) for m, t in own.items()} for d, own in devices.items()}
    scaled, _ = complete(grown, rng(seed), clusters=4)
    for m, one in tables.items():
        assert one.means.tobytes() == again[m].means.tobytes()
        np.testing.assert_allclose(scaled[m].means, one.means, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(one.means, axis=1), 1, atol=1e-6)
        assert one.counts.tolist() == again[m].counts.tolist() == scaled[m].counts.tolist()
        assert one.counts.sum() == 15  # 16 prototypes came, one of them absent


def test_global_clusters_are_those_of_scikit_learn():
    x, _ = blobs(4, 3, 5, 0.2, 8)
    image, text = x.astype(np.float32), np.roll(x, 1, axis=1).astype(np.float32)
    devices = {f"d{i}": {"image": table(*image[i::3]), "text": table(*text[i::3])} for i in range(3)}
    tables, _ = complete(devices, rng(), clusters=4)
    rows = (normalised(image) + normalised(text)) / 2
    members = np.eye(4)[KMeans(4, n_init=10, random_state=0).fit(rows).labels_].T
    mine = np.concatenate([tables["image"].means, tables["text"].means], axis=1)
    expected = np.concatenate([normalised(members @ normalised(half)) for half in (image, text)], axis=1)
    np.testing.assert_allclose(mine[np.lexsort(mine.T)], expected[np.lexsort(expected.T)], atol=1e-5)


PAIRS = {"clip": {"weight": 1.0, "temperature": 0.05}}


@pytest.mark.parametrize(
    ("own", "samples", "changes", "count"),
    [
        # Of 20 pairs a quarter is held out, 5: of 30 of b 25 are left at most, which make 12 clusters of 2, and 6 of 4.
        ("ab", {"": 50, "a": 40, "b": 30}, {"local_clusters": 40.0}, 12),
        ("ab", {"": 50, "a": 40, "b": 30}, {"local_clusters": 10.0}, 10),
        ("ab", {"": 50, "a": 40, "b": 30}, {"local_clusters": 40.0, "min_count": 4.0}, 6),
        # 40 of a alone, of which no more than the 5 are held out
        ("a", {"": 50, "a": 40, "b": 30}, {"local_clusters": 40.0}, 17),
        # 12 that have both: of the 7 of 30 held out, 2.8 would be theirs
        ("ac", {"": 50, "a": 40, "b": 30, "c": 12}, {"local_clusters": 40.0}, 4),
        ("ab", {"": 2, "a": 2, "b": 1}, {"local_clusters": 40.0}, 0),
        ("a", {"": 0, "a": 0}, {"local_clusters": 40.0}, 0),
        ("", {"": 0}, {"local_clusters": 40.0, "min_count": 1.0}, 0),
    ],
)
def test_rows_of_a_device_without_labels_are_priced_by_what_it_trains_on(own, samples, changes, count):
    options = {"local_clusters": 10.0, "min_count": 2.0, **changes}
    expected = dict.fromkeys(own, (count, 6)) if count else {}
    for classes in (3, 0):
        made = job(model_spec(modalities="abc", classes=classes), objective=PAIRS, holdout=0.25)
        for counts in ((), (0, 0, 0)) if classes else ((5, 5, 5),):
            candidate = Candidate("d", samples=samples, class_counts=counts)
            assert local_rows(made, candidate, list(own), **options) == expected


def test_rows_of_a_device_with_labels_are_classes():
    made = job(model_spec(), objective=PAIRS)
    found = local_rows(made, Candidate("d", class_counts=(0, 1, 0)), ["b"], local_clusters=10.0, min_count=2.0)
    assert found == {"b": (3, 6)}
    assert rows(model_spec(), clusters=7.0) == {"a": (7, 6), "b": (7, 6)}


def test_tables_of_another_width_are_refused_by_device():
    """The first fitting device's width holds for all modalities: a cluster is one of means over them."""
    sent = {
        "torn": {"image": table(X), "text": table([1, 2, 3])},
        "good": {"image": table(X), "text": table(Y)},
        "wide": {"text": table([1, 2, 3])},
        "odd": {"image": table(X, Y), "text": table(X)},
    }
    loaders = {device: partial(to_tensors, tables) for device, tables in sent.items()}
    slot = choose("prototypes", {"prototypes": {"adaptive": {}}})
    outcome = merge_prototypes(loaders, None, slot, rng())
    assert outcome.refused == {
        "torn": ("shape", "table 'text' is 3 wide, others are 2"),
        "wide": ("shape", "table 'text' is 3 wide, others are 2"),
        "odd": ("malformed", "tables of 2 (image), 1 (text) rows are not pairs"),
    }
    assert set(from_tensors(outcome.tensors)) == {"image", "text"}
