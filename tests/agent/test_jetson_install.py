"""Every documented way to a Jetson's torch, by pip itself, beside PyPI's build for processors of the same version.

Two indexes in folders stand for PyPI's and the Jetson's; the tags are this machine's. The pip is the one that Python
brings along, as in a Jetson's fresh environment: it ranks manylinux_2_28 before linux; newer ones, such as 26.3, do
not. The commands are those of the page, the files and doctor.
"""

from __future__ import annotations

import ensurepip
import os
import platform
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.board import Board
from device_agent.library_checks import TorchFacts, judge_torch
from edgefl import findings

ROOT = Path(__file__).parents[2]
PROCESSOR = platform.machine()
INDEX = re.compile(r"https://pypi\.jetson-ai-lab\.io/\S+?(?=[\s)]|$)")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tags of Linux wheels")
Install = Callable[..., str]


def wheel(index: Path, name: str, version: str, tag: str, build: str, requires: tuple[str, ...] = ()) -> Path:
    """A tiny wheel in an index's folder: a module that says which build it is."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{version}-py3-none-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", f"build = {build!r}\n")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: train\n{needs}",
        )
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{one.name}">{one.name}</a>\n' for one in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(links)
    return file


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the pip that Python puts into a new environment."""
    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        pytest.skip("this Python brings no pip along")
    folder = tmp_path_factory.mktemp("pip")
    with zipfile.ZipFile(bundled[-1]) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def install(tmp_path: Path, pip: Path) -> Install:
    """Runs a documented command in a fresh environment, and tells which build of torch is there afterwards."""
    pypi, jetson = tmp_path / "pypi", tmp_path / "jetson"
    for version in ("2.8.0", "2.9.1"):
        for name in ("torch", "onnxruntime_gpu"):
            wheel(pypi, name, version, f"manylinux_2_28_{PROCESSOR}", "processors", ("filelock",))
            wheel(jetson, name, version, f"linux_{PROCESSOR}", "jetson", ("filelock",))
    wheel(pypi, "filelock", "3.0", "any", "")
    wheel(tmp_path / "wheels", "edgefl_toolkit", "0.1", "any", "", ('torch>=2.6; extra == "train"',))
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment" / "bin" / "python"
    there = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    there |= {
        "PYTHONPATH": str(pip),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": pypi.as_uri(),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    there |= {"PIP_FIND_LINKS": str(tmp_path / "wheels" / "edgefl-toolkit"), "TORCH_INDEX": jetson.as_uri()}

    def run(command: str, module: str = "torch") -> str:
        words = shlex.split(INDEX.sub(jetson.as_uri(), command.replace("$TORCH_INDEX", jetson.as_uri())), comments=True)
        words = words[words.index("install") :]
        done = subprocess.run(
            [str(python), "-m", "pip", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=there,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        built = [str(python), "-c", f"import {module}; print({module}.build)"]
        return subprocess.run(built, capture_output=True, text=True, timeout=60, check=False).stdout.strip()

    return run


def commands(text: str) -> list[str]:
    """The commands of a page or a script that install with pip."""
    joined = text.replace("\\\n", " ")
    return [line.strip() for line in re.split(r"\n|&&", joined) if re.search(r"bin/(?:python -m )?pip install", line)]


def documented() -> dict[str, list[str]]:
    page = (ROOT / "docs/install.md").read_text().partition("\n## A Jetson\n")[2].partition("\n## ")[0]
    container = (ROOT / "containers/agent-l4t.Dockerfile").read_text().replace("/source/", "")  # run from there
    script = (ROOT / "examples/jetson/install.sh").read_text().replace("$constraints", "constraints/jetpack-6.txt")
    constraint = (ROOT / "constraints/jetpack-6.txt").read_text().replace("#   pip", "bin/pip")
    return {
        "page": commands(page),
        "container": [line.replace(" @ file:///source", "") for line in commands(container)],
        "script": [line.replace('--find-links "$wheels"', "") for line in commands(script)],
        "constraints": commands(constraint),
    }


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "where", ["page", "container", pytest.param("script", marks=SLOW), pytest.param("constraints", marks=SLOW)]
)
def test_a_documented_install_takes_the_jetsons_torch(install: Install, where: str) -> None:
    first, *then = documented()[where]
    assert install(first) == "jetson"
    assert len(then) == (where != "constraints")
    for command in then:  # EdgeFL itself, which brings what torch needs and leaves it alone
        assert install(command.replace("/srv/wheels", "wheels")) == "jetson"


def remedy(text: str, package: str) -> str:
    """The command in a remedy of doctor's."""
    command = re.search(rf"pip install [^)]*? {package}(?=[)., ]|$)", text)
    assert command, text
    return command[0]


@pytest.mark.parametrize("l4t", [36, pytest.param(38, marks=SLOW), pytest.param(39, marks=SLOW)])
def test_doctors_remedy_puts_the_jetsons_torch_over_a_build_for_processors(install: Install, l4t: int) -> None:
    check = judge_torch(TorchFacts("2.9.1+cpu"), "auto", Board("NVIDIA Jetson Orin Nano", l4t=l4t))
    assert check.status == "fail"
    assert install("pip install torch==2.9.1") == "processors"  # of the very version that the Jetson's index has
    assert install(remedy(check.remedy, "torch")) == "jetson"


def test_doctors_remedy_puts_the_jetsons_onnxruntime_over_pips(install: Install) -> None:
    source = Board("NVIDIA Jetson Orin Nano", l4t=36).source("onnxruntime-gpu")
    text = findings.found("onnxruntime-jetson", "", source=source).remedy
    assert install("pip install onnxruntime-gpu==2.9.1", "onnxruntime_gpu") == "processors"
    assert install(remedy(text, "onnxruntime-gpu"), "onnxruntime_gpu") == "jetson"


def test_the_extra_index_is_what_took_the_wrong_build(install: Install) -> None:
    """Without this the tests above would prove nothing."""
    assert install('pip install --extra-index-url "$TORCH_INDEX" torch==2.8.0') == "processors"
