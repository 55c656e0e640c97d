"""examples/two_machines: its commands are ones that there are (here); the fleet trains across namespaces (nightly)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from identity_fixture import free_ports
from test_pages import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "two_machines" / "run.sh"
SMALL = [
    "model.stages=1", "training.rounds=[1]", "training.epochs=1",
    *(f"model.encoders.{m}.{field}" for m in ("acc", "gyro") for field in ("size=tiny", "width=32")),
]  # fmt: skip


def commands() -> list[list[str]]:
    """The commands of our programs in the script, its variables filled in."""
    text = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
    for name, value in {"$host": "10.77.0.1", "$port": "8883", "$newcomers": "8884"}.items():
        text = text.replace(name, value)
    lines = re.findall(r"^\s*(?:on_server |on_device )?(edgefl(?:-\w+)? .*)$", text, re.MULTILINE)
    return [shlex.split(re.split(r" [>&]|$", line)[0].replace('"$@"', "")) for line in lines]


def test_the_script_is_a_shell_script() -> None:
    subprocess.run(["sh", "-n", str(SCRIPT)], check=True)


def test_it_goes_the_way_of_the_page_on_security() -> None:
    steps = [" ".join(words[:2]) for words in commands()]
    assert steps == [
        "edgefl-coordinator init", "edgefl data", "edgefl-coordinator enrollments", "edgefl-coordinator enroll",
        "edgefl-agent enroll", "edgefl-agent run", "edgefl-coordinator run", "edgefl report",
    ]  # fmt: skip
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert [step for step in steps if step.startswith(("edgefl-c", "edgefl-a")) and f"{step}" not in page] == []


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[:2]))
def test_each_command_can_be_parsed(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parse(words)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(shutil.which("mosquitto") is None, reason="needs mosquitto")
@pytest.mark.parametrize("root", [True, False])
def test_two_devices_enrol_and_train(tmp_path: Path, root: bool) -> None:
    """As root in namespaces, else, and without ``ip`` on the path, on loopback."""
    port, newcomers = free_ports(2)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {
        "edgefl": "edgefl.cli.main", "edgefl-agent": "device_agent.cli", "edgefl-coordinator": "coordinator.cli",
    }.items():  # fmt: skip
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    if not root:
        (programs / "ip").write_text("#!/bin/sh\nexit 1\n")
        (programs / "ip").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PORT": str(port),
        "ENROLL_PORT": str(newcomers),
    }
    command = ["sh", str(SCRIPT), str(tmp_path / "work"), *(word for one in SMALL for word in ("--set", one))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 of 2 devices trained" in done.stdout
    named = os.geteuid() == 0 and root and "two network namespaces" in done.stdout
    assert named or "all on loopback" in done.stdout
    address = "10.77.0.1:8883" if named else f"127.0.0.1:{port}"
    for name in ("left", "right"):
        assert f"mqtts://{address}" in (tmp_path / "work" / "enrollments.log").read_text()
        assert "delivered" in (tmp_path / "work" / f"{name}.log").read_text()
        assert not (tmp_path / "work" / f"{name}.token").exists()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True) if shutil.which("ip") else None
    assert left is None or "edgefl-" not in left.stdout
