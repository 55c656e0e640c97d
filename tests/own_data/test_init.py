"""``edgefl init``: what it says, what it writes, and what it refuses."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import own_data_fixture as own
import pytest
import yaml
from PIL import Image

from edgefl.api.local_run import LocalOptions, LocalRun
from edgefl.cli.main import main
from edgefl.run_records import EventRow

pytestmark = pytest.mark.data


def init(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of ``edgefl init`` in a folder."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return int(ended.value.code or 0)


def run_file(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.slow
def test_photos_with_texts_of_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    own.photos_and_texts(tmp_path / "photos", samples=80)
    (tmp_path / "photos/notes.md").write_text("mine")
    assert init(tmp_path, "photos", "--device", "gpu-box", "--device", "jetson-nano", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "80 samples of image (vision), text (text)" in said
    assert "paths are read as {group}/{label}/{id}" in said
    assert "not used: notes.md (.md is not read)" in said
    assert "All 2 devices fit every stage" in said
    found = run_file(tmp_path / "photos.yaml")
    assert found["data"] == {"source": "photos", "partition": "natural"}
    assert found["model"]["encoders"]["image"] == {
        "kind": "vision",
        "size": "small",
        "image_size": 32,
        "arch": "conv",
        "patch": 8,
        "crop": "center",
    }
    assert [device["profile"] for device in found["fleet"]] == ["gpu-box", "jetson-nano"]
    assert len((tmp_path / "photos/manifest.jsonl").read_text().splitlines()) == 80


def test_a_table_of_sensors_is_cut_into_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own.three_sensors(tmp_path / "walks.csv")
    assert init(tmp_path, "walks.csv", "--format", "json", monkeypatch=monkeypatch) == 0
    found = run_file(tmp_path / "walks.yaml")
    acc = {
        "kind": "sensor",
        "size": "small",
        "patch": 8,
        "window": 128,
        "step": 64,
        "rate": 50.0,
        "standardize": "fleet",
    }
    assert found["model"]["encoders"] == {
        m: acc | {"columns": {f"{m}_{axis}": "number" for axis in "xyz"}} for m in ("acc", "bodyacc", "gyro")
    }
    lines = [json.loads(line) for line in (tmp_path / "walks-edgefl/manifest.jsonl").read_text().splitlines()]
    assert len(lines) == 36
    assert len({line["group"] for line in lines}) == len({line["label"] for line in lines}) == 6
    assert (tmp_path / "walks-edgefl" / lines[0]["gyro"]).read_text().startswith("time,gyro_x,gyro_y,gyro_z\n")


def test_arrays_with_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    own.arrays(tmp_path / "har.npz")
    assert init(tmp_path, "har.npz", "--format", "json", monkeypatch=monkeypatch) == 0
    told = json.loads(capsys.readouterr().out)
    assert "the array subject is the group" in told["understood"]
    assert list(told["unused"]) == ["start"]
    assert run_file(tmp_path / "har.yaml")["data"]["test"] == "har-edgefl-test.npz"
    assert np.load(tmp_path / "har-edgefl.npz")["group"].dtype.kind == "U"


def test_nothing_that_is_there_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    own.photos_and_texts(tmp_path / "photos", samples=40)
    (tmp_path / "photos.yaml").write_text("mine")
    assert init(tmp_path, "photos", monkeypatch=monkeypatch) == 15
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "photos.yaml").read_text() == "mine"
    assert not (tmp_path / "photos/manifest.jsonl").exists()


def test_a_manifest_of_ones_own_beside_a_list_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for i in range(24):
        (tmp_path / f"{i}.txt").write_text("hello there")
    (tmp_path / "list.csv").write_text("file,class\n" + "".join(f"{i}.txt,{'ab'[i % 2]}\n" for i in range(24)))
    (tmp_path / "manifest.jsonl").write_text("mine")
    assert init(tmp_path, "list.csv", monkeypatch=monkeypatch) == 15
    assert "manifest.jsonl is there already" in capsys.readouterr().err
    assert (tmp_path / "manifest.jsonl").read_text() == "mine"


def test_a_test_halfs_own_manifest_is_not_written_over_nor_the_other_half_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for half in ("train", "test"):
        for i in range(24):
            path = tmp_path / f"data/{half}/{'ab'[i % 2]}/{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("hello there")
    (tmp_path / "data/test/manifest.jsonl").write_text("mine")
    assert init(tmp_path, "data", monkeypatch=monkeypatch) == 15
    assert (tmp_path / "data/test/manifest.jsonl").read_text() == "mine"
    assert not (tmp_path / "data/train/manifest.jsonl").exists()


def test_one_modality_without_labels_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "pile").mkdir()
    for i in range(12):
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(tmp_path / f"pile/{i:03d}.png")
    assert init(tmp_path, "pile", monkeypatch=monkeypatch) == 11
    assert "--path" in capsys.readouterr().err


def test_a_class_that_cannot_be_tested_is_said_by_init_plan_data_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = "the test set has no sample of 1 of 3 classes (2), so that its scores leave them out"
    np.savez(tmp_path / "a.npz", acc=np.random.default_rng(0).normal(size=(41, 8, 2)), y=[*range(2)] * 20 + [2])
    assert init(tmp_path, "a.npz", monkeypatch=monkeypatch) == 0
    assert f"warning: {said}" in capsys.readouterr().out
    for command in ("plan", "data"):
        with pytest.raises(SystemExit):
            main([command, "a.yaml"])
        assert said in " ".join(capsys.readouterr().out.split())
    events: list[EventRow] = []
    LocalRun(LocalOptions("a.yaml", runs=tmp_path / "runs", in_process=True), events.append)._prepare()
    assert [(event.kind, event.data["text"]) for event in events] == [("warning", said)]


def test_silent_sounds_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """One of 24 has nothing, and two channels that cancel out leave nothing of two more."""
    tone = np.sin(2 * np.pi * 440 * np.arange(4000) / 8000) * 9000
    for i in range(24):
        place = tmp_path / f"clips/{'low' if i % 2 else 'high'}/{i}.wav"
        place.parent.mkdir(parents=True, exist_ok=True)
        left = tone[:: 2 - i % 2] * (i > 0) * (1 - i / 100)
        sides = np.stack([left, -left if i in {5, 6} else left], axis=1)
        with wave.open(str(place), "wb") as sound:
            sound.setparams((2, 2, 8000, 0, "NONE", ""))
            sound.writeframes(sides.astype("<i2").tobytes())
    assert init(tmp_path, "clips", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "warning: 3 of 24 samples of audio are silent once their channels are mixed (" in out
    for name in ("high/0", "low/5", "high/6"):
        assert name in out


def test_pictures_in_arrays_of_another_range_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    grey = np.random.default_rng(0).integers(0, 17, (40, 8, 8))
    np.savez(tmp_path / "a.npz", digits=grey.astype(float), y=np.arange(40) % 2)
    np.savez(tmp_path / "b.npz", digits=grey / 16, y=np.arange(40) % 2)
    assert init(tmp_path, "a.npz", "--kind", "digits=vision", monkeypatch=monkeypatch) == 11
    assert "digits holds pixels from 0 to 16, and pictures are bytes, or numbers in 0..1" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npz", "b.npz"]
    assert init(tmp_path, "b.npz", "--kind", "digits=vision", monkeypatch=monkeypatch) == 0


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere", "does not exist"), ("a.pdf", "are not read"), ("empty", "no samples")]
)
def test_what_is_no_data_is_refused(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty").mkdir()
    assert init(tmp_path, name, monkeypatch=monkeypatch) == 11
    assert said in capsys.readouterr().err


def test_texts_of_files_are_neither_fields_of_the_run_file_nor_orders_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    labels = ["cat\nbroker: mqtts://evil.example #", "dog\x1b]0;title\x07\uffff"]
    rows = [{"class": labels[i % 2], "a": i, "b": 2 * i, "\x1b[2J": ""} for i in range(40)]
    (tmp_path / "pets.json").write_text(json.dumps(rows))
    assert init(tmp_path, "pets.json", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "2 labels: cat\ufffdbroker: mqtts" in said
    assert "pets.json: \ufffd[2J (is empty)" in said
    assert "\x1b" not in said
    assert "broker" not in run_file(tmp_path / "pets.yaml")
