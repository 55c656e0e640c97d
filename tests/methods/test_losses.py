"""Contrastive terms of the loss: by hand, and against torch's and scikit-learn's own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it
from hypothesis import given
from hypothesis import strategies as st
from losses_fixture import EXAMPLES, flags, near, normal, oracle, table, tensor
from sklearn.metrics.pairwise import cosine_similarity

from edgefl.methods.apromfl.margin import margin
from edgefl.methods.apromfl.transfer import cluster_contrast, cluster_terms
from edgefl.methods.fedmml.clip import clip, clip_loss
from edgefl.methods.pmcmfl.contrast import prototype_alignment, prototype_contrast

# ---- clip


@pytest.mark.parametrize("case", ["clip-1", "clip-2", "clip-3", "clip-4"])
def test_clip_loss_by_hand(case):
    inputs, expected = oracle(case)
    loss = clip_loss(inputs["z_a"], inputs["z_b"], inputs["temperature"])
    near(loss, expected)
    every = torch.ones(len(inputs["z_a"]), dtype=torch.bool)
    near(clip({"a": 3 * inputs["z_a"], "b": inputs["z_b"]}, {"a": every, "b": every}, inputs["temperature"]), expected)


@EXAMPLES
@given(st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=6), st.integers(0, 1000))
def test_clip_is_the_mean_over_pairs_of_clip_loss_on_the_rows_that_have_both(rows, seed):
    has = {m: torch.tensor([row[i] for row in rows]) for i, m in enumerate("abc")}
    e = {m: normal(seed + i, len(rows), 4) for i, m in enumerate("abc")}
    found = []
    for a, b in ("ab", "ac", "bc"):
        both = has[a] & has[b]
        if both.sum() >= 2:
            found.append(clip_loss(F.normalize(e[a][both], dim=1), F.normalize(e[b][both], dim=1), 0.5))
    torch.testing.assert_close(clip(e, has, 0.5), sum(found, tensor(0.0)) / max(len(found), 1))


# ---- margin


def test_margin_by_hand():
    """Cosines [[1, .6], [0, .8]] - margins .9 and .2: pull (0 + .1)/2, push (.4 + 0)/2."""
    e = {"a": tensor([[2, 0], [0, 1]]), "b": tensor([[1, 0], [0.6, 0.8]])}
    near(margin(e, flags("11", "11"), 0.9, 0.2), 0.05 + 0.2)
    near(margin({"b": e["b"], "a": e["a"]}, flags("11", "11"), 0.9, 0.2), 0.25)
    near(margin(e, flags("11", "11")), 0.2)  # .8 and .2 are the defaults
    near(margin({"a": e["a"], "b": e["b"]}, flags("01", "11"), 0.9, 0.2), 0.1)  # one row: nothing to push


def test_margin_agrees_with_torch_on_every_pair():
    e = {m: normal(i, 5, 3) for i, m in enumerate("abc")}
    found = []
    for a, b in ("ab", "ac", "bc"):
        left, right = (
            e[m][index] for m, index in ((a, torch.arange(5).repeat_interleave(5)), (b, torch.arange(5).repeat(5)))
        )
        same = torch.eye(5, dtype=torch.bool).flatten()
        # CosineEmbeddingLoss pulls to 1; the hinge at .8 is that, less .2.
        pull = F.relu(F.cosine_embedding_loss(left, right, torch.ones(25), reduction="none") - 0.2)[same].mean()
        push = F.cosine_embedding_loss(left, right, -torch.ones(25), margin=0.2, reduction="none")[~same].mean()
        found.append(pull + push)
    torch.testing.assert_close(margin(e, flags(*["11111"] * 3)), torch.stack(found).mean())


def test_margin_is_over_the_rows_that_have_both():
    e, both = {m: normal(i, 5, 3) for i, m in enumerate("ab")}, [1, 2, 4]
    selected = margin({m: rows[both] for m, rows in e.items()}, flags("111", "111"))
    torch.testing.assert_close(margin(e, flags("01111", "11101")), selected)


# ---- prototype contrast


@pytest.mark.parametrize("case", ["contrast-1", "contrast-2"])
def test_prototype_contrast_by_hand(case):
    inputs, expected = oracle(case)
    near(prototype_contrast(inputs["h"], table(inputs["prototypes"]), inputs["y"], inputs["temperature"]), expected)
    if case == "contrast-2":
        near(prototype_contrast(inputs["h"], table(inputs["prototypes"]), inputs["y"]), expected)


def test_prototype_contrast_by_class_is_cross_entropy_over_the_classes_that_have_a_prototype():
    h, rows, labels = normal(1, 5, 3), normal(2, 4, 3), torch.tensor([0, 1, 3, 1, 0])
    loss = prototype_contrast(h, table(rows), labels, 0.5, class_level=True)
    torch.testing.assert_close(loss, F.cross_entropy(h @ rows.T / 0.5, labels))
    known = [0, 1, 3]  # class 2 has none
    partly = prototype_contrast(h, table(rows, [True, True, False, True]), labels, 0.5, class_level=True)
    torch.testing.assert_close(partly, F.cross_entropy(h @ rows[known].T / 0.5, torch.tensor([0, 1, 2, 1, 0])))


@pytest.mark.parametrize("class_level", [False, True])
def test_prototype_contrast_leaves_out_rows_without_a_label_or_prototype_on_both_sides(class_level):
    h, rows, labels = normal(1, 5, 3), normal(2, 3, 3), torch.tensor([0, -1, 1, 2, 0])
    some, kept = table(rows, [True, False, True]), [0, 3, 4]
    whole = prototype_contrast(h, some, labels, 0.5, class_level=class_level)
    torch.testing.assert_close(whole, prototype_contrast(h[kept], some, labels[kept], 0.5, class_level=class_level))
    assert prototype_contrast(h, table(rows, [False] * 3), labels, 0.5, class_level=class_level) == 0


def test_prototype_alignment_is_the_mean_squared_error_to_the_own_class_s():
    """(1, 0) to (1, 2): 4 / 2; (3, 1) to (0, 1): 9 / 2; unlabelled, and of a class without a prototype: left out."""
    h, labels = tensor([[1, 0], [3, 1], [7, 7], [8, 8]]), torch.tensor([0, 1, -1, 2])
    known = table(tensor([[1, 2], [0, 1], [0, 0]]), [True, True, False])
    near(prototype_alignment(h, known, labels), (2 + 4.5) / 2)
    near(F.mse_loss(h[:2], known.rows[:2]), (2 + 4.5) / 2)


def test_prototype_contrast_of_one_row_is_that_row_s():
    """h = [1, 0] against [1, 0] and [0, 1]: log(1 + 1/e); among samples it has nothing to differ from."""
    h, two, labels = tensor([[1, 0], [5, 5]]), table(tensor([[1, 0], [0, 1]])), torch.tensor([0, -1])
    near(prototype_contrast(h, two, labels, 1.0, class_level=True), math.log1p(math.exp(-1)))
    near(prototype_contrast(h, two, labels, 1.0), 0.0)


# ---- contrast within and between modalities


def inter(e_a, e_b, labels, temperature, has_a=None, has_b=None):
    every = torch.ones(len(labels), dtype=torch.bool)
    has_a, has_b = (every if has is None else has for has in (has_a, has_b))
    return cluster_terms(e_a, e_b, labels, temperature, has_a, has_b)


def intra(e, labels, temperature, has=None):
    return inter(e, e, labels, temperature, has, has)


def test_intra_by_hand():
    inputs, expected = oracle("intra-1")
    terms = intra(inputs["e"], inputs["labels"], inputs["temperature"])
    near(terms.values, expected)
    near(terms.mean(), np.mean(expected))


def test_inter_by_hand():
    inputs, expected = oracle("inter-1")
    terms = inter(inputs["image"], inputs["text"], inputs["labels"], inputs["temperature"])
    near(terms.values, expected)
    near(terms.mean(), np.mean(expected))


def test_cluster_contrast_is_the_sum_over_modalities_and_pairs():
    e, labels = {m: normal(i, 4, 3) for i, m in enumerate("abc")}, torch.tensor([0, 1, 0, 1])
    parts = [intra(e[m], labels, 0.5).mean() for m in "abc"]
    parts += [inter(e[a], e[b], labels, 0.5).mean() for a, b in ("ab", "ac", "bc")]
    every = flags(*["1111"] * 3)
    torch.testing.assert_close(cluster_contrast(e, every, labels, 0.5), sum(parts))


@EXAMPLES
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(-1, 2)), min_size=1, max_size=7), st.integers(0, 99)
)
def test_contrast_by_cluster_is_that_of_the_labelled_rows_that_are_there(rows, seed):
    has = {m: torch.tensor([row[i] for row in rows]) for i, m in enumerate("ab")}
    labels, e = torch.tensor([row[2] for row in rows]), {m: normal(seed + i, len(rows), 3) for i, m in enumerate("ab")}
    keep_a, keep_b = (has[m] & (labels >= 0) for m in "ab")
    within = intra(e["a"], labels, 0.5, has=has["a"])
    torch.testing.assert_close(within.values[keep_a], intra(e["a"][keep_a], labels[keep_a], 0.5).values)
    assert torch.equal(within.counts, keep_a)
    between = inter(e["a"], e["b"], labels, 0.5, has["a"], has["b"])
    cosine = cosine_similarity(e["a"], e["b"])
    for i, value in enumerate(between.values):
        friends = keep_b & (labels == labels[i])
        counts = bool(keep_a[i] and friends.any())
        assert bool(between.counts[i]) == counts
        logits = tensor(cosine[i]) / 0.5
        expected = logits[keep_b].logsumexp(0) - logits[friends].mean() if counts else tensor(0.0)
        torch.testing.assert_close(value, expected)
