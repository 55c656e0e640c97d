"""Recordings of a sensor: time columns, rates, gaps, windows; and the samples that a folder of them gives."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from edgefl.config.settings import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.data.folder import read_manifest
from edgefl.data.hold_out import hold_out
from edgefl.data.readers import SampleError, Target, read, read_samples
from edgefl.data.recording import Recording, cut, read_csv, regular
from edgefl.data.sources import load
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec

WINDOWED = EncoderSpec(input_shape=(4, 1), patch=2, step=4)


def csv(path: Path, head: str, rows: list[str]) -> Path:
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("head", "stamps", "seconds"),
    [
        ("t", ["0", "0.5", "1"], [0, 0.5, 1]),
        ("Time_ms", ["100", "600", "1100"], [0, 0.5, 1]),
        ('"timestamp [us]"', ["0", "500000", "1000000"], [0, 0.5, 1]),
        ("timestamp", ["1700000000000", "1700000000500", "1700000001000"], [0, 0.5, 1]),  # milliseconds since 1970
        ("timestamp", ["1700000000", "1700000000.5", "1700000001"], [0, 0.5, 1]),
    ],
)
def test_a_first_column_called_time_is_no_channel(tmp_path: Path, head: str, stamps: list[str], seconds: list[float]):
    found = read_csv(csv(tmp_path / "a.csv", f"{head},x,y", [f"{stamp},1,2" for stamp in stamps]))
    assert found.rows.tolist() == [[1, 2]] * 3
    assert found.times is not None
    assert found.times.tolist() == seconds


@pytest.mark.parametrize(("head", "width"), [("x,y,z", 3), ("temperature,y,z", 3), ("x,t,z", 3), ("t", 1)])
def test_any_other_column_is_a_channel(tmp_path: Path, head: str, width: int):
    found = read_csv(csv(tmp_path / "a.csv", head, [",".join(["1"] * width)] * 2))
    assert (found.rows.shape, found.times) == ((2, width), None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0,1", "2,1", "1,1"], "row 4: its time lies before the row above"),
        (["0,1", ",1"], "row 3 has no time"),
        (["0,1", "nan,1"], "row 3 has no time"),
        (["0,1", "0,1", "0,1"], "more than half of its time stamps are equal"),
        (["0,1", "20,1", "40,1"], "make it 0.05 Hz, and 50 Hz are asked for: if they are milliseconds"),
        (["0,1", "0.02,1", "0.04,1", "85,1"], "lasts 85 s, and its 4 rows take 0.08 s: its gaps are too long"),
        (["0,1", "1e308,1"], "row 3: 1e\\+308 is no time"),
        (["-1e308,1", "1e308,1"], "row 2: -1e\\+308 is no time"),
    ],
)
def test_a_bad_time_column_is_named(tmp_path: Path, rows: list[str], message: str):
    csv(tmp_path / "a.csv", "t,x", rows)
    with pytest.raises(SampleError, match=rf"a\.csv: .*{message}"):
        read(tmp_path, "a.csv", Target("sensor", rate=50.0))


@pytest.mark.parametrize("row", ["1.0,2.0,x", ",2.0,x", "1.0;2.0,2,3"])
def test_a_first_row_with_a_bad_cell_is_no_head_line(tmp_path: Path, row: str):
    with pytest.raises(DataError, match=f"row 1 is not a row of numbers: '{row}'"):
        read_csv(csv(tmp_path / "a.csv", row, ["1,2,3"] * 2))


@pytest.mark.parametrize("head", ["time,0,1", "a,b,c", "a,,c"])
def test_a_head_line_may_have_empty_names_and_beside_the_time_numbers(tmp_path: Path, head: str):
    assert len(read_csv(csv(tmp_path / "a.csv", head, ["1,2,3", "4,5,6"])).rows) == 2


def test_a_recording_whose_rows_would_fill_a_file_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgefl.data.recording.MAX_FILE_BYTES", 40)
    recording = Recording(np.zeros((6, 2)), np.arange(6.0))
    with pytest.raises(DataError, match="at 1 Hz it has 6 rows, more than 40 bytes"):
        regular(recording, rate=1.0)


def test_cutting_takes_less_memory_than_three_times_the_rows():
    """A count of 4 bytes a row, made of as much, and flags; the rows of a gap may be many."""
    rows, none = np.zeros((10**5, 1), np.float32), np.zeros(10**5, bool)
    tracemalloc.start()
    cut(rows, none, 16, 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * rows.nbytes


def test_resampling_is_linear():
    """A ramp of 2 a second at 4 Hz with jitter: at 2 Hz it is 0, 1, 2, 3, wherever the time stamps lie."""
    times = np.array([0, 0.25, 0.52, 0.75, 1.0, 1.24, 1.5])
    rows, cuts = regular(Recording((2 * times)[:, None], times), rate=2.0)
    assert np.allclose(rows[:, 0], [0, 1, 2, 3])
    assert not cuts.any()


def tone(hz: float, source: float, seconds: float = 20.0, jitter: float = 0.0) -> Recording:
    """A sine, at time stamps with jitter (of a period)."""
    count = int(seconds * source)
    times = (np.arange(count) + jitter * np.random.default_rng(0).uniform(-0.5, 0.5, count)) / source
    times -= times[0]
    return Recording(np.sin(2 * np.pi * hz * times)[:, None], times)


@pytest.mark.parametrize(
    ("source", "rate", "jitter", "off"),
    [(200.0, 50.0, 0.0, 0.03), (1000.0, 10.0, 0.0, 0.001), (1000.0, 10.0, 0.3, 0.001), (100.0, 64.0, 0.0, 0.19)],
)
def test_what_is_too_fast_for_a_rate_does_not_become_slow(source: float, rate: float, jitter: float, off: float):
    """A sine of 0.55 of the new rate would be one of 0.45. One of 0.3 stays, but for what lines between values take.

    These are off by 1 - cos(pi f / source): of 19.2 Hz at 100 Hz 0.18.
    """
    fast = regular(tone(0.55 * rate, source, jitter=jitter), rate=rate)[0]
    assert np.abs(fast[20:-20]).max() < 0.005
    slow = regular(tone(0.3 * rate, source, jitter=jitter), rate=rate)[0][:, 0]
    expected = np.sin(2 * np.pi * 0.3 * np.arange(len(slow)))
    assert np.abs(slow - expected)[20:-20].max() < off


def test_what_is_filtered_ends_at_gaps():
    """A step of 100 behind a gap is not seen before it; a level stays what it is, up to the edges."""
    times = np.concatenate((np.arange(300), 310 + np.arange(300))) / 100
    levels = np.where(np.arange(600) < 300, 1.0, 101.0)
    levels[450] = np.nan
    rows = regular(Recording(levels[:, None], times), rate=20.0)[0][:, 0]
    assert np.isnan(rows[[60, 61]]).all()
    assert np.isnan(rows).sum() <= 4
    assert np.allclose(rows[:60], 1.0)
    assert np.allclose(rows[62:][~np.isnan(rows[62:])], 101.0)


def test_a_filtered_recording_of_one_file_takes_bounded_memory():
    rows = np.zeros((10**6, 1), np.float32)
    tracemalloc.start()
    regular(Recording(rows), rate=0.01, source_rate=1000.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 10**6 * 8


def test_without_times_source_rate_says_what_it_is_at():
    rows = np.arange(8.0)[:, None]
    assert np.allclose(regular(Recording(rows), rate=2.0, source_rate=4.0)[0][:, 0], [0, 2, 4, 6])
    assert regular(Recording(rows), rate=4.0, source_rate=4.0)[0][:, 0].tolist() == list(range(8))
    with pytest.raises(DataError, match="no time column, and 2 Hz are asked for: set source_rate"):
        regular(Recording(rows), rate=2.0)


def test_windows_of_a_recording_and_what_is_left_over():
    """Ten rows, windows of 4 every 3: they start at 0, 3 and 6; with a step of 4 at 0 and 4, and two rows are left."""
    rows, none = np.arange(10, dtype=np.float32)[:, None], np.zeros(10, bool)
    assert cut(rows, none, 4, 3).values[:, 0, 0].tolist() == [0, 3, 6]
    assert cut(rows, none, 4, 4).values[:, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut(rows, none, 10, 1).values.shape == (1, 10, 1)
    with pytest.raises(DataError, match="has 10 time steps, fewer than one window of 11"):
        cut(rows, none, 11, 1)


def test_windows_that_touch_a_gap_are_not_whole():
    """Row 5 is absent: of windows of 4 every 2 those from 2 and 4 hold it. Between rows 5 and 6 a jump: 4 alone."""
    rows, cuts = np.zeros((10, 2), np.float32), np.zeros(10, bool)
    rows[5, 1] = np.nan
    assert cut(rows, cuts, 4, 2).whole.tolist() == [True, False, False, True]
    rows[5, 1], cuts[6] = 0, True
    assert cut(rows, cuts, 4, 2).whole.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("late", "gap"), [(0.35, True), (0.25, False)])
def test_time_stamps_that_jump_are_a_gap(late: float, gap: bool):
    """At 10 Hz a jump of 0.35 s is more than three periods, one of 0.25 s a lost row and jitter."""
    times = np.concatenate((np.arange(5) * 0.1, 0.4 + late + np.arange(5) * 0.1))
    recording = Recording(np.arange(10.0)[:, None], times)
    assert regular(recording)[1].tolist() == [False] * 5 + [gap] + [False] * 4
    assert bool(np.isnan(regular(recording, rate=10.0)[0]).any()) is gap


def test_a_csv_has_gaps_where_cells_are_empty(tmp_path: Path):
    csv(tmp_path / "a.csv", "x,y", ["1,1", "1,", "1,nan", *["1,1"] * 5])
    found = read_samples(tmp_path, "a.csv", Target("sensor", (2, 0), step=2))
    assert found.whole.tolist() == [False, False, True, True]
    with pytest.raises(SampleError, match="absent values in 2 of 8"):
        read(tmp_path, "a.csv", Target("sensor"))
    with pytest.raises(SampleError, match="no window of 8 time steps without a gap"):
        read_samples(tmp_path, "a.csv", Target("sensor", (8, 0), step=8))
    csv(tmp_path / "b.csv", "x", ["1", "1e300", "1", "1"])
    with pytest.raises(SampleError, match="not finite"):
        read_samples(tmp_path, "b.csv", Target("sensor", (2, 1), step=2))


def folder(root: Path, *lines: dict[str, object]) -> Path:
    (root / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def steps(count: int, first: float = 0.0) -> list[list[float]]:
    return [[first + i] for i in range(count)]


def test_a_line_gives_a_sample_a_window(tmp_path: Path):
    root = folder(
        tmp_path,
        {"id": "w", "label": "walk", "group": "anna", "acc": steps(9), "gyro": steps(13), "note": [[7.0]]},
        {"id": "r", "label": "rest", "note": [[8.0]]},
    )
    encoders = {"acc": WINDOWED, "gyro": WINDOWED, "note": EncoderSpec(input_shape=(1, 1))}
    data = read_manifest(root, encoders=encoders)
    assert data.ids == ["w#0", "w#1", "r"]
    assert data.recordings is not None
    assert data.recordings.tolist() == ["w", "w", "r"]
    assert data.labels is not None
    assert data.labels.tolist() == [1, 1, 0]
    assert list(data.groups) == ["anna", "anna", ""]
    assert data.modalities["acc"][:, 0, 0].tolist() == [0, 4, 0]
    assert data.modalities["note"][:, 0, 0].tolist() == [7, 7, 8]
    assert data.present["gyro"].tolist() == [True, True, False]
    data.save_npz(tmp_path / "a.npz")
    again = Dataset.load_npz(tmp_path / "a.npz", encoders)
    assert again.recordings is not None
    assert again.recordings.tolist() == ["w", "w", "r"]


def test_a_window_with_a_gap_is_missing_and_counted(tmp_path: Path):
    np.save(tmp_path / "g.npy", np.array([[0.0], [1.0], [np.nan], *[[5.0]] * 9]))
    root = folder(tmp_path, {"id": "a", "acc": steps(12), "gyro": "g.npy"}, {"id": "b", "gyro": "g.npy"})
    data = read_manifest(root, encoders={"acc": WINDOWED, "gyro": WINDOWED})
    assert data.ids == ["a#0", "a#1", "a#2", "b#1", "b#2"]
    assert data.present["gyro"].tolist() == [False, True, True, True, True]
    assert [str(problem).partition(": ")[2] for problem in data.skipped] == [
        "gyro: 1 of 3 windows touch a gap and are left out"
    ] * 2


def test_a_recording_shorter_than_a_window_is_a_problem_of_its_line(tmp_path: Path):
    root = folder(tmp_path, {"acc": steps(4)}, {"acc": steps(3)})
    with pytest.raises(DataError, match=r"jsonl:2: acc: has 3 time steps, fewer than one window of 4"):
        read_manifest(root, encoders={"acc": WINDOWED})
    assert len(read_manifest(root, encoders={"acc": WINDOWED}, bad_samples="skip")) == 1


def test_channels_have_to_be_the_models(tmp_path: Path):
    root = folder(tmp_path, {"acc": [[1.0, 2.0]] * 4})
    with pytest.raises(DataError, match=r"acc: has shape \[4, 2\], the encoder takes \[4, 1\]"):
        read_manifest(root, encoders={"acc": WINDOWED})


def test_the_number_of_windows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = folder(tmp_path, {"acc": steps(40)})
    dense = {"acc": EncoderSpec(input_shape=(4, 1), patch=2, step=1)}
    monkeypatch.setattr("edgefl.data.folder.MAX_SAMPLES", 36)
    with pytest.raises(DataError, match="more than 36 samples"):
        read_manifest(root, encoders=dense)
    monkeypatch.setattr("edgefl.data.folder.MAX_DATASET_BYTES", 36 * 4 * 4)
    with pytest.raises(DataError, match="take more than 576 bytes of memory"):
        read_manifest(root, encoders=dense)


def test_without_a_model_recordings_of_any_length_are_data(tmp_path: Path):
    """An agent counts them, and reads them again when it knows the model."""
    np.save(tmp_path / "g.npy", np.array([[0.0], [np.nan], [1.0]]))
    root = folder(tmp_path, {"acc": steps(9)}, {"acc": steps(9)}, {"acc": steps(5)}, {"gyro": "g.npy"})
    data = load(root)
    assert data.resizable == {"acc"}
    assert len(data) == 4
    assert "gyro: has gaps" in str(data.skipped[0])
    with pytest.raises(DataError, match=r"the others \[9, 1\]; set model.encoders.acc.window"):
        read_manifest(root, encoders={"acc": EncoderSpec(input_shape=())})


def test_windows_of_a_recording_are_never_on_both_sides(tmp_path: Path):
    lines = [{"id": f"w{i}", "label": f"c{i % 2}", "acc": steps(4 * (3 + i))} for i in range(10)]
    data = read_manifest(folder(tmp_path, *lines), encoders={"acc": WINDOWED})
    train, test, origin = hold_out(data, DataConfig(), 2, seed=3)
    assert origin == "samples"
    assert train.recordings is not None
    assert test.recordings is not None
    assert not set(train.recordings) & set(test.recordings)
    assert len(set(test.recordings)) == 2
    assert set(test.labels.tolist()) == {0, 1}  # one recording of each label
    few = data.subset(np.isin(data.recordings, ["w0", "w1"]))
    with pytest.raises(DataError, match="2 recordings are too few to hold 20% out"):
        hold_out(few, DataConfig(), 2, seed=3)
