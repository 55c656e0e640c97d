"""Files by which devices get the agent: images, versions per JetPack, the page that leads through it."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import device_agent.cli
from edgefl.config.profiles import load_device, shipped

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "containers").glob("*.Dockerfile"))
AGENTS = [image for image in IMAGES if image.name.startswith("agent")]
VERSIONS = sorted((ROOT / "constraints").glob("*.txt"))
LINTER = Path(sys.executable).with_name("hadolint")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hadolint has wheels for x86-64 only")
@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_a_linter_has_nothing_against_an_image(image: Path):
    found = subprocess.run([LINTER, image], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def instruction(image: Path, name: str) -> list[str]:
    """The words of an image's last such instruction, given as JSON."""
    return json.loads(re.findall(rf"^(?:HEALTHCHECK .*?)?{name} (\[.*\])$", image.read_text(), re.MULTILINE)[-1])


@pytest.mark.parametrize("image", AGENTS, ids=lambda path: path.name)
def test_an_agents_image_is_not_root_and_its_commands_are_there(image: Path):
    text = image.read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)", text, re.MULTILINE) == ["10001:10001"]
    assert instruction(image, "ENTRYPOINT") == ["tini", "--", "edgefl-agent"]
    check, start = (json.loads(words) for words in re.findall(r"CMD (\[.*\])$", text, re.MULTILINE))
    program = typer.main.get_command(device_agent.cli.app)
    for words in (check[1:], [*start, "--broker", "mqtt://h"]):
        program.commands[words[0]].make_context(words[0], words[1:])
    assert check[:2] == ["edgefl-agent", "status"]  # whether it runs, not whether a broker is there
    profiles = [start[at + 1] for at, word in enumerate(start) if word == "--profile"]
    assert set(profiles) <= set(shipped("devices"))


def test_the_page_names_each_shipped_profile_that_asks_for_cuda():
    page = " ".join((ROOT / "docs" / "install.md").read_text(encoding="utf-8").split())
    (named,) = re.findall(r"((?:`[\w-]+`(?:, | and )?)+) ask for CUDA", page)
    asking = [name for name in shipped("devices") if load_device(name).torch_device == "cuda"]
    assert re.findall(r"`([\w-]+)`", named) == asking


@pytest.mark.parametrize("file", VERSIONS, ids=lambda path: path.name)
def test_versions_of_a_jetpack_are_within_what_the_extras_take(file: Path):
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    wanted = {found.name: found.specifier for found in map(Requirement, lines)}
    assert set(wanted) == {"torch", "onnxruntime-gpu"}
    for name, specifier in wanted.items():
        (bounds,) = set(re.findall(rf'"{name}([<>=][^;"]*)', PROJECT))
        least = next(str(one.version) for one in specifier if one.operator in {"==", ">="})
        assert SpecifierSet(bounds).contains(least), f"{name} {least} is outside {bounds}"
    assert "NOT TESTED" in file.read_text()
    assert f"[{file.name}]({file.name})" in (file.parent / "README.md").read_text()
