"""examples/edgefl_extra, a package of its own: installed beside EdgeFL, its methods and data train over MQTT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "edgefl_extra"


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is installed too."""
    target = tmp_path_factory.mktemp("extra")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(EXAMPLE)], check=True)
    return {**os.environ, "PYTHONPATH": str(target)}


def ran(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgefl.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(300)
def test_its_objective_selection_and_data_train_over_a_broker(beside: dict[str, str], tmp_path: Path):
    settings = ["--set", "training.rounds=[1,1]", "--trainers", "1", "--no-export", "--no-page"]
    done = ran(beside, "run", str(EXAMPLE / "run.yaml"), "--runs", str(tmp_path), "--format", "json", *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "done"
    recipe = report["config"]["recipe"]
    assert (recipe["objective"], recipe["select"]) == (
        {"focal": {"weight": 1.0, "gamma": 2.0}},
        {"cyclic": {"share": 0.5}},
    )
    first, second = ({row["device"] for row in report["assignments"] if row["round"] == number} for number in (1, 2))
    assert (first, second) == ({"east", "north"}, {"south", "west"})


def test_its_options_are_checked_like_our_own(beside: dict[str, str]):
    done = ran(beside, "plan", str(EXAMPLE / "run.yaml"), "--set", "slots.objective={focal: {gama: 1}}")
    assert done.returncode == 10
    assert "focal has no option 'gama'; did you mean 'gamma'?" in " ".join(done.stderr.split())


def test_without_it_its_names_are_unknown():
    done = ran(dict(os.environ), "plan", str(EXAMPLE / "run.yaml"))
    assert done.returncode == 10
    assert "unknown choice 'focal'" in " ".join(done.stderr.split())


def test_a_package_that_does_not_load_is_named_to_who_asks_for_its_method(tmp_path: Path):
    info = tmp_path / "torn-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[edgefl.methods]\ntorn = torn_package\n")
    (tmp_path / "torn_package.py").write_text("raise RuntimeError('no libtorn.so')\n")
    program = "from edgefl.registry import method, methods; methods('weight'); method('weight', 'torn')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "unknown method 'torn' (package torn has it but does not load: RuntimeError: no libtorn.so)" in done.stderr
