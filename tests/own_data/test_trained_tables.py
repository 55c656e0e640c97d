"""The file that trained can be predicted: by the names of its columns, in any order, with the truth beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_fixture import some_state, stage_of

from edgefl.cli.main import main
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.draft import Outline, Paths, Wishes, run_values
from edgefl.own_data.facts import facts_of
from edgefl.own_data.samples import understand
from edgefl.own_data.trained_tables import read_trained
from edgefl.records import TableColumn

ISLANDS = ("Biscoe", "Dream")
TABLE = EncoderSpec(
    "table", (3, 2), columns=(TableColumn("mass"), TableColumn("island", "category", ISLANDS), TableColumn("year"))
)


def penguins(path: Path, rows: int = 40) -> Path:
    lines = [f"{'AG'[i % 2]},{3000 + i},{ISLANDS[i % 2]},{2007 + i % 3},n{i}" for i in range(rows)]
    path.write_text("\n".join(["species,mass,island,year,note", *lines]) + "\n")
    return path


def test_columns_in_another_order_and_others_beside_them(tmp_path: Path):
    (tmp_path / "a.csv").write_text("extra;island;species;mass\nx;Dream;G;3,5\ny;NA;A;\nz;Mars;nobody;4,5\n")
    data = read_trained(tmp_path / "a.csv", {"features": TABLE}, ("A", "G"), "species", "skip")
    assert data.modalities["features"].tolist() == [[[3.5, 1], [1, 1], [0, 0]], [[4.5, 1], [0, 0], [0, 0]]]
    assert data.labels is not None
    assert (data.labels.tolist(), data.label_names) == ([1, -1], ("A", "G"))
    assert [str(problem) for problem in data.skipped] == ["label: 'nobody' of 1 rows is none the model knows"]


def test_a_row_without_any_of_the_columns_is_a_bad_sample(tmp_path: Path):
    (tmp_path / "a.csv").write_text("mass,species\n3,A\nheavy,G\n")
    with pytest.raises(DataError, match="features: column mass: 'heavy' is no number"):
        read_trained(tmp_path / "a.csv", {"features": TABLE}, ("A", "G"), "species")
    (tmp_path / "b.csv").write_text("weight\n3\n")
    with pytest.raises(DataError, match="has no column that the model knows; its columns: weight") as caught:
        read_trained(tmp_path / "b.csv", {"features": TABLE}, ("A", "G"), "")
    assert "mass, island, year" in caught.value.remedy


def test_columns_that_lack_or_are_spelt_otherwise_are_told(tmp_path: Path):
    (tmp_path / "a.csv").write_text("Mass,Island,yeer,specie\n3,Dream,2007,A\n4,dream,2008,G\n5,,2009,G\n")
    data = read_trained(tmp_path / "a.csv", {"features": TABLE}, ("A", "G"), "species")
    assert data.modalities["features"][:, 0].tolist() == [[3, 1], [4, 1], [5, 1]]
    assert data.labels is None
    assert data.notes == (
        "columns by another spelling: 'Mass' as 'mass', 'Island' as 'island'",
        "no column 'year' (there is 'yeer'): its cells are missing",
        "no column 'species' (there is 'specie'): no score",
        "rows without a value that the model knows: 'island' 2 of 3",
    )
    (tmp_path / "b.csv").write_text("mass,island,year,Species\n3,Dream,2007,A\n")
    data = read_trained(tmp_path / "b.csv", {"features": TABLE}, ("A", "G"), "species")
    assert data.labels is not None
    assert data.labels.tolist() == [0]
    assert data.notes == ("columns by another spelling: 'Species' as 'species'",)


def bundles_of(source: Path, folder: Path) -> tuple[Dataset, Path]:
    """What `edgefl init` makes of a table, and bundles of an untrained model for it."""
    found = understand(source)
    found.root.mkdir(exist_ok=True)
    lines = [json.dumps(sample.line(numeric=found.numeric)) for sample in found.samples]
    (found.root / "manifest.jsonl").write_text("\n".join(lines))
    facts = {m: facts_of(found, m) for m in sorted(found.kinds)}
    values = run_values(Paths("t", str(found.root), label=found.label_column), facts, Outline(40, True, 0), Wishes())
    (folder / "run.yaml").write_text(json.dumps(values))
    from edgefl.api.run_inputs import data_of
    from edgefl.config.profiles import load_run
    from edgefl.data.sources import load
    from edgefl.plan.compile import compile_run

    config, recipe = load_run(str(folder / "run.yaml"), [])
    shapes, labels, _ = data_of(config, [device.name for device in config.fleet])
    model = compile_run(config, recipe, run="t", shapes=shapes, label_names=labels).model
    _, parts = some_state(model)
    stage = stage_of(model, model.stages)
    export_bundles(TrainedState(model, stage, parts), folder / "bundles", mask="zero")
    return load(str(found.root), modalities=model.encoders, label_names=model.label_names), folder / "bundles"


def answers(bundles: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(bundles), str(file), "--format", "json"])
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    found: dict[str, Any] = json.loads(out.out)
    return found


def test_the_table_that_trained_is_answered_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = penguins(tmp_path / "penguins.csv")
    trained, bundles = bundles_of(source, tmp_path)
    found = answers(bundles, source, capsys)
    assert found["samples"] == found["answered"] == 40
    assert [row["truth"] for row in found["predictions"]] == ["A", "G"] * 20
    assert 0 <= found["accuracy"] <= 1
    assert found["notes"] == []
    again = read_trained(source, {"features": TABLE}, ("A", "G"), "species")
    np.testing.assert_array_equal(again.modalities["features"], trained.modalities["features"])


@pytest.mark.slow
def test_the_list_of_files_that_trained_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from PIL import Image

    rows = []
    for i in range(24):
        Image.new("RGB", (32, 32), (10 * i, 0, 0)).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,a red number {i},{'ab'[i % 2]}")
    source = tmp_path / "captions.csv"
    source.write_text("\n".join(["image,caption,class", *rows]))
    trained, bundles = bundles_of(source, tmp_path)
    assert set(trained.modalities) == {"image", "caption"}
    found = answers(bundles, source, capsys)
    assert found["answered"] == 24
    assert {row["truth"] for row in found["predictions"]} == {"a", "b"}


def test_the_table_of_time_steps_that_trained_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [f"{0.02 * t:.2f},{np.sin(t):.3f},{t % 7},{'walk' if t // 200 % 2 else 'sit'}" for t in range(2000)]
    source = tmp_path / "watch.csv"
    source.write_text("\n".join(["time,acc_x,acc_y,activity", *rows]))
    trained, bundles = bundles_of(source, tmp_path)
    found = answers(bundles, source, capsys)
    assert found["samples"] == len(trained) == 10
    assert [row["truth"] for row in found["predictions"]] == ["sit", "walk"] * 5
    (tmp_path / "less.csv").write_text("time,acc_x\n0,1\n1,2\n")
    with pytest.raises(DataError, match="acc lacks the channel acc_y"):
        read_trained(tmp_path / "less.csv", {"acc": _sensor()}, ("sit", "walk"), "activity")


def _sensor() -> EncoderSpec:
    columns = [{"name": "acc_x"}, {"name": "acc_y"}]
    return encoder_of_size("sensor", "tiny", (8, 2), step=8, columns=columns)
