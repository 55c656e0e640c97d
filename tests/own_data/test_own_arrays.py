"""Which arrays of a user's own .npz are what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.npz import Arrays, facts_of_arrays, read_arrays


def arrays(folder: Path, split: list[object]) -> Arrays:
    """Of a file of ten samples, numbered, with this split."""
    np.savez(folder / "a.npz", acc=np.arange(10.0)[:, None, None], split=np.array(split))
    return read_arrays(folder / "a.npz")


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("Training", "Validation"), ("a", "held-out"), (0, 1), (False, True)]
)
def test_the_test_set_is_what_is_called_so(tmp_path: Path, train: object, test: object):
    found = arrays(tmp_path, [train] * 8 + [test] * 2)
    assert found.train["acc"].ravel().tolist() == list(range(8))
    assert found.test["acc"].ravel().tolist() == [8, 9]


@pytest.mark.parametrize("values", [("test", "val"), ("a", "b")])
def test_a_split_that_names_no_test_set_or_two_is_refused(tmp_path: Path, values: tuple[str, str]):
    with pytest.raises(DataError, match=f"holds '{values[0]}' and '{values[1]}'"):
        arrays(tmp_path, [values[0]] * 8 + [values[1]] * 2)


def test_rows_of_numbers_are_a_table_unless_the_user_says_otherwise(tmp_path: Path):
    np.savez(tmp_path / "a.npz", digits=np.zeros((9, 64)), grey=np.zeros((9, 8, 8)), walk=np.zeros((9, 50, 3)))
    data = Dataset.load_npz(tmp_path / "a.npz")
    rows = {"digits"}
    assert {m: one.kind for m, one in facts_of_arrays(data, rows).items()} == {
        "digits": "table", "grey": "sensor", "walk": "sensor",
    }  # fmt: skip
    said = facts_of_arrays(data, rows, {"digits": "sensor"})
    assert said["digits"].kind == "sensor"


def test_grey_pictures_in_an_array_are_pictures_where_the_user_says_so(tmp_path: Path):
    np.savez(tmp_path / "a.npz", digits=np.ones((9, 8, 8)))
    data = Dataset.load_npz(tmp_path / "a.npz")
    assert facts_of_arrays(data, (), {"digits": "vision"})["digits"].sides == [8]
    again = Dataset.load_npz(tmp_path / "a.npz", {"digits": EncoderSpec("vision", (8, 8, 1))})
    assert again.signature() == {"digits": (8, 8, 1)}


def test_labels_of_fewer_samples_are_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.ones((12, 3)), y=np.arange(11) % 2)
    with pytest.raises(DataError, match="the array y has 11 labels, and there are 12 samples"):
        read_arrays(tmp_path / "a.npz")
