"""Three sensors, any of them at hand: what the report says and what the exported bundles answer.

har_hapt (EDGEFL_DATA) with its accelerometer split in two: *gravity*, a moving average of half a second, and *body*,
the rest; *gyro* is the third. Six devices of 150 windows: three have lost one sensor each, three lack every sensor in a
fifth of their windows. The product's coordinator and agents train in one process (benchmarks/common/inprocess.py), once
with zeros for what is missing and once with prototypes found by match (lw-prototypes); then `edgefl export`, and the
bundles answer the test windows given each subset of the sensors.

    python -m benchmarks.accuracy.three_sensors [--seeds 3] [--write docs/results/three_sensors.md]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from benchmarks.accuracy.har_prototypes import PLAIN
from benchmarks.common.inprocess import run_shares
from benchmarks.common.spread import spread
from edgefl.api.export_run import export_run
from edgefl.cli.scored import accuracy
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load_pair
from edgefl.export.runtime import apply, find_bundles
from edgefl.run_records import RunReport

SENSORS = ("body", "gravity", "gyro")
SUBSETS = tuple(some for n in (1, 2, 3) for some in combinations(SENSORS, n))
#: Training -> (overrides of the run file, the mask its bundles are asked for).
TRAININGS = {"zeros": (PLAIN, "zero"), "prototypes": ((), "prototype")}
DEVICES, ROWS, TEST, LACKING = 6, 150, 480, 0.2
#: Half a second at 50 Hz.
AVERAGED = 25
#: (evaluated, predicted) accuracy by subset, in percent.
Figures = dict[tuple[str, ...], tuple[float, float]]

RUN = {
    "name": "three",
    "recipe": "lw-prototypes",
    "model": {
        "stages": 2,
        "encoders": {m: {"kind": "sensor", "width": 32, "depth": 2, "heads": 2, "patch": 16} for m in SENSORS},
        "head": {"kind": "none"},
        "fusion_width": 32,
    },
    "training": {"rounds": [4, 6], "epochs": 2, "batch_size": 16, "lr": {"encoder": 3e-3, "head": 3e-3}},
    "round": {"devices": DEVICES, "join_s": 60, "quorum": 1.0},
    "evaluate": "stage",
}


def three(data: Dataset) -> Dataset:
    """The same windows with the three sensors."""
    acc = np.asarray(data.modalities["acc"])
    padded = np.pad(acc, ((0, 0), (AVERAGED // 2, AVERAGED // 2), (0, 0)), mode="edge")
    sums = np.cumsum(np.pad(padded, ((0, 0), (1, 0), (0, 0))), axis=1, dtype=np.float64)
    gravity = ((sums[:, AVERAGED:] - sums[:, :-AVERAGED]) / AVERAGED).astype(np.float32)
    arrays = {"body": acc - gravity, "gravity": gravity, "gyro": np.asarray(data.modalities["gyro"])}
    return replace(data, modalities=arrays, present=dict.fromkeys(SENSORS, np.ones(len(data), bool)))


def only(data: Dataset, has: Mapping[str, np.ndarray]) -> Dataset:
    """The windows with a sensor where ``has`` [N] says so, and zeros elsewhere; without a sensor that none has."""
    shown = {m: rows for m, rows in has.items() if rows.any()}
    arrays = {m: np.where(rows[:, None, None], data.modalities[m], np.float32(0)) for m, rows in shown.items()}
    return replace(data, modalities=arrays, present=shown)


def shares(train: Dataset, rng: np.random.Generator) -> list[Dataset]:
    """What each device has."""
    rows = rng.permutation(len(train))[: DEVICES * ROWS].reshape(DEVICES, ROWS)
    found = []
    for i, own in enumerate(rows):
        has = {m: np.full(ROWS, i != at) for at, m in enumerate(SENSORS)}
        if i >= len(SENSORS):
            has = {m: rng.random(ROWS) >= LACKING for m in SENSORS}
            has["body"] |= ~np.any(list(has.values()), axis=0)
        found.append(only(train.subset(own), has))
    return found


def measured(training: str, seed: int) -> Figures:
    """One run, its export, and what both say."""
    overrides, mask = TRAININGS[training]
    rng = np.random.default_rng(seed)
    train, test = (three(half) for half in load_pair("har_hapt") if half is not None)
    test = test.subset(np.random.default_rng(0).permutation(len(test))[:TEST])
    with tempfile.TemporaryDirectory(prefix="edgefl-three-") as name:
        folder = Path(name)
        own = {f"device-{i}": share for i, share in enumerate(shares(train, rng))}
        report = run_shares(folder, {**RUN, "seed": seed}, own, test, overrides)
        export_run(folder / "run", output=folder / "bundles")
        return {some: (told(report, some, mask), answered(folder / "bundles", test, some, mask)) for some in SUBSETS}


def told(report: RunReport, some: tuple[str, ...], mask: str) -> float:
    """The accuracy that the report shows after the last round."""
    shown = "none" if some == SENSORS else mask
    rows = [r for r in report.evaluations if (r.available, r.missing, r.metric) == (some, shown, "accuracy")]
    return 100 * max(rows, key=lambda row: (row.stage, row.round)).value


def answered(bundles: Path, test: Dataset, some: tuple[str, ...], mask: str) -> float:
    """The accuracy of what `edgefl predict` answers."""
    given = only(test, {m: np.full(len(test), m in some) for m in SENSORS})
    answers, left = apply(find_bundles(bundles), given, mask=mask)
    share = accuracy(given, answers)
    if share is None or len(left):
        raise RuntimeError(f"{len(left)} windows with {some} were not answered")
    return 100 * share


def page(rows: Mapping[str, list[Figures]]) -> str:
    """Markdown: a table for each training, and the comparison of pairs with the better sensor of them."""
    lines = ["# Three sensors, any of them at hand", "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += [f"`python -m benchmarks.accuracy.three_sensors --seeds {max(map(len, rows.values()))}`", ""]
    lines += [f"Accuracy in percent of {TEST} test windows, mean ± deviation over the seeds. *Gain*: the pair"]
    lines += ["minus the better of its two sensors alone (by their means), as predicted."]
    for training, figures in rows.items():
        mean = {some: statistics.mean(one[some][1] for one in figures) for some in SUBSETS}
        lines += ["", f"## Trained and filled in with {training}", ""]
        lines += [
            "| given | in the report | by `edgefl predict` | largest difference | gain |",
            "|---|---|---|---|---|",
        ]
        for some in SUBSETS:
            gain = ""
            if len(some) == 2:
                best = max(some, key=lambda m: mean[m,])
                gain = spread([one[some][1] - one[best,][1] for one in figures], signed=True) + f" over {best}"
            apart = max(abs(one[some][0] - one[some][1]) for one in figures)
            told_, said = ([one[some][i] for one in figures] for i in (0, 1))
            lines.append(f"| {' + '.join(some)} | {spread(told_)} | {spread(said)} | {apart:.1f} | {gain} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, export and answer; print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--training", choices=TRAININGS, nargs="+", default=list(TRAININGS))
    parser.add_argument("--write", type=Path, help="also write the page here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[Figures]] = {}
    for training in given.training:
        for seed in range(1, given.seeds + 1):
            rows.setdefault(training, []).append(measured(training, seed))
            sys.stderr.write(f"{training}, seed {seed}: {rows[training][-1]}\n")
    text = page(rows)
    print(text)
    if given.write:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
