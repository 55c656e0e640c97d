"""A large fleet in one process: seconds to its first round, and of a round, of devices that are mostly not asked.

A thousand devices with 50 samples each of made-up movements, of whom 20 are asked a round (`select: random`), train a
model of about 43,000 parameters by the command line (`--in-process --no-export`). Counted from where the run has read
and shared out its data, before it loads torch and builds its agents. Processor seconds are user and system time of the
command.

    python -m benchmarks.cost.simulated [--devices 1000] [--asked 20] [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from edgefl.config.yaml_files import yaml_text
from edgefl.data.dataset import Dataset

#: Interval of looking at the run.
PERIOD_S = 0.05
SAMPLES, CLASSES, SHAPE = 50, 10, (32, 6)


class Took(NamedTuple):
    """Seconds by the clock and of the processor."""

    first_round: tuple[float, float]  # from the shares on disk to the first round's begin
    round: tuple[float, float]  # a mean round after the first
    whole: tuple[float, float]


def movements(rows: int) -> Dataset:
    """Noise around one pattern a class."""
    draw = np.random.default_rng(0)
    labels = np.arange(rows, dtype=np.int64) % CLASSES
    means = draw.normal(size=(CLASSES, *SHAPE)).astype(np.float32)
    values = means[labels] + draw.normal(scale=0.5, size=(rows, *SHAPE)).astype(np.float32)
    names = tuple(f"class-{n}" for n in range(CLASSES))
    return Dataset({"acc": values}, {"acc": np.ones(rows, bool)}, labels, names, [str(n) for n in range(rows)])


def run_file(folder: Path, devices: int, asked: int, rounds: int) -> Path:
    """The run's file and its data."""
    movements(devices * SAMPLES + 200).save_npz(folder / "all.npz")
    values = {
        "name": "simulated",
        "seed": 1,
        "recipe": "end_to_end",
        "slots": {"select": {"random": {"share": asked / devices}}},
        "data": {"source": str(folder / "all.npz")},
        "model": {
            "stages": 3,
            "encoders": {"acc": {"kind": "sensor", "width": 32, "depth": 3, "heads": 4, "patch": 4}},
            "head": {"width": 32, "out": 16, "dropout": 0.0},
            "fusion_width": 16,
        },
        "training": {"rounds": [0, 0, rounds], "epochs": 1, "batch_size": 10},
        "round": {"join_s": 600},
        "evaluate": "stage",
        "fleet": [{"name": f"device-{n:05}"} for n in range(devices)],
    }
    file = folder / "run.yaml"
    file.write_text(yaml_text(values))
    return file


def measured(folder: Path, file: Path) -> Took:
    """One run by the command line, whose lines say how far it is."""
    command = [sys.executable, "-m", "edgefl.cli.main", "run", str(file), "--in-process", "--no-export", "--no-page"]
    command += ["--runs", str(folder / "runs"), "--format", "json"]
    began = time.monotonic()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    opened: list[tuple[float, float]] = []
    shared_out = whole = (0.0, 0.0)
    rows = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            spent = process.cpu_times()
            whole = (time.monotonic() - began, spent.user + spent.system)
        if not shared_out[0] and any((folder / "runs").glob("*/run.yaml")):  # written once the shares are
            shared_out = whole
        for journal in (folder / "runs").glob("*/events.jsonl"):
            rows = journal.read_bytes().count(b'"kind":"round_started"')
        opened += [whole] * (rows - len(opened))
        time.sleep(PERIOD_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    between = max(1, len(opened) - 1)
    return Took(_since(shared_out, opened[0]), _since(opened[0], opened[-1], between), whole)


def _since(start: tuple[float, float], end: tuple[float, float], parts: int = 1) -> tuple[float, float]:
    return (end[0] - start[0]) / parts, (end[1] - start[1]) / parts


def main() -> None:
    """Run it, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--asked", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = run_file(folder, chosen.devices, chosen.asked, chosen.rounds)
        took = measured(folder, file)
    print(f"{chosen.devices} devices, {chosen.asked} asked a round; seconds by the clock, and of the processor:")
    for what, (wall_s, cpu_s) in zip(("to the first round", "a round", "whole command"), took, strict=True):
        print(f"{what:20} {wall_s:7.2f} {cpu_s:7.2f}")


if __name__ == "__main__":
    main()
