"""Samples of several labels: how they are read, kept and renumbered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import classes_in, in_words, set_names
from edgefl.data.sources import load
from edgefl.errors import DataError

ACC = np.zeros((4, 8, 1), np.float32)


def manifest(folder: Path, *labels: object) -> Path:
    lines = [{"acc": [[0.0]] * 4, "label": label} for label in labels]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_names_say_that_a_sample_may_have_several() -> None:
    assert classes_in(set_names(["cat", "dog"])) == ("cat", "dog")
    assert classes_in(("cat", "&dog")) is None
    assert classes_in(()) is None
    assert in_words([True, True], ("cat", "dog")) == "cat;dog"
    assert in_words([False, False], ("cat", "dog")) == "none"


def test_an_array_of_0_and_1_is_kept_as_it_is(tmp_path: Path) -> None:
    given = np.array([[1, 1, 0], [0, 0, 0], [-1, -1, -1], [0, 0, 1]])
    np.savez(tmp_path / "a.npz", acc=ACC, label=given, label_names=np.array(["cat", "dog", "owl"]))
    data = Dataset.load_npz(tmp_path / "a.npz")
    data.save_npz(tmp_path / "b.npz")
    again = Dataset.load_npz(tmp_path / "b.npz")
    for each in (data, again):
        assert each.label_names == ("&cat", "&dog", "&owl")
        assert each.sets is not None
        assert each.sets.tolist() == (given == 1).tolist()
        assert each.labels is not None
        assert each.labels.tolist() == [0, 0, -1, 2]  # the second has none of them, of the third nothing is known
    assert again.class_counts() == (1, 1, 1)
    assert again.subset([0]).class_counts() == (1, 1, 0)


def test_one_1_in_every_row_is_one_label_each(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", acc=ACC, label=np.eye(4, dtype=np.int8)[[3, 1, 0, 3]])
    data = Dataset.load_npz(tmp_path / "a.npz")
    assert data.sets is None
    assert data.labels is not None
    assert data.labels.tolist() == [3, 1, 0, 3]
    assert data.label_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(("label", "says"), [(np.full((4, 2), 2), "besides 0 and 1"), (np.ones((4, 3)), "3 columns")])
def test_other_arrays_of_two_axes_are_refused(label: np.ndarray, says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", acc=ACC, label=label, label_names=np.array(["cat", "dog"]))
    with pytest.raises(DataError, match=says):
        Dataset.load_npz(tmp_path / "a.npz")


def test_lists_in_a_manifest(tmp_path: Path) -> None:
    data = load(manifest(tmp_path, ["dog", "cat"], [], None, "owl"))
    assert data.label_names == ("&cat", "&dog", "&owl")
    assert data.sets is not None
    assert data.sets.astype(int).tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert data.labels is not None
    assert data.labels.tolist() == [0, 0, -1, 2]
    known = load(tmp_path, label_names=("&owl", "&cat", "&dog"))  # as a model numbers them
    assert known.sets is not None
    assert known.sets[0].astype(int).tolist() == [0, 1, 1]
    with pytest.raises(DataError, match="'dog' is out of range; valid: cat, owl"):
        load(tmp_path, label_names=("&cat", "&owl"))


def test_one_label_is_a_set_of_one_and_several_are_no_class(tmp_path: Path) -> None:
    one = load(manifest(tmp_path, "dog", "cat", None))
    as_sets = one.relabelled(("&cat", "&cow", "&dog"))
    assert as_sets.sets is not None
    assert as_sets.sets.astype(int).tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert as_sets.labels is not None
    assert as_sets.labels.tolist() == [2, 0, -1]
    with pytest.raises(DataError, match="labels not known to the model: dog; it knows: cat, cow"):
        one.relabelled(("&cat", "&cow"))
    with pytest.raises(DataError, match="samples have several labels, and the model knows one of cat, dog each"):
        as_sets.relabelled(("cat", "dog"))


def test_numbers_without_names_are_places(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", acc=ACC, label=np.array([[1, 1], [0, 0], [1, 0], [0, 1]]))
    data = load(tmp_path / "a.npz", label_names=("&cat", "&dog"))
    assert data.label_names == ("&cat", "&dog")
    assert data.class_counts() == (2, 2)
