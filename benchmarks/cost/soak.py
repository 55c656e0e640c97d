"""Memory, files and disk of a run of many rounds: does anything grow that should not?

`edgefl run` as a user would start it: a broker, a coordinator with its evaluator, two agents with their trainers, all
processes of their own; a tiny model, one stage, every round evaluated. Every second each process' resident memory and
open file descriptors are read, and the sizes of the ledger and of the state directories.

The slope is Theil and Sen's (the median of the slopes of all pairs, with its 95 % interval) over medians of ten rounds,
without the first fifty, in which caches and allocators fill. "Grows": the whole interval lies above LIMIT_MIB.

    python -m benchmarks.cost.soak [--rounds 500] [--samples soak.json] [--write docs/results]

``--samples`` keeps what was read; with ``--rounds 0`` such a file is read again in place of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import yaml

from benchmarks.common import plotting
from benchmarks.cost.resource_table import MIB
from edgefl.run_records import RunReport

#: Rounds that are left out: caches and allocators fill.
WARM_UP = 50
#: Rounds of one point of the line that is fitted.
BIN = 10
#: Growth that matters: with 1 MiB in 100 rounds a device of 256 MiB lasts for thousands of rounds.
LIMIT_MIB = 1.0
#: Part of a command line -> what the process is.
ROLES = {
    "coordinator.runtime.evaluator": "evaluator",
    "coordinator.cli": "coordinator",
    "device_agent.trainer": "trainer",
    "device_agent.runtime.connect": "supervisor",
    "mosquitto": "broker",
}
#: Kept on the disk, below the run's directory -> what it is.
PLACES = {"ledger.sqlite*": "ledger", "devices": "devices' state", "objects": "coordinator's objects"}
_SETTING = "Coordinator, evaluator, broker and two agents with their trainers, a tiny model, every round evaluated."
_METHOD = (
    f"Slopes are Theil and Sen's over medians of {BIN} rounds, with their 95 % interval, without the first {WARM_UP} "
    f"rounds (grey). A process grows when its whole interval lies above {LIMIT_MIB:g} MiB in 100 rounds."
)
_DISK = "| on the disk | first, MiB | last, MiB | MiB in 100 rounds | 95 % interval |"


class Sample(msgspec.Struct, frozen=True):
    """One look: seconds since the epoch; bytes and descriptors by process; bytes by place."""

    at: float
    resident: dict[str, int]
    descriptors: dict[str, int]
    disk: dict[str, int]


class Soak(msgspec.Struct, frozen=True):
    """A whole run: the samples, and when each round began."""

    samples: list[Sample]
    rounds: list[float]
    command: str = ""


class Slope(NamedTuple):
    """Growth in 100 rounds with its interval, and the first and last medians, in the values' unit."""

    middle: float
    low: float
    high: float
    first: float
    last: float


def run_file(folder: Path, rounds: int) -> dict[str, object]:
    """Two sensors, three activities, two devices."""
    rng = np.random.default_rng(1)
    labels = np.arange(96) % 3
    acc, gyro = (rng.normal(labels[:, None, None], 1.0, (96, 16, 3)).astype(np.float32) for _ in range(2))
    names = np.array(["rest", "walk", "run"])
    np.savez(folder / "data.npz", label=labels, label_names=names, acc=acc, gyro=gyro)
    sensor = {"kind": "sensor", "width": 16, "depth": 2, "heads": 2, "patch": 4}
    return {
        "name": "soak",
        "recipe": "lw-prototypes",
        "data": {"source": str(folder / "data.npz")},
        "model": {
            "stages": 1,
            "encoders": {"acc": sensor, "gyro": sensor},
            "head": {"width": 16, "out": 8, "dropout": 0.0},
            "fusion_width": 16,
        },
        "training": {"rounds": [rounds], "batch_size": 8},
        "round": {"join_s": 300, "deadline_s": 300},
        "evaluate": "round",
        "fleet": [{"name": "left", "profile": "cpu"}, {"name": "right", "profile": "cpu"}],
    }


def soak(folder: Path, rounds: int) -> Soak:
    """Run it and look once a second."""
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(folder, rounds)))
    command = [sys.executable, "-m", "edgefl.cli.main", "run", str(folder / "run.yaml"), "--runs", str(folder / "runs")]
    samples: list[Sample] = []
    with (folder / "report.json").open("wb") as out:
        run = subprocess.Popen([*command, "--no-export", "--no-page", "--format", "json"], stdout=out)
        while run.poll() is None:
            samples.append(look(psutil.Process(run.pid), folder / "runs"))
            time.sleep(1.0)
    if run.returncode:
        raise SystemExit(f"the run ended with {run.returncode}")
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=RunReport)
    return Soak(samples, [row.started_at for row in report.rounds])


def look(run: psutil.Process, runs: Path) -> Sample:
    """What the run's processes hold now, and what lies on the disk."""
    resident, descriptors = {}, {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in run.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (name := name_of(process)) and process.status() != psutil.STATUS_ZOMBIE:
                    resident[name], descriptors[name] = process.memory_info().rss, process.num_fds()
    disk = {name: sum(size(path) for path in runs.glob(f"*/{where}")) for where, name in PLACES.items()}
    return Sample(time.time(), resident, descriptors, disk)


def name_of(process: psutil.Process) -> str:
    """What a process is, an agent's with its device's name; "" for one that is not looked at."""
    line = process.cmdline()
    role = next((name for part, name in ROLES.items() if any(part in word for word in line)), "")
    if role == "trainer":
        return f"{role} {psutil.Process(process.ppid()).cmdline()[-1]}"
    return f"{role} {line[-1]}" if role == "supervisor" else role


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; files that go while it looks do not count."""
    total = 0
    for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total


def series(found: Soak, values: str) -> dict[str, dict[int, float]]:
    """Name -> round -> median of what was read while it went on; ``values``: a field of the samples."""
    starts = np.array(found.rounds)
    every: dict[str, dict[int, list[float]]] = {}
    for sample in found.samples:
        number = int(np.searchsorted(starts, sample.at, side="right"))
        if number:
            for name, value in getattr(sample, values).items():
                every.setdefault(name, {}).setdefault(number, []).append(value)
    return {name: {number: median(read) for number, read in rounds.items()} for name, rounds in every.items()}


def slope(rounds: Mapping[int, float]) -> Slope | None:
    """Growth of one series after the warm-up; None with fewer than five points."""
    from scipy.stats import theilslopes

    bins: dict[int, list[float]] = {}
    for number, value in rounds.items():
        if number > WARM_UP:
            bins.setdefault((number - 1) // BIN, []).append(value)
    points = [(key * BIN + BIN / 2, median(values)) for key, values in sorted(bins.items())]
    if len(points) < 5:
        return None
    fitted = theilslopes([value for _, value in points], [at for at, _ in points], 0.95)
    middle, low, high = (100 * float(one) for one in (fitted[0], fitted[2], fitted[3]))
    return Slope(middle, low, high, points[0][1], points[-1][1])


def grows(found: Slope | None) -> bool:
    """Whether a process' resident memory grows beyond the limit."""
    return found is not None and found.low / MIB > LIMIT_MIB


def draw(found: Soak, path: Path) -> None:
    """Resident memory over rounds, a line a process."""
    with plotting.plot(path, "round", "resident memory (MiB)") as axes:
        for colour, (name, rounds) in zip(plotting.COLOURS, sorted(series(found, "resident").items()), strict=False):
            at = sorted(rounds)
            axes.plot(at, [rounds[number] / MIB for number in at], color=colour, label=name, linewidth=1.2)
        axes.axvspan(0, WARM_UP, color="#eeeeee", zorder=0)
        axes.set_yscale("log")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def page(found: Soak) -> str:
    """The verdict, the plot, the tables."""
    slopes = {name: slope(rounds) for name, rounds in sorted(series(found, "resident").items())}
    growing = [name for name, one in slopes.items() if grows(one)]
    creeping = [name for name, one in slopes.items() if one is not None and one.low > 0 and name not in growing]
    minutes = (found.samples[-1].at - found.rounds[0]) / 60
    if not all(slopes.values()):
        verdict = f"**Too few rounds to tell; {WARM_UP + 5 * BIN} at least.**"
    elif growing:
        verdict = f"**Beyond the limit grows: {', '.join(growing)}.**"
    else:
        most = max(one.middle for one in slopes.values() if one is not None) / MIB
        verdict = f"**Nothing grows beyond {LIMIT_MIB:g} MiB in 100 rounds; the most is {most:.2f} MiB.**"
    if creeping:
        verdict += f" Slower growth, with an interval above zero: {', '.join(creeping)}."
    lines = [
        "# A run of many rounds",
        "",
        f"{verdict} {len(found.rounds)} rounds in {minutes:.0f} minutes. {_SETTING}",
        "",
        "`python -m benchmarks.cost.soak --write docs/results`",
        "",
        "![Resident memory of each process over the rounds](soak.svg)",
        "",
        _METHOD,
        "",
        "| process | first, MiB | last, MiB | MiB in 100 rounds | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    lines += [row(name, one, MIB) for name, one in slopes.items()]
    lines += ["", "| open file descriptors | first | last | in 100 rounds | 95 % interval |", "|---|---|---|---|---|"]
    lines += [row(name, slope(rounds), 1) for name, rounds in sorted(series(found, "descriptors").items())]
    lines += [
        "",
        "| on the disk | first, MiB | last, MiB | MiB in 100 rounds | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    lines += [row(name, slope(rounds), MIB) for name, rounds in sorted(series(found, "disk").items())]
    return "\n".join(lines) + "\n"


def row(name: str, found: Slope | None, unit: int) -> str:
    """A line of a table."""
    if found is None:
        return f"| {name} | – | – | – | too few rounds |"
    first, last = (f"{value / unit:,.2f}".removesuffix(".00") for value in (found.first, found.last))
    middle, low, high = (f"{value / unit:+.3f}" for value in found[:3])
    return f"| {name} | {first} | {last} | {middle} | {low} to {high} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--samples", type=Path, help="file to keep what was read in")
    parser.add_argument("--write", type=Path, help="folder of soak.md and soak.svg")
    chosen = parser.parse_args(arguments)
    if chosen.rounds:
        with tempfile.TemporaryDirectory(prefix="edgefl-soak-") as folder:
            found = soak(Path(folder), chosen.rounds)
        if chosen.samples is not None:
            chosen.samples.write_bytes(msgspec.json.encode(found))
    else:
        found = msgspec.json.decode(chosen.samples.read_bytes(), type=Soak)
    text = page(found)
    if chosen.write is not None:
        draw(found, chosen.write / "soak.svg")
        (chosen.write / "soak.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    if any(grows(slope(rounds)) for rounds in series(found, "resident").values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
