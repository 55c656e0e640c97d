"""Arrays, data frames and Datasets as the data of `edgefl.run`, `plan_run` and `study`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import edgefl
from edgefl.api.given_data import Given, with_data
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.errors import ConfigError, DataError

N = 60
Y = np.arange(N) % 2
ACC = np.random.default_rng(0).normal(size=(N, 12, 3)) + Y[:, None, None]
SMALL = {
    "name": "tiny",
    "model": {
        "stages": 1,
        "encoders": {m: {"kind": "sensor", "width": 16, "depth": 1, "heads": 2, "patch": 4} for m in ("acc", "gyro")},
        "head": {"width": 16, "out": 8, "dropout": 0.0},
        "fusion_width": 16,
    },
    "training": {"rounds": [1], "batch_size": 8},
    "fleet": [{"name": "one"}],
}


def penguins() -> pd.DataFrame:
    """Bodies of two species; the last column has a value a row, which is of no use."""
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "species": pd.Categorical(np.where(Y, "gentoo", "adelie")),
            "mass": pd.array([None if i == 7 else int(m) for i, m in enumerate(3700 + 1300 * Y)], "Int64"),
            "bill": rng.normal(size=N).astype(np.float32) + Y,
            "ringed": pd.date_range("2024-01-01", periods=N),
            "male": rng.random(N) < 0.5,
            "ring": [f"ring{i}" for i in range(N)],
        }
    )


def values_of(given: Given, folder: Path) -> dict[str, Any]:
    """The drafted run file."""
    file, fields = with_data(None, given, folder)
    assert isinstance(file, dict)
    assert fields == {}
    load_run(file)
    return file


def test_a_data_frame_is_a_table_with_columns_of_its_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        values = values_of(Given(penguins(), "species"), tmp_path)
    assert values["data"]["label"] == "species"
    assert values["model"]["encoders"]["features"]["columns"] == {
        "mass": "number",
        "bill": "number",
        "ringed": "date",
        "male": ["False", "True"],
    }
    assert "ring" in caplog.text
    lines = (Path(values["data"]["source"]) / "manifest.jsonl").read_text().splitlines()
    seventh = json.loads(lines[7])
    assert seventh["label"] == "gentoo"
    assert seventh["features"].get("mass") in {None, ""}
    assert seventh["features"]["ringed"] == "2024-01-08 00:00:00"


def test_arrays_keep_their_values_labels_and_groups(tmp_path: Path):
    names = pd.Series(["rest", "walk", None] * (N // 3))
    values = values_of(Given({"acc": ACC, "gyro": ACC[:, :6]}, names, np.arange(N) // 10), tmp_path)
    data = load(values["data"]["source"])
    np.testing.assert_array_equal(data.modalities["acc"], ACC.astype(np.float32))
    assert data.groups is not None
    assert data.groups[-1] == "5"
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, -1] * (N // 3)


@pytest.mark.parametrize(
    ("array", "modality", "kind"),
    [
        (ACC[:, 0], "table", "table"),
        (ACC, "sensor", "sensor"),
        (np.zeros((N, 16, 16, 3), np.uint8), "image", "vision"),
    ],
)
def test_one_array_is_a_modality_by_its_axes(array: np.ndarray, modality: str, kind: str, tmp_path: Path):
    encoders = values_of(Given(array, Y), tmp_path)["model"]["encoders"]
    assert {name: encoder["kind"] for name, encoder in encoders.items()} == {modality: kind}


def test_a_dataset_and_its_file_are_the_same_source(tmp_path: Path):
    data = Dataset(
        {"acc": ACC.astype(np.float32)}, {"acc": np.ones(N, bool)}, Y, ("rest", "walk"), [f"w{i}" for i in range(N)]
    )
    data.save_npz(tmp_path / "mine.npz")
    given, named = values_of(Given(data), tmp_path), values_of(Given(tmp_path / "mine.npz"), tmp_path)
    assert named["data"].pop("source") == str(tmp_path / "mine.npz")
    assert Path(given["data"].pop("source")).read_bytes() == (tmp_path / "mine.npz").read_bytes()
    assert given == named


def test_equal_data_is_written_once_and_other_data_beside_it(tmp_path: Path):
    first, again, other = (
        values_of(Given(ACC, labels), tmp_path)["data"]["source"] for labels in (Y, Y.tolist(), 1 - Y)
    )
    assert first == again != other


FRAME = penguins()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Given({"acc": ACC, "gyro": ACC[:9]}, Y), "acc 60, gyro 9"),
        (Given({"acc": ACC}, Y[:9]), "acc 60, label 9"),
        (Given(FRAME, Y[:9]), "has 60 rows, and labels are 9"),
        (Given(FRAME, "specis"), "no column 'specis'; did you mean 'species'?"),
        (Given(FRAME), "labels are not given"),
        (Given(FRAME.assign(label=1), Y), "the column 'label' too"),
        (Given(FRAME.assign(species="adelie"), "species"), "nothing to tell apart"),
        (Given(FRAME.assign(bill=[[1, 2]] * N), "species"), "'bill' holds list objects"),
        (Given(FRAME.iloc[:0], "species"), "no rows"),
        (Given(ACC, np.zeros(N, int)), "nothing to tell apart"),
        (Given(ACC, np.eye(2)[Y]), "labels have the shape [60, 2]"),
        (Given(ACC, "walks"), "names a column, and data is no data frame"),
        (Given({"acc": ACC, "label": Y}, Y), "data['label'] too"),
        (Given({"my acc": ACC}, Y), "'my acc' cannot name a modality"),
        (Given({"acc": [[1, 2], [1]]}, [0, 1]), "data['acc'] is no array"),
        (Given({"acc": ACC, "text": ["hello"] * N}, Y), "text: has shape [60]"),
        (Given(Y, Y), "is no modality"),
        (Given({"acc": ACC}), "no labels: there is nothing to learn"),
        (Given({}, Y), "data has no array"),
        (Given("photos", Y), "given beside photos"),
        (Given("photos"), "neither an .npz file nor a folder"),
    ],
)
def test_data_that_does_not_fit_is_told_by_its_names(given: Given, words: str, tmp_path: Path):
    with pytest.raises(DataError) as raised:
        with_data(None, given, tmp_path)
    assert words in raised.value.message
    assert str(tmp_path) not in raised.value.message
    assert "--" not in raised.value.remedy


def test_a_call_needs_a_run_file_or_data():
    with pytest.raises(ConfigError, match="file: is missing"):
        edgefl.plan_run()
    with pytest.raises(ConfigError, match="given without data"):
        edgefl.run("demo", labels="species")


@pytest.mark.parametrize(("names", "words"), [(("acc",), "has no modality 'gyro'"), (("mag",), "only mag")])
def test_a_modality_that_the_run_file_takes_and_the_data_lacks_is_named(names: tuple[str, ...], words: str):
    with pytest.raises(edgefl.EdgeFLError, match=words):
        edgefl.plan_run(SMALL, data=dict.fromkeys(names, ACC), labels=Y)


def test_a_run_file_trains_on_given_arrays(tmp_path: Path):
    both = {"acc": ACC, "gyro": ACC[:, :6]}
    run = edgefl.run(
        SMALL,
        data=both,
        labels=Y,
        overrides=["training.epochs=2"],
        directory=tmp_path,
        in_process=True,
        export=False,
        page=False,
    )
    assert run.status == "done"
    assert run.accuracy is not None
    assert "epochs: 2" in (run.directory / "run.yaml").read_text()


@pytest.mark.slow
def test_a_study_of_given_arrays_keeps_what_is_done(tmp_path: Path):
    def study() -> edgefl.Study:
        both = {"acc": ACC, "gyro": ACC[:, :6]}
        return edgefl.study(
            SMALL, {"training.epochs": [1, 2]}, data=both, labels=Y, directory=tmp_path, in_process=True
        )

    first, again = study(), study()
    assert [cell.error for cell in first.cells] == ["", ""]
    assert [cell.run.id for cell in again.cells if cell.run] == [cell.run.id for cell in first.cells if cell.run]
    assert len(list(tmp_path.glob("tiny-*"))) == 2


@pytest.mark.slow
def test_a_data_frame_gives_a_trained_model_in_three_lines(tmp_path: Path):
    run = edgefl.run(data=penguins(), labels="species", directory=tmp_path, in_process=True)
    assert run.accuracy == 1.0
    assert run.load_bundle().manifest.label_column == "species"
