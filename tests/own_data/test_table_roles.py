"""What the columns of a table of features become, which is the label, and what the user may say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from edgefl.cli.main import main
from edgefl.errors import DataError
from edgefl.own_data.label_columns import best_label, is_quantity
from edgefl.own_data.samples import understand
from edgefl.own_data.tables import read_table
from edgefl.own_data.wishes import Roles, wished
from edgefl.records import TableColumn


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def cars(path: Path, count: int = 60) -> Path:
    rows = [
        {"Name": f"car {i}", "Weight": 900.5 + i, "Cylinders": 4 + 2 * (i % 3), "Year": f"19{70 + i % 12}-01-01",
         "Origin": ["USA", "Europe", "Japan"][i % 3], "Power": None if i % 9 == 0 else 50 + i}
        for i in range(count)
    ]  # fmt: skip
    return written(path, "\n".join(map(json.dumps, rows)))


def test_a_table_of_cars(tmp_path: Path):
    """The first column of few values was the label: the year."""
    found = read_table(cars(tmp_path / "cars.jsonl"))
    assert (found.what, found.label, found.guess.said) == ("features", "Origin", False)
    assert set(found.guess.others) >= {"Year"}
    assert [(cell.name, cell.kind) for cell in found.cells] == [
        ("Weight", "number"), ("Cylinders", "number"), ("Year", "date"), ("Power", "number"),
    ]  # fmt: skip
    assert (found.texts, list(found.unused)) == ([], ["Name"])
    (first, *_) = understand(tmp_path / "cars.jsonl", roles=wished([], "", [], ["Name=text"])).samples
    assert first.values == {"features": {"Weight": 900.5, "Cylinders": 4, "Year": "1970-01-01"}, "name": "car 0"}


def test_a_spreadsheet_saved_in_germany(tmp_path: Path):
    rows = "".join(
        f"{1.5 + i:.1f};{i % 2},5;{'rot' if i % 2 else 'weiß'};{i % 28 + 1:02d}.03.2024;sorte{i % 2}\n"
        for i in range(30)
    )
    text = "\ufeffalkohol;säure;farbe;gekauft;sorte\n" + rows.replace(".5;", ",5;", 30)
    found = read_table(written(tmp_path / "wein.csv", text))
    assert found.label == "sorte"
    assert found.cells == [
        TableColumn("alkohol"), TableColumn("säure"), TableColumn("farbe", "category", ("rot", "weiß")),
        TableColumn("gekauft", "date", unit="%d.%m.%Y"),
    ]  # fmt: skip
    assert found.rows[1]["alkohol"] == "2.5"


def test_units_index_trailing_separators_and_marks_for_nothing(tmp_path: Path):
    rows = "".join(f"{i},{'NA' if i == 3 else i * 2},{'?' if i == 4 else 'ab'[i % 2]},\n" for i in range(25))
    found = read_table(written(tmp_path / "u.csv", ",mass,kind,\n,g,,\n" + rows))
    assert found.units == {"mass": "g"}
    assert (found.label, found.cells) == ("kind", [TableColumn("mass", unit="g")])
    assert (len(found.rows), found.rows[3]["mass"]) == (25, "")
    assert found.unused == {}
    quoted = '"mass","kind"\n' + "".join(f'"{i}",{i},"{"ab"[i % 2]}"\n' for i in range(20))  # as R writes it
    assert [cell.name for cell in read_table(written(tmp_path / "r.csv", quoted)).cells] == ["mass"]


def test_a_date_beside_each_row_is_a_number_of_the_sample(tmp_path: Path):
    rows = "".join(f"2012/01/{i + 1:02d},{i},{['sun', 'rain', 'fog'][i % 3]}\n" for i in range(30))
    found = read_table(written(tmp_path / "weather.csv", "date,temp,weather\n" + rows))
    assert (found.what, found.label, found.time) == ("features", "weather", "")
    assert found.cells == [TableColumn("date", "date", unit="%Y/%m/%d"), TableColumn("temp")]


def test_the_users_word_counts(tmp_path: Path):
    path = cars(tmp_path / "cars.jsonl")
    roles = wished(["Cylinders"], "Origin", ["Year"], ["Name=category", "Weight=category"])
    found = read_table(path, roles=roles)
    assert (found.label, found.group, found.guess.said) == ("Cylinders", "Origin", True)
    assert [(cell.name, cell.kind) for cell in found.cells] == [
        ("Name", "category"), ("Weight", "category"), ("Power", "number"),
    ]  # fmt: skip
    with pytest.raises(DataError, match="has no column Colour") as caught:
        read_table(path, roles=Roles("Colour"))
    assert "Name, Weight, Cylinders, Year, Origin, Power" in caught.value.remedy
    for wrong in ("Name", "=text", "Name=words"):
        with pytest.raises(DataError, match="names no kind"):
            wished([], "", [], [wrong])


def test_which_column_is_the_label():
    few, many = ["a", "b"] * 20, [str(i / 7) for i in range(40)]
    assert best_label({"sex": few, "species": few, "island": few}, "", numbers=True).column == "species"
    assert best_label({"sex": few, "size": many, "colour": few}, "", numbers=True).column == "colour"
    assert best_label({"target": many, "sex": few}, "", numbers=True)[:4] == ("target", True, ("sex",), True)
    assert best_label({"a": many}, "", numbers=True).column == ""
    assert best_label({"b": ["1", "2"] * 20}, "", numbers=False).column == ""
    assert is_quantity(many)
    assert not is_quantity(["1.0", "2.0"] * 20)


def init(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return int(ended.value.code or 0)


def test_init_says_the_guess_and_what_else_it_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cars(tmp_path / "cars.jsonl")
    assert init(tmp_path, "cars.jsonl", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.split("wrote ")[0].splitlines())) <= 80
    others = "Year, Cylinders, Weight, Power"
    assert (
        f"label: Origin (a guess: a usual name, 3 values; others possible: {others}; choose with --label)"
        in " ".join(said.split())
    )
    found: dict[str, Any] = yaml.safe_load((tmp_path / "cars.yaml").read_text())
    assert found["data"]["label"] == "Origin"
    assert found["model"]["encoders"]["features"]["columns"] == {
        "Weight": "number", "Cylinders": "number", "Year": "date", "Power": "number",
    }  # fmt: skip
    words = ["cars.jsonl", "--force", "--label", "Weight", "--drop", "Year", "--format", "json"]
    assert init(tmp_path, *words, monkeypatch=monkeypatch) == 0
    understood = json.loads(capsys.readouterr().out)["understood"]
    assert "60 labels from 900.5 to 959.5" in understood
    assert "label, a number to be predicted: Weight" in understood[-1]
    lines = (tmp_path / "cars-edgefl/manifest.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["label"] == 900.5


def test_one_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    written(tmp_path / "one.csv", "size,class\n" + "".join(f"{i},yes\n" for i in range(40)))
    assert init(tmp_path, "one.csv", monkeypatch=monkeypatch) == 11
    assert "all 40 labels (column class) are 'yes': there is nothing to tell apart" in capsys.readouterr().err
    assert not (tmp_path / "one-edgefl").exists()


def test_a_text_among_numeric_labels_is_a_bad_sample_by_its_line(tmp_path: Path):
    rows = "".join(f"{i},{i / 7}\n" for i in range(2100))
    found = understand(written(tmp_path / "n.csv", "size,target\n" + rows + "1,unknown\n"))
    assert found.numeric
    assert [sample.line(numeric=True)["label"] for sample in found.samples[-2:]] == [pytest.approx(2099 / 7), "unknown"]


def films(path: Path, count: int = 360) -> Path:
    """Titles of the row alone, lists of genres, a rating in each row, and a seldom filled column of few values."""
    rng = np.random.default_rng(0)
    names = [f"{a}{b}" for a in "bdfghklm" for b in ("ore", "ina", "ust", "emp", "ald", "ick", "osh", "urm")]
    kinds = ["war", "drama", "comedy", "crime", "love", "music"]
    rows = [
        {
            "Title": f"{names[i % 64]}{i} {names[i * 7 % 64]}{i}",
            "Board": ["R", "PG"][i // 6 % 2] if i % 6 == 0 else "",
            "Themes": ", ".join(sorted(rng.choice(kinds, 1 + i % 3, replace=False))),
            "Minutes": 60 + i % 90,
            "Rating": round(float(rng.uniform(1, 9)), 2),
        }
        for i in range(count)
    ]
    return written(path, "\n".join(map(json.dumps, rows)))


def test_films_keep_what_can_be_learned_and_say_the_rest(tmp_path: Path) -> None:
    """A column of names took 100 R2 from 37 to -8; that of genres was left out without a word of the way in."""
    found = read_table(films(tmp_path / "films.jsonl"))
    assert (found.label, found.guess.numeric, found.guess.others) == ("Rating", True, ("Themes", "Board", "Minutes"))
    assert (found.texts, [cell.name for cell in found.cells]) == (["Themes"], ["Board", "Minutes"])
    assert list(found.unused) == ["Title"]
    assert "--kind Title=text" in found.unused["Title"]
    asked = read_table(tmp_path / "films.jsonl", roles=wished(["Board"], "", [], ["Title=text"]))
    assert asked.texts == ["Title", "Themes"]


def test_words_alone_are_used_however_rare_they_are(tmp_path: Path) -> None:
    rows = "".join(f"x{i} y{i} z{i},{'ab'[i % 2]}\n" for i in range(120))
    assert read_table(written(tmp_path / "t.csv", "note,class\n" + rows)).texts == ["note"]


def test_samples_without_a_label_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    films(tmp_path / "films.jsonl")
    assert init(tmp_path, "films.jsonl", "--label", "Board", monkeypatch=monkeypatch) == 0
    assert "300 of the samples have no label" in capsys.readouterr().out


def test_two_labels_of_one_table_have_a_run_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    films(tmp_path / "films.jsonl")
    for label in ("Board", "Rating"):
        words = ("films.jsonl", "-o", f"{label}.yaml", "--label", label)
        assert init(tmp_path, *words, monkeypatch=monkeypatch) == 0
    assert yaml.safe_load((tmp_path / "Board.yaml").read_text())["data"]["source"] == "films-Board-edgefl"
    first = json.loads((tmp_path / "films-Rating-edgefl/manifest.jsonl").read_text().splitlines()[0])
    assert isinstance(first["label"], float)


def test_passengers_sorted_by_class_and_sex_are_no_recordings(tmp_path: Path) -> None:
    """The table of the Titanic, as it is published, was five recordings of 270 steps."""
    rng = np.random.default_rng(0)
    rows = [
        f"Name{cls}{sex}{i} Of{i},{cls},{rng.integers(1, 80)},{sex},{rng.integers(2)}"
        for cls in ("1st", "2nd", "3rd")
        for sex in ("female", "male")
        for i in range(60)
    ]
    rows.insert(150, "Odd One,*,30,male,0")
    found = read_table(written(tmp_path / "t.csv", "name,class,age,sex,survived\n" + "\n".join(rows)))
    assert (found.what, found.label, found.guess.others) == ("features", "survived", ("class", "sex", "age"))
    assert [cell.name for cell in found.cells] == ["class", "age", "sex"]


@pytest.mark.parametrize(("smooth", "what"), [(True, "recording"), (False, "features")])
def test_rows_are_steps_in_time_where_a_number_goes_on(tmp_path: Path, smooth: bool, what: str) -> None:
    noise = np.random.default_rng(0).normal(size=(200, 2))
    values = np.sin(np.arange(200) / 5)[:, None] + 0.2 * noise if smooth else noise
    rows = [f"{a:.4f},{b:.4f},{'pq'[i // 25 % 2]}" for i, (a, b) in enumerate(values)]
    table = read_table(written(tmp_path / "t.csv", "left,right,class\n" + "\n".join(rows)))
    assert (table.what, list(table.sensors)) == (what, ["left", "right"])


def test_a_column_of_numbers_and_a_few_words_is_numbers_and_says_so(tmp_path: Path) -> None:
    rows = "".join(f"{'Ancient' if i % 8 == 0 else 1700 + i},{i * 1.5},{'ab'[i % 2]}\n" for i in range(80))
    path = written(tmp_path / "t.csv", "found,TMAX,kind\n" + rows)
    assert read_table(path).cells == [TableColumn("found"), TableColumn("TMAX")]
    found = understand(path)
    assert "10 cells of found are no numbers, such as 'Ancient': taken as empty" in found.said
    assert found.samples[8].values == {"features": {"TMAX": 12.0}}


def test_a_table_of_its_own_is_the_test_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    films(tmp_path / "train.jsonl")
    films(tmp_path / "test.jsonl", 30)
    assert init(tmp_path, "train.jsonl", "--label", "Board", "--test", "test.jsonl", monkeypatch=monkeypatch) == 0
    assert "test-edgefl is the test set, of 30 samples" in capsys.readouterr().out
    made = yaml.safe_load((tmp_path / "train.yaml").read_text())["data"]
    assert (made["source"], made["test"]) == ("train-edgefl", "test-edgefl")
    told = [
        json.loads(line).get("label") for line in (tmp_path / "test-edgefl/manifest.jsonl").read_text().splitlines()
    ]
    assert told[:13] == ["R", *[None] * 5, "PG", *[None] * 5, "R"]
    assert init(tmp_path, "train.jsonl", "--test", "no.csv", "-o", "b.yaml", monkeypatch=monkeypatch) == 11
    assert "--test no.csv: does not exist" in capsys.readouterr().err
    assert not (tmp_path / "b-edgefl").exists()


def test_axes_with_units_are_one_sensor_and_a_second_clock_is_none(tmp_path: Path) -> None:
    rows = "".join(f"{i / 50},{1700000000 + i / 50},{i},{2 * i},{3 * i},walk\n" for i in range(60))
    head = "seconds_elapsed,timestamp,Acc x (m/s^2),Acc y (m/s^2),Acc z (m/s^2),activity\n"
    table = read_table(written(tmp_path / "t.csv", head + rows))
    assert (table.what, table.time, list(table.sensors)) == ("recording", "seconds_elapsed", ["acc"])
    assert list(table.unused) == ["timestamp"]


def test_a_segment_of_customers_is_a_category(tmp_path: Path) -> None:
    """Its name is that of a recording's piece; of rows that are samples it was in no list."""
    rows = "".join(f"{'xyz'[i % 3]},{i * 1.5},{'ab'[i % 2]}\n" for i in range(60))
    found = read_table(written(tmp_path / "t.csv", "Segment,Sales,kind\n" + rows))
    assert found.cells == [TableColumn("Segment", "category", ("x", "y", "z")), TableColumn("Sales")]


def orders(path: Path, codes: int, rows: int) -> Path:
    lines = [f"{'pq'[i % 2]},{10000 + i * 7 % codes},{i},{i * 0.5},{i % 500}" for i in range(rows)]
    return written(path, "kind,Postal Code,CustomerID,Profit,note\n" + "\n".join(lines))


def test_postal_codes_and_ids_are_no_numbers(tmp_path: Path) -> None:
    few = read_table(orders(tmp_path / "few.csv", 25, 100))
    codes = tuple(str(10000 + i) for i in range(25))
    assert few.cells == [
        TableColumn("Postal Code", "category", codes), TableColumn("Profit"), TableColumn("note"),
    ]  # fmt: skip
    assert few.guess.others == ("Profit", "note")
    said = "Postal Code is a category, as its name is that of a code; to use it as a number: "
    assert f"{said}--kind 'Postal Code=number'" in understand(tmp_path / "few.csv").said
    assert few.unused == {
        "CustomerID": "100 values in 100 rows are too many of a code; to use it as a number: --kind CustomerID=number"
    }
    asked = read_table(tmp_path / "few.csv", roles=wished([], "", [], ["Postal Code=number"]))
    assert TableColumn("Postal Code") in asked.cells


def test_what_is_counted_in_the_first_rows_says_so(tmp_path: Path) -> None:
    found = read_table(orders(tmp_path / "many.csv", 999, 2500))
    assert found.unused["Postal Code"].startswith("999 values in the first 2000 rows are too many")


def test_a_column_called_name_is_left_out_where_its_cells_differ(tmp_path: Path) -> None:
    """Words of names of cars come again; with them 100 R2 is 79, without 88."""
    rows = "".join(f"ford {'pinto' if i % 2 else 'torino'} {i % 50},{i},{'ab'[i % 2]}\n" for i in range(80))
    found = read_table(written(tmp_path / "t.csv", "Name,weight,class\n" + rows))
    assert (found.texts, list(found.unused)) == ([], ["Name"])
    few = "".join(f"ford {'pinto' if i % 2 else 'torino'} a,{i},{'ab'[i % 2]}\n" for i in range(80))
    assert "Name" not in read_table(written(tmp_path / "u.csv", "Name,weight,class\n" + few)).unused
