"""HAPT's raw files to windows, on a small made-up set of the same form.

From the real files, which are not here, come the same windows as those that the benchmarks use: labels and origins are
equal, and 99.99 % of the float16 values, the others by one step (tried by hand; the server itself was not).
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.arrays import write_npz
from edgefl.data.named import named
from edgefl.errors import DataError
from edgefl.fetch.hapt import STEP, TEST_SUBJECTS, WINDOW, convert

#: experiment, user, activity, first, last (from 1 on): two windows, one exactly, none, three of a test subject.
SEGMENTS = [(1, 1, 5, 251, 500), (1, 1, 7, 501, 628), (1, 1, 4, 629, 750), (3, 2, 1, 101, 400)]
SAMPLES = {(1, 1): 800, (3, 2): 500}


def text(values: np.ndarray) -> str:
    return "\n".join(" ".join(f"{value:.10f}" for value in row) for row in values) + "\n"


def raw_files() -> dict[str, str]:
    """A slow tilt (gravity) and a 2 Hz swing; a spike of one sample, which the median takes off."""
    found = {"labels.txt": "\n".join(" ".join(map(str, row)) for row in SEGMENTS) + "\n"}
    for (experiment, user), count in SAMPLES.items():
        time = np.arange(count)[:, None] / 50
        swing = 0.2 * np.sin(2 * np.pi * 2 * time + np.arange(3))
        acc = np.array([0.9, 0.1, 0.2]) + swing
        acc[300] += 5
        found[f"acc_exp{experiment:02d}_user{user:02d}.txt"] = text(acc)
        found[f"gyro_exp{experiment:02d}_user{user:02d}.txt"] = text(swing + experiment)
    return found


def archive(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(f"RawData/{name}", content)
        file.writestr("README.txt", "about")
        file.writestr("Train/X_train.txt", "1 2 3")
    return path


def converted(tmp_path: Path, **changes: str) -> dict[str, np.ndarray]:
    return convert(archive(tmp_path / "a.zip", {**raw_files(), **changes}))


def test_windows_lie_in_their_segments_training_subjects_first(tmp_path: Path) -> None:
    found = converted(tmp_path)
    origins = list(zip(found["experiment"].tolist(), found["start"].tolist(), strict=True))
    # 251 to 500 are 250 samples: windows at 250 and 250 + 64 fit, one at 378 would end at 506
    assert origins == [(1, 250), (1, 250 + STEP), (1, 500), *((3, 100 + STEP * i) for i in range(3))]
    assert found["label"].tolist() == [4, 4, 6, 0, 0, 0]
    assert found["subject"].tolist() == [1, 1, 1, 2, 2, 2]
    assert found["split"].tolist() == [0, 0, 0, 1, 1, 1]
    assert 2 in TEST_SUBJECTS
    assert {name: (found[name].shape, found[name].dtype) for name in ("acc", "body_acc", "gyro")} == dict.fromkeys(
        ("acc", "body_acc", "gyro"), ((6, WINDOW, 3), np.float16)
    )


def test_filters_keep_the_swing_and_take_off_spike_and_gravity(tmp_path: Path) -> None:
    found = converted(tmp_path)
    time = np.arange(250, 250 + WINDOW)[:, None] / 50
    swing = 0.2 * np.sin(2 * np.pi * 2 * time + np.arange(3))
    assert np.abs(found["acc"][0] - (np.array([0.9, 0.1, 0.2]) + swing)).max() < 0.06  # the spike of 5 g is gone
    assert np.abs(found["body_acc"][0] - swing).max() < 0.06
    assert np.abs(found["gyro"][0] - (swing + 1)).max() < 0.02


def test_a_training_run_reads_what_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(tmp_path / "har_hapt" / "har_hapt.npz", converted(tmp_path))
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    train, test, groups, _ = named("har_hapt", {"classes": "all"})
    assert (len(train), len(test)) == (3, 3)
    assert list(groups if groups is not None else []) == ["person-01"] * 3
    assert train.label_names[4] == "STANDING"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("labels.txt", "1 1 13 1 200\n", "labels.txt: a row is not experiment"),
        ("labels.txt", "1 1 5 200 1\n", "labels.txt: a row is not experiment"),
        ("labels.txt", "1 1 5 1.5 200\n", "labels.txt: a row is not experiment"),
        ("labels.txt", "1 1 5 1 200\n" * 2, "segments of experiment 1 overlap at sample 1"),
        ("labels.txt", "1 1 5 200 400\n3 2 1 1 200\n1 1 4 1 200\n", "segments of experiment 1 overlap at sample 200"),
        ("labels.txt", "1 1 5 1 900\n", "ends at 900, beyond its recording"),
        ("labels.txt", "1 1 5 1 100\n", "no segment is as long as a window"),
        ("labels.txt", "2 1 5 1 200\n", r"it has no acc_exp02_user01\.txt"),
        ("labels.txt", "1 1 5\n", "not rows of 5 numbers"),
        ("labels.txt", "", "not rows of 5 numbers"),
        ("acc_exp01_user01.txt", "1 2 nan\n" * 800, "not finite"),
        ("acc_exp01_user01.txt", "1 2 1e999\n" * 800, "not finite"),
        ("acc_exp01_user01.txt", "1 2\n" * 800, "not rows of 3 numbers"),
        ("acc_exp01_user01.txt", "1 2 3\n1 2\n", r"acc_exp01_user01\.txt: "),
        ("acc_exp01_user01.txt", "1 2 3\n" * 700, "acc and gyro have 700 and 800 samples"),
        ("acc_exp01_user01.txt", "1 2 x\n" * 800, r"acc_exp01_user01\.txt: could not convert"),
        ("acc_exp01_user01.txt", "1 2 3\n" * 5, "5 samples, fewer than a window"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")  # of an empty file
def test_a_file_that_is_wrong_is_named(tmp_path: Path, name: str, content: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        converted(tmp_path, **{name: content})
