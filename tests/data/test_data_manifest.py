"""manifest.jsonl: what a line may say, and how bad samples are reported."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from edgefl.data.folder import read_manifest
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec

ROW = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
ENCODERS = {"acc": EncoderSpec(input_shape=(2, 3)), "gyro": EncoderSpec(input_shape=(2, 3))}


@pytest.fixture
def folder(tmp_path):
    """Writes lines (objects, or raw text) as a manifest and returns the folder."""

    def write(*lines: object):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "manifest.jsonl").write_text("\n".join(text) + "\n")
        return tmp_path

    return write


def test_absent_keys_are_missing_modalities(folder):
    root = folder(
        {"id": "one", "acc": ROW, "gyro": "g.npy", "label": "walk", "group": "anna"},
        {"acc": ROW, "gyro": None, "label": "rest"},
        "",
        {"gyro": "g.npy", "meta": {"note": 1}},
    )
    np.save(root / "g.npy", np.ones((2, 3)))
    data = read_manifest(root)
    assert data.ids == ["one", "line 2", "line 4"]
    assert data.present["acc"].tolist() == [True, True, False]
    assert data.present["gyro"].tolist() == [True, False, True]
    assert (data.modalities["acc"][2] == 0).all()
    assert data.labels.tolist() == [1, 0, -1]
    assert data.label_names == ("rest", "walk")
    assert list(data.groups) == ["anna", "", ""]
    assert data.skipped == []


def test_without_labels_there_are_none(folder):
    data = read_manifest(folder({"acc": ROW}))
    assert data.labels is None
    assert data.groups is None


def test_labels_are_numbered_by_the_model_or_by_labels_json(folder):
    root = folder({"acc": ROW, "label": "walk"}, {"acc": ROW, "label": 0})
    assert read_manifest(root, label_names=["run", "rest", "walk"]).labels.tolist() == [2, 0]
    (root / "labels.json").write_text('["rest", "run", "walk"]')
    assert read_manifest(root).label_names == ("rest", "run", "walk")
    (root / "labels.json").write_text('["rest", "rest"]')
    with pytest.raises(DataError, match="names have to differ"):
        read_manifest(root)
    (root / "labels.json").write_text("{")
    with pytest.raises(DataError, match=r"labels\.json"):
        read_manifest(root)


BAD = [
    ({"acc": "none.npy"}, "acc: none.npy: there is no such file"),
    ({"acc": [[1, 2, 3]]}, "acc: has shape [1, 3], the encoder takes [2, 3]"),
    ({"acc": "../x.npy"}, "acc: ../x.npy: leads out of the data set's folder"),
    ({"acc": ROW, "label": 2}, "label: 2 is out of range; valid: 0 to 1 (rest, walk)"),
    ({"acc": ROW, "label": -1}, "label: -1 is out of range"),
    ({"acc": ROW, "label": "wlak"}, "label: 'wlak' is out of range"),
    ({"acc": ROW, "label": True}, "label: True is neither a name nor a number"),
    ({"acc": ROW, "label": 1.5}, "label: 1.5 is neither a name nor a whole"),
    ({"acc": ROW, "id": "good"}, "id: 'good' is already used on line 1"),
    ({"label": "walk"}, "has no modality of acc, gyro"),
    ({"acc": ROW, "gyr": ROW}, "gyr: not a modality of this model; did you mean 'gyro'?"),
    ({"acc": ROW, "id": "x" * 300}, "id, label and group may have 200 characters"),
    ("{", "not a JSON object"),
    ("[1]", "not a JSON object"),
    ('{"acc": [[1, 2, NaN], [1, 2, 3]]}', "not a JSON object"),
    ('{"acc": [[1, 2, 1e400], [1, 2, 3]]}', ""),
    ("[" * 5000, "not a JSON object"),
    ("\x00\x01", "not a JSON object"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_each_bad_sample_is_named_with_its_line(folder, line, message):
    root = folder({"id": "good", "acc": ROW}, line)
    names = ["rest", "walk"]
    with pytest.raises(DataError) as caught:
        read_manifest(root, encoders=ENCODERS, label_names=names)
    assert f"{root.name}/manifest.jsonl:2: {message}" in caught.value.message
    assert caught.value.exit_code == 11
    data = read_manifest(root, encoders=ENCODERS, label_names=names, bad_samples="skip")
    assert data.ids == ["good"]
    assert len(data.skipped) == 1
    assert message in str(data.skipped[0])


def test_the_error_lists_twenty_and_counts_all(folder):
    root = folder({"acc": ROW}, *[{"acc": f"{i}.npy"} for i in range(25)])
    with pytest.raises(DataError) as caught:
        read_manifest(root)
    lines = caught.value.message.splitlines()
    assert lines[0].endswith("manifest.jsonl: 25 problems")
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  … and 5 more"
    assert "skip" in caught.value.remedy
    assert len(read_manifest(root, bad_samples="skip").skipped) == 25


def test_one_sample_with_two_faults_is_two_problems_in_order(folder):
    root = folder({"acc": ROW, "label": 9}, {"acc": "a.npy", "gyro": "b.npy"}, {"acc": ROW})
    data = read_manifest(root, encoders=ENCODERS, label_names=["rest"], bad_samples="skip")
    assert [p.path.rpartition(":")[2] for p in data.skipped] == ["1", "2", "2"]


def test_nothing_left_is_an_error_under_every_policy(folder):
    with pytest.raises(DataError, match="no good sample is left"):
        read_manifest(folder({"acc": "a.npy"}), bad_samples="skip")
    with pytest.raises(DataError, match="holds no sample"):
        read_manifest(folder(""), bad_samples="skip")
    with pytest.raises(DataError, match="bad_samples is 'maybe'"):
        read_manifest(folder({"acc": ROW}), bad_samples="maybe")


def test_no_manifest(tmp_path):
    with pytest.raises(DataError, match=r"manifest\.jsonl: there is no such file"):
        read_manifest(tmp_path)


def test_without_encoders_the_usual_shape_counts(folder):
    root = folder({"acc": [[1, 2]]}, {"acc": ROW}, {"acc": ROW})
    data = read_manifest(root, bad_samples="skip")
    assert data.signature() == {"acc": (2, 3)}
    assert "manifest.jsonl:1: acc: has shape [1, 2], the others [2, 3]" in str(data.skipped[0])


def test_the_usual_shape_is_looked_up_once_a_modality_however_many_sizes_there_are(folder, monkeypatch):
    looked: list[int] = []

    class Counting(Counter):
        def most_common(self, n=None):
            looked.append(len(self))
            return super().most_common(n)

    monkeypatch.setattr("edgefl.data.folder.Counter", Counting)
    root = folder(*({"acc": [[1.0] * size]} for size in range(1, 41)))
    assert len(read_manifest(root, bad_samples="skip").skipped) == 39
    assert looked == [40]


def test_a_guess_is_not_fixed_by_a_bad_value(folder):
    root = folder({"text": {"no": 1}}, {"text": "a red house"}, {"label": 1, "text": "blue"}, {"fusion": ROW})
    data = read_manifest(root, bad_samples="skip")
    assert data.signature() == {"text": (32,)}
    assert [p.path.rpartition(":")[2] for p in data.skipped] == ["1", "4"]


def test_other_keys_than_the_models_are_not_read(folder):
    root = folder({"acc": ROW, "image": "none.png"})
    assert list(read_manifest(root, encoders=ENCODERS).modalities) == ["acc"]


def test_limits(folder, monkeypatch):
    monkeypatch.setattr("edgefl.data.folder.MAX_LINE_BYTES", 100)
    root = folder({"acc": ROW}, {"acc": ROW, "meta": "x" * 350}, {"acc": ROW})
    data = read_manifest(root, bad_samples="skip")
    assert data.ids == ["line 1", "line 3"]
    assert "more than 100 bytes" in str(data.skipped[0])
    monkeypatch.setattr("edgefl.data.folder.MAX_SAMPLES", 2)
    with pytest.raises(DataError, match="more than 2 lines"):
        read_manifest(root, bad_samples="skip")
    monkeypatch.setattr("edgefl.data.folder.MAX_SAMPLES", 10)
    monkeypatch.setattr("edgefl.data.folder.MAX_DATASET_BYTES", 30)
    with pytest.raises(DataError, match="more than 30 bytes of memory"):
        read_manifest(root, bad_samples="skip")
