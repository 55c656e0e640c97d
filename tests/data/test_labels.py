"""One class for one label: whole numbers with gaps, Unicode forms and blanks, over files, devices and models."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import Dataset
from edgefl.data.folder import read_manifest
from edgefl.data.labels import merged, texts_as_labels
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.samples import understand
from edgefl.own_data.trained_tables import read_trained
from edgefl.records import TableColumn

CAFE = "Caf\u00e9"
DECOMPOSED = unicodedata.normalize("NFD", CAFE)


def arrays(path: Path, **given: object) -> Dataset:
    np.savez(path, acc=np.zeros((len(given["label"]), 2, 1)), **given)  # type: ignore[arg-type]
    return Dataset.load_npz(path)


def folder(root: Path, *labels: object) -> Path:
    root.mkdir()
    lines = [{"id": f"s{i}", "acc": [i, 0], "label": label} for i, label in enumerate(labels)]
    (root / "manifest.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return root


def classes(data: Dataset) -> list[str]:
    """The name of each sample's label."""
    assert data.labels is not None
    return [data.label_names[label] if label >= 0 else "" for label in data.labels]


def test_whole_numbers_with_gaps_are_as_many_classes_as_occur(tmp_path: Path) -> None:
    data = arrays(tmp_path / "a.npz", label=[7, 1042, -1, 30011, 7])
    assert (data.label_names, classes(data)) == (("7", "1042", "30011"), ["7", "1042", "", "30011", "7"])
    assert read_manifest(folder(tmp_path / "f", 30011, 7, None, 1042)).label_names == data.label_names


@pytest.mark.parametrize("labels", [(30011, 7), ("30011", "7"), (7, 30011)])
def test_a_device_with_some_of_the_numbers_has_the_same_classes(tmp_path: Path, labels: tuple[object, ...]) -> None:
    names, expected = ("7", "1042", "30011"), [str(label) for label in labels]
    root = folder(tmp_path / "f", *labels)
    assert classes(read_manifest(root).relabelled(names)) == expected
    assert classes(read_manifest(root, label_names=names)) == expected
    assert classes(arrays(tmp_path / "a.npz", label=list(labels)).relabelled(names)) == expected


def test_a_number_is_no_place_among_numbers(tmp_path: Path) -> None:
    """1 of a device is the class 1 of the model, which stands in its second place; 0 is none of its classes."""
    names = ("0", "1", "3")
    assert classes(arrays(tmp_path / "a.npz", label=[3, 1]).relabelled(names)) == ["3", "1"]
    with pytest.raises(DataError, match="labels not known to the model: 2; it knows: 0, 1, 3"):
        arrays(tmp_path / "b.npz", label=[1, 2]).relabelled(names)
    with pytest.raises(DataError, match="label: 2 is out of range"):
        read_manifest(folder(tmp_path / "f", 1, 2), label_names=names)


def test_a_number_counts_names_that_are_words(tmp_path: Path) -> None:
    assert classes(arrays(tmp_path / "a.npz", label=[2, 0]).relabelled(("x", "y", "z"))) == ["z", "x"]
    assert classes(read_manifest(folder(tmp_path / "f", 2, 0), label_names=("x", "y", "z"))) == ["z", "x"]


def test_whole_numbers_are_values_to_a_model_that_predicts_a_number(tmp_path: Path) -> None:
    data = read_manifest(folder(tmp_path / "f", 3, 1), label_names=("~0.5", "~1.5", "~3.5"))
    assert data.targets is not None
    assert data.targets.tolist() == [3.0, 1.0]


def test_one_text_in_two_forms_is_one_class(tmp_path: Path) -> None:
    spelt = [CAFE, DECOMPOSED, f" {CAFE}\t", "bar", " "]
    for data in (arrays(tmp_path / "a.npz", label=spelt), read_manifest(folder(tmp_path / "f", *spelt))):
        assert data.label_names == (CAFE, "bar")
        assert classes(data) == [CAFE, CAFE, CAFE, "bar", ""]
        assert classes(data.relabelled(("bar", DECOMPOSED)))[1:4] == [DECOMPOSED, DECOMPOSED, "bar"]
    labels, names = merged(np.array([0, 1, 2, -1, 9]), [DECOMPOSED, CAFE, "bar"])
    assert (labels.tolist(), names) == ([0, 0, 1, -1, 9], (CAFE, "bar"))
    assert texts_as_labels(np.array([CAFE]), ["bar", DECOMPOSED])[0].tolist() == [1]
    (tmp_path / "f/labels.json").write_text(json.dumps(["bar ", DECOMPOSED]), encoding="utf-8")
    assert read_manifest(tmp_path / "f").label_names == ("bar", CAFE)


def test_folders_and_cells_of_one_text_are_one_label_to_init_and_to_predict(tmp_path: Path) -> None:
    for name in (CAFE, DECOMPOSED, "bar"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / f"photos/{name}/{i}.txt").write_text("a text of some words", encoding="utf-8")
    assert understand(tmp_path / "photos").labels == {CAFE: 6, "bar": 3}
    rows = "\n".join(f"{i},{[CAFE, DECOMPOSED, 'bar'][i % 3]}" for i in range(30))
    table = tmp_path / "t.csv"
    table.write_text(f"size,label\n{rows}\n", encoding="utf-8")
    assert understand(table).labels == {CAFE: 20, "bar": 10}
    encoder = EncoderSpec("table", (1, 2), columns=(TableColumn("size"),))
    found = read_trained(table, {"features": encoder}, (DECOMPOSED, "bar"), "label")
    assert classes(found)[:3] == [DECOMPOSED, DECOMPOSED, "bar"]
    assert not found.skipped
