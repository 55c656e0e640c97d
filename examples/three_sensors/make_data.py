"""One table of a wrist's three sensors, as a logger writes it: walks.csv. Computed, nobody wore anything."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

RATE = 50  # Hz
#: Steps a second, and how strongly acceleration (g), rotation (rad/s) and field (µT) swing with them.
ACTIVITIES = {
    "sitting": (0.3, 0.02, 0.05, 0.5),
    "walking": (1.8, 0.30, 0.90, 6.0),
    "stairs": (1.4, 0.45, 0.60, 9.0),
    "running": (2.7, 1.10, 2.40, 12.0),
}
COLUMNS = [f"{sensor}_{axis}" for sensor in ("acc", "gyro", "mag") for axis in "xyz"]


def recording(activity: str, own: np.random.Generator, rng: np.random.Generator, seconds: float) -> np.ndarray:
    """[time, 9]: each axis swings with the steps and their double, as strongly as the person does, in noise."""
    pace, *swings = ACTIVITIES[activity]
    pace *= own.uniform(0.9, 1.1)
    turns = 2 * np.pi * pace * np.arange(int(seconds * RATE)) / RATE
    columns = []
    for sensor, swing in enumerate(swings):
        for axis in range(3):
            rest = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 20.0, 4.0, -42.0)[3 * sensor + axis]
            phase, share = own.uniform(0, 6.28), own.uniform(0.5, 1.2)
            wave = np.sin(turns + phase) + 0.4 * np.sin(2 * turns + rng.uniform(0, 6.28))
            columns.append(rest + swing * (share * wave + 0.35 * rng.normal(size=len(turns))))
    return np.stack(columns, axis=1)


def main(file: Path, people: int) -> None:
    rng, now = np.random.default_rng(2), 0.0
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["time", *COLUMNS, "activity", "person"])
        for person in range(people):
            for activity in ACTIVITIES:
                now += 30.0  # somebody else, or something else, later
                own = np.random.default_rng(100 + person)
                for step, values in enumerate(recording(activity, own, rng, rng.uniform(20, 30)).tolist()):
                    now += 3.0 if step == 400 and person % 3 == 0 else 1 / RATE  # the logger stood still
                    cells = [f"{value:.3f}" for value in values]
                    if step % 300 == 100:
                        cells[3:6] = ["", "", ""]  # the gyroscope lost a row
                    rows.writerow([f"{now:.2f}", *cells, activity, f"person-{person + 1}"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "walks.csv"), int(sys.argv[2]) if len(sys.argv) > 2 else 8)
