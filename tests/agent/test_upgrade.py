"""Another release into a real environment, by pip; and back, where the new one is not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from device_agent import upgrade as upgrading
from device_agent.upgrade import Upgrade, find_wheel
from edgefl.errors import ServiceError, StoreError

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, version: str, **changes: str) -> Path:
    """A wheel of this checkout as another version, with lines put before those of its files."""
    tree = folder / f"tree-{version}"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("edgefl", "device_agent", "coordinator", "profiles"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (tree / name).write_text(re.sub(r'^version = ".*"$', f'version = "{version}"', text, flags=re.MULTILINE))
    init = tree / "edgefl" / "__init__.py"
    init.write_text(re.sub(r"__version__ = .*", f'__version__ = "{version}"', init.read_text()))
    for name, line in changes.items():
        file = tree / "device_agent" / f"{name}.py"
        start = "from __future__ import annotations"
        file.write_text(file.read_text().replace(start, f"{start}; {line}", 1))
    out = folder / version
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    return find_wheel(out)


def test_a_folder_without_a_wheel_or_with_two_is_refused(tmp_path):
    with pytest.raises(StoreError, match="holds 0 files"):
        find_wheel(tmp_path)
    for version in ("1.0", "1.1"):
        (tmp_path / f"edgefl_toolkit-{version}-py3-none-any.whl").touch()
    with pytest.raises(StoreError, match="holds 2 files"):
        find_wheel(tmp_path)
    assert find_wheel(tmp_path / "edgefl_toolkit-1.1-py3-none-any.whl").name == "edgefl_toolkit-1.1-py3-none-any.whl"


@pytest.mark.parametrize("call", ["link", "unlink"])
def test_power_that_goes_while_packages_are_saved_or_let_go_costs_none_of_them(tmp_path, monkeypatch, call):
    """What is there of the packages of before by half is never put back."""
    packages = tmp_path / "site-packages"
    for name in ("edgefl", "numpy", "torch"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(name)
    monkeypatch.setattr(upgrading.sysconfig, "get_path", lambda name: str(packages))
    monkeypatch.setattr(upgrading, "run", lambda command: "pip is not asked here")
    told: list[str] = []

    def upgrade() -> None:
        doctor = [sys.executable, "-c", "print('[]')"]
        Upgrade(doctor, lambda: "", told.append).install(tmp_path / "a.whl", online=False)

    one = getattr(os, call)

    def once(*given: object, **more: object) -> None:
        one(*given, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, call, once)
        patched.setattr(upgrading, "run", lambda command: "")
        with pytest.raises(KeyboardInterrupt):
            upgrade()
    told.clear()
    with pytest.raises(ServiceError, match="pip is not asked here"):
        upgrade()
    assert sorted(path.name for path in packages.iterdir()) == ["edgefl", "numpy", "torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["site-packages"]
    assert told == ["going back to the packages of before"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_release_that_fails_its_checks_gives_way_to_the_one_before(tmp_path):
    """What the project needs lies beside, as on a device whose packages are there already: pip asks no index."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    (packages,) = environment.glob("lib/python*/site-packages")
    for old in packages.glob("setuptools*"):  # which torch does not take
        shutil.rmtree(old)
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEFL_", "PYTHON"))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        given = {**clean, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, env=given)

    def version() -> str:
        return run("-m", "device_agent.cli", "--version").stdout.split()[1]

    def upgrade(to: Path) -> subprocess.CompletedProcess[str]:
        return run("-m", "device_agent.cli", "upgrade", str(to))

    first = wheel(tmp_path, "0.9.1")
    assert run("-m", "pip", "install", "--no-index", "--no-deps", str(first)).returncode == 0
    assert version() == "0.9.1"
    done = upgrade(wheel(tmp_path, "0.9.2"))
    assert done.returncode == 0, done.stderr
    assert version() == "0.9.2"
    before = sorted(path.name for path in packages.iterdir())

    unfit = {
        "0.9.3": ({"cli": "raise SystemExit('this release is broken')"}, "this release is broken"),
        "0.9.4": ({"device_checks": "import sys; sys.version_info = (3, 9)"}, "now fails: python"),
    }
    for number, (changes, fault) in unfit.items():
        done = upgrade(wheel(tmp_path, number, **changes))
        assert done.returncode == 23, done.stderr
        assert fault in done.stderr
        assert "The old release is back." in done.stderr
        assert version() == "0.9.2"
        assert sorted(path.name for path in packages.iterdir()) == before

    # The power goes while packages are replaced: what was saved is put back by the next upgrade.
    shutil.copytree(packages, packages.with_name("site-packages.before"), symlinks=True)
    shutil.copytree(packages / "edgefl" / "data", packages / "edgefl" / "left-over")
    done = upgrade(wheel(tmp_path, "0.9.5"))
    assert "cut off" in done.stderr, done.stderr
    assert version() == "0.9.5"
    assert not (packages / "edgefl" / "left-over").exists()
    assert not list(packages.parent.glob("site-packages.*"))
