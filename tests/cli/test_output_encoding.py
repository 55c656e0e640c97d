"""Outputs that cannot show every character: ASCII in its place, exit code 0, and data whole in UTF-8."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from report_fixture import SIZES, run_report

from edgefl import console
from edgefl.cli import main
from edgefl.console import for_terminal, guarded
from edgefl.errors import StoreError
from edgefl.storage.disk import LEDGER

ENCODINGS = ["ascii", "latin-1", "cp1252"]
NAME = "Küche – 字"
Shown = Callable[..., str]


@pytest.fixture(params=ENCODINGS)
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Output of an ``edgefl`` command on a terminal of this encoding, read as UTF-8; it has to end with 0."""

    def call(*arguments: str) -> str:
        binary = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(binary, encoding=request.param))
        with pytest.raises(SystemExit) as ended:
            main.main(list(arguments))
        assert not ended.value.code
        sys.stdout.flush()
        data = binary.getvalue()
        return data.decode() if "json" in arguments else data.decode(request.param)

    return call


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose ledger is stood in for by the fixture's report."""
    (folder := tmp_path / "runs" / "20260918-new").mkdir(parents=True)
    (folder / LEDGER).write_bytes(b"")
    monkeypatch.setenv("EDGEFL_RUNS", str(folder.parent))
    report = msgspec.structs.replace(run_report(), name=NAME)
    for module in ("show", "devices"):
        monkeypatch.setattr(f"edgefl.cli.{module}.read_run", lambda _: report)
    monkeypatch.setattr("edgefl.cli.show.priced", lambda report, _: report)
    return folder


@pytest.mark.parametrize("verb", ["report", "devices"])
def test_a_report_is_shown_to_its_end(run: Path, shown: Shown, verb: str) -> None:
    text = shown(verb, "latest")
    assert all(device in text for device in SIZES)
    assert "?" not in text


def test_data_is_utf8_on_every_output(run: Path, shown: Shown) -> None:
    assert json.loads(shown("report", "latest", "--format", "json"))["name"] == NAME


@pytest.mark.slow
@pytest.mark.parametrize("program", ["edgefl plan demo", "edgefl-agent --help", "edgefl-coordinator run --help"])
def test_each_program_ends_well(program: str) -> None:
    name, *arguments = program.split()
    there = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=there)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("it’s 4 – 5 … 2×3 → 6", "it's 4 - 5 ... 2x3 -> 6"),
        ("“naïve” ½ 3 m² 45 °C ≥ θ", '"naive" 1/2 3 m^2 45 deg C >= theta'),
        ("字\udc80", "??"),
    ],
)
def test_each_character_has_its_ascii(monkeypatch: pytest.MonkeyPatch, text: str, plain: str) -> None:
    binary = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(binary, encoding="ascii"))
    console.fit_outputs()
    sys.stdout.write(text)
    sys.stdout.flush()
    assert binary.getvalue().decode() == plain


def test_another_way_that_was_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="xmlcharrefreplace")
    monkeypatch.setattr(sys, "stdout", chosen)
    console.fit_outputs()
    assert chosen.errors == "xmlcharrefreplace"


class Terminal(io.StringIO):
    """Something a person looks at."""

    def isatty(self) -> bool:
        return True


def test_prose_is_broken_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (
        "error: device 'cam-99' has no identity here, and no broker was named\n"
        "what to do: leave `edgefl-coordinator enrollments --identity /srv/edgefl/warehouse/fleet`, or a run, running "
        "until cam-99 has come"
    )
    assert for_terminal(text, io.StringIO()) == text
    shown = for_terminal(text, Terminal())
    assert max(map(len, shown.splitlines())) <= 80
    assert " ".join(shown.split()) == " ".join(text.split())
    assert "`edgefl-coordinator enrollments --identity /srv/edgefl/warehouse/fleet`" in shown, "in one piece"
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with pytest.raises(SystemExit), guarded():
        raise StoreError("the disk is full " * 12, remedy="Free space, or name another directory. " * 6)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line.partition(":")[0] for line in lines if ":" in line] == ["error", "what to do"]
