"""Prototypes: the hand-computed cases, the rules for absent classes, and matching."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.errors import ModelError, ProtocolError
from edgefl.prototypes.table import ClassMeans, Merger, class_means, empty, from_tensors, to_tensors

ORACLES = {
    case["id"]: case for case in json.loads((Path(__file__).parents[1] / "oracles/oracles.json").read_text())["cases"]
}


def table(means: list[list[float]], counts: list[float]) -> ClassMeans:
    return ClassMeans(np.array(means, np.float32), np.array(counts, np.float32))


def merge(tables, weighting="modality", previous=None) -> ClassMeans:
    merger = Merger(weighting)
    for one in tables:
        merger.add(one)
    return merger.result(previous)


def client(values: dict) -> ClassMeans:
    means = [values["means"].get(c, [0, 0]) for c in ("0", "1")]
    return table(means, [values["counts"].get(c, 0) for c in ("0", "1")])


@pytest.mark.parametrize(("case", "weighting"), [("prototype-1", "modality"), ("prototype-2", "class")])
def test_merging_gives_the_hand_computed_prototypes(case, weighting):
    oracle = ORACLES[case]
    merged = merge([client(values) for values in oracle["inputs"]["clients"]], weighting)
    np.testing.assert_allclose(merged.means, [oracle["expect"]["0"], oracle["expect"]["1"]], atol=1e-6)
    assert merged.counts.tolist() == [2, 3]


def test_a_class_absent_everywhere_keeps_its_previous_row_and_one_never_seen_stays_absent():
    previous = table([[9, 9], [7, 7], [0, 0]], [4, 5, 0])
    merged = merge([table([[1, 1], [0, 0], [0, 0]], [3, 0, 0])], previous=previous)
    assert merged.means.tolist() == [[1, 1], [7, 7], [0, 0]]
    assert merged.counts.tolist() == [3, 5, 0]
    assert merged.present.tolist() == [True, True, False]


def test_merging_nothing_is_the_previous_table_or_an_error():
    previous = table([[1, 2]], [3])
    assert merge([], previous=previous) is previous
    with pytest.raises(ModelError, match="no prototypes to merge"):
        merge([])


def test_tables_of_different_shapes_are_refused_with_both_shapes():
    with pytest.raises(ModelError, match=r"\[1, 2\].*\[1, 3\]"):
        merge([empty(1, 3), empty(1, 2)])
    with pytest.raises(ModelError, match="weighting"):
        merge([], "sampels")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=6), st.randoms())
def test_merged_prototypes_stay_inside_the_hull_and_ignore_the_order(counts, shuffler):
    generator = np.random.default_rng(len(counts))
    tables = [
        ClassMeans(
            generator.uniform(1, 2, (3, 4)).astype(np.float32) * (np.array(n)[:, None] > 0), np.array(n, np.float32)
        )
        for n in counts
    ]
    merged = merge(tables)
    rows = merged.means[merged.present]
    assert ((rows >= 1 - 1e-5) & (rows <= 2 + 1e-5)).all()  # weights sum to one: no shrinking (D-P1)
    assert (merged.means[~merged.present] == 0).all()
    shuffler.shuffle(tables)
    np.testing.assert_allclose(merge(tables).means, merged.means, atol=1e-6)


def test_class_means_leave_unlabelled_samples_out_and_batches_merge_to_the_whole():
    h = np.array([[2, 0], [4, 0], [9, 9], [0, 6]], np.float32)
    whole = class_means(h, [0, 0, -1, 2], classes=3)
    assert whole.means.tolist() == [[3, 0], [0, 0], [0, 6]]
    assert whole.counts.tolist() == [2, 0, 1]
    batches = [class_means(h[:1], [0], 3), class_means(h[1:], [0, -1, 2], 3)]
    np.testing.assert_allclose(merge(batches, "class").means, whole.means, atol=1e-6)
    with pytest.raises(ModelError, match="label 3 is out of range"):
        class_means(h, [0, 0, 0, 3], classes=3)


def test_tables_survive_the_way_through_tensors():
    tables = {"acc": table([[1, 2], [0, 0]], [3, 0]), "fused": table([[5]], [1])}
    tensors = to_tensors(tables)
    assert sorted(tensors) == ["acc", "acc.count", "fused", "fused.count"]
    back = from_tensors(tensors)
    assert list(back) == ["acc", "fused"]
    np.testing.assert_array_equal(back["acc"].means, tables["acc"].means)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"acc": np.zeros((2, 3))}, "no counts"),
        ({"acc.count": np.zeros(2)}, "no table"),
        ({"acc": np.zeros((2, 3)), "acc.count": np.zeros(3)}, r"\[2, 3\] with counts \[3\]"),
        ({"acc": np.full((1, 1), np.nan), "acc.count": np.ones(1)}, "not finite"),
        ({"acc": np.zeros((1, 1)), "acc.count": -np.ones(1)}, "negative"),
    ],
)
def test_malformed_tensors_name_the_table(tensors, message):
    with pytest.raises(ProtocolError, match=message):
        from_tensors(tensors)
