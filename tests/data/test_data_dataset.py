"""Dataset: what a share is, how it is cut, renumbered, and kept on disk."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from edgefl.data.arrays import write_npz
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError, StoreError


def small() -> Dataset:
    """Three samples; the second lacks gyro, the third has no label."""
    acc = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    gyro = np.ones((3, 2, 1), dtype=np.float32)
    gyro[1] = 0
    present = {"acc": np.ones(3, dtype=bool), "gyro": np.array([True, False, True])}
    labels = np.array([1, 0, -1])
    return Dataset(
        {"acc": acc, "gyro": gyro}, present, labels, ("rest", "walk"), ["a", "b", "c"], np.array(list("xyx"))
    )


def test_says_what_it_holds():
    data = small()
    assert len(data) == 3
    assert data.signature() == {"acc": (2, 2), "gyro": (2, 1)}
    assert data.samples() == {"": 3, "acc": 3, "gyro": 2, "&acc&gyro": 2}
    assert data.class_counts() == (1, 1)
    assert not data.has("image").any()
    with pytest.raises(DataError, match="label 1 is out of range: there are 1 classes"):
        replace(data, label_names=data.label_names[:1])


def test_subset_by_index_and_by_mask():
    data = small()
    assert data.subset([2, 0]).ids == ["c", "a"]
    one = data.subset(np.array([False, True, False]))
    assert one.ids == ["b"]
    assert one.signature() == {"acc": (2, 2)}  # nobody left has gyro
    assert one.groups is not None
    assert list(one.groups) == ["y"]
    assert len(data.subset([])) == 0


def test_npz_round_trip_keeps_everything(tmp_path):
    data, path = small(), tmp_path / "deep" / "share.npz"
    data.save_npz(path)
    back = Dataset.load_npz(path)
    for name in ("acc", "gyro"):
        assert np.array_equal(back.modalities[name], data.modalities[name])
        assert np.array_equal(back.present[name], data.present[name])
    assert (back.labels == data.labels).all()
    assert (back.label_names, back.ids) == (data.label_names, data.ids)
    assert list(back.groups) == list(data.groups)
    assert [p.name for p in path.parent.iterdir()] == ["share.npz"]  # no temporary file stays
    with np.load(path, allow_pickle=False) as plain:  # an ordinary npz
        assert set(plain.files) == {
            "acc",
            "acc.present",
            "gyro",
            "gyro.present",
            "label",
            "label_names",
            "ids",
            "group",
        }


def test_equal_data_gives_equal_bytes(tmp_path):
    for name in ("one", "two"):
        small().save_npz(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "share.npz"
    small().save_npz(path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(StoreError, match=r"share\.npz.*No space left"):
        small().subset([0]).save_npz(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_bare_npz_gets_defaults_and_absent_rows_are_zeroed(tmp_path):
    path = tmp_path / "x.npz"
    image = np.full((2, 4, 4, 1), 255, dtype=np.uint8)
    np.savez(path, image=image, text=np.ones((2, 3), dtype=np.int32), label=np.array([0, 2], dtype=np.uint8))
    data = Dataset.load_npz(path)
    assert data.modalities["image"].dtype == np.float32
    assert data.modalities["image"].max() == 1.0
    assert data.modalities["text"].dtype == np.int64
    assert (data.label_names, data.ids) == (("0", "2"), ["0", "1"])
    np.savez(path, **{"acc": np.ones((2, 3)), "acc.present": np.array([True, False])})
    assert Dataset.load_npz(path).modalities["acc"].tolist() == [[[1], [1], [1]], [[0], [0], [0]]]


def test_relabelled_follows_the_names():
    assert small().relabelled(["walk", "run", "rest"]).labels.tolist() == [0, 2, -1]
    bare = Dataset({}, {}, np.array([1, 0]), ("0", "1"), ["a", "b"])
    assert bare.relabelled(["walk", "rest"]).labels.tolist() == [1, 0]
    with pytest.raises(DataError, match="labels not known to the model: rest; it knows: walk"):
        small().relabelled(["walk"])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"acc": np.ones((2, 3)), "label": np.array([0, 1, 1])}, "'label' has 3 rows, but there are 2 samples"),
        ({"acc": np.ones((2, 3)), "gyro": np.ones((3, 3))}, "'gyro' has 3 rows"),
        ({"acc": np.ones(2)}, "samples along the first axis"),
        ({"label": np.array([0])}, "no modality"),
        ({"acc": np.ones((1, 3)), "label": np.array([-2])}, "label -2 is out of range"),
        ({"acc": np.ones((1, 3)), "label": np.array([2]), "label_names": np.array(["a", "b"])}, "there are 2 classes"),
        ({"acc": np.ones((1, 3)), "label": np.ones(1, bool)}, "not integers"),
        ({"acc": np.array([["1"]])}, "not numbers"),
        ({"fusion": np.ones((2, 3))}, "cannot name a modality"),
    ],
)
def test_inconsistent_npz_is_named(tmp_path, arrays, message):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        Dataset.load_npz(path)
    assert str(path) in caught.value.message


def test_damaged_and_hostile_files_are_refused(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(DataError, match="no such file"):
        Dataset.load_npz(path)
    path.write_bytes(b"PK not really")
    with pytest.raises(DataError, match=r"not a readable \.npz"):
        Dataset.load_npz(path)
    np.savez(path, acc=np.array([{"a": 1}], dtype=object))  # holds a pickle
    with pytest.raises(DataError, match="not accepted"):
        Dataset.load_npz(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("acc.npy", pickle.dumps([1]))
    with pytest.raises(DataError, match=r"not a readable \.npz"):
        Dataset.load_npz(path)


def test_a_header_that_promises_too_much_takes_no_memory(tmp_path):
    path = tmp_path / "x.npz"
    header = np.lib.format.magic(1, 0)
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 999)}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("acc.npy", header + len(text).to_bytes(2, "little") + text + b"\0" * 64)
    with pytest.raises(DataError, match="more than the file holds"):
        Dataset.load_npz(path)


def test_limit_on_the_whole_set(tmp_path, monkeypatch):
    small().save_npz(tmp_path / "x.npz")
    monkeypatch.setattr("edgefl.data.arrays.MAX_DATASET_BYTES", 100)
    with pytest.raises(DataError, match="more than the limit of 100"):
        Dataset.load_npz(tmp_path / "x.npz")


def test_arrays_of_any_layout_are_written_as_numpy_does(tmp_path):
    whole = np.arange(24.0).reshape(2, 3, 4)
    arrays = {
        "rows": whole,
        "columns": np.asfortranarray(whole),
        "transposed": whole.transpose(0, 2, 1),
        "every second": whole[..., ::2],
        "texts": np.array(["a", "bcd"]),
        "flags": np.array([True, False]),
        "one number": np.array(3),
        "nothing": np.zeros((0, 3)),
    }
    write_npz(tmp_path / "a.npz", arrays)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
        for name, array in arrays.items():
            np.save(tmp_path / "one.npy", array)
            assert archive.read(f"{name}.npy") == (tmp_path / "one.npy").read_bytes(), name
