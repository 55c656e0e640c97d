"""What a run leaves: its directory, the keys of its events by kind, and the descriptions of its bundles."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from export_fixture import exported
from memory_fleet import plan_of, run_fleet, share

from pins.golden import check

FILE = "run.json"
RUN = """
name: pin
recipe: lw-prototypes
broker: amqtt
data: {source: all.npz, test: test.npz}
model:
  stages: 2
  encoders:
    a: {kind: sensor, width: 8, depth: 2, heads: 2, patch: 4}
    b: {kind: sensor, width: 8, depth: 2, heads: 2, patch: 4}
  head: {width: 8, out: 8}
  fusion_width: 8
training: {rounds: [1, 1], batch_size: 8}
fleet: [{name: left}, {name: right}]
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_edgefl_run(tmp_path: Path):
    share(40, {"a": 1.0, "b": 0.8}, 1).save_npz(tmp_path / "all.npz")
    share(20, {"a": 1.0, "b": 1.0}, 2).save_npz(tmp_path / "test.npz")
    (tmp_path / "run.yaml").write_text(RUN)
    command = [Path(sys.executable).with_name("edgefl"), "run", "run.yaml", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    check(FILE, "directory", layout(run))
    check(
        FILE, "bundles of the run", {path.parent.name: described(path) for path in run.glob("bundles/*/manifest.json")}
    )


def test_a_run_in_one_process(tmp_path: Path):
    plan = plan_of(tmp_path, "lw-fedmml", "ab", 2, ["round.devices=2", "round.join_s=60"])
    own = {"whole": share(24, {"a": 1.0, "b": 1.0}, 1), "only-a": share(12, {"a": 1.0}, 2)}
    run_fleet(tmp_path, plan, own)
    rows = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()]
    assert {tuple(row) for row in rows} == {("at", "kind", "stage", "round", "device", "data")}
    kinds = {
        row["kind"]: sorted({key for one in rows if one["kind"] == row["kind"] for key in one["data"]}) for row in rows
    }
    check(FILE, "events", kinds)
    check(FILE, "directory of the coordinator", layout(tmp_path / "run"))
    check(FILE, "directories of the agents", layout(tmp_path / "agents"))


def test_bundles():
    """Of random weights: a model of each sensor, and one of both."""
    bundles = exported().directory
    check(FILE, "bundles", {path.parent.name: described(path) for path in bundles.glob("*/manifest.json")})
    check(FILE, "index", shape(json.loads((bundles / "index.json").read_text("utf-8"))))
    check(FILE, "files of the bundles", layout(bundles))


def layout(directory: Path) -> list[str]:
    """The paths below, but for what is called by its contents; slots as one: how many are made is a matter of time."""
    return sorted(
        {
            re.sub(r"/work\.\d$", "/work.N", path.relative_to(directory).as_posix()) + "/" * path.is_dir()
            for path in directory.rglob("*")
            if path.parent.name not in {"objects", "rows"}
        }
    )


def described(path: Path) -> dict[str, Any]:
    """A manifest without what depends on the versions of torch and onnx, on the floats and on the machine."""
    found = json.loads(path.read_text("utf-8").replace('"onnxruntime-gpu"', '"onnxruntime"'))  # as it is installed
    measured = ("sha256", "table_sha256", "size_bytes", "max_difference", "opset", "ir_version", "versions", "parts")
    found |= {key: shape(found[key]) for key in (*measured, "parity")}
    return found


def shape(value: Any) -> Any:
    """The keys of a JSON value, and of what kind its leaves are; of a list each different shape, once."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return distinct(shape(one) for one in value)
    return type(value).__name__


def distinct(shapes: Iterable[Any]) -> list[Any]:
    """Each once, sorted."""
    return [json.loads(text) for text in sorted({json.dumps(one, sort_keys=True) for one in shapes})]
