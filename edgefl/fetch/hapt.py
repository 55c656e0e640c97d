"""HAPT's raw recordings (UCI no. 341) as windows: acceleration, body acceleration and turning rate at 50 Hz.

Filtered as its authors do: median of three, then a third-order Butterworth low-pass at 20 Hz, both ways; body
acceleration is the rest of a 0.3 Hz low-pass. Windows of 128 with step 64 lie inside one labelled segment each: from
the raw files this gives labels and subjects of the published windows, one by one (7,767 to train, 3,162 to test).
"""

from __future__ import annotations

import io
import itertools
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np

from edgefl.data.arrays import Array
from edgefl.errors import DataError

LABELS = (
    *("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING"),
    *("STAND_TO_SIT", "SIT_TO_STAND", "SIT_TO_LIE", "LIE_TO_SIT", "STAND_TO_LIE", "LIE_TO_STAND"),
)
#: The authors' test subjects; the other 21 train.
TEST_SUBJECTS = (2, 4, 9, 10, 12, 13, 18, 20, 24)
WINDOW, STEP = 128, 64
RATE_HZ, NOISE_HZ, GRAVITY_HZ, ORDER = 50, 20, 0.3, 3
#: Samples of one recording: the longest has 39,000, which is 13 minutes.
MAX_ROWS = 10**6


def convert(path: Path) -> dict[str, Array]:
    """The arrays of har_hapt.npz: sensors [N, 128, 3] float16 in g and rad/s, and of each window its label and origin.

    Windows of the training subjects come first, each half in the order of labels.txt. Needs scipy. Raises DataError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            segments = _segments(archive)
            recordings = dict.fromkeys((experiment, subject) for experiment, subject, *_ in segments)
            sensors = {key: _signals(archive, *key) for key in recordings}
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: is no readable zip archive: {error}") from None
    found: dict[str, list[object]] = {name: [] for name in ("label", "subject", "experiment", "start")}
    cut: dict[str, list[Array]] = {name: [] for name in ("acc", "body_acc", "gyro")}
    for experiment, subject, label, first, last in segments:
        signals = sensors[experiment, subject]
        if last > len(signals["acc"]):
            raise DataError(f"labels.txt: a segment of experiment {experiment} ends at {last}, beyond its recording")
        for start in range(first - 1, last - WINDOW + 1, STEP):
            for name, values in zip(found, (label - 1, subject, experiment, start), strict=True):
                found[name].append(values)
            for name in cut:
                cut[name].append(signals[name][start : start + WINDOW].astype(np.float16))
    if not found["label"]:
        raise DataError(f"{path}: no segment is as long as a window of {WINDOW} samples")
    subjects = np.array(found["subject"], np.uint8)
    split = np.isin(subjects, TEST_SUBJECTS).astype(np.uint8)
    order = np.argsort(split, kind="stable")
    types = {"label": np.uint8, "subject": np.uint8, "experiment": np.uint8, "start": np.int32}
    return {
        **{name: np.stack(windows)[order] for name, windows in cut.items()},
        **{name: np.array(values, types[name])[order] for name, values in found.items()},
        "split": split[order],
        "label_names": np.array(LABELS),
    }


def _segments(archive: zipfile.ZipFile) -> list[tuple[int, int, int, int, int]]:
    """Rows of labels.txt: experiment, subject, label from 1 on, first and last sample from 1 on. Raises DataError.

    Those of one recording lie apart, or a short file would name any number of windows.
    """
    rows = _numbers(archive, "labels.txt", 5)
    whole = rows.astype(np.int64)
    low, high = (1, 1, 1, 1, 1), (99, 99, len(LABELS), MAX_ROWS, MAX_ROWS)
    if (whole != rows).any() or (whole < low).any() or (whole > high).any() or (whole[:, 3] > whole[:, 4]).any():
        raise DataError("labels.txt: a row is not experiment, user, activity, first and last sample")
    found = [(int(e), int(u), int(a), int(s), int(t)) for e, u, a, s, t in whole]
    in_order = sorted((e, u, first, last) for e, u, _, first, last in found)
    for (*recording, _, last), (*other, first, _) in itertools.pairwise(in_order):
        if recording == other and first <= last:
            raise DataError(f"labels.txt: segments of experiment {other[0]} overlap at sample {first}")
    return found


def _signals(archive: zipfile.ZipFile, experiment: int, subject: int) -> dict[str, Array]:
    """The filtered signals of one recording, [time, 3] each."""
    from scipy import signal

    noise = signal.butter(ORDER, NOISE_HZ / (RATE_HZ / 2))
    slow = signal.butter(ORDER, GRAVITY_HZ / (RATE_HZ / 2))
    clean = {}
    for sensor in ("acc", "gyro"):
        name = f"{sensor}_exp{experiment:02d}_user{subject:02d}.txt"
        raw = _numbers(archive, name, 3)
        if len(raw) < WINDOW:
            raise DataError(f"{name}: {len(raw)} samples, fewer than a window of {WINDOW}")
        clean[sensor] = signal.filtfilt(*noise, np.stack([signal.medfilt(axis, 3) for axis in raw.T], axis=1), axis=0)
    if len(clean["acc"]) != len(clean["gyro"]):
        lengths = " and ".join(str(len(values)) for values in clean.values())
        raise DataError(f"experiment {experiment}: acc and gyro have {lengths} samples")
    return {**clean, "body_acc": clean["acc"] - signal.filtfilt(*slow, clean["acc"], axis=0)}


def _numbers(archive: zipfile.ZipFile, name: str, columns: int) -> Array:
    """A text of numbers [rows, columns]. Raises DataError naming the member."""
    paths = {PurePosixPath(path).name: path for path in archive.namelist()}
    if name not in paths:
        raise DataError(f"{archive.filename}: it has no {name}")
    try:
        values = np.loadtxt(io.BytesIO(archive.read(paths[name])), dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    if values.ndim != 2 or values.shape[1] != columns or not len(values):
        raise DataError(f"{name}: has the shape {list(values.shape)}, not rows of {columns} numbers")
    if not np.isfinite(values).all():
        raise DataError(f"{name}: holds numbers that are not finite")
    return values
