"""A folder of new files is predicted without a manifest: files of one name are a sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serve_fixture import bundles

from edgefl.cli.main import main
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.trained_folders import read_folder

IMAGE, TEXT = EncoderSpec("vision", (8, 8, 3)), EncoderSpec("text", (6,), vocabulary=100)
ACC = EncoderSpec("sensor", (4, 3))
KNOWN = {"acc": ACC, "image": IMAGE, "text": TEXT}


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (len(path.name), 0, 0)).save(path)


def test_a_flat_folder_has_a_row_of_answers_for_each_stem(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for stem in ("n1", "n2", "n3"):
        picture(tmp_path / f"{stem}.png")
    (tmp_path / "n2.txt").write_text("a cat")
    (tmp_path / "n4.txt").write_text("a dog")
    (tmp_path / "n4.wav").write_bytes(b"")
    (tmp_path / "README.md").write_text("of mine")
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(bundles()), str(tmp_path), "--format", "json"])
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    found = {row["id"]: row["given"] for row in json.loads(out.out)["predictions"]}
    assert found == {"n1": ["image"], "n2": ["image", "text"], "n3": ["image"], "n4": ["text"]}
    assert "left out: n4.wav: is of a kind that no bundle takes" in out.err
    assert "left out: README.md: .md is not read" in out.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md", "n1.png", "n2.png", "n2.txt", "n3.png", "n4.txt", "n4.wav",
    ]  # fmt: skip


def test_folders_of_labels_that_the_model_knows_are_the_truth(tmp_path: Path):
    for name in ("walk/a.png", "walk/b.png", "fly/c.png"):
        picture(tmp_path / name)
    data = read_folder(tmp_path, KNOWN, ("rest", "run", "walk"))
    assert data.ids == ["fly/c", "walk/a", "walk/b"]
    assert data.labels is not None
    assert data.labels.tolist() == [-1, 2, 2]
    assert [str(problem) for problem in data.skipped] == ["label: 'fly' of 1 rows is none the model knows"]


def test_folders_called_after_modalities_and_a_modality_of_another_name(tmp_path: Path):
    for stem in "ab":
        picture(tmp_path / f"pictures/{stem}.png")
        (tmp_path / "acc").mkdir(exist_ok=True)
        np.save(tmp_path / f"acc/{stem}.npy", np.zeros((4, 3), np.float32))
    data = read_folder(tmp_path, {"acc": ACC, "gyro": ACC, "view": IMAGE}, ())
    assert (data.ids, sorted(data.modalities)) == (["a", "b"], ["acc", "view"])


def test_what_cannot_be_told_apart_or_read_is_named(tmp_path: Path):
    picture(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"\(a.png: may be front or rear: name a folder") as raised:
        read_folder(tmp_path, {"front": IMAGE, "rear": IMAGE}, ())
    assert "They take front (vision), rear (vision)" in raised.value.remedy
    (tmp_path / "b.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"1 problem\n  image: b.png: no picture") as raised:
        read_folder(tmp_path, KNOWN, ())
    assert "--bad-samples skip" in raised.value.remedy
    assert len(read_folder(tmp_path, KNOWN, (), "skip")) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no file is a sample of these bundles \(it has no files\)"):
        read_folder(tmp_path / "empty", KNOWN, ())
