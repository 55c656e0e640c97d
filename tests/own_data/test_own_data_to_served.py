"""From files as users have them to a served model, without an edit: init, run, predict, serve."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import own_data_fixture as own
import pytest
import yaml
from serve_fixture import json_inputs, running

from benchmarks.own_data.sets import SETS, MissingError, OwnData
from edgefl.data.dataset import Dataset
from edgefl.data.raw_sample import raw_samples
from edgefl.export.bundle_format import read_manifest
from edgefl.export.runtime import load_bundle
from edgefl.export.tables import read_tables
from edgefl.own_data.table_rows import read_rows

DEVICES = ("--device", "raspberry-pi-5", "--device", "jetson-nano", "--device", "gpu-box")


def edgefl(*words: object, folder: Path, seconds: float = 110) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", *map(str, words)],
        cwd=folder, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def started(source: Path) -> dict[str, Any]:
    """The result of ``edgefl init``, and the run file own.yaml beside the source."""
    said = edgefl("init", source.name, "--out", "own.yaml", *DEVICES, "--format", "json", folder=source.parent)
    found: dict[str, Any] = json.loads(said)
    assert found["fits"], found["verdict"]
    return found


def trained(source: Path, *options: str, seconds: float) -> Path:
    """The folder of the bundles that ``edgefl run`` wrote."""
    edgefl("run", "own.yaml", "--runs", "runs", *options, folder=source.parent, seconds=seconds)
    (run,) = (source.parent / "runs").iterdir()
    return run / "bundles"


def answers_agree(bundles: Path, raw: dict[str, Path | str]) -> None:
    """The same raw files give one class by ``predict``, by the server, and by onnxruntime alone."""
    words = [f"{m}={value}" for m, value in raw.items()]
    told = json.loads(edgefl("predict", bundles, *words, "--format", "json", folder=bundles))
    with running(where=bundles) as server:
        files = {m: value if isinstance(value, str) else (value.name, value.read_bytes()) for m, value in raw.items()}
        form = {m: (None, value) if isinstance(value, str) else value for m, value in files.items()}
        served = httpx.post(f"{server.url}/predict", files=form, timeout=30).raise_for_status().json()
    labels = [row["label"] for row in told["predictions"]]
    assert labels
    assert [row["label"] for row in served["predictions"]] == labels
    bundle = next(path for path in bundles.iterdir() if "+" in path.name)
    manifest = read_manifest(bundle)
    data = raw_samples(raw, manifest.encoders)
    session = onnxruntime.InferenceSession(str(bundle / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds = {m: data.modalities[m] for m in manifest.modalities} | {
        f"{m}.present": np.ones(len(data), np.float32) for m in manifest.modalities
    }
    feeds |= read_tables(bundle, manifest)
    plain = session.run(["logits"], feeds)[0].argmax(axis=1)
    assert [manifest.labels[i] for i in plain] == labels


def first_sample(folder: Path) -> dict[str, Path | str]:
    """The raw values of the manifest's first sample that has all modalities."""
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    values = [{m: v for m, v in line.items() if m not in {"id", "label", "group"}} for line in lines]
    whole = max(values, key=len)
    return {m: folder / v if (folder / v).is_file() else v for m, v in whole.items()}


FOLDERS: dict[str, tuple[str, Callable[[Path], Path], dict[str, str], int]] = {
    "photos and texts": ("photos", own.photos_and_texts, {"image": "vision", "text": "text"}, 8),
    "sounds and pictures": ("av", own.sounds_and_pictures, {"audio": "audio", "image": "vision"}, 4),
    "a table of three sensors with gaps": (
        "walks.csv", own.three_sensors, dict.fromkeys(("acc", "bodyacc", "gyro"), "sensor"), 6,
    ),
    "people as folders": ("people", own.people_as_folders, {"acc": "sensor", "gyro": "sensor"}, 6),
}  # fmt: skip


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", FOLDERS)
def test_files_become_a_served_model_without_an_edit(case: str, tmp_path: Path):
    name, make, kinds, classes = FOLDERS[case]
    source = make(tmp_path / name)
    found = started(source)
    text = (tmp_path / "own.yaml").read_text()
    assert all(f"{m}:\n      kind: {kind}" in text for m, kind in kinds.items())
    bundles = trained(source, seconds=800)
    report = json.loads(edgefl("report", "latest", "--runs", "runs", "--format", "json", folder=tmp_path))
    last = [
        r["value"] for r in report["evaluations"] if r["metric"] == "accuracy" and len(r["available"]) == len(kinds)
    ]
    assert last[-1] > 1.5 / classes
    answers_agree(bundles, first_sample(tmp_path / found["source"]))


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arrays_become_a_served_model_without_an_edit(tmp_path: Path):
    source = own.arrays(tmp_path / "har.npz")
    found = started(source)
    assert "the array subject is the group" in found["understood"]
    bundles = trained(source, seconds=800)
    data = Dataset.load_npz(tmp_path / "har-edgefl-test.npz").subset([0, 1, 2])
    arrays = {m: np.asarray(values) for m, values in data.modalities.items()}
    expected = list(load_bundle(bundles / "acc+gyro").predict(arrays).labels)
    with running("--name", "own", where=bundles) as server:
        body = {"inputs": json_inputs(arrays)}
        told = httpx.post(f"{server.url}/v2/models/own/infer", json=body, timeout=30).raise_for_status().json()
    assert next(one["data"] for one in told["outputs"] if one["name"] == "label") == expected


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(300)
def test_some_recordings_become_a_served_model(tmp_path: Path):
    # The nightly tests' small form: a round a stage.
    source = own.people_as_folders(tmp_path / "people")
    started(source)
    bundles = trained(source, "--set", "training.rounds=[1,1,1]", "--set", "training.epochs=1", seconds=200)
    answers_agree(bundles, first_sample(source))


#: The set that each CI run takes; the others are nightly.
SMALL = {"iris"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in SETS]
)
def test_a_set_of_a_package_goes_from_init_to_a_served_answer(name: str, tmp_path: Path):
    try:
        data = SETS[name](tmp_path)
    except (MissingError, ModuleNotFoundError) as error:
        if os.environ.get("EDGEFL_REQUIRE_OWN_DATA") == "1":
            raise
        pytest.skip(f"not installed: {error}; `make own-data` installs it")
    edgefl("init", data.source.name, "--yes", "--out", "own.yaml", *data.options, folder=tmp_path)
    edgefl("plan", "own.yaml", folder=tmp_path)
    stages = yaml.safe_load((tmp_path / "own.yaml").read_text())["model"]["stages"]
    one = ("--set", f"training.rounds={[1] * stages}", "--set", "training.epochs=1", "--in-process")
    bundles = trained(data.source, *one, seconds=600)
    told = json.loads(edgefl("predict", bundles, data.source, "--format", "json", "--limit", "3", folder=tmp_path))
    assert told["predictions"]
    with running(where=bundles) as server:
        served = httpx.post(f"{server.url}/predict", **request_of(data), timeout=30).raise_for_status().json()
    (answer,) = served["predictions"][:1]
    assert math.isfinite(answer["value"]) if data.kind == "numeric" else answer["label"] in set(data.labels)


def request_of(data: OwnData) -> dict[str, Any]:
    """One sample as a client sends it: a row of a table, label beside it, as a JSON object; files as a form."""
    if data.kind in {"table", "numeric"}:
        return {"json": {"features": dict(read_rows(data.source, 1)[0][0])}}
    if data.source.is_file():  # a table of texts
        return {"json": {name: v for name, v in read_rows(data.source, 1)[0][0].items() if v != data.labels[0]}}
    return {
        "files": {
            m: (None, value) if isinstance(value, str) else (value.name, value.read_bytes())
            for m, value in first_sample(data.source).items()
        }
    }
