"""``--help`` of every command, 100 columns wide.

The configuration and command references are generated: ``tests/project/test_docs.py`` holds them to the code.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from pins.golden import WRITING, check, check_keys, pinned

FILE = "help.json"
VERBS = {
    "edgefl": "init, run, study, plan, recipes, runs, report, compare, devices, logs, export, data, data fetch, "
    "predict, benchmark, serve, doctor",
    "edgefl-agent": "run, enroll, doctor, profile, install, uninstall, status, upgrade",
    "edgefl-coordinator": "run, init, enroll, enrollments, backup, restore",
}
COMMANDS = [f"{program} {verb}".strip() for program, verbs in VERBS.items() for verb in ["", *verbs.split(", ")]]
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    drawn_by = {name: version(name) for name in ("typer", "rich")}
    there = pinned(FILE).get(command, {}).get("drawn_by", drawn_by)
    if there != drawn_by and not WRITING:
        pytest.skip(f"written with typer {there['typer']} and rich {there['rich']}, here they are {drawn_by}")
    text = printed(command, "100", monkeypatch, capsys)
    check(FILE, command, {"drawn_by": drawn_by, "text": [line.rstrip() for line in text.splitlines()]})


@pytest.mark.parametrize(
    "command", ["edgefl doctor", "edgefl-agent run", "edgefl-agent install", "edgefl-coordinator run"]
)
def test_a_broker_s_user_and_password_are_in_the_printed_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rich takes [words] in a help text for markup, and drops them."""
    assert "://user:password@host" in printed(command, "300", monkeypatch, capsys)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name.startswith("edgefl-agent")])
def test_nothing_of_the_agents_help_is_cut_off_on_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An example that ends in … cannot be typed."""
    assert "\u2026" not in printed(command, "80", monkeypatch, capsys)


def printed(command: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints as its help, without colours."""
    program, *verb = command.split()
    where, name = re.search(
        rf'^{program} = "([\w.]+):(\w+)"$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE
    ).groups()
    monkeypatch.setitem(
        sys.modules, "__main__", ModuleType("__main__")
    )  # click names the program by it: no pytest there
    monkeypatch.setattr("sys.argv", [program, *verb, "--help"])
    for variable, value in (("COLUMNS", columns), ("LINES", "50"), ("TERM", "dumb")):
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(getattr(importlib.import_module(where), name)())
    assert not ended.value.code
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_every_command_is_pinned():
    """Those that the programs' own help names."""
    check_keys(FILE, set(COMMANDS))
    for program, verbs in VERBS.items():
        text = "\n".join(pinned(FILE)[program]["text"])
        listed = re.findall(r"^│ (\w+(?: \w+)?)  ", text.partition("Commands")[2], re.MULTILINE)
        assert listed == verbs.split(", ")
