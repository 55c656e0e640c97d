"""The test set that is held out: every class on both sides where samples allow it, else it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config.settings import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.data.hold_out import held_groups, hold_out, untested
from edgefl.data.prepare import prepare_shares


def data(
    labels: Sequence[int], groups: Sequence[object] | None = None, recordings: Sequence[object] | None = None
) -> Dataset:
    count = len(labels)
    acc = np.arange(count, dtype=np.float32)[:, None, None]
    names = tuple("abcdefghijklmnop"[: max(labels, default=0) + 1])
    own = [None if each is None else np.array(list(map(str, each))) for each in (groups, recordings)]
    present = {"acc": np.ones(count, bool)}
    return Dataset(
        {"acc": acc},
        present,
        np.array(labels),
        names,
        list(map(str, range(count))),
        own[0],
        [],
        {},
        frozenset(),
        own[1],
    )


def split(found: Dataset, seed: int = 0, **options: object) -> tuple[set[int], set[int], str]:
    """Classes that are trained on, classes that are tested, and the origin of the test set."""
    train, test, origin = hold_out(found, DataConfig(**options), 1, seed)
    assert len(train) + len(test) == len(found)
    assert sorted(train.ids + test.ids, key=int) == found.ids
    assert train.labels is not None
    assert test.labels is not None
    return set(train.labels.tolist()), set(test.labels.tolist()), origin


@pytest.mark.parametrize("seed", range(5))
def test_every_class_of_two_recordings_is_tested_and_trained_on(seed: int):
    """Eight recordings of four classes, as of a watch, of 10 windows each; 2 of 20 samples of a rare class."""
    labels = np.repeat([0, 0, 1, 1, 2, 2, 3, 3], 10)
    found = data(labels.tolist(), recordings=np.repeat(range(8), 10).tolist())
    assert split(found, seed) == ({0, 1, 2, 3}, {0, 1, 2, 3}, "samples")
    assert split(data([0] * 18 + [1] * 2), seed) == ({0, 1}, {0, 1}, "samples")


@pytest.mark.parametrize("seed", range(5))
def test_a_class_of_one_sample_is_trained_on_and_said_to_be_untested(seed: int):
    trained, tested, _ = split(data([0] * 10 + [1] * 10 + [2]), seed)
    assert (trained, tested) == ({0, 1, 2}, {0, 1})


@pytest.mark.parametrize("seed", range(10))
def test_whole_people_are_held_out_such_that_every_class_is_on_both_sides(seed: int):
    """Ten people of two classes each; class 4 is of two people alone, class 5 of one, who trains."""
    classes = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 3), (2, 4), (3, 1), (0, 2), (1, 5)]
    labels = [label for two in classes for label in two for _ in range(6)]
    people = [f"p{person}" for person in range(10) for _ in range(12)]
    train, test, origin = hold_out(data(labels, people), DataConfig(), 1, seed)
    assert origin == "groups"
    assert train.groups is not None
    assert test.groups is not None
    assert not set(train.groups) & set(test.groups)
    assert 2 <= len(set(test.groups)) <= 5
    assert train.labels is not None
    assert test.labels is not None
    assert set(train.labels.tolist()) == {0, 1, 2, 3, 4, 5}
    assert set(test.labels.tolist()) == {0, 1, 2, 3, 4}


def test_people_who_are_the_classes_are_not_held_out_whole():
    people = [person for person in range(5) for _ in range(10)]
    assert split(data(people, people)) == ({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, "samples")


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_group_is_no_half_of_the_samples(seed: int, tmp_path: Path):
    """Of two languages one was the test set, half of the data; of three one is a third, which is said."""
    labels = [0, 1] * 30
    train, test, origin = hold_out(data(labels, ["en"] * 30 + ["fr"] * 30), DataConfig(), 1, seed)
    assert (origin, len(test)) == ("samples", 12)
    assert held_groups(train, test) == ()
    train, test, origin = hold_out(data(labels, ["en"] * 2 + ["fr"] * 8 + ["es"] * 50), DataConfig(), 1, seed)
    assert origin == "samples" or len(test) <= 8
    third = data(labels, ["en"] * 20 + ["fr"] * 20 + ["es"] * 20)
    third.save_npz(tmp_path / "a.npz")
    ready = prepare_shares(DataConfig(source=str(tmp_path / "a.npz"), partition={"uniform": {}}), ["x"], tmp_path, seed)
    (warned,) = ready.warnings
    assert ": 20 of 60 samples" in warned


def test_samples_of_no_group_are_no_group() -> None:
    people = [""] * 30 + ["anna"] * 30 + ["ben"] * 30
    assert split(data([0, 1] * 45, people), 1)[2] == "samples"
    people = [""] * 30 + [f"p{i % 5}" for i in range(60)]
    _, test, origin = hold_out(data([0, 1] * 45, people), DataConfig(), 1, 0)
    assert test.groups is not None
    assert (origin, "" in set(test.groups.tolist())) == ("groups", False)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=60),
    st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_recordings_are_whole_and_what_two_of_them_have_is_tested(
    rows: list[tuple[int, int, int]], seed: int, natural: bool
):
    """A recording is of one person and class."""
    labels, people, _ = zip(*sorted(rows), strict=True)
    recordings = ["-".join(map(str, row)) for row in sorted(rows)]
    of = {label: {r for r, at in zip(recordings, labels, strict=True) if at == label} for label in labels}
    found, devices = data(labels, people, recordings), 9 if natural else 1
    how = DataConfig(**({"partition": {"natural": {}}} if natural else {}))
    if all(len(every) == 1 for every in of.values()):
        return  # one of each class: a fifth of them where there are five, else an error
    train, test, origin = hold_out(found, how, devices, seed)
    assert train.recordings is not None
    assert test.recordings is not None
    assert not set(train.recordings) & set(test.recordings)
    assert train.labels is not None
    assert test.labels is not None
    both = set(train.labels.tolist()) & set(test.labels.tolist())
    assert origin == "groups" or both == {label for label, every in of.items() if len(every) > 1}


def test_what_is_not_tested_or_only_tested_is_said(tmp_path: Path):
    train, test = data([0, 0, 1, 3]), data([0, 2, 3])
    test = replace(test, label_names=train.label_names)
    assert untested(train, test) == (
        "the test set has no sample of 1 of 4 classes (b), so that its scores leave them out",
        "no device trains on 1 of 4 classes (c), which the test set has",
    )
    assert untested(train, train) == ()
    data([0] * 10 + [1] * 10 + [2]).save_npz(tmp_path / "a.npz")
    how = DataConfig(source=str(tmp_path / "a.npz"), partition={"uniform": {}})
    ready = prepare_shares(how, ["x"], tmp_path, 0)
    assert ready.warnings == ("the test set has no sample of 1 of 3 classes (c), so that its scores leave them out",)
