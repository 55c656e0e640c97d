"""The table of brokers: a run leaves the rows of brokers that it did not try."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.network.broker_kinds import KINDS
from benchmarks.network.brokers import Row, page


def test_rows_of_brokers_that_have_not_run_stay() -> None:
    old = page([Row("a", "5", 98304, "yes", 15.0, 0.41, 7.3), Row("b", "5", 98304, "yes", 17.0, 0.48, 8.4), Row("c")])

    new = page([Row("b", "3.1.1", 4096, "yes", 1.0, 0.1, 0.2), Row("a"), Row("d")], f"\n{old}")

    assert new.splitlines()[2:] == [
        "| a | 5 | 98,304 | yes | 15.0 | 0.41 | 7.3 |",
        "| b | 3.1.1 | 4,096 | yes | 1.0 | 0.10 | 0.2 |",
        "| c |  |  | not installed |  |  |  |",
        "| d |  |  | not installed |  |  |  |",
    ]


def test_a_broker_that_is_not_there_has_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    monkeypatch.setenv("EDGEFL_IOTCORE_PYTHON", "false")

    assert [kind.command(tmp_path, 1) for kind in KINDS] == [None] * len(KINDS)
