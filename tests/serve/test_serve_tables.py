"""Tables sent as files: each row is answered as ``edgefl predict`` answers it, with the same notes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from serve_fixture import LABELS, Server, running, tabular

from edgefl.cli.main import main
from edgefl.cli.predict import _csv
from edgefl.data.dataset import Dataset
from edgefl.export.runtime import Answers, Prediction

ROWS = "mass,isle,kind\n10,Dream,run\n12,Torgersen,walk\n,Biscoe,\n"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tabular(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def server(bundles: Path) -> Iterator[Server]:
    with running("--name", "rows", where=bundles) as started:
        yield started


def sent(server: Server, **parts: tuple[str | None, str]) -> httpx.Response:
    return httpx.post(f"{server.url}/predict", files=parts, timeout=30)


def predicted(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["predict", *map(str, words)])
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    return out


def test_each_row_of_a_csv_is_answered_as_by_predict(
    server: Server, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "features.csv").write_text(ROWS)
    told = json.loads(predicted(capsys, bundles, tmp_path / "features.csv", "--format", "json"))
    answer = sent(server, features=("anything.csv", ROWS)).raise_for_status().json()
    keys = ("id", "label", "probabilities", "truth")
    assert [[row[k] for k in keys] for row in answer["predictions"]] == [
        [row[k] for k in keys] for row in told["predictions"]
    ]
    assert [row["truth"] for row in answer["predictions"]] == ["run", "walk", None]
    assert answer["notes"] == told["notes"] == ["rows without a value that the model knows: 'mass' 1, 'isle' 1 of 3"]


def test_one_row_goes_with_other_parts_and_several_do_not(server: Server):
    head, first, *_ = ROWS.splitlines()
    one = sent(server, features=("row.csv", f"{head}\n{first}"), text=(None, "a bird")).raise_for_status().json()
    assert [row["given"] for row in one["predictions"]] == [["features", "text"]]
    assert one["notes"] == []
    refused = sent(server, features=("row.csv", ROWS), text=(None, "a bird"))
    assert refused.status_code == 400
    assert refused.json()["error"] == (
        "the table 'features' has 3 rows, and the other parts are of one sample. "
        "Send one row with them, or the table alone: each of its rows is answered."
    )


def test_a_table_without_the_model_s_columns_or_too_long_is_refused_by_name(server: Server):
    other = sent(server, features=("row.csv", "length\n3\n"))
    assert other.status_code == 400
    assert other.json()["error"].startswith("features.csv: has no column that the model knows; its columns: length.")
    assert "has no column" in sent(server, features=("row.csv", "")).json()["error"]
    for long in ("mass,isle\n" + "1," * 2**15, "mass\n" + "1\n" * 5000, "mass,isle\n" + "1" * 2**20):
        assert sent(server, features=("row.csv", long)).status_code == 413


def test_a_category_that_training_never_saw_is_in_the_notes(server: Server):
    def notes(isle: str | None) -> list[str]:
        record = {"features": {"mass": 10, "isle": isle}}
        told: list[str] = httpx.post(f"{server.url}/predict", json=record).raise_for_status().json()["notes"]
        return told

    assert notes("Dream") == notes(None) == []
    assert notes("Torgersen") == ["rows without a value that the model knows: 'isle' 1 of 1"]


def test_a_number_has_an_interval_and_no_probability(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bundles = tabular(tmp_path / "numbers", ("~10", "~20", "~40"))
    (tmp_path / "rows.csv").write_text("mass,isle,kind\n1,Dream,15\n")
    told = json.loads(predicted(capsys, bundles, tmp_path / "rows.csv", "--format", "json"))["predictions"][0]
    low, high = told["interval"]
    assert 10 <= low < told["value"] < high <= 40
    assert told["probability"] is None
    terminal = predicted(capsys, bundles, tmp_path / "rows.csv")
    assert "80 % interval" in terminal
    assert "robability" not in terminal
    head, line = predicted(capsys, bundles, tmp_path / "rows.csv", "--format", "csv").splitlines()
    assert head == "sample,given,prediction,low,high,truth"
    assert line == f"rows-1,features,{told['label']},{low:.6g},{high:.6g},15"


def test_predict_writes_a_line_a_row_as_csv(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.csv").write_text(ROWS)
    told = json.loads(predicted(capsys, bundles, tmp_path / "rows.csv", "--format", "json"))["predictions"]
    head, *lines = predicted(capsys, bundles, tmp_path / "rows.csv", "--format", "csv").splitlines()
    assert head == f"sample,given,prediction,{','.join(f'probability_{name}' for name in LABELS)},truth"
    for row, line in zip(told, lines, strict=True):
        id_, given, label, *odds, truth = line.split(",")
        assert (id_, given, label, truth) == (row["id"], "features", row["label"], row["truth"] or "")
        assert list(map(float, odds)) == pytest.approx(list(row["probabilities"].values()), abs=1e-5)


def test_embeddings_are_columns_by_modality_and_empty_where_there_is_none():
    rows = np.zeros((2, 3), np.float32)
    data = Dataset({"v": rows, "w": rows}, {"v": np.array([True, False]), "w": np.ones(2, bool)}, None, (), ["a", "b"])
    one, third = np.ones((1, 2), np.float32), np.full((1, 1), 1 / 3, np.float32)
    both = Answers("v+w", ("v", "w"), np.array([0]), Prediction(embeddings={"v": third, "w": one}))
    alone = Answers("w", ("w",), np.array([1]), Prediction(embeddings={"w": 2 * one}))
    assert _csv(data, [both, alone], (), None) == "sample,given,v_0,w_0,w_1\na,v+w,0.333333,1,1\nb,w,,2,2\n"
