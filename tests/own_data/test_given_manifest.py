"""``edgefl init`` on a folder with a manifest drafts the run file that it drafts without one."""

from __future__ import annotations

import json
from pathlib import Path

import own_data_fixture as own
import pytest
import yaml

from edgefl.cli.main import main

pytestmark = pytest.mark.data


def init(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return int(ended.value.code or 0)


def test_a_second_init_drafts_the_same_and_writes_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own.photos_and_texts(tmp_path / "photos", samples=40)
    assert init("photos", "-o", "one.yaml") == 0
    before = (tmp_path / "photos/manifest.jsonl").read_bytes()
    assert init("photos", "-o", "two.yaml") == 0
    assert (tmp_path / "photos/manifest.jsonl").read_bytes() == before
    assert "photos/manifest.jsonl is used as it is" in capsys.readouterr().out
    one, two = (yaml.safe_load((tmp_path / f"{name}.yaml").read_text()) for name in ("one", "two"))
    assert one | {"name": ""} == two | {"name": ""}


@pytest.mark.parametrize("option", [("--path", "{_}/{label}/{id}"), ("--label", "x"), ("--task", "multilabel")])
def test_options_that_read_files_are_refused_beside_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own.photos_and_texts(tmp_path / "photos", samples=40)
    assert init("photos", "-o", "one.yaml") == 0
    assert init("photos", "-o", "two.yaml", *option) == 15
    assert "--force" in capsys.readouterr().err
    assert not (tmp_path / "two.yaml").exists()


def test_cells_by_name_numeric_labels_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": f"s{i}", "label": i / 7, "group": i % 5,
         "cells": {"a": i, "sort": "xy"[i % 2], "day": f"2024-01-{i % 28 + 1:02}", "town": f"t{i}", "none": None}}
        for i in range(60)
    ]  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own/manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert init("own", "--kind", "sort=category") == 0
    said = capsys.readouterr().out
    assert "5 groups: 0 12" in said
    assert "town (60 values in 60 rows are too many" in said
    assert "none (is empty)" in said
    made = yaml.safe_load((tmp_path / "own.yaml").read_text())
    columns = {"a": "number", "sort": ["x", "y"], "day": "date"}
    assert made["model"]["encoders"]["cells"] == {"kind": "table", "size": "small", "depth": 3, "columns": columns}
    assert made["data"]["partition"] == "natural"


@pytest.mark.parametrize(
    ("line", "why"), [("[1]", "Expected"), ('{"id": "s", "label": "a", "x": 3}', "path"), ("{", ":1:")]
)
def test_a_line_that_is_no_sample_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/manifest.jsonl").write_text(line + "\n")
    assert init("own") == 11
    told = capsys.readouterr().err
    assert "own/manifest.jsonl:1:" in told
    assert why in told


def test_a_bad_line_is_left_out_where_asked_and_none_is_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"label": ["a"] if i % 2 else [], "cells": {"x": i}} for i in range(30)]
    (tmp_path / "own").mkdir()
    lines = ['{"files": ".", "', *(json.dumps(row) for row in rows)]
    (tmp_path / "own/manifest.jsonl").write_text("\n".join(lines))
    assert init("own", "--skip-bad") == 0
    said = capsys.readouterr().out
    assert "not used: manifest.jsonl:1 (not a JSON object" in said
    assert "have no label" not in said
