"""A device without internet installs from a folder that `make wheels` made, and its programs start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_of_wheels_is_enough_for_a_device_without_internet(tmp_path: Path):
    version = ".".join(map(str, sys.version_info[:2]))
    wanted = [f"ARCH={platform.machine()}", f"FOR={version}", "EXTRA=", f"WHEELS={tmp_path / 'wheels'}"]
    made = subprocess.run(["make", "wheels", *wanted], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "EDGEFL_"))}
    offline = {**clean, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path)}

    def run(program: str, *words: str) -> str:
        command = [str(environment / "bin" / program), *words]
        done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pip", "install", "--find-links", str(tmp_path / "wheels"), "edgefl-toolkit")
    for program in ("edgefl", "edgefl-agent", "edgefl-coordinator"):
        assert run(program, "--version").startswith(f"{program} {edgefl.__version__} (protocol ")
    told = run(
        "edgefl-agent", "install", "--user", "--dry-run", "--data", "basic_motions", "--broker", "mqtt://127.0.0.1"
    )
    assert f"ExecStart={environment}/bin/python" in told
