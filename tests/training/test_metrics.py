"""Classification and retrieval figures: hand-worked numbers, scikit-learn's own, ties, and nothing to judge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    precision_recall_fscore_support,
    roc_auc_score,
    top_k_accuracy_score,
)

from edgefl.errors import DataError
from edgefl.training import metrics
from edgefl.training.metrics import (
    classification,
    pairs,
    ranking,
    retrieval,
    retrieval_ranks,
    same_items,
    several_labels,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_macro_averages_by_hand():
    """Truth 0 0 0 1 2 2, answers 0 0 1 1 1 3.

    Class 0: 2 hits of 2 answers and 3 true: 1, 2/3, 4/5. Class 1: 1 of 3 and 1: 1/3, 1, 1/2. Class 2: never answered:
    0, 0, 0. Class 3 is in no truth: it only costs class 2 its recall. Means: 4/9, 5/9, 13/30; 3 of 6 right.
    """
    figures = classification([0, 0, 1, 1, 1, 3], [0, 0, 0, 1, 2, 2])
    assert list(figures) == ["accuracy", "macro_precision", "macro_recall", "macro_f1"]
    assert list(figures.values()) == pytest.approx([3 / 6, 4 / 9, 5 / 9, 13 / 30])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30))
def test_classification_is_that_of_scikit_learn(samples):
    predicted, truth = np.array(samples).T
    wanted = precision_recall_fscore_support(
        truth, predicted, labels=np.unique(truth), average="macro", zero_division=0
    )[:3]
    figures = classification(predicted, truth)
    assert list(figures.values()) == pytest.approx([accuracy_score(truth, predicted), *wanted])


def test_ranking_by_hand():
    """Scores of class 1: 1, 3 | 2, 3 (its own): pairs 2>1, 2<3, 3>1, 3=3: 2.5 of 4."""
    told = ranking([[9, 1], [9, 3], [0, 2], [0, 3]], [0, 0, 1, 1])
    assert told == {"macro_auroc": pytest.approx((1 + 2.5 / 4) / 2)}
    assert ranking(np.zeros((3, 11)), [4, 4, 4]) == {"top5_accuracy": 0}  # a model that prefers nothing


@pytest.mark.parametrize("classes", [2, 7, 12])
def test_ranking_is_that_of_scikit_learn(rng, classes):
    truth = np.concatenate([np.arange(classes), rng.integers(0, classes, 60)])
    scores = rng.dirichlet(np.ones(classes), len(truth)).round(2) + np.eye(classes)[truth] * 0.1
    scores /= scores.sum(1, keepdims=True)
    figures = ranking(scores, truth)
    areas = [roc_auc_score(truth == c, scores[:, c]) for c in range(classes)]
    assert figures["macro_auroc"] == pytest.approx(np.mean(areas))
    if classes > 2:
        assert figures["macro_auroc"] == pytest.approx(roc_auc_score(truth, scores, multi_class="ovr"))
    assert ("top5_accuracy" in figures) == (classes > 10)
    apart = scores + rng.uniform(0, 1e-6, scores.shape)  # without ties
    assert ranking(apart, truth).get("top5_accuracy", 0) == (
        top_k_accuracy_score(truth, apart, k=5) if classes > 10 else 0
    )


def test_average_precision_by_hand():
    """Scores .9 (its own) .8 (not) .7 (its own): 1/2 x 1/1 + 1/2 x 2/3; the second class: of .6 .6 one: 1 x 1/2."""
    p = np.array([[0.9, 0.6, 0.1], [0.8, 0.6, 0.1], [0.7, 0.1, 0.1]])
    sets = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 0]], bool)  # nothing is of the third
    figures = several_labels(p, sets)
    assert figures["mean_average_precision"] == pytest.approx((0.5 + 1 / 3 + 0.5) / 2)
    # from 1/2 on: the first class 3 answers, 2 hits of 2; the second 2 answers, 1 hit of 1
    assert figures["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert several_labels(p, sets & False) == {}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 25), st.integers(0, 1000))
def test_several_labels_are_judged_as_by_scikit_learn(classes, samples, seed):
    rng = np.random.default_rng(seed)
    p, sets = rng.random((samples, classes)).round(1), rng.random((samples, classes)) < 0.4
    there = np.flatnonzero(sets.any(axis=0))
    figures = several_labels(p, sets)
    if there.size:
        wanted = average_precision_score(sets[:, there], p[:, there], average="macro")
        assert figures["mean_average_precision"] == pytest.approx(wanted)
        each = [f1_score(sets[:, c], p[:, c] >= 0.5, zero_division=0) for c in there]
        assert figures["macro_f1"] == pytest.approx(np.mean(each))


def test_ranks_by_hand():
    """Query (1, 0) against (1, 0), (0, 1), (1, 1), own (1, 1): cosines 1, 0, .71, so one is ahead: rank 2."""
    queries = [[1, 0], [0, 2], [1, 0]]
    candidates = [[3, 0], [0, 1], [1, 1]]
    assert retrieval_ranks(queries, candidates).tolist() == [1, 1, 2]
    assert retrieval_ranks([[1, 0]], [[0, 1]]).tolist() == [1]


def test_whoever_is_as_near_as_the_own_one_counts_as_ahead(rng):
    alike = np.tile(rng.normal(size=8).astype(np.float32), (6, 1))
    alike *= np.float32(1) + np.arange(6, dtype=np.float32)[:, None] * np.float32(1e-7)  # rounding apart
    assert retrieval_ranks(rng.normal(size=(6, 8)), alike).tolist() == [6] * 6
    assert retrieval("a", "b", np.zeros((6, 4)), np.zeros((6, 4)))["a_to_b_recall_at_1"] == 0
    # cosines 1 and .9999995 are equal, 1 and .999998 are not: TIE lies between
    near, far = ([np.cos(angle), np.sin(angle)] for angle in (1e-3, 2e-3))
    assert retrieval_ranks([[1, 0], near], [[1, 0], near]).tolist() == [2, 2]
    assert retrieval_ranks([[1, 0], far], [[1, 0], far]).tolist() == [1, 1]


def test_what_can_not_be_compared_is_no_hit(rng):
    broken = rng.normal(size=(4, 3))
    broken[1] = np.nan
    ranks = retrieval_ranks(rng.normal(size=(4, 3)), broken)
    assert ranks[1] == 4
    assert (ranks[[0, 2, 3]] >= 2).all()


@pytest.mark.parametrize("k", [1, 5, 10, 50])
def test_recalls_are_scikit_learns_top_k_accuracy(k, rng):
    z_a = rng.normal(size=(300, 5))
    z_b = z_a + 2 * rng.normal(size=(300, 5))
    unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_a, z_b)]
    similarity = unit[0] @ unit[1].T
    figures = retrieval("x", "y", z_a, z_b)
    for name, scores in ((f"x_to_y_recall_at_{k}", similarity), (f"y_to_x_recall_at_{k}", similarity.T)):
        assert figures[name] == pytest.approx(top_k_accuracy_score(np.arange(300), scores, k=k))
    assert len(figures) == 9
    assert 0 < figures["x_to_y_recall_at_1"] < figures["x_to_y_recall_at_50"] < 1


def test_the_ways_differ_and_rsum_adds_ones_fives_and_tens_in_percent():
    """Ten on a circle, 36 degrees apart, and b_1 lies where b_0 is.

    a to b: a_0 has b_0 and b_1 alike, rank 2; a_1 has b_0, b_1 and b_2 each 36 degrees off, rank 3. Back: b_1 has a_0
    nearest and then a_1 and a_9 alike, rank 3.
    """
    angles = np.deg2rad(36 * np.arange(10))
    z_a = np.stack([np.cos(angles), np.sin(angles)], 1)
    z_b = z_a.copy()
    z_b[1] = z_b[0]
    figures = retrieval("a", "b", z_a, z_b)
    assert retrieval_ranks(z_a, z_b).tolist() == [2, 3, 1, 1, 1, 1, 1, 1, 1, 1]
    assert retrieval_ranks(z_b, z_a).tolist() == [1, 3, 1, 1, 1, 1, 1, 1, 1, 1]
    assert figures == pytest.approx(
        {
            "a_to_b_recall_at_1": 0.8,
            "a_to_b_recall_at_5": 1,
            "a_to_b_recall_at_10": 1,
            "b_to_a_recall_at_1": 0.9,
            "b_to_a_recall_at_5": 1,
            "b_to_a_recall_at_10": 1,
            "rsum": 80 + 90 + 400,
        }
    )


def test_a_k_beyond_the_candidates_is_left_out_and_then_the_sum_as_well():
    nine = {f"{way}_recall_at_{k}" for way in ("a_to_b", "b_to_a") for k in (1, 5)}
    assert set(retrieval("a", "b", np.eye(9), np.eye(9))) == nine
    assert retrieval("a", "b", np.eye(10), np.eye(10))["rsum"] == 600
    assert "a_to_b_recall_at_50" not in retrieval("a", "b", np.eye(49), np.eye(49))
    assert "a_to_b_recall_at_50" in retrieval("a", "b", np.eye(50), np.eye(50))


def test_blocks_of_queries_change_nothing(monkeypatch, rng):
    z_a, z_b = rng.normal(size=(2, 11, 3))
    whole = retrieval_ranks(z_a, z_b)
    monkeypatch.setattr(metrics, "_BLOCK", 4)
    assert retrieval_ranks(z_a, z_b).tolist() == whole.tolist()


def test_the_order_of_the_pairs_does_not_matter(rng):
    z_a, z_b = rng.normal(size=(2, 12, 3))
    order = rng.permutation(12)
    assert retrieval("a", "b", z_a[order], z_b[order]) == pytest.approx(retrieval("a", "b", z_a, z_b))


def test_nothing_to_judge_is_an_error_and_so_are_lengths_that_differ():
    with pytest.raises(DataError, match="no sample"):
        classification([], [])
    with pytest.raises(DataError, match="no sample"):
        retrieval_ranks(np.zeros((0, 3)), np.zeros((0, 3)))
    with pytest.raises(DataError, match=r"\[2\].*\[3\]"):
        classification([1, 2], [1, 2, 3])
    with pytest.raises(DataError, match=r"\[2, 3\].*\[3, 3\]"):
        retrieval("a", "b", np.zeros((2, 3)), np.zeros((3, 3)))


def test_every_drawing_of_what_a_text_says_is_right():
    """Texts 0 and 1 are one: image 1 is nearest to text 0, which counts as found; for image 2 they are both wrong."""
    texts = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    images = np.array([[0.6, 0.8], [1.0, 0.1], [0.8, 0.6]])
    assert retrieval_ranks(texts, images).tolist() == [3, 1, 2]  # each only by its own row
    items = [same_items(texts)]
    assert items[0].tolist() == [0, 0, 1]
    assert retrieval_ranks(texts, images, items).tolist() == [1, 1, 2]
    assert retrieval_ranks(images, texts, items).tolist() == [2, 1, 3]
    assert same_items(np.zeros((2, 3, 1), np.float32)).tolist() == [0, 0]


def test_pairs_are_unordered():
    assert pairs(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert pairs(["a"]) == []
