"""README.md and example.py of a bundle, for those who have numpy and onnxruntime alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from export_fixture import LABELS, exported, windows

from edgefl.export.bundle_format import read_manifest
from edgefl.export.guide import example, readme
from edgefl.export.runtime import load_bundle
from edgefl.models.spec import EncoderSpec

#: Without EdgeFL and what it stands on; a warning is an error, and what onnxruntime says at load is on stderr.
ALONE = "import runpy, sys; sys.modules.update(edgefl=None, torch=None, onnx=None, msgspec=None); runpy.run_path({!r})"


def ran(path: Path) -> dict[str, float]:
    command = [sys.executable, "-W", "error", "-c", ALONE.format(str(path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    return {name: float(value) for name, value in (line.split(": ") for line in done.stdout.splitlines())}


@pytest.mark.parametrize("name", ["acc", "acc+gyro"])
def test_the_example_runs_without_edgefl_and_answers_as_edgefl_does(name: str):
    bundle = load_bundle(exported().directory / name)
    zeros = {m: np.zeros_like(x) for m, x in windows(exported().spec, 1).items() if m in bundle.modalities}
    told = ran(exported().directory / name / "example.py")
    expected = dict(zip(LABELS, bundle.predict(zeros).probabilities[0].round(3).tolist(), strict=True))
    assert told == pytest.approx(expected, abs=0.0011)


def test_the_page_names_every_input_and_output_with_type_and_shape():
    manifest = read_manifest(exported().directory / "acc+gyro")
    page = (exported().directory / "acc+gyro" / "README.md").read_text()
    for port in (*manifest.inputs, *manifest.presence, *manifest.tables, *manifest.outputs):
        assert f"| `{port.name}` | {port.dtype} | [{', '.join(map(str, port.shape))}] |" in page
    assert "Labels, in order: rest, run, swim, walk." in page
    assert "where\n0.0001 was allowed" in page


def test_preparation_is_told_for_each_kind():
    manifest = read_manifest(exported().directory / "acc")
    kinds = {
        "image": EncoderSpec("vision", (32, 32, 3)),
        "words": EncoderSpec("text", (32,), vocabulary=99),
        "sound": EncoderSpec("audio", (61, 40)),
        "odd": EncoderSpec("lidar", (5,)),
    }
    page = readme(msgspec.structs.replace(manifest, encoders=kinds, inputs=()))
    assert "**image** [32, 32, 3]: height, width and red, green, blue from 0 to 1" in page
    assert "crc32(its UTF-8 bytes) mod (vocabulary - 2) (vocabulary 99)" in page
    assert "windows of 32 ms every 16 ms" in page
    assert "float32 as the kind 'lidar' takes them" in page


def test_an_example_of_a_model_without_labels_prints_shapes():
    manifest = msgspec.structs.replace(read_manifest(exported().directory / "acc"), task="embed", labels=())
    text = example(manifest)
    compile(text, "example.py", "exec")
    assert "print(one.name, value.shape)" in text
