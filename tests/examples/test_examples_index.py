"""The folder of examples: each has a page of one screen, and its own run files are right with the package they name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and (path / "README.md").is_file())
#: Loads a run file and builds its plan.
PLANNED = """
import sys
from edgefl.api.run_inputs import data_of
from edgefl.config.profiles import load_run
from edgefl.plan.compile import compile_run
config, recipe = load_run(sys.argv[1])
shapes, labels, _ = data_of(config, [device.name for device in config.fleet])
plan = compile_run(config, recipe, run="r", shapes=shapes, label_names=labels)
print({m: encoder.kind for m, encoder in plan.model.encoders.items()}, recipe.slots["objective"])
"""


def test_the_index_names_each_folder() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(FOLDERS) >= 6
    assert [name for name in FOLDERS if f"({name}/README.md)" not in text] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_page_is_one_screen(name: str) -> None:
    lines = (EXAMPLES / name / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package edgefl_extra, installed apart."""
    place = tmp_path_factory.mktemp("extra")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(place)]
    command = [sys.executable, "-m", "pip", "install", *options, str(EXAMPLES / "edgefl_extra")]
    subprocess.run(command, check=True)
    return place


def planned(file: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, paths), str(ROOT)])
    command = [sys.executable, "-c", PLANNED, str(EXAMPLES / file)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("file", "what", "lacks"),
    [
        ("own_encoder/run.yaml", "'acc': 'conv_sensor', 'gyro': 'sensor'", "conv_sensor"),
        ("own_encoder/module.yaml", "'acc': 'conv_gru', 'gyro': 'sensor'", "conv_gru"),
        ("own_method/run.yaml", "focal", "focal"),
    ],
)
def test_its_run_file_is_right_with_the_package_and_named_without_it(
    file: str, what: str, lacks: str, package: Path
) -> None:
    done = planned(file, package)
    assert done.returncode == 0, done.stderr
    assert what in done.stdout
    without = planned(file)
    assert "ConfigError" in without.stderr
    assert lacks in without.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", ["own_encoder/run.yaml", "own_encoder/module.yaml", "own_method/run.yaml"])
def test_it_trains(file: str, package: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(package), str(ROOT)])
    command = [
        sys.executable,
        "-m",
        "edgefl.cli.main",
        "run",
        str(EXAMPLES / file),
        "--runs",
        str(tmp_path),
    ]
    rounds = "[1,1,1]" if file.endswith("module.yaml") else "[1,1]"
    command += ["--set", f"training.rounds={rounds}", "--no-page"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 of 2 devices trained" in done.stdout
