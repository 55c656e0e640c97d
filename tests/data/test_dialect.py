"""Recordings as loggers and spreadsheets write them: separators, quotes, decimal commas, dates, units."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dialect import BLANKS, ONE_COLUMN, dialect_of
from edgefl.data.recording import TIME, read_csv
from edgefl.data.table_cells import cells_of
from edgefl.errors import DataError
from edgefl.own_data.cut_tables import write_recordings
from edgefl.own_data.samples import understand
from edgefl.own_data.table_rows import read_rows
from edgefl.own_data.tables import read_table
from edgefl.records import TableColumn

ROWS = [(0.00, 0.0126, 0.9868), (0.02, 0.1358, 0.9385), (0.04, -0.3791, 1.0633)]
STAMPS = ["2023-11-14 22:13:20.000", "2023-11-14 22:13:20.020", "2023-11-14 22:13:20.040"]


def written(separator: str, comma: str = ".", quote: str = "", end: str = "", head: str = "time x y") -> str:
    cells = [head.split(), *([f"{cell:.4f}".replace(".", comma) for cell in row] for row in ROWS)]
    return "".join(separator.join(f"{quote}{cell}{quote}" for cell in row) + end + "\n" for row in cells)


@pytest.mark.parametrize(
    "text",
    [
        written(","),
        written(";"),
        written("\t"),
        written(";", comma=","),
        written("   "),
        written("  ", comma=","),
        "# " + written(" "),
        written(",", quote='"'),
        written(",", quote='"', comma=","),
        written(",", end=","),
        written(";", end=";", comma=","),
        written(",").replace("\n", "\ns,g,g\n", 1),
        "\ufeff" + written(","),
        "time,x,y\n" + "".join(f"{at},{x},{y}\n" for at, (_, x, y) in zip(STAMPS, ROWS, strict=True)),
        "time,x,y\n" + "".join(f"{at[11:]},{x},{y}\n" for at, (_, x, y) in zip(STAMPS, ROWS, strict=True)),
        "Zeit;x;y\n" + "".join(f"14.11.2023 {at[11:]};{x};{y}\n" for at, (_, x, y) in zip(STAMPS, ROWS, strict=True)),
        "time;x;y\n" + "".join(f"11/14/23 {at[12:]} PM;{x};{y}\n" for at, (_, x, y) in zip(STAMPS, ROWS, strict=True)),
        ",time,x,y\n" + "".join(f"{i},{t},{x},{y}\n" for i, (t, x, y) in enumerate(ROWS)),
        "Index;time;x;y\n-;ms;-;-\n"
        + "".join(f"{i};{t * 1000};{x};{y}\n" for i, (t, x, y) in enumerate(ROWS, start=1)),
        '"time","x","y"\n' + "".join(f'"{i}",{t},{x},{y}\n' for i, (t, x, y) in enumerate(ROWS)),
    ],
)
def test_a_recording_is_read_whatever_writes_it(tmp_path: Path, text: str):
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    found = read_csv(tmp_path / "a.csv")
    np.testing.assert_allclose(found.rows, np.array(ROWS)[:, 1:])
    assert found.times is not None
    np.testing.assert_allclose(found.times, [0, 0.02, 0.04], atol=1e-6)


@pytest.mark.parametrize(
    ("head", "seconds"),
    [
        ("time;x\nms;g\n", 0.02),
        ("Zeit;x\n[ms];[g]\n", 0.02),
        ("time [\u00b5s];x\n", 2e-5),
        ("Zeit (sec);x\n", 20),
        ("time;x\nmin;-\n", 1200),
        ("timestamp_h;x\n", 72000),
    ],
)
def test_the_unit_of_time_is_that_of_the_name_or_of_the_row_below(tmp_path: Path, head: str, seconds: float):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text(head + "".join(f"{20 * i};{i},5\n" for i in range(20)), encoding="utf-8")
    found = read_csv(path)
    assert found.rows.shape == (20, 1)
    assert found.times is not None
    np.testing.assert_allclose(np.diff(found.times), seconds)
    (made,) = write_recordings(read_table(path), tmp_path, "made")
    (name,) = made.files.values()
    times = read_csv(tmp_path / name).times
    assert times is not None
    np.testing.assert_allclose(np.diff(times), seconds)


def test_marks_for_nothing_are_gaps(tmp_path: Path):
    (tmp_path / "a.csv").write_text("time,x\n0,NA\n1,-\n2,\n3,#N/V\n4,5\n")
    found = read_csv(tmp_path / "a.csv").rows[:, 0]
    np.testing.assert_equal(found, [np.nan] * 4 + [5])


def test_a_channel_that_counts_is_one_unless_it_is_the_rows(tmp_path: Path):
    (tmp_path / "a.csv").write_text("steps,x\n1,5\n2,5\n3,5\n")
    assert read_csv(tmp_path / "a.csv").rows.shape == (3, 2)
    (tmp_path / "a.csv").write_text("id,x\n1,5\n1,5\n3,5\n")
    assert read_csv(tmp_path / "a.csv").rows.shape == (3, 2)


def test_a_lowest_temperature_is_no_time():
    assert not any(map(TIME.fullmatch, ("t_min", "tmin", "th", "t_h")))


@pytest.mark.parametrize("head", ["level\n", ""])
def test_one_column_of_decimal_commas_is_one_channel(tmp_path: Path, head: str):
    (tmp_path / "a.csv").write_text(head + "0,0126\n0,1358\n-0,3791\n")
    np.testing.assert_allclose(read_csv(tmp_path / "a.csv").rows, [[0.0126], [0.1358], [-0.3791]])


@pytest.mark.parametrize(
    ("separator", "cells", "read"),
    [
        (";", ["0,5", "1.137", "1.234.567,25"], [0.5, 1137, 1234567.25]),
        (";", ["1,137", "0,211", "12"], [1.137, 0.211, 12]),
        (";", ["0,5", "1.5", "1.137"], [0.5, 1.5, 1.137]),
        (",", ['"1,137"', '"1,234.50"', "7"], [1137, 1234.5, 7]),
        (",", ['"1,137"', "999", '"-2,000"'], [1137, 999, -2000]),
        (",", ['"0,137"', '"1,211"', "2"], [0.137, 1.211, 2]),
        ("\t", ["1,137", "0.5", "1,000,000"], [1137, 0.5, 1000000]),
        (";", ["1\u00a0137,5", "1'000", "\u22122"], [1137.5, 1000, -2]),
    ],
)
def test_thousands_may_be_grouped(tmp_path: Path, separator: str, cells: list[str], read: list[float]):
    pytest.importorskip("pandas")
    text = "".join(f"{cell}{separator}{i}\n" for i, cell in enumerate(cells))
    (path := tmp_path / "a.csv").write_text(f"x{separator}y\n{text}", encoding="utf-8")
    assert read_csv(path).rows[:, 0].tolist() == read
    assert [float(row["x"]) for row in read_rows(path).rows] == read


BODY = "".join(f"{i},{i}.5,{'ab'[i % 2]}\n" for i in range(12))


@pytest.mark.parametrize(
    "above",
    [
        "",
        "sep=,\n",
        "Logger X1\nStart: 12.03.2024\n\n",
        "Logger X1,,\n,,\n",
        "# device 7\n# rate, 50\n",
        "# one, two, three\n",
        "# device 7\n#",
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_above_the_head_are_passed_over(tmp_path: Path, above: str, end: str):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_bytes((above + "time,x,label\n" + BODY).replace("\n", end).encode())
    rows = read_rows(path).rows
    assert [float(row["time"]) for row in rows] == list(range(12))
    assert rows[3] == {"time": "3", "x": "3.5", "label": "b"}
    numbers = (above + "time,x,y\n" + BODY.replace("a", "1").replace("b", "2")).replace("\n", end)
    path.write_bytes(numbers.encode())
    found = read_csv(path)
    assert found.rows[:2].tolist() == [[0.5, 1], [1.5, 2]]
    assert found.times is not None


def test_rows_of_text_below_a_short_one_lose_none(tmp_path: Path):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text(",x\na,hello\nb,bye\n")
    assert [row["x"] for row in read_rows(path).rows] == ["hello", "bye"]


def test_a_column_of_sentences_keeps_its_head_line():
    text = "text\n" + 6 * "Good day, sir\n" + 4 * "Hello\n"
    assert dialect_of(text, whole=True)[:2] == (ONE_COLUMN, ("text",))


def test_a_head_line_of_too_few_names_is_refused(tmp_path: Path):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text("x,label\n" + 9 * "1,2,3,a\n")
    with pytest.raises(DataError, match="names 2 columns, and most rows have 4 cells"):
        read_rows(path)


def test_head_lines_of_files_that_were_joined_are_no_rows(tmp_path: Path):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text(2 * "time,x,y\n1,2,3\n")
    assert read_rows(path).rows == 2 * [{"time": "1", "x": "2", "y": "3"}]
    assert read_csv(path).rows.tolist() == 2 * [[2, 3]]


def test_digits_with_an_underscore_are_a_name(tmp_path: Path):
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text("room,x,label\n" + "".join(f"1_{i % 3},{i},{'ab'[i % 2]}\n" for i in range(12)))
    assert understand(tmp_path / "a.csv").samples[4].values == {"features": {"room": "1_1", "x": 4.0}}


@pytest.mark.parametrize(
    ("cell", "number", "unit"),
    [
        ("12 km", 12, "km"),
        ("45 %", 45, "%"),
        ("3,50 €", 3.5, "€"),
        ("$1000.50", 1000.5, "$"),
        ("-4\u00a0°C", -4, "°C"),
        ("1.137 km/h", 1.137, "km/h"),
        ("1e3V", 1000, "V"),
    ],
)
def test_a_unit_beside_every_number_is_the_columns(tmp_path: Path, cell: str, number: float, unit: str):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text(f"x;y\n{cell};a\nNA;b\n{cell};c\n", encoding="utf-8")
    rows, units = read_rows(path)
    assert [row["x"] and float(row["x"]) for row in rows] == [number, "", number]
    assert units == {"x": unit}
    found = cells_of({"x": cell.replace(",", ".")}, [TableColumn("x", unit=unit)])
    np.testing.assert_allclose(found, [[number, 1]])


@pytest.mark.parametrize(
    "cells",
    [["1 day", "7 days"], ["5.04", "6.06 LTS"], ["1.png", "2.png"], ["12 km", "far"], ["5a", "5b"], ["1.5.2", "2"]],
)
def test_other_texts_keep_what_stands_beside_numbers(tmp_path: Path, cells: list[str]):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text("x;y\n" + "".join(f"{cell};a\n" for cell in 2 * cells))
    assert [row["x"] for row in read_rows(path).rows] == 2 * cells


def test_a_list_of_numbers_is_no_number_with_a_decimal_comma(tmp_path: Path):
    pytest.importorskip("pandas")
    (path := tmp_path / "a.csv").write_text("tags;x\n1,2;0,5\n1,2,3;1,5\n3;2,5\n")
    assert [(row["tags"], row["x"]) for row in read_rows(path).rows] == [("1,2", "0.5"), ("1,2,3", "1.5"), ("3", "2.5")]


def test_a_head_line_of_one_name_above_rows_of_two_values_is_refused(tmp_path: Path):
    (tmp_path / "a.csv").write_text("level\n1.5,2.5\n1.5,2.5\n")
    with pytest.raises(DataError, match="its head line names 1 column, and row 2 has 2 values"):
        read_csv(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("first", "period"),
    [
        (1_700_000_000_000, 20),  # ms since 1970
        (1_700_000_000_000_000, 20_000),  # us
        (1_700_000_000_000_000_000, 20_000_000),  # ns
        (10_000_000_000_000, 20_000_000),  # ns since the device was switched on
    ],
)
def test_the_unit_of_large_time_stamps(tmp_path: Path, first: int, period: int):
    (tmp_path / "a.csv").write_text("timestamp,x\n" + "".join(f"{first + i * period},{i}\n" for i in range(9)))
    times = read_csv(tmp_path / "a.csv").times
    assert times is not None
    np.testing.assert_allclose(np.diff(times), 0.02, rtol=1e-3)


def test_what_a_dialect_says(tmp_path: Path):
    found = dialect_of('"a","b"\n"1",2,"x, y"\n"2",4,"z"\n', whole=True)  # as R writes names of rows
    assert (found.separator, found.head, found.numbered, found.ends) == (",", ("a", "b"), True, False)
    text = '"len" "kind"\n"1"  5.1 "so so"\n"2" 14.9 b\n'  # as R writes tables
    blanks = dialect_of(text, whole=True)
    assert (blanks.separator, blanks.head, blanks.numbered) == (BLANKS, ("len", "kind"), True)
    (path := tmp_path / "a.csv").write_text(text)
    assert read_rows(path).rows == [{"len": "5.1", "kind": "so so"}, {"len": "14.9", "kind": "b"}]
    assert dialect_of("mass kind\n", whole=True).separator == ONE_COLUMN
    assert dialect_of("some words\nhello there\nfull stop\n", whole=True).separator == ONE_COLUMN
    assert dialect_of("words\nhello there\n", whole=True).separator == ONE_COLUMN
    assert dialect_of("", whole=True).head == ()
