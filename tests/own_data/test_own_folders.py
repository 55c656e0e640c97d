"""Folders and lists of files as users have them: what is no part of the data is named, and no traceback."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgefl.cli.predict import read_input
from edgefl.data.readers import Target, read, read_samples
from edgefl.data.recording import read_csv
from edgefl.errors import DataError
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.draft import encoders
from edgefl.own_data.facts import facts_of
from edgefl.own_data.samples import Understood, understand
from edgefl.own_data.source import from_arrays, from_files

NO_FILE = "names no file that is there, is read and lies in the folder"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def listed(folder: Path, last: str) -> Understood:
    """A list of twelve texts, and of what ``last`` names."""
    for i in range(12):
        written(folder / f"{i}.txt", "hello there")
    rows = "".join(f"{i}.txt,{'ab'[i % 2]}\n" for i in range(12))
    return understand(written(folder / "list.csv", f"file,class\n{rows}{last},a\n"))


@pytest.mark.parametrize("suffix", [".tsv", ".json", ".jsonl", ".parquet"])
def test_recordings_in_folders_of_their_labels_may_be_tables_of_any_kind(tmp_path: Path, suffix: str):
    rows = [{"time": k / 50, "x": float(k), "y": 2.0} for k in range(20)]
    for label in ("sit", "walk"):
        for number in range(3):
            path = tmp_path / label / f"{number}{suffix}"
            if suffix == ".parquet":
                pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
                path.parent.mkdir(exist_ok=True)
                pq.write_table(pa.Table.from_pylist(rows), path)
            elif suffix == ".tsv":
                written(path, "time\tx\ty\n" + "".join("\t".join(map(str, row.values())) + "\n" for row in rows))
            else:
                written(path, json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    found = understand(tmp_path)
    assert found.labels == {"sit": 3, "walk": 3}
    recording = read_csv(tmp_path / str(found.samples[0].values["sensor"]))
    assert (recording.rows.shape, recording.times is not None) == ((20, 2), True)


@pytest.mark.parametrize("last", ["/etc/passwd", "../../../../etc/hostname", "x.pdf", "13.txt", ""])
def test_a_row_that_names_no_file_of_the_data_is_left_out_and_told(tmp_path: Path, last: str):
    written(tmp_path / "x.pdf", "p")
    found = listed(tmp_path, last)
    assert len(found.samples) == 12
    assert found.unused == {"list.csv:13": NO_FILE}


def test_a_second_file_of_a_kind_is_told(tmp_path: Path):
    for name in ("left", "right"):
        written(tmp_path / f"{name}.txt", "hello there")
    found = understand(written(tmp_path / "list.csv", "one,two,class\n" + "left.txt,right.txt,a\n" * 3))
    assert [sample.values for sample in found.samples] == [{"text": "left.txt"}] * 3
    assert found.unused == {"right.txt": "is a second text of the sample left"}


def test_numbers_that_are_not_finite_are_empty_cells(tmp_path: Path):
    """Also what is no number below the rows that were looked at."""
    rows = ["1,2,x", "1,2,z"] * 1000 + ["1,nan,y", "inf,1,y", "1,,y", "1,none,y", "3,4,y"]
    found = understand(written(tmp_path / "f.csv", "\n".join(["a,b,class", *rows])))
    assert len(found.samples) == 2005
    assert [sample.values["features"] for sample in found.samples[2000:]] == [
        {"a": 1}, {"b": 1}, {"a": 1}, {"a": 1}, {"a": 3, "b": 4},
    ]  # fmt: skip
    assert not found.unused


def test_a_row_without_its_time_is_named_but_one_without_values_may_lack_it(tmp_path: Path):
    path = written(tmp_path / "w.csv", "time,class,x\n" + "0,walk,1\n" * 9 + ",walk,\n")
    assert len(understand(path).samples) == 1
    with pytest.raises(DataError, match=r"w\.csv: row 10: '' is no time"):
        understand(written(path, "time,class,x\n" + "0,walk,1\n" * 9 + ",walk,1\n"))


def test_arrays_that_are_none_or_damaged_are_named(tmp_path: Path):
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        np.save(tmp_path / label / "1.npy", np.array(1.0))
    assert facts_of(understand(tmp_path), "sensor").channels == 1
    (tmp_path / "a/1.npy").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"a/1\.npy: not a readable \.npy file"):
        facts_of(understand(tmp_path), "sensor")


def test_names_that_a_manifest_can_not_hold_are_no_part_of_it(tmp_path: Path):
    for label in ("a", "b"):
        written(tmp_path / label / "1.txt", "hello there")
    Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/\xff.txt")).write_text("hello there")
    found = understand(tmp_path)
    assert [sample.id for sample in found.samples] == ["a/1", "b/1"]
    assert found.unused == {"a/?.txt": "its name is not UTF-8"}


def test_texts_that_a_manifest_can_not_hold_are_replaced(tmp_path: Path):
    text = '[{"class": "\\ud800", "a": 1, "b": 2}, {"class": "x", "a": 1, "b": 2}]'
    assert understand(written(tmp_path / "f.json", text)).labels == {"?": 1, "x": 1}


def test_folders_without_a_file_of_the_data_are_told(tmp_path: Path):
    for label in ("a", "b"):
        written(tmp_path / "data" / label / "1.txt", "hello there")
    (tmp_path / "data" / "empty").mkdir()
    written(tmp_path / "elsewhere" / "1.txt", "hello there")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    written(tmp_path / "data" / "__MACOSX" / "a" / "1.txt", "of no use")
    found = understand(tmp_path / "data")
    assert found.labels == {"a": 1, "b": 1}
    assert found.unused == {"empty": "is an empty folder", "linked": "is a link to a folder"}


def test_labels_that_differ_in_capitals_or_blanks_are_told(tmp_path: Path):
    pytest.importorskip("pandas")
    labels = ["cat", " Cat", "CAT ", "brown bear", "Brownbear", "dog"]
    path = written(tmp_path / "a.csv", "x,label\n" + "".join(f"{i},{labels[i % 6]}\n" for i in range(30)))
    alike = "CAT, Cat, cat; Brownbear, brown bear"
    assert f"labels that differ in capitals or blanks alone are classes of their own: {alike}" in understand(path).said


def test_the_sensors_that_tables_are_cut_into_are_told(tmp_path: Path):
    pytest.importorskip("pandas")
    for name in ("a/1", "b/1"):
        written(tmp_path / f"{name}.csv", "time,acc_x,gyro_x\n" + "".join(f"{i},1,2\n" for i in range(9)))
    found = understand(tmp_path)
    assert "2 tables of time steps are cut into sensors: acc, gyro" in found.said
    known = {m: EncoderSpec("sensor", (9, 1), columns=columns) for m, columns in found.columns.items()}
    data = read_input([str(tmp_path / "a/1.csv")], known, ("a", "b"), [], "error")
    assert {m: values[0, 0, 0] for m, values in data.modalities.items()} == {"acc": 1, "gyro": 2}


def test_short_recordings_with_gaps_are_cut_around_them(tmp_path: Path):
    for name in ("a/1", "a/2", "b/1", "b/2"):
        rows = "".join(f"{i / 50},{'NA' if i == 40 else i}\n" for i in range(120))
        written(tmp_path / f"{name}.csv", f"time,x\n{rows}")
    found = understand(tmp_path)
    facts = facts_of(found, "sensor")
    assert (facts.gaps, list(facts.steps)) == (True, [79] * 4)
    chosen = encoders({"sensor": facts}, "tiny", raw=True)["sensor"]
    assert (chosen["window"], chosen["step"], chosen["rate"]) == (32, 16, 50)
    to = Target("sensor", (chosen["window"], 1), step=chosen["step"], rate=chosen["rate"])
    assert read_samples(tmp_path, "a/1.csv", to).whole.tolist() == [True, False, False, True, True, True]
    with pytest.raises(DataError, match=r"a/1\.csv: has absent values in 1 of 120 time steps, and no window is cut"):
        read(tmp_path, "a/1.csv", Target("sensor", (120, 1)))


def test_texts_of_numbers_are_told(tmp_path: Path):
    for name in ("a/1", "b/1"):
        written(tmp_path / f"{name}.txt", "acc_x acc_y\n" + "0.5 1.5 -2\n1,5;2e3\n" * 9)
    facts_of(found := understand(tmp_path), "text")
    assert "the texts of text are numbers: a sensor's recordings are files called .csv" in found.said
    written(tmp_path / "b/1.txt", "1 of 2")
    facts_of(found := understand(tmp_path), "text")
    assert not any("numbers" in said for said in found.said)


def test_an_empty_text_is_named(tmp_path: Path):
    written(tmp_path / "a.txt", "\ufeff \n")
    with pytest.raises(DataError, match=r"a\.txt: the text is empty"):
        read(tmp_path, "a.txt", Target("text"))


@pytest.mark.parametrize(("period", "told"), [(20_000, True), (20, True), (0.02, False)])
def test_rows_as_rare_as_in_another_unit_are_told(tmp_path: Path, period: float, told: bool):
    for name in ("a/1", "b/1"):
        written(tmp_path / f"{name}.csv", "timestamp,x\n" + "".join(f"{i * period:g},1\n" for i in range(20)))
    facts_of(found := understand(tmp_path), "sensor")
    said = f"the rows of sensor come every {period} s; if not, name the unit of their time, as time_ms"
    assert (said in found.said) == told


def test_a_folder_that_cannot_be_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "c"):
        written(tmp_path / name / "1.txt", "hello there")
    opened = os.scandir

    def scandir(path: str) -> object:  # the tests may be root's, whom nothing is closed to
        if str(path).endswith("/c"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = understand(tmp_path)
    assert (found.labels, found.unused) == ({"a": 1, "b": 1}, {"c": "cannot be opened: Permission denied"})


def test_folders_called_minus_one_and_one_are_two_labels(tmp_path: Path) -> None:
    """Half of the samples were lost as second pictures of the others."""
    for label in ("-1", "1"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "data" / label / f"{i}.png")
    found = understand(tmp_path / "data")
    assert found.labels == {"-1": 3, "1": 3}


def test_what_lies_beside_the_halves_is_said(tmp_path: Path) -> None:
    for half in ("train", "test", "val"):
        for i in range(6):
            path = tmp_path / half / "ab"[i % 2] / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("hello there")
    assert from_files(tmp_path).unused == {"val": "lies beside train and test"}


def test_labels_of_minus_one_are_said_to_be_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", acc=np.zeros((8, 4), np.float32), label=np.array([-1, 1] * 4))
    with pytest.raises(DataError, match=r"all 4 labels are one class \(4 are -1: no label\)"):
        from_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize(("bits", "factor"), [(12, 16), (10, 64), (16, 0)])
def test_pictures_of_fewer_bits_than_their_16_are_told(tmp_path: Path, bits: int, factor: int) -> None:
    for i, label in enumerate("aabb"):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 2**bits - 1 - i, np.uint16)).save(tmp_path / label / f"{i}.png")
    said = [text for text in from_files(tmp_path).said if "16-bit" in text]
    told = f"the 16-bit pictures of image go up to {2**bits - 1} of 65535, nearly black: multiply them by {factor}"
    assert said == [told] * bool(factor)


def test_rows_of_a_test_table_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    rows = [f"{i / 4},{i % 3},{'ab'[i % 2]}\n" for i in range(12)]
    train = written(tmp_path / "train.csv", "x,y,kind\n" + "".join(rows[:9]))
    other = rows[0].replace("a", "b")  # another label: no row of the other table
    test = written(
        tmp_path / "test.csv",
        "y,x,kind\n" + "".join(f"{r.split(',')[1]},{r.split(',')[0]},{r[-2:]}" for r in [*rows[7:], other]),
    )
    said = [text for text in from_files(train, test=test).said if "trained on" in text]
    assert said == [
        "2 of the 6 samples of the test set are trained on, too, with the same label: only the others are new"
    ]


def test_pictures_of_both_halves_are_counted(tmp_path: Path) -> None:
    for half, shades in (("train", range(8)), ("test", range(6, 10))):
        for shade in shades:
            (folder := tmp_path / "zoo" / half / "ab"[shade % 2]).mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), shade).save(folder / f"{half}{shade}.png")
    said = [text for text in from_files(tmp_path / "zoo").said if "trained on" in text]
    assert said == [
        "2 of the 4 samples of the test set are trained on, too, with the same label: only the others are new"
    ]
