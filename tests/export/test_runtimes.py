"""Bundles in runtimes that are not onnxruntime's Python package of today, against torch. Nightly: `make test-runtimes`.

``EDGEFL_RUNTIMES`` is the folder of their environments: oldest, python (of Python packages), node_modules.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from browser_fixture import chromium
from export_fixture import exported, some_tables, windows

from edgefl.export.bundle_format import MODEL_FILE, read_manifest
from edgefl.export.graph import BundleGraph
from edgefl.export.tables import read_tables, table_arrays
from edgefl.prototypes.table import ClassMeans
from edgefl.registry import method

FOLDER = Path(os.environ.get("EDGEFL_RUNTIMES", ""))
SCRIPTS = Path(__file__).parent / "runtimes"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.name, reason="no other runtimes (EDGEFL_RUNTIMES; make test-runtimes)"),
]
Arrays = dict[str, np.ndarray]
#: Runtime -> its command, but for the model and the calls.
COMMANDS: dict[str, list[str]] = {
    "onnxruntime of 2024": [str(FOLDER / "oldest/bin/python"), str(SCRIPTS / "answer.py"), "onnxruntime"],
    "onnxruntime": [sys.executable, str(SCRIPTS / "answer.py"), "onnxruntime"],
    "onnx reference": [sys.executable, str(SCRIPTS / "answer.py"), "reference"],
    "openvino": [str(FOLDER / "python/bin/python"), str(SCRIPTS / "answer.py"), "openvino"],
    "tract": [str(FOLDER / "python/bin/python"), str(SCRIPTS / "answer.py"), "tract"],
    "onnxruntime-node": ["node", str(SCRIPTS / "answer.mjs"), "onnxruntime-node"],
    "onnxruntime-web in node": ["node", str(SCRIPTS / "answer.mjs"), "onnxruntime-web"],
}


@functools.cache
def calls(name: str) -> tuple[list[Arrays], list[list[np.ndarray]]]:
    """Calls of a bundle (its own tables, none valid, others; each sensor at hand and both), and torch's answers."""
    folder = exported().directory / name
    manifest, spec = read_manifest(folder), exported().spec
    own, count = read_tables(folder, manifest), 3
    other = {
        m: ClassMeans(np.pad(t.means, ((0, 2), (0, 0))), np.pad(t.counts, (0, 2)))
        for m, t in some_tables(spec, 9).items()
    }
    none = {k: np.zeros_like(v) if k.endswith(".valid") else v for k, v in own.items()}
    inputs = {m: x for m, x in windows(spec, count, seed=4).items() if m in manifest.modalities}
    flags = np.array([[1, 1, 0], [1, 0, 1]], np.float32)
    shown = {port.name: flags[i] for i, port in enumerate(manifest.presence)}
    feeds = [{**inputs, **shown, **tables} for tables in (own, none, table_arrays(other))]
    graph = BundleGraph(exported().model, 2, manifest.modalities, method("missing", "prototype").make).eval()
    answers = []
    for one in feeds:
        tensors = [[torch.from_numpy(one[p.name]) for p in ports] for ports in (manifest.inputs, manifest.presence)]
        with torch.no_grad():
            found = graph(*map(tuple, tensors), tuple(torch.from_numpy(one[p.name]) for p in manifest.tables))
        answers.append([found[0].numpy(), found[1].numpy()])
    return feeds, answers


def written(feeds: list[Arrays], path: Path) -> Path:
    told = [
        {k: {"dtype": str(v.dtype), "shape": v.shape, "data": v.ravel().tolist()} for k, v in one.items()}
        for one in feeds
    ]
    path.write_text(json.dumps(told))
    return path


def ran(runtime: str, model: Path, cases: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMANDS[runtime], str(model), str(cases)]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=FOLDER, env=clean)


def differences(answers: list[dict[str, list[float]]], expected: list[list[np.ndarray]]) -> list[float]:
    """The largest difference of each call."""
    return [
        max(
            float(np.abs(np.ravel(one[n]) - v.ravel()).max())
            for n, v in zip(("logits", "probabilities"), right, strict=True)
        )
        for one, right in zip(answers, expected, strict=True)
    ]


@pytest.mark.parametrize("name", ["acc", "acc+gyro"])
@pytest.mark.parametrize("runtime", COMMANDS)
def test_a_runtime_answers_as_torch_with_any_tables(runtime: str, name: str, tmp_path: Path):
    feeds, expected = calls(name)
    moved = np.abs(expected[2][0] - expected[0][0]).max()
    assert moved > 1e-2, "the other tables would change nothing"
    done = ran(runtime, exported().directory / name / MODEL_FILE, written(feeds, tmp_path / "cases.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "appears in graph inputs" not in done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    off = differences(told["answers"], expected)
    sys.stdout.write(f"{runtime} {told['version']}, {name}: {', '.join(f'{one:.1e}' for one in off)}\n")
    assert max(off) < 1e-4


@pytest.mark.parametrize("runtime", COMMANDS)
def test_a_call_without_tables_is_an_error_and_no_answer(runtime: str, tmp_path: Path):
    """But in OpenVINO, which takes zeros for what is not given: no row is valid then, which is the zero mask."""
    feeds, expected = calls("acc")
    lacking = [{k: v for k, v in feeds[0].items() if not k.startswith("prototypes.")}]
    done = ran(runtime, exported().directory / "acc" / MODEL_FILE, written(lacking, tmp_path / "cases.json"))
    if runtime == "openvino":
        assert max(differences(json.loads(done.stdout)["answers"], expected[1:2])) < 1e-4
        return
    assert done.returncode != 0, f"{runtime} answered {done.stdout[:200]}"


@pytest.mark.parametrize("runtime", COMMANDS)
def test_int8_answers_as_onnxruntime_here(runtime: str, tmp_path: Path):
    from test_precision import in_int8

    bundle, (feeds, _) = in_int8(), calls("acc+gyro")
    (tmp_path / MODEL_FILE).write_bytes(bundle.data)
    cases = written(feeds, tmp_path / "cases.json")
    here = json.loads(ran("onnxruntime", tmp_path / MODEL_FILE, cases).stdout)["answers"]
    done = ran(runtime, tmp_path / MODEL_FILE, cases)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    expected = [[np.array(one["logits"]), np.array(one["probabilities"])] for one in here]
    off = differences(told["answers"], expected)
    sys.stdout.write(f"{runtime} {told['version']}, int8: {', '.join(f'{one:.1e}' for one in off)}\n")
    assert max(off) < 0.05


PAGE = """<!doctype html><script src="node_modules/onnxruntime-web/dist/ort.wasm.min.js"></script><script>
async function answer(model, cases) {
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(model);
  const answers = [];
  for (const one of await (await fetch(cases)).json()) {
    const feeds = {};
    for (const [name, { dtype, shape, data }] of Object.entries(one)) {
      feeds[name] = new ort.Tensor(dtype, Float32Array.from(data), shape);
    }
    const found = await session.run(feeds);
    answers.push(Object.fromEntries(["logits", "probabilities"].map((n) => [n, Array.from(found[n].data)])));
  }
  return answers;
}
</script>"""


@pytest.mark.parametrize("name", ["acc", "acc+gyro"])
def test_onnxruntime_web_in_a_browser_answers_as_torch(name: str, tmp_path: Path):
    (tmp_path / "node_modules").symlink_to(FOLDER / "node_modules")
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / MODEL_FILE).write_bytes((exported().directory / name / MODEL_FILE).read_bytes())
    feeds, expected = calls(name)
    written(feeds, tmp_path / "cases.json")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        answers = page.evaluate(f"answer('{MODEL_FILE}', 'cases.json')")
        server.shutdown()
    off = differences(answers, expected)
    sys.stdout.write(f"onnxruntime-web in chromium, {name}: {', '.join(f'{one:.1e}' for one in off)}\n")
    assert max(off) < 1e-4
