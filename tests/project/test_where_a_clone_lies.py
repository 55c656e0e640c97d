"""A clone below the directory for temporary files, below a path with blanks, without data beside it."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What stands in a checkout and is not of it.
MADE = {"build", "dist", "runs"}
#: Tests of what a path goes into: shells, units, installed programs, processes of their own.
OF_PATHS = (
    "tests/agent/test_service_install.py",
    "tests/examples/test_jetson_example.py",
    "tests/process",
    "tests/project/test_packaging.py",
)


def left_out(folder: str, names: list[str]) -> set[str]:
    made = MADE if Path(folder) == ROOT else set()
    return {name for name in names if name.startswith(".") or name == "__pycache__" or name in made}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with an environment of its own, which has the packages of the one that runs this and no other EdgeFL."""
    place = tmp_path_factory.mktemp("a path with blanks") / "my clone"
    shutil.copytree(ROOT, place, ignore=left_out)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / ".venv"], check=True, timeout=60)
    (own,) = (place / ".venv" / "lib").glob("python*/site-packages")
    packages = [path for path in [*site.getsitepackages(), *sys.path] if path.endswith("-packages")]
    (own / "here.pth").write_text("\n".join([str(place), *dict.fromkeys(packages)]), encoding="utf-8")
    return place


@pytest.mark.slow
def test_the_tests_of_paths_pass_there(clone: Path) -> None:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEFL_DATA", "PYTEST_"))}
    environment = {**known, "EDGEFL_REQUIRE_DATA": "", "PYTHONPATH": ""}
    command = [clone / ".venv" / "bin" / "python", "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *OF_PATHS], cwd=clone, capture_output=True, text=True, env=environment, timeout=110
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("target", ["demo", "test", "wheels", "test-kserve", "test-runtimes"])
def test_no_command_of_the_makefile_splits_the_path(clone: Path, target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=clone, capture_output=True, text=True, check=True, timeout=30)
    words = [word for line in done.stdout.replace("\\\n", " ").splitlines() for word in shlex.split(line)]
    assert words
    half = str(clone).partition(" ")[0]
    assert [word for word in words if half in word and str(clone) not in word] == []
