"""Rows on disk: read as they were written, never in memory as a whole, gone with the process."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fixture import dataset

from edgefl.data.arrays import FileRows, RowFile, chosen, on_disk
from edgefl.errors import StoreError

VALUES = np.arange(7 * 2 * 3, dtype=np.float32).reshape(7, 2, 3)


@given(st.lists(st.integers(0, 6), max_size=12))
def test_any_rows_in_any_order_are_those_of_the_array(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int]
) -> None:
    kept = on_disk(VALUES, tmp_path_factory.getbasetemp())
    index = np.array(rows, np.int64)
    np.testing.assert_array_equal(kept[index], VALUES[index])
    np.testing.assert_array_equal(np.asarray(chosen(kept, index)), VALUES[index])


def test_rows_of_rows_flags_and_slices(tmp_path: Path) -> None:
    kept = chosen(on_disk(VALUES, tmp_path), np.array([5, 1, 4, 0]))
    assert isinstance(kept, FileRows)
    assert kept.shape == (4, 2, 3)
    assert len(kept) == 4
    np.testing.assert_array_equal(kept[np.array([True, False, True, False])], VALUES[[5, 4]])
    np.testing.assert_array_equal(kept[1:3], VALUES[[1, 4]])
    np.testing.assert_array_equal(np.asarray(kept.take(np.array([3, 3]))), VALUES[[0, 0]])


def test_written_anywhere_read_anywhere(tmp_path: Path) -> None:
    file = RowFile(tmp_path, (5, 2), np.float16)
    file.write(np.array([3, 4, 0]), np.array([[1, 2], [3, 4], [5, 6]]))
    np.testing.assert_array_equal(file.read(np.arange(5)), [[5, 6], [0, 0], [0, 0], [1, 2], [3, 4]])
    assert list(tmp_path.iterdir()) == []  # no name: nothing is left of a process that was killed


def test_nothing_stays_open_after_the_last_user(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = on_disk(VALUES, tmp_path).take(np.array([1]))
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    del kept
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_disk_without_room_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make a file in") as caught:
        RowFile(tmp_path, (2**40, 2**18), np.float32)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno in {errno.ENOSPC, errno.EFBIG}


def test_a_data_set_of_rows_on_disk_is_the_same(tmp_path: Path) -> None:
    data = dataset(absent={"a": [1, 2]})
    kept = dataclasses.replace(data, modalities={m: on_disk(v, tmp_path) for m, v in data.modalities.items()})
    some = kept.subset([4, 1, 7])
    assert all(isinstance(values, FileRows) for values in some.modalities.values())
    for m, values in data.subset([4, 1, 7]).modalities.items():
        np.testing.assert_array_equal(np.asarray(some.modalities[m]), values)
    kept.save_npz(tmp_path / "a.npz")
    data.save_npz(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
