"""The verb `edgefl benchmark`: bundles measured in processes of their own."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_fixture import LABELS, exported, windows

from edgefl.cli.main import main
from edgefl.data.dataset import Dataset
from edgefl.errors import EdgeFLError, ExportError
from edgefl.export.benchmark import convert, exported_precisions
from edgefl.export.bundle_format import MODEL_FILE
from edgefl.export.measure import Samples
from edgefl.export.runtime import load_bundle


def edgefl(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], error: type[EdgeFLError], *words: object) -> str:
    assert edgefl("benchmark", *words) == error.exit_code
    return capsys.readouterr().err


def samples(count: int = 40) -> Dataset:
    """The first ten lack gyro; labels are what acc alone answers, but for the last sixteen."""
    arrays = windows(exported().spec, count)
    truth = load_bundle(exported().directory / "acc").predict({"acc": arrays["acc"]}).classes
    truth[-16:] = (truth[-16:] + 1) % len(LABELS)
    has = np.arange(count) >= 10
    arrays["gyro"][~has] = 0
    present = {"acc": np.ones(count, bool), "gyro": has}
    return Dataset(arrays, present, truth, LABELS, [str(i) for i in range(count)])


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    samples().save_npz(tmp_path / "test.npz")
    return tmp_path / "test.npz"


def test_every_subset_is_measured_with_the_accuracy_of_predict(npz: Path, capsys: pytest.CaptureFixture[str]):
    assert edgefl("benchmark", exported().directory, npz, "--batch", 4, "--batch", 1, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["given"], row["bundle"], row["batch"], row["samples"]) for row in rows] == [
        ("acc+gyro", "acc+gyro", 1, 30),
        ("acc+gyro", "acc+gyro", 4, 30),
        ("acc", "acc", 1, 40),
        ("acc", "acc", 4, 40),
        ("gyro", "gyro", 1, 30),
        ("gyro", "gyro", 4, 30),
    ]
    right = {row["given"]: row["accuracy"] for row in rows}
    truth = samples()
    both = load_bundle(exported().directory / "acc+gyro").predict({m: a[10:] for m, a in truth.modalities.items()})
    assert truth.labels is not None
    assert right["acc"] == 24 / 40
    assert right["acc+gyro"] == (both.classes == truth.labels[10:]).mean()
    for one, four in zip(rows[::2], rows[1::2], strict=True):
        assert one["ms_per_sample"] > four["ms_per_sample"] > 0  # a call's own cost is shared
        assert one["idle_bytes"] < one["peak_bytes"] <= four["peak_bytes"]
        assert one["calls"] >= 3


def test_the_table_fits_80_columns_and_needs_no_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert edgefl("benchmark", exported().directory / "gyro", "--batch", 2, "--threads", 1) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "accuracy" not in out.lower()
    assert "1 threads" in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("f32")] == [["f32", "gyro", "2"]]


def test_a_numeric_target_is_judged_by_r2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    kept = json.loads((exported().directory / "acc" / "manifest.json").read_text())
    bundle = tmp_path / "numbers"
    shutil.copytree(exported().directory / "acc", bundle)
    (bundle / "manifest.json").write_text(json.dumps({**kept, "labels": ["~0", "~1", "~2.5", "~4"]}))
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "out.csv"
    assert edgefl("benchmark", bundle, npz_of_numbers(tmp_path), "--batch", 1, "--format", "csv", "-o", out) == 0
    (row,) = csv.DictReader(io.StringIO(out.read_text()))
    assert row["accuracy"] == ""
    assert float(row["r2"]) < 1
    assert float(row["mae"]) > 0
    capsys.readouterr()
    assert edgefl("predict", bundle, npz_of_numbers(tmp_path), "--format", "json") == 0
    first = json.loads(capsys.readouterr().out)["predictions"][0]
    levels = first["probabilities"]
    assert list(levels) == ["0", "1", "2.5", "4"]
    assert first["value"] == pytest.approx(sum(float(level) * p for level, p in levels.items()))


def npz_of_numbers(folder: Path) -> Path:
    path = folder / "numbers.npz"
    np.savez(path, acc=windows(exported().spec, 12)["acc"], label=np.linspace(0, 4, 12))
    return path


def test_a_precision_that_is_not_exported_is_made_from_samples(npz: Path, capsys: pytest.CaptureFixture[str]):
    words = (exported().directory / "acc", "--precision", "int8", "--precision", "f32", "--batch", 1)
    said = refused(capsys, ExportError, *words)
    assert "no bundles in int8" in said
    assert "no samples" in said
    assert edgefl("benchmark", *words, npz, "--format", "csv", "--max-loss", 100) == 0
    int8, f32 = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (int8["precision"], f32["precision"]) == ("int8", "f32")
    assert int(int8["size_bytes"]) < int(f32["size_bytes"])
    assert not (exported().directory.with_name("bundles-int8")).exists()


def test_the_precisions_of_an_export_are_found_beside_each_other(tmp_path: Path):
    for name in ("acc", "gyro"):
        for kind, place in (("f32", tmp_path / "bundles"), ("f16", tmp_path / "bundles-f16")):
            place.mkdir(exist_ok=True)
            source = exported().directory / name
            if kind == "f32":
                (place / name).symlink_to(source)
            else:
                convert(source, place / name, "f16", Samples(samples(), "here"), 100)
    all_of_them = {"f32": tmp_path / "bundles", "f16": tmp_path / "bundles-f16"}
    assert exported_precisions(tmp_path / "bundles") == all_of_them
    assert exported_precisions(tmp_path / "bundles-f16") == all_of_them
    assert exported_precisions(tmp_path / "bundles-f16" / "acc") == {k: p / "acc" for k, p in all_of_them.items()}


def test_what_cannot_be_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "no bundle takes wrist alone; there are: acc" in refused(
        capsys, ExportError, exported().directory, "--given", "wrist"
    )
    broken = tmp_path / "acc"
    broken.mkdir()
    for file in (exported().directory / "acc").iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(bytes(len(data)) if file.name == MODEL_FILE else data)
    assert "is damaged" in refused(capsys, ExportError, broken, "--batch", 1)
