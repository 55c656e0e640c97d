"""One sample of several modalities from raw files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgefl.data.raw_sample import Value, modality_of_file, raw_samples
from edgefl.data.tokens import hashed
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec
from edgefl.records import TableColumn

ENCODERS = {
    "image": EncoderSpec(kind="vision", input_shape=(2, 2, 3), patch=2),
    "text": EncoderSpec(kind="text", input_shape=(5,), vocabulary=100),
    "acc": EncoderSpec(kind="sensor", input_shape=(2, 3)),
}


def test_a_picture_a_text_and_a_table_are_one_sample(tmp_path: Path):
    Image.new("RGB", (2, 2), (255, 0, 51)).save(tmp_path / "a.png")
    (tmp_path / "walk.csv").write_text("1,2,3\n4,5,6\n")
    data = raw_samples({"image": tmp_path / "a.png", "text": "red square", "acc": tmp_path / "walk.csv"}, ENCODERS)
    assert len(data) == 1
    assert data.modalities["image"][0, 0, 0].tolist() == pytest.approx([1, 0, 0.2])
    assert data.modalities["text"][0].tolist() == hashed("red square", 5, 100).tolist()
    assert data.modalities["acc"][0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert all(rows.all() for rows in data.present.values())
    assert data.labels is None


def test_a_text_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "secret.txt").write_text("what it says")
    monkeypatch.chdir(tmp_path)
    data = raw_samples({"text": "secret.txt"}, ENCODERS)
    assert data.modalities["text"][0].tolist() == hashed("secret.txt", 5, 100).tolist()


def test_a_file_is_known_by_what_can_be_read_from_it(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    assert modality_of_file(tmp_path / "x.npy", ENCODERS) == "acc"
    (tmp_path / "x.txt").write_text("red")
    assert modality_of_file(tmp_path / "x.txt", ENCODERS) == "text"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "needs one modality"),
        ({"sound": "x"}, "no bundle takes sound"),
        ({"acc": "a text"}, "a text is no sensor sample"),
        ({"text": "  "}, "the text is empty"),
        ({"image": Path("x.csv")}, "is vision, and .csv files hold sensor"),
        ({"image": Path("none.png")}, "there is no such file"),
        ({"image": Path("x.mp4")}, "cannot be read"),
    ],
)
def test_what_is_no_sample_is_refused_with_the_reason(files: dict[str, Path | str], said: str, tmp_path: Path):
    placed = {m: tmp_path / value if isinstance(value, Path) else value for m, value in files.items()}
    with pytest.raises(DataError, match=said):
        raw_samples(placed, ENCODERS)


def test_the_windows_of_a_request_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows in windows of 4 from every row: 37 windows of 16 bytes."""
    np.save(tmp_path / "a.npy", np.zeros((40, 1), np.float32))
    dense = {"acc": EncoderSpec(input_shape=(4, 1), patch=2, step=1)}
    assert len(raw_samples({"acc": tmp_path / "a.npy"}, dense)) == 37
    monkeypatch.setattr("edgefl.data.raw_sample.MAX_WINDOWS_BYTES", 37 * 16 - 1)
    with pytest.raises(DataError, match="its 37 windows take 592 bytes"):
        raw_samples({"acc": tmp_path / "a.npy"}, dense)


def test_records_of_a_table_and_of_a_sensor_as_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = EncoderSpec("table", (2, 2), columns=(TableColumn("mass"), TableColumn("sex", "category", ("f", "m"))))
    record: dict[str, Value] = {"features": {"sex": "m", "more": 3}, "acc": [[1, 2, 3], [4, 5, 6]], "text": "red"}
    data = raw_samples(record, {**ENCODERS, "features": table})
    assert data.modalities["features"][0].tolist() == [[0, 0], [1, 1]]
    assert data.notes == (
        "features: no column 'mass': its cell is missing, as null is",
        "features: not used: 'more'",
    )
    assert data.modalities["acc"][0].tolist() == [[1, 2, 3], [4, 5, 6]]
    monkeypatch.chdir(tmp_path)
    for name, value, said in [
        ("features", {"mass": "much"}, "column mass: 'much' is no number"),
        ("features", {"other": 1}, "has no cell of its 2 columns: mass, sex"),
        ("features", {"mass": {"a": 1}}, "is no number"),
        ("features", {"mass": 1e999}, "not finite"),
        ("acc", {"x": 1}, "an object"),
        ("image", [[1]], "a list is no vision sample"),
        ("text", {"a": 1}, "an object is no text sample"),
    ]:
        with pytest.raises(DataError, match=said):
            raw_samples({name: value}, {**ENCODERS, "features": table})


def test_a_record_with_null_for_a_cell_lacks_nothing_and_capitals_do_not_count():
    table = EncoderSpec("table", (2, 2), columns=(TableColumn("Mass"), TableColumn("age")))
    data = raw_samples({"features": {"mass": 3, "age": None}}, {"features": table})
    assert data.modalities["features"][0].tolist() == [[3, 1], [0, 0]]
    assert data.notes == ("features: columns by another spelling: 'mass' as 'Mass'",)
