"""``--help`` as it is printed; tests/project/test_docs.py holds docs/commands.md to its words."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

AGENT = ("", "run", "enroll", "doctor", "profile", "install", "uninstall", "status", "upgrade")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    "command", ["edgefl doctor", "edgefl-agent run", "edgefl-agent install", "edgefl-coordinator run"]
)
def test_a_broker_s_user_and_password_are_in_the_printed_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rich takes [words] in a help text for markup, and drops them."""
    assert "://user:password@host" in printed(command, "300", monkeypatch, capsys)


@pytest.mark.parametrize("command", [f"edgefl-agent {verb}".strip() for verb in AGENT])
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
