"""Several labels a row of a user's own table: guessed, said, put right, trained, and predicted."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from edgefl.cli.main import main
from edgefl.own_data.several_labels import known_parts, merged, parts, separator_of

pytestmark = pytest.mark.data
NAMES = ("hot", "wet", "dark")


def edgefl(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command in a folder."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def rooms(count: int = 90) -> list[tuple[list[float], list[str]]]:
    """Measurements, each of which tells one of the labels."""
    rng = np.random.default_rng(0)
    sets = rng.random((count, 3)) < 0.5
    values = (sets * 2.0 - 1 + rng.normal(size=sets.shape) * 0.3).round(3)
    return [
        (v.tolist(), [n for n, there in zip(NAMES, s, strict=True) if there]) for v, s in zip(values, sets, strict=True)
    ]


def write(path: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as out:
        csv.writer(out).writerows([head, *rows])


def cells(path: Path, separator: str = ";", column: str = "tags") -> None:
    rows = [[*values, separator.join(names) or "none"] for values, names in rooms()]
    write(path, ["temperature", "humidity", "lux", column], rows)


def lines(folder: Path) -> list[Any]:
    return [json.loads(line)["label"] for line in (folder / "manifest.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("values", "asked", "found"),
    [
        (["a;b", "a", "b;c", "c", "a;c"] * 3, False, ";"),
        (["a|b", "a", "b|c", "c", "a|c"] * 3, False, "|"),
        (["a, b", "a", "b, c", "c"] * 3, False, ""),
        (["a, b", "a", "b, c", "c"] * 3, True, ","),
        (["up", "down"] * 5, True, ""),
        ([f"x{i};y{i}" for i in range(40)], False, ""),  # names, each once
        (["well, I really think so", "no"] * 5, True, ""),
    ],
)
def test_separators(values: list[str], asked: bool, found: str) -> None:
    assert separator_of(values, asked=asked) == found


def test_cells_are_taken_apart() -> None:
    assert parts(" b ;a;; b", ";") == ["b", "a"]
    assert parts("none", ";") == parts(" ; ", ";") == []
    assert known_parts("a, b|c", {"a", "b|c"}) == (["a", "b|c"], [])
    assert known_parts("a;x", {"a", "b"}) == (["a"], ["x"])
    assert known_parts("a;b", {"a;b"}) == (["a;b"], [])


def test_columns_of_yes_and_no_become_one() -> None:
    rows = [{"n": "1", "a": "1", "b": "No"}, {"n": "2", "a": "0", "b": "false"}, {"n": "3", "a": "", "b": ""}]
    assert merged(rows, ["a", "n", "b"], ["a", "b"]) == ["n", "a;b"]
    assert [row["a;b"] for row in rows] == ["a", "none", ""]


@pytest.mark.parametrize("separator", [";", "|", ", "])
def test_cells_of_several_labels_are_guessed(
    separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells(tmp_path / "rooms.csv", separator)
    assert edgefl(tmp_path, "init", "rooms.csv", monkeypatch=monkeypatch) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"labels, several a row between '{separator.strip()}': tags (a guess: cells of several labels; " in said
    assert "; as one label by --task classes" in said
    assert "3 labels: " in said
    assert "a sample has 1." in said
    assert lines(tmp_path / "rooms-edgefl") == [names for _, names in rooms()]
    told = yaml.safe_load((tmp_path / "rooms.yaml").read_text())
    assert told["data"]["label"] == "tags"


def test_the_user_says_that_each_text_is_one_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells(tmp_path / "rooms.csv")
    assert edgefl(tmp_path, "init", "rooms.csv", "--task", "classes", monkeypatch=monkeypatch) == 0
    assert lines(tmp_path / "rooms-edgefl") == [";".join(names) or "none" for _, names in rooms()]


def test_numbers_as_classes_and_texts_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.csv", ["x", "level"], [[i * 0.1, [0.5, 1.5, 2.5][i % 3]] for i in range(45)])
    assert edgefl(tmp_path, "init", "a.csv", "--label", "level", "--task", "classes", monkeypatch=monkeypatch) == 0
    assert set(lines(tmp_path / "a-edgefl")) == {"0.5", "1.5", "2.5"}
    cells(tmp_path / "rooms.csv")
    assert edgefl(tmp_path, "init", "rooms.csv", "--task", "number", monkeypatch=monkeypatch) == 11
    assert "the column tags holds texts" in " ".join(capsys.readouterr().err.split())


def test_columns_of_yes_and_no_by_the_users_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[*values, *(int(name in names) for name in NAMES)] for values, names in rooms()]
    write(tmp_path / "rooms.csv", ["temperature", "humidity", "lux", *NAMES], rows)
    options = [word for name in NAMES for word in ("--label", name)]
    assert edgefl(tmp_path, "init", "rooms.csv", *options, monkeypatch=monkeypatch) == 0
    assert lines(tmp_path / "rooms-edgefl") == [names for _, names in rooms()]
    assert "3 numbers" in capsys.readouterr().out
    assert (
        edgefl(tmp_path, "init", "rooms.csv", "--force", "--label", "hot", "--label", "lux", monkeypatch=monkeypatch)
        == 11
    )
    assert "the column lux holds" in " ".join(capsys.readouterr().err.split())


def test_an_array_of_0_and_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = rooms()
    label = np.array([[name in names for name in NAMES] for _, names in given], np.int8)
    signal = np.repeat(np.array([v for v, _ in given], np.float32)[:, None], 8, axis=1)
    np.savez(tmp_path / "rooms.npz", sensor=signal, y=label, label_names=np.array(NAMES))
    assert edgefl(tmp_path, "init", "rooms.npz", monkeypatch=monkeypatch) == 0
    assert "3 labels, several a sample: hot, wet, dark" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("columns", [False, True])
def test_from_a_table_to_answers(
    columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is trained on three measurements tells all eight sets of labels, by far better than by chance."""
    options = []
    if columns:
        rows = [[*values, *(int(name in names) for name in NAMES)] for values, names in rooms()]
        write(tmp_path / "rooms.csv", ["temperature", "humidity", "lux", *NAMES], rows)
        options = [word for name in NAMES for word in ("--label", name)]
    else:
        cells(tmp_path / "rooms.csv", "|")
    assert edgefl(tmp_path, "init", "rooms.csv", *options, monkeypatch=monkeypatch) == 0
    run = ["run", "rooms.yaml", "--in-process", "--set", "training.rounds=[4, 4, 4]"]
    assert edgefl(tmp_path, *run, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "mean average precision" in said
    (made,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    predict = ["predict", str(made / "bundles"), "rooms.csv", "--format", "json", "--limit", "90"]
    assert edgefl(tmp_path, *predict, monkeypatch=monkeypatch) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["averages"]["mean_average_precision"] > 0.95
    assert body["averages"]["macro_f1"] > 0.85
    truth = [";".join(sorted(names)) or "none" for _, names in rooms()]
    assert [";".join(sorted(each["truth"].split(";"))) for each in body["predictions"]] == truth
