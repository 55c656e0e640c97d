"""examples/jetson: the profile is one, the script's commands are ones that there are. Nothing was tried on a Jetson."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from test_pages import commands, parse

from edgefl.config.profiles import load_device

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "jetson"
ROOT = FOLDER.parents[1]


def printed(*arguments: str) -> list[list[str]]:
    done = subprocess.run(
        ["sh", str(FOLDER / "install.sh"), *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_the_profile_is_the_shipped_ones_with_a_budget_of_its_own() -> None:
    own, shipped = load_device(str(FOLDER / "my-jetson.yaml")), load_device("jetson-orin-nano-8gb")
    assert (own.memory_bytes, own.unified, own.speed) == (shipped.memory_bytes, shipped.unified, shipped.speed)
    assert own.budget.memory_bytes == 2 * 2**30
    assert own.budget != shipped.budget


def test_the_script_only_prints_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    lines = printed("mqtts://broker.example", str(tmp_path))
    assert [words[0] for words in lines] == [
        "python3", *["/opt/edgefl/bin/pip"] * 2, *["/opt/edgefl/bin/edgefl-agent"] * 3
    ]  # fmt: skip
    assert not Path("/opt/edgefl").exists()
    without = subprocess.run(["sh", str(FOLDER / "install.sh")], capture_output=True, text=True, timeout=30)
    assert without.returncode != 0
    assert "name the broker" in without.stderr


def test_its_versions_and_files_are_there(tmp_path: Path) -> None:
    _, torch, *_ = printed("mqtts://broker.example", str(tmp_path))
    assert Path(torch[torch.index("-c") + 1]).samefile(ROOT / "constraints" / "jetpack-6.txt")
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert torch[torch.index("--index-url") + 1] in page, "docs/install.md names another index"


@pytest.mark.parametrize("step", [3, 4, 5])
def test_each_command_of_the_agent_can_be_parsed(step: int, tmp_path: Path) -> None:
    words = printed("mqtts://broker.example", str(tmp_path))[step]
    parse(["edgefl-agent", *words[1:]])
    if "--profile" in words:
        load_device(words[words.index("--profile") + 1])


def test_the_commands_of_the_page_can_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = commands((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert [words[:2] for words in found] == [["edgefl", "plan"], ["edgefl-agent", "install"]]
    for words in found:
        parse(words)
    assert re.search(r"Not tried on a Jetson", (FOLDER / "README.md").read_text(encoding="utf-8"))
