"""A Jetson by each of its signs, NVIDIA's index for its release, and boards without one: simulated trees."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tree_fixture import tree
from typer.testing import CliRunner

from device_agent import library_checks, service_commands
from device_agent.board import Board, board
from device_agent.cli import app
from device_agent.library_checks import TorchFacts, judge_torch
from edgefl.config.profiles import load_device
from edgefl.resources.hardware import NvmlError, graphics

MODEL = b"NVIDIA Jetson AGX Orin Developer Kit\0"
KERNEL = "Linux version {}-tegra (buildbrain@mobile) (gcc 11.4.0) #1 SMP PREEMPT"
PACKAGES = "Package: libc6\nVersion: 2.35-0\n\nPackage: nvidia-l4t-core\nStatus: installed\nVersion: 36.4.3-2025\n"


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVIDIA card of this machine is seen."""

    def none() -> None:
        raise NvmlError("libnvidia-ml.so.1 is not installed")

    monkeypatch.setattr("device_agent.board.graphics", partial(graphics, nvml=none))


@pytest.mark.parametrize(
    ("files", "l4t", "jetson"),
    [
        ({}, 0, False),
        ({"proc/version": "Linux version 6.1.0-18-arm64 (debian)"}, 0, False),
        ({"etc/nv_tegra_release": "# R39 (release), REVISION: 2.0, GCID: 1"}, 39, True),
        # In a container: the file is empty, and the kernel is the host's.
        ({"etc/nv_tegra_release": "", "proc/version": KERNEL.format("5.15.148")}, 36, True),
        ({"proc/version": KERNEL.format("6.8.12")}, 38, True),
        ({"proc/version": "Linux version 4.9.337-l4t-r32.7.4+ga1 (oe-user@oe-host)"}, 32, True),
        ({"var/lib/dpkg/status": PACKAGES}, 36, True),
        ({"proc/version": KERNEL.format("7.1.2")}, 0, True),
        ({"proc/device-tree/model": MODEL}, 0, True),
        ({"sys/devices/soc0/family": "Tegra"}, 0, True),
    ],
)
def test_a_jetson_is_known_by_any_of_its_signs(
    tmp_path: Path, files: dict[str, object], l4t: int, jetson: bool
) -> None:
    found = board(tree(tmp_path, files))
    assert (found.l4t, found.is_jetson, found.any_gpu) == (l4t, jetson, jetson)
    if jetson:
        assert "pytorch.org" not in found.source("torch")


@pytest.mark.parametrize(
    ("l4t", "words"),
    [
        (35, ["JetPack 6 or newer first", "L4T 35 has too old a Python"]),
        (36, ["JetPack 6: pip install", "https://pypi.jetson-ai-lab.io/jp6/cu126"]),
        (38, ["JetPack 7: pip install", "https://pypi.jetson-ai-lab.io/sbsa/cu130"]),
        (39, ["JetPack 7.2: pip install", "https://pypi.jetson-ai-lab.io/sbsa/cu130"]),
        (40, ["L4T 40 is newer than this release knows", "--force-reinstall --no-deps --index-url INDEX torch"]),
        (
            0,
            [
                "JetPack not known",
                "https://pypi.jetson-ai-lab.io/jp6/cu126",
                "https://pypi.jetson-ai-lab.io/sbsa/cu130",
            ],
        ),
    ],
)
def test_each_release_has_its_index_or_says_that_it_is_unknown(l4t: int, words: list[str]) -> None:
    text = Board("NVIDIA Jetson Orin", l4t=l4t, jetson=not l4t).source("torch")
    assert all(word in text for word in words), text
    assert l4t == 35 or "too old" not in text


def test_a_build_for_processors_fails_where_the_jetsons_release_is_not_known() -> None:
    check = judge_torch(TorchFacts("2.8.0"), "auto", Board(jetson=True))
    assert (check.id, check.status) == ("torch-cpu-build", "fail")
    assert "JetPack not known" in check.remedy
    assert judge_torch(TorchFacts("2.8.0", on="cpu"), "cpu", Board(jetson=True)).status == "ok"


def doctor(profile: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, str]:
    """Exit code and text of doctor with a build of torch for processors, on a machine without a GPU."""
    monkeypatch.setattr(library_checks, "board", Board)
    build = library_checks._TORCH.replace('torch.version.cuda or ""', '""')
    monkeypatch.setattr(library_checks, "_TORCH", build)
    result = CliRunner().invoke(app, ["doctor", "--profile", profile, "--state", str(tmp_path)])
    return result.exit_code, " ".join(result.stdout.split())


def test_doctor_fails_a_jetsons_profile_with_a_build_for_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, text = doctor("jetson-orin-nano-8gb", monkeypatch, tmp_path)
    assert code == 1
    assert "[torch-cpu-build]" in text
    assert "--force-reinstall --no-deps" in text
    assert "[profile-plan-only]" not in text


@pytest.mark.parametrize("name", ["jetson-nano", "jetson-xavier-nx"])
def test_a_board_without_a_supported_jetpack_is_to_plan_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    found = load_device(name)
    assert "to plan with; no supported JetPack" in found.description
    words = ["run", "--profile", name, "--broker", "mqtt://127.0.0.1:1", "--data", "x", "--state", str(tmp_path)]
    monkeypatch.setattr("device_agent.runtime.connect.become", lambda options: None)
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert "profile-plan-only" in ran.output
    assert "no supported JetPack" in ran.output
    monkeypatch.setattr(service_commands, "warn_of_torch", lambda profile: None)
    monkeypatch.setattr("edgefl.data.sources.check_source", lambda source: None)
    words = ["install", "--dry-run", "--profile", name, "--broker", "mqtt://127.0.0.1:1", "--data"]
    installed = CliRunner().invoke(app, [*words, "x"])
    assert "no supported JetPack" in installed.output, installed.output
