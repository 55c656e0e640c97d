"""Two devices with recordings of their own, cut and standardised by the run: what they say, train and are scaled by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.inprocess import run_fleet
from coordinator.ledger.ledger import Ledger
from edgefl.api.export_run import export_run
from edgefl.config.profiles import load_run
from edgefl.data.sources import load
from edgefl.export.recordings import of_recordings
from edgefl.export.runtime import apply, encoders, find_bundles
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.plan.preparation import read_as
from edgefl.run_records import RunReport

torch.set_num_threads(1)
RUN = """
name: raw
recipe: end_to_end
model:
  stages: 1
  encoders:
    acc: {kind: sensor, window: 16, step: 8, rate: 25, standardize: fleet, width: 8, depth: 1, heads: 2, patch: 4}
  head: {width: 8, out: 8}
  fusion_width: 8
training: {rounds: [6], epochs: 3, batch_size: 8, lr: {encoder: 0.01, head: 0.01}, holdout: 0.2}
round: {devices: 2, join_s: 20}
"""


def recordings(root: Path, count: int, seed: int) -> Path:
    """Rest and shake, in metres per square second: gravity is a hundred times as large as what tells them apart."""
    draw = np.random.default_rng(seed)
    root.mkdir()
    lines = []
    for i in range(count):
        steps = 100 + 20 * i
        times = np.arange(steps) * 20 + draw.uniform(-3, 3, steps)
        shake = 0.1 * np.sin(times / 40) * (i % 2)
        rows = [f"{t:.2f},{980 + s + 0.02 * draw.normal():.4f}" for t, s in zip(times, shake, strict=True)]
        (root / f"{i}.csv").write_text("\n".join(["time_ms,z", *rows]) + "\n")
        lines.append(json.dumps({"id": f"r{i}", "label": ("rest", "shake")[i % 2], "acc": f"{i}.csv"}))
    (root / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    return root


def trained(place: Path) -> tuple[RunPlan, RunReport, dict[str, int]]:
    """The plan as the ledger has it in the end, its report, and how many windows each device has."""
    (place / "run.yaml").write_text(RUN)
    config, recipe = load_run(str(place / "run.yaml"))
    folders = {name: recordings(place / name, 6, seed) for seed, name in enumerate(("left", "right"))}
    test = load(recordings(place / "test", 4, 9), modalities=read_as(config, folder=True))
    test.save_npz(place / "test.npz")
    shapes, labels = test.signature(), test.label_names
    plan = compile_run(config, recipe, run="raw", shapes=shapes, label_names=labels, test=str(place / "test.npz"))
    windows = {name: len(load(folder, modalities=plan.model.encoders)) for name, folder in folders.items()}
    report = run_fleet(place, plan, folders, 120)
    with Ledger(place / "run" / "ledger.sqlite") as ledger:
        return ledger.plan("raw"), report, windows


def test_recordings_of_two_devices_become_one_model(tmp_path: Path):
    plan, report, windows = trained(tmp_path)
    assert {row.device: row.samples["acc"] for row in report.devices} == windows
    done = [row for row in report.assignments if row.status == "done"]
    assert len(done) == 12  # of two devices in six rounds
    encoder = plan.model.encoders["acc"]
    assert encoder.mean == (pytest.approx(980, abs=0.05),)
    assert 0.03 < encoder.std[0] < 0.1  # noise of 0.02, and in half of the recordings a sine of 0.1
    (fixed,) = [row for row in report.events if row.kind == "standardized"]
    assert fixed.data["modalities"]["acc"]["devices"] == ["left", "right"]
    accuracy = [row.value for row in report.evaluations if row.metric == "accuracy"]
    assert accuracy[-1] > 0.9  # unscaled, 980 ± 0.1 would tell it nothing

    # From the same raw files the exported bundle answers as the coordinator's evaluation did.
    export_run(tmp_path / "run", output=tmp_path / "bundles")
    bundles = find_bundles(tmp_path / "bundles")
    (manifest,) = bundles.values()
    assert manifest.encoders["acc"] == encoder
    raw = load(tmp_path / "test", modalities=encoders(bundles), label_names=manifest.labels)
    answers, left = apply(bundles, raw)
    assert not len(left)
    assert raw.labels is not None
    right = [one.prediction.classes == raw.labels[one.rows] for one in answers]
    assert float(np.concatenate(right).mean()) == accuracy[-1]
    every = [answer.label for answer in of_recordings(raw, answers, manifest.labels)]
    assert every == ["rest", "shake"] * 2
