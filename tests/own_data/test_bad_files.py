"""Files that cannot be read: all named in one error, left out on request, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from edgefl.cli.main import main
from edgefl.data.sources import load
from edgefl.errors import DataError


def pictures(root: Path, count: int = 16) -> Path:
    for label, shade in (("dark", 40), ("light", 200)):
        (root / label).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (32, 32), (shade, shade, i)).save(root / label / f"{i}.png")
    return root


def init(*words: str) -> int:
    """The exit code of ``edgefl init`` in the working directory."""
    with pytest.raises(SystemExit) as ended:
        main(["init", *words, "--yes"])
    return int(ended.value.code or 0)


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = pictures(tmp_path / "pics")
    (root / "dark" / "empty.png").write_bytes(b"")
    whole = (root / "light" / "3.png").read_bytes()
    (root / "light" / "3.png").write_bytes(whole[: len(whole) // 2])
    return root


def test_bad_pictures_are_named_together_and_nothing_stays(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("pics")
    said = " ".join(capsys.readouterr().err.split())
    assert "2 of 33 files of image cannot be used" in said
    assert "dark/empty.png: no picture of a format that is read" in said
    assert not list(damaged.rglob("manifest.jsonl"))
    assert not Path("pics.yaml").exists()


def test_bad_pictures_are_left_out_on_request(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("pics", "--skip-bad") == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (damaged / "manifest.jsonl").read_text().splitlines()]
    assert len(lines) == 31
    assert "31 samples" in said
    assert yaml.safe_load(Path("pics.yaml").read_text())["data"]["bad_samples"] == "skip"


def test_what_was_there_stays_where_init_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = pictures(tmp_path / "pics")
    Path("pics.yaml").write_text("mine")
    assert init("pics")
    assert Path("pics.yaml").read_text() == "mine"
    assert not (root / "manifest.jsonl").exists()


def test_a_photo_that_is_cut_short_is_found_behind_its_good_head(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save(damaged / "dark" / "photo.jpg")
    whole = (damaged / "dark" / "photo.jpg").read_bytes()
    (damaged / "dark" / "photo.jpg").write_bytes(whole[: len(whole) // 2])
    assert init("pics")
    assert "3 of 34 files of image cannot be used" in " ".join(capsys.readouterr().err.split())


def test_every_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    root = pictures(tmp_path / "pics", 120)
    for i in (101, 103, 105):
        (root / "dark" / f"{i}.png").write_bytes(b"")
    assert init("pics")
    assert "3 of 240 files" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written_has_its_manifest_beside_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pictures(tmp_path / "medium" / "pics")
    (place := tmp_path / "own").mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or not Path(path).is_relative_to(root.parent))
    assert init(str(root)) == 0
    assert not list(root.rglob("manifest.jsonl"))
    source = yaml.safe_load(Path("pics.yaml").read_text())["data"]["source"]
    assert source == "pics-edgefl.jsonl"
    data = load(source)
    assert len(data) == len(list(root.rglob("*.png")))
    assert data.ids[0].startswith("dark/")


def test_a_manifest_elsewhere_names_its_folder_and_reads_nothing_outside(tmp_path: Path) -> None:
    root = pictures(tmp_path / "pics")
    manifest = tmp_path / "own.jsonl"
    manifest.write_text('{"files": "pics"}\n{"image": "../secret.png", "label": "a"}\n')
    with pytest.raises(DataError, match=r"own\.jsonl:2: image: \.\./secret\.png: leads out of the data set's folder"):
        load(manifest)
    manifest.write_text('{"image": "light/3.png", "label": "a"}\n')
    with pytest.raises(DataError, match="its first line does not name the folder of its files"):
        load(manifest)
    assert root.is_dir()


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On a medium that is read-only, taking away what is not there fails like writing."""
    root = pictures(tmp_path / "pics")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edgefl.own_data.source.write_new", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert init(str(root)) == 15
    assert "manifest.jsonl: Read-only file system" in capsys.readouterr().err


def test_copies_of_pictures_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 814 icons of a theme 620 are links to others, and each picture of the test set was trained on."""
    monkeypatch.chdir(tmp_path)
    root = pictures(tmp_path / "pics")
    for i in range(3):
        (root / "dark" / f"{i}z.png").write_bytes((root / "dark" / f"{i}.png").read_bytes())
    (root / "light" / "odd.png").write_bytes((root / "dark" / "5.png").read_bytes())
    assert init("pics") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "4 of 36 samples are copies of others, to the byte: left out, 1 of them with another label" in told
    assert "32 samples of image" in told
    lines = (tmp_path / "pics" / "manifest.jsonl").read_text().splitlines()
    assert len(lines) == 32
    assert not any("z.png" in line or "odd" in line for line in lines)
