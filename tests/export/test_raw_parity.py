"""The same raw files give the same classes by training's evaluation, `edgefl predict` and plain onnxruntime."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from export_fixture import LABELS, some_state, stage_of
from PIL import Image

from edgefl.cli.main import main
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.export.bundle import export_bundles
from edgefl.export.bundle_format import read_manifest
from edgefl.export.drafts import TrainedState
from edgefl.export.tables import read_tables
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.training.evaluate import Criteria, evaluate

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2}
#: A sensor in windows of 0.64 s, standardised; photos cropped to their middle; sounds of half a second; short texts.
ENCODERS = {
    "acc": EncoderSpec(
        input_shape=(16, 2), patch=4, step=8, rate=25.0, standardize="fleet", mean=(9.0, -3.0), std=(2.0, 5.0), **SMALL
    ),
    "photo": EncoderSpec(kind="vision", input_shape=(16, 16, 3), patch=8, crop="center", **SMALL),
    "speech": EncoderSpec(kind="audio", input_shape=(30, 16), patch=8, **SMALL),
    "note": EncoderSpec(kind="text", input_shape=(9,), vocabulary=60, **SMALL),
}


def raw_files(root: Path, recordings: int) -> Path:
    """Recordings at 50 Hz with jitter and a gap, of several lengths; photos of two sizes; sounds; sentences."""
    draw = np.random.default_rng(8)
    root.mkdir()
    lines = []
    for i in range(recordings):
        count = 120 + 30 * i
        times = np.arange(count) * 20 + draw.uniform(-4, 4, count)
        times[count // 2 :] += 900  # the sensor was away
        values = draw.normal((9, -3), (2, 5), (count, 2)) * (0.2 + i / 2)
        rows = [f"{t:.3f},{x:.4f},{y:.4f}" for t, (x, y) in zip(times, values, strict=True)]
        (root / f"{i}.csv").write_text("\n".join(["time_ms,x,y", *rows]))
        pixels = draw.integers(0, 255, ((30, 50, 3), (64, 20, 3))[i % 2], np.uint8)
        Image.fromarray(pixels).save(root / f"{i}.png")
        with wave.open(str(root / f"{i}.wav"), "wb") as sound:
            sound.setparams((1, 2, 8000 * (1 + i % 2), 0, "NONE", ""))
            sound.writeframes((draw.normal(size=3000 + 2000 * i) * 4000).astype("<i2").tobytes())
        (root / f"{i}.txt").write_text(f"{'quick ' * i} brown fox {i}")
        lines.append({"id": f"r{i}", "acc": f"{i}.csv", "photo": f"{i}.png", "speech": f"{i}.wav", "note": f"{i}.txt"})
    (root / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def predicted(capsys: pytest.CaptureFixture[str], bundle: Path, *files: str) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(bundle), *files, "--format", "json"])
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    found: dict[str, Any] = json.loads(out.out)
    return found


def plainly(bundle: Path, data: Dataset) -> list[str]:
    """What onnxruntime alone says: nothing but the files of the bundle, and the arrays as they were read."""
    session = onnxruntime.InferenceSession(str(bundle / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds = dict(data.modalities)
    if len(data.modalities) > 1:
        feeds |= {f"{m}.present": has.astype(np.float32) for m, has in data.present.items()}
    feeds |= read_tables(bundle, read_manifest(bundle))
    return [LABELS[i] for i in session.run(["logits"], feeds)[0].argmax(axis=1)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [("note",), *(pytest.param(names, marks=pytest.mark.slow) for names in (("acc",), tuple(ENCODERS)))],
    ids="+".join,
)
def test_raw_files_give_the_same_classes_everywhere(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    chosen = {m: ENCODERS[m] for m in names}
    spec = ModelSpec(chosen, 2, HeadSpec(width=16, out=8), 12, len(LABELS), LABELS)
    _, parts = some_state(spec)
    export_bundles(TrainedState(spec, stage_of(spec), parts), tmp_path / "bundles", capacity=6)
    bundle, root = tmp_path / "bundles" / "+".join(names), raw_files(tmp_path / "raw", 6)

    # What a device trains on, and a coordinator evaluates, is read by the model's own encoders; so is this.
    data = load(root, modalities=chosen)
    by_manifest = load(root, modalities=read_manifest(bundle).encoders)
    assert all(np.array_equal(values, by_manifest.modalities[m]) for m, values in data.modalities.items())
    body = predicted(capsys, bundle, str(root))
    answers = {row["id"]: row["label"] for row in body["predictions"]}
    assert list(answers) == data.ids
    assert len(set(answers.values())) > 1  # else a wrong sample would go unnoticed
    assert [answers[name] for name in data.ids] == plainly(bundle, data)

    # Judged by the classes that predict gave, evaluation finds all of them right.
    given = np.array([LABELS.index(answers[name]) for name in data.ids])
    judged = Dataset(data.modalities, data.present, given, LABELS, data.ids, recordings=data.recordings)
    rows = evaluate(spec, stage_of(spec), {k: v for k, v in parts.items() if k != "prototypes"}, judged, Criteria())
    complete = [row.value for row in rows if row.metric == "accuracy" and set(row.available) == set(names)]
    assert complete == [1.0]

    # And file by file, as a user gives them.
    for i in range(6):
        files = {"acc": f"{i}.csv", "photo": f"{i}.png", "speech": f"{i}.wav", "note": f"{i}.txt"}
        one = predicted(capsys, bundle, *(f"{m}={root / files[m]}" for m in names))
        of_folder = [row["label"] for row in body["predictions"] if row["id"].split("#")[0] == f"r{i}"]
        assert [row["label"] for row in one["predictions"]] == of_folder
        if "acc" in names:
            (whole,) = one["recordings"]
            mean = np.mean([list(row["probabilities"].values()) for row in one["predictions"]], axis=0)
            assert whole["label"] == LABELS[int(mean.argmax())]
            assert whole["windows"] == len(of_folder)
            assert math.isclose(max(whole["probabilities"].values()), float(mean.max()), abs_tol=1e-6)
