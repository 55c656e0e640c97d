"""A state directory of another account, such as the service's, asked about by whoever is logged in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from edgefl.errors import StoreError
from edgefl.identity import token

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")

TOKEN = token.encode_token(token.Token(1, "lab", "d1", "mqtts://127.0.0.1:9", bytes(32), b"certificate"))
DIALLED = ["--data", "basic_motions", "--broker", "mqtt://127.0.0.1:9"]
COMMANDS = {
    "status": ["status"],
    "run": ["run", *DIALLED],
    "install": ["install", "--user", "--dry-run", *DIALLED],
    "enroll": ["enroll", TOKEN],
    "doctor": ["doctor", "--format", "json"],
}
#: Loads what nobody may not read any more, becomes nobody, and runs one command line after the other.
AS_NOBODY = """
import importlib, json, os, sys
names = "cli device_checks library_checks enroll service_install service_report runtime.connect"
for name in names.split(): importlib.import_module("device_agent." + name)
names = "config.profiles data.sources data.named transport.mqtt identity.device identity.authority"
for name in names.split(): importlib.import_module("edgefl." + name)
from typer.testing import CliRunner
from device_agent import device_checks
from device_agent.cli import app
from edgefl.findings import well
device_checks.library_checks.torch = lambda *_, **__: well("torch", "")
device_checks.library_checks.runtimes = list
device_checks.ceiling = lambda: well("ceiling", "")
CliRunner().invoke(app, ["run"])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
told = []
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    told.append([done.exit_code, done.stdout, done.stderr])
print(json.dumps(told))
"""


class Said(NamedTuple):
    """What a command ended with."""

    code: int
    out: str
    error: str


class Asked(NamedTuple):
    """``locked``: root's alone; ``open``: readable, and root's to write. ``said``: by command and directory."""

    locked: Path
    open: Path
    said: dict[tuple[str, Path], Said]


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    """All commands, about both directories and what is in them. pytest's own directories are all private."""
    root = Path(os.path.realpath("/var/tmp")) / f"edgefl-state-{os.getpid()}"
    locked, readable = root / "locked", root / "open"
    known = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEFL_", "XDG_"))}
    try:
        for place, mode in ((root, 0o755), (locked, 0o700), (readable, 0o755)):
            place.mkdir(mode=mode)
        asked = [(name, place) for name in COMMANDS for place in (locked, locked / "inside")]
        asked.append(("enroll", readable / "new"))
        lines = [[*COMMANDS[name], "--state", str(place)] for name, place in asked]
        command = [sys.executable, "-c", AS_NOBODY, json.dumps(lines)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**known, "HOME": "/nonexistent"}
        )
        assert done.returncode == 0, done.stderr
        said = [Said(*one) for one in json.loads(done.stdout)]
        yield Asked(locked, readable, dict(zip(asked, said, strict=True)))
    finally:
        for place in (locked, readable, root):
            place.rmdir()


@pytest.mark.parametrize("inside", ["", "inside"])
@pytest.mark.parametrize("name", ["status", "run", "install", "enroll"])
def test_each_command_says_whose_it_is_and_who_may(asked: Asked, name: str, inside: str) -> None:
    said = asked.said[name, asked.locked / inside]
    assert said.code == StoreError.exit_code, said.error
    assert f"what to do: {asked.locked} belongs to root: run the same command as root (sudo" in said.error
    assert "Free space" not in said.error


def test_enrolling_into_a_directory_that_may_be_read_alone(asked: Asked) -> None:
    place = asked.open / "new"
    said = asked.said["enroll", place]
    assert said.code == StoreError.exit_code
    assert f"cannot create {place}: Permission denied\nwhat to do: {asked.open} belongs to root" in said.error


@pytest.mark.parametrize("inside", ["", "inside"])
def test_doctor_tells_it_as_a_fault_and_goes_on(asked: Asked, inside: str) -> None:
    place = asked.locked / inside
    said = asked.said["doctor", place]
    assert said.code == 1, said.error
    checks = {check["name"]: check for check in json.loads(said.out)}
    assert checks["state"]["id"] == "state-permission"
    assert checks["identity"]["detail"] == f"cannot read {place}: Permission denied"
    assert f"{asked.locked} belongs to root" in checks["identity"]["remedy"]
    assert {"clock", "python", "torch", "memory", "ceiling", "energy"} <= set(checks)
