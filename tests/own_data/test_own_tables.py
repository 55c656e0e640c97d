"""What the columns of a user's table are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgefl.data.recording import read_csv
from edgefl.errors import DataError
from edgefl.own_data.cut_tables import write_recordings
from edgefl.own_data.samples import understand
from edgefl.own_data.table_rows import MAX_COLUMNS, MAX_TABLE_BYTES, read_rows
from edgefl.own_data.tables import has_head, read_table


def table(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_table_of_time_steps_has_sensors_by_their_names(tmp_path: Path):
    rows = "".join(f"{t / 10},{t},{t},{t},7,walk,anna\n" for t in range(20))
    found = read_table(table(tmp_path, "w.csv", "time,acc_x,acc_y,acc_z,pressure,activity,person\n" + rows))
    assert found.what == "recording"
    assert found.sensors == {"acc": ["acc_x", "acc_y", "acc_z"], "pressure": ["pressure"]}
    assert (found.time, found.label, found.group) == ("time", "activity", "person")


def test_x_y_z_are_axes_and_y_no_label(tmp_path: Path):
    found = read_table(table(tmp_path, "w.csv", "t,x,y,z\n" + "0.1,1,2,3\n" * 9))
    assert found.sensors == {"sensor": ["x", "y", "z"]}
    assert found.label == ""


def test_rows_without_time_are_samples_of_numbers(tmp_path: Path):
    rows = "".join(f"{i},{i * 2},{'ab'[i % 2]}\n" for i in range(12))
    found = read_table(table(tmp_path, "iris.csv", "length,width,species\n" + rows))
    assert found.what == "features"
    assert found.label == "species"


def test_a_table_of_files_has_labels_and_captions_beside_them(tmp_path: Path):
    rows = "".join(f"{i}.png;a cat on a sofa;{'xy'[i % 2]};p{i % 3}\n" for i in range(12))
    path = table(tmp_path, "list.csv", "image;caption;class;speaker\n" + rows)
    found = read_table(path, lambda text: text.endswith(".png"))
    assert found.what == "list"
    assert (found.files, found.texts, found.label, found.group) == (["image"], ["caption"], "class", "speaker")


def test_captions_may_be_a_json_object(tmp_path: Path):
    found = read_table(
        table(tmp_path, "c.json", '{"a.png": "a red cat", "b.png": "two blue dogs"}'), lambda t: ".png" in t
    )
    assert found.files == ["file"]
    assert found.texts == ["text"]


@pytest.mark.parametrize("text", ["[1, 2]", "{", '"a"', "[[1]]"])
def test_json_that_is_no_table_is_refused(tmp_path: Path, text: str):
    with pytest.raises(DataError):
        read_table(table(tmp_path, "c.json", text))


def test_a_parquet_file_reads_like_its_csv(tmp_path: Path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"time": [0.0, 0.1], "acc_x": [1.0, None], "label": ["a", "a"]}), tmp_path / "t.parquet")
    found = read_table(tmp_path / "t.parquet")
    assert found.rows == [{"time": "0.0", "acc_x": "1", "label": "a"}, {"time": "0.1", "acc_x": "", "label": "a"}]


def test_a_parquet_of_many_equal_cells_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"x": pa.array([True]).take(pa.array([0] * 4_000_001))}), path)
    assert path.stat().st_size < 2**20
    with pytest.raises(DataError, match="has 4000001 rows of 1 columns, more than can be held"):
        read_table(path)
    pq.write_table(pa.table({"x": ["word " * 200] * 3000}), path)
    monkeypatch.setattr("edgefl.own_data.table_rows.MAX_TABLE_BYTES", 2**20)
    with pytest.raises(DataError, match="unpacked it has more than 1048576 bytes"):
        read_table(path)
    pq.write_table(pa.table({f"c{i}": [1] for i in range(MAX_COLUMNS + 1)}), path)
    with pytest.raises(DataError, match="1 rows of 2001 columns"):
        read_table(path)


def test_a_table_beyond_the_limit_is_refused_unread(tmp_path: Path):
    path = tmp_path / "big.csv"
    with path.open("wb") as file:
        file.truncate(MAX_TABLE_BYTES + 1)
    with pytest.raises(DataError, match="limit"):
        read_table(path)


def test_a_head_line_is_told_from_numbers(tmp_path: Path):
    assert has_head(table(tmp_path, "a.csv", "time,x\n1,2\n"))
    assert not has_head(table(tmp_path, "b.csv", "1,2\n3,4\n"))
    assert not has_head(table(tmp_path, "c.csv", ""))


def test_recordings_keep_gaps_and_each_sensor_its_own_rate(tmp_path: Path):
    # The pressure is there in every second row; one row of the accelerometer lacks a cell; the activity changes once.
    rows = [
        f"{t}.0,{t},{'' if t == 1 else t},{t if t % 2 == 0 else ''},{'walk' if t < 4 else 'sit'}\n" for t in range(6)
    ]
    found = read_table(table(tmp_path, "w.csv", "time_ms,acc_x,acc_y,press,activity\n" + "".join(rows)))
    walk, sit = write_recordings(found, tmp_path, "made")
    assert (walk.label, sit.label) == ("walk", "sit")
    assert set(walk.files) == {"acc", "press"}
    assert (tmp_path / walk.files["acc"]).read_text().split() == [
        "time_ms,acc_x,acc_y",
        "0,0,0",
        "1,1,",
        "2,2,2",
        "3,3,3",
    ]
    assert (tmp_path / walk.files["press"]).read_text().split() == ["time_ms,press", "0,0", "2,2"]


def test_days_whose_label_changes_every_few_rows_are_samples(tmp_path: Path):
    rows = [f"2012-01-{day:02d},{day % 5},{day % 3},{'rain' if day // 3 % 2 else 'sun'}\n" for day in range(1, 31)]
    found = read_table(table(tmp_path, "days.csv", "date,wind,temp,weather\n" + "".join(rows)))
    assert (found.what, found.label, found.time) == ("features", "weather", "")
    assert [(cell.name, cell.kind) for cell in found.cells] == [
        ("date", "date"),
        ("wind", "number"),
        ("temp", "number"),
    ]


@pytest.mark.parametrize(
    ("name", "step"),
    [("t_ms", 20), ("time_us", 2e4), ("timestamp [ns]", 2e7), ("Time (s)", 0.02), ("seconds", 0.02), ("ms", 20)],
)
def test_a_clock_is_no_sensor_whatever_its_unit(tmp_path: Path, name: str, step: float):
    """At 50 Hz in every unit; without a column of groups, and not the first one."""
    rows = "".join(f"walk,{i},{i},{i * step:g}\n" for i in range(12))
    found = read_table(table(tmp_path, "w.csv", f"class,acc_x,acc_y,{name}\n{rows}"))
    assert (found.time, found.sensors) == (name, {"acc": ["acc_x", "acc_y"]})
    (one,) = write_recordings(found, tmp_path, "made")
    times = read_csv(tmp_path / one.files["acc"]).times
    assert times is not None
    assert times[:3].tolist() == pytest.approx([0, 0.02, 0.04])


@pytest.mark.parametrize("head", ["x,y,time", "seconds,x,y"])
def test_a_clock_that_the_reader_of_sensors_would_take_for_a_channel_is_cut_out(tmp_path: Path, head: str):
    (tmp_path / "walk").mkdir()
    table(tmp_path / "walk", "1.csv", head + "\n" + "".join(f"{i},{i},{i}\n" for i in range(12)))
    (sample,) = understand(tmp_path).samples
    found = read_csv(tmp_path / str(sample.values["sensor"]))
    assert found.times is not None
    assert found.rows.shape == (12, 2)


def test_no_column_is_lost_for_its_name(tmp_path: Path):
    head = "time,subject,class,温度,湿度,a-b,a b,meta,2nd"
    path = table(tmp_path, "w.csv", head + "\n" + "".join(f"{i},p,walk,1,2,3,4,5,6\n" for i in range(12)))
    (sample,) = (found := understand(path)).samples
    names = ["sensor", "sensor-2", "a-b", "a_b", "sensor_meta", "sensor_2nd"]
    assert list(sample.values) == names
    assert [read_csv(found.root / str(sample.values[name])).rows[0, 0] for name in names] == [1, 2, 3, 4, 5, 6]
    assert "sensor-2 (1 channels)" in found.said[0]


def test_tables_with_names_alike_are_not_written_over_each_other(tmp_path: Path):
    for number, name in enumerate(("走.csv", "跑.csv", "a b.csv", "a_b.csv", "a_b.tsv")):
        table(tmp_path, name, "time,subject,class,x\n" + f"0,p,walk,{number}\n" * 3)
    found = understand(tmp_path)
    values = [read_csv(tmp_path / str(sample.values["x"])).rows[0, 0] for sample in found.samples]
    assert sorted(values) == [0, 1, 2, 3, 4]
    assert (tmp_path / "edgefl-recordings/a_b-0001_x.csv").is_file()


def test_no_sentence_is_lost_for_its_columns_name(tmp_path: Path):
    path = table(tmp_path, "t.csv", "标题,文本,class\n" + "a red cat,on a mat,cat\n" * 12)
    assert understand(path).samples[0].values == {"text": "a red cat", "text-2": "on a mat"}


@pytest.mark.parametrize("name", ["datetime", "timestamp_ms"])
def test_dates_become_seconds(tmp_path: Path, name: str):
    text = f"{name},acc_x,acc_y\n2026-05-01 12:00:00.250,1,2\n2026-05-01 12:00:01.250,1,2\n"
    (one,) = write_recordings(read_table(table(tmp_path, "w.csv", text)), tmp_path, "made")
    head, first, second = (tmp_path / one.files["acc"]).read_text().split()
    assert head.startswith("time_s,")
    assert float(second.split(",")[0]) - float(first.split(",")[0]) == pytest.approx(1.0)
    with pytest.raises(DataError, match="is no time"):
        write_recordings(read_table(table(tmp_path, "x.csv", text.replace("2026-05-01", "1 May"))), tmp_path, "more")


@pytest.mark.parametrize(("order", "what"), [("aabb", "features"), ("abab", "recording")])
def test_a_table_of_features_that_is_sorted_by_its_label_is_no_recording(tmp_path: Path, order: str, what: str):
    rows = [f"{0.1 * i},{0.2 * i},{label}" for label in order for i in range(25)]
    (tmp_path / "iris.csv").write_text("\n".join(["sepal_length,sepal_width,species", *rows]))
    table = read_table(tmp_path / "iris.csv", lambda _: False)
    assert (table.label, table.what) == ("species", what)


def test_a_jump_of_the_time_begins_a_recording_but_a_gap_does_not(tmp_path: Path):
    """Sessions five minutes apart, a gap of two seconds in the second, and a clock that starts again in the third."""
    session = [0.1 * k for k in range(20)]
    times = [*session, *(300 + at + 2 * (at > 0.95) for at in session), *session]
    rows = "".join(f"{at:.1f},{k % 5},{k % 3},walk\n" for k, at in enumerate(times))
    found = understand(table(tmp_path, "w.csv", "time,acc_x,acc_y,activity\n" + rows))
    recordings = [read_csv(found.root / str(sample.values["acc"])) for sample in found.samples]
    assert [len(one.rows) for one in recordings] == [20, 20, 20]
    assert recordings[1].times is not None
    assert recordings[1].times[-1] == pytest.approx(3.9)


def test_rows_of_people_that_are_written_at_a_time_are_told_apart(tmp_path: Path):
    rows = "".join(f"{0.1 * k:.1f},{k},{person},{label}\n" for k in range(20) for person, label in ("ab", "cd"))
    found = understand(table(tmp_path, "w.csv", "time,x,person,class\n" + rows))
    assert [(sample.group, sample.label) for sample in found.samples] == [("a", "b"), ("c", "d")]
    assert read_csv(found.root / str(found.samples[1].values["x"])).rows[:, 0].tolist() == list(range(20))


def test_a_long_table_has_a_column_a_channel(tmp_path: Path):
    rows = [f"u{u},{k},{c},{100 * u + 10 * k + c},{'ab'[u % 2]}" for u in range(4) for k in range(9) for c in range(3)]
    path = table(tmp_path, "v.csv", "\n".join(["utterance,time,channel,value,label", *rows]))
    found = understand(path)
    assert [sample.label for sample in found.samples] == ["a", "b", "a", "b"]
    values = read_csv(found.root / str(found.samples[2].values["value"])).rows
    assert values.tolist() == [[200 + 10 * k + c for c in range(3)] for k in range(9)]
    path.write_text(path.read_text() + "\nu3,8,2,1,b\n")
    with pytest.raises(DataError, match=r"v\.csv: row 109: the channel '2' has two values at time 8"):
        understand(path)


def test_time_stamps_as_written_in_germany(tmp_path: Path):
    text = "timestamp;x;label\n" + "".join(f"14.11.2023 22:13:{k:02d}.500;{k},5;a\n" for k in range(12))
    (sample,) = (found := understand(table(tmp_path, "g.csv", text))).samples
    recording = read_csv(found.root / str(sample.values["x"]))
    assert recording.times is not None
    assert recording.times[:3].tolist() == [0, 1, 2]
    assert recording.rows[1, 0] == 1.5


def test_a_row_of_too_many_cells_is_named(tmp_path: Path):
    text = "a,b,class\n" + "1,2,x\n" * 30 + "1,2,3,4,x\n"
    with pytest.raises(DataError, match=r"t\.csv: line 32 has 5 cells, the head line 3"):
        read_table(table(tmp_path, "t.csv", text))


def test_objects_in_json_are_columns_and_lists_of_texts_several_labels(tmp_path: Path):
    rows = [
        {"acc": {"x": i, "y": {"deep": 2}}, "user": {"id": f"u{i}"}, "tags": ["a", "b"], "at": [1, 2]} for i in range(3)
    ]
    (path := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_rows(path).rows
    assert found[2] == {"acc.x": "2", "acc.y.deep": "2", "user.id": "u2", "tags": "a;b", "at": ""}


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
def test_whole_numbers_are_alike_beside_absent_cells(tmp_path: Path, suffix: str):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"label": [1.0, None, 3.0], "x": [1.0, 2.5, None]})
    path = tmp_path / f"a{suffix}"
    write = {".csv": frame.to_csv, ".json": frame.to_json, ".parquet": frame.to_parquet}[suffix]
    write(path, **({"orient": "records"} if suffix == ".json" else {"index": False}))
    found = read_rows(path).rows
    assert [row["label"] for row in found] == ["1", "", "3"]
    assert [row["x"] for row in found] == ["1.0", "2.5", ""]


def test_bytes_in_a_parquet_are_texts(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"label": [b"a", "\u00fc".encode()]}).to_parquet(tmp_path / "a.parquet")
    assert [row["label"] for row in read_rows(tmp_path / "a.parquet").rows] == ["a", "\u00fc"]


@pytest.mark.parametrize(
    ("head", "day", "clock"),
    [
        ("Date,Time", "2024-03-31", "12:00:{:05.2f}"),
        ("Datum,Uhrzeit", "31.03.2024", "12:00:{:05.2f}"),
        ("Time,Date", "3/31/2024", "12:00:{:05.2f} PM"),
    ],
)
def test_a_day_and_a_time_of_it_are_one_time(tmp_path: Path, head: str, day: str, clock: str):
    pytest.importorskip("pandas")
    cells = [(day, clock.format(i / 50)) for i in range(40)]
    rows = [f"{b},{a}" if head.startswith("Time") else f"{a},{b}" for a, b in cells]
    path = table(tmp_path, "w.csv", f"{head},acc_x\n" + "".join(f"{row},{i}\n" for i, row in enumerate(rows)))
    found = read_table(path)
    assert (found.columns, found.time, found.unused) == (["datetime", "acc_x"], "datetime", {})
    (made,) = write_recordings(found, tmp_path, "made")
    lines = (tmp_path / made.files["acc"]).read_text().split()
    assert lines[:3] == ["time_s,acc_x", "1711886400.0,0", "1711886400.02,1"]


def test_days_beside_a_time_that_is_a_number_stay_apart(tmp_path: Path):
    pytest.importorskip("pandas")
    path = table(
        tmp_path,
        "w.csv",
        "date,time,x,label\n" + "".join(f"2024-03-{i % 28 + 1:02d},{i},1,{'ab'[i % 2]}\n" for i in range(40)),
    )
    assert {"date", "time"} <= set(read_table(path).columns)
