"""The verb logs of a device, followed to the end of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.cli import logs


def test_following_a_device_ends_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [{"lines": ["one"], "count": 1}, {"lines": ["two"], "count": 2}]
    asked: list[int] = []

    def ask(verb: str, run: str, runs: Path, device: str, lines: int, after: int) -> dict[str, object]:
        asked.append(after)
        return answers[len(asked) - 1]

    monkeypatch.setattr(logs, "LOOK_S", 0.0)
    monkeypatch.setattr(logs, "find_run", lambda run, runs: tmp_path)
    monkeypatch.setattr(logs, "is_held", lambda directory: len(asked) < 2)
    monkeypatch.setattr(logs, "ask_run", ask)
    logs.command("r1", "cam", tmp_path, 20, follow=True, format="terminal")
    assert asked == [0, 1]
    assert capsys.readouterr().out == "one\ntwo\n"
