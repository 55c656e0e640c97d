"""Folders of files as users have them, written from the small real data sets."""

from __future__ import annotations

import csv
import json
import wave
from pathlib import Path

import numpy as np
from data_fixture import needed
from PIL import Image

RATE = 50.0  # Hz, of har_hapt


def photos_and_texts(folder: Path, samples: int = 160) -> Path:
    """<vendor>/<label>/<number>.png with a .txt of the same name; some pictures of another size."""
    data = np.load(needed("emoji_pairs") / "emoji_mini32.npz")
    lines = (needed("emoji_pairs") / "concepts.jsonl").read_text(encoding="utf-8").splitlines()
    concepts = [json.loads(line)["text"] for line in lines]
    names = data["label_names"].tolist()
    for i in np.linspace(0, len(data["label"]) - 1, samples).astype(int).tolist():
        there = folder / data["vendor_names"][data["vendor"][i]] / names[data["label"][i]]
        there.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(data["image"][i])
        (picture.resize((48, 40)) if i % 7 == 0 else picture).save(there / f"{i:04d}.png")
        (there / f"{i:04d}.txt").write_text(concepts[data["concept"][i]])
    return folder


def sounds_and_pictures(folder: Path, samples: int = 150) -> Path:
    """images/<label>_<number>.png of digits, audio/<label>_<number>.wav: a tone that the digit sets, in noise."""
    data, rng = np.load(needed("av_digits") / "av_mini.npz"), np.random.default_rng(1)
    chosen = np.flatnonzero(data["label"] < 4)[:samples]
    for name in ("images", "audio"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i in chosen.tolist():
        name = f"{['zero', 'one', 'two', 'three'][data['label'][i]]}_{i:04d}"
        Image.fromarray(data["image"][i]).save(folder / f"images/{name}.png")
        moments = np.arange(int(8000 * rng.uniform(0.4, 0.6))) / 8000
        tone = 0.6 * np.sin(2 * np.pi * 300 * (1 + data["label"][i]) * moments) + 0.1 * rng.normal(size=len(moments))
        with wave.open(str(folder / f"audio/{name}.wav"), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(8000)
            sound.writeframes((np.clip(tone, -1, 1) * 30000).astype("<i2").tobytes())
    return folder


def _har() -> dict[str, np.ndarray]:
    return dict(np.load(needed("har_hapt") / "har_mini.npz"))


def three_sensors(file: Path, *, gaps: bool = True) -> Path:
    """One table: time, acc_x … bodyacc_z, activity, person; with gaps in time and empty cells."""
    data = _har()
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        axes = [f"{sensor}_{axis}" for sensor in ("acc", "gyro", "bodyacc") for axis in "xyz"]
        rows.writerow(["time", *axes, "activity", "person"])
        now = 0.0
        for person in np.unique(data["subject"]).tolist():
            for label in np.unique(data["label"]).tolist():
                now += 5.0
                which = np.flatnonzero((data["subject"] == person) & (data["label"] == label))
                values = [np.concatenate(data[m][which]) for m in ("acc", "gyro", "body_acc")]
                for step, row in enumerate(np.concatenate(values, axis=1).tolist()):
                    now += 1 / RATE if not (gaps and step == 300) else 2.0
                    cells = [f"{cell:.4f}" for cell in row]
                    if gaps and step % 500 == 77:
                        cells[3:6] = ["", "", ""]  # one lost row of the gyroscope
                    if gaps and step % 400 == 11:
                        cells[7] = ""
                    rows.writerow([f"{now:.3f}", *cells, data["label_names"][label].lower(), f"p{person}"])
    return file


def people_as_folders(folder: Path) -> Path:
    """person-<n>/<activity>_<number>_acc.csv and …_gyro.csv: recordings of four windows, with a head line."""
    data = _har()
    for person in np.unique(data["subject"]).tolist():
        there = folder / f"person-{person:02d}"
        there.mkdir(parents=True, exist_ok=True)
        for label in np.unique(data["label"]).tolist():
            which = np.flatnonzero((data["subject"] == person) & (data["label"] == label))
            for number, part in enumerate(np.array_split(which, 2)):
                for sensor in ("acc", "gyro"):
                    rows = np.concatenate(data[sensor][part]).astype(float)
                    name = data["label_names"][label].lower().replace("_", "")
                    times = np.arange(len(rows)) / RATE
                    np.savetxt(
                        there / f"{name}_{number}_{sensor}.csv", np.column_stack([times, rows]),
                        "%.4f", delimiter=",", header="time,x,y,z", comments="",
                    )  # fmt: skip
    return folder


def arrays(file: Path) -> Path:
    """An .npz with a user's own names: subject for the group, a split, half precision, arrays of no use."""
    data = _har()
    np.savez(
        file, **{name: data[name] for name in ("acc", "gyro", "label", "label_names", "subject", "split", "start")}
    )
    return file
