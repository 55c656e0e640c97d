"""Two simulated fleets by EdgeFL's studies and by Flower's simulation, in turns: time and memory of the same training.

`har_hapt` with 30 people as devices, all of them a round, end-to-end, ten rounds of an epoch in batches of 32,
complete samples; two sensor encoders of three blocks, 32 wide, layer norm; the same first weights, test set and
optimiser. Both have two cores for two runs, of two seeds: `edgefl study --workers 2` has both at once, Flower one
after the other, each with two Ray actors of one core. Seconds are the clock's for both runs, from start to end of the
commands. Processor seconds and memory (the largest sum of proportional set sizes, PSS) are those of all processes, of
a turn of their own in which they are looked at every quarter of a second and which is not timed; of processor seconds
at least so many. EdgeFL also keeps a ledger, counts FLOPs and bytes, and judges each modality alone.

    pip install 'flwr[simulation]'    # once, beside EdgeFL
    python -m benchmarks.cost.flower [--times 3] [--write docs/results]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from benchmarks.common.sections import put

HEAD = "# A run in one process\n\nWhat `edgefl run --in-process` and `edgefl study` save ([studies.md](../studies.md))."
SEEDS = (1, 2)
ROUNDS = 10
_SENSOR = {"kind": "sensor", "width": 32, "depth": 3, "heads": 2, "patch": 16}
VALUES: dict[str, Any] = {
    "name": "simulated",
    "recipe": "end_to_end",
    "data": {"source": {"har_hapt": {"clients": 30}}, "partition": "natural"},
    "model": {
        "stages": 3,
        "encoders": {"acc": _SENSOR, "gyro": _SENSOR},
        "head": {"width": 64, "out": 32, "dropout": 0.0, "norm": "layer"},
        "fusion_width": 32,
    },
    "training": {"rounds": [0, 0, ROUNDS], "epochs": 1, "batch_size": 32, "lr": {"encoder": 1e-3, "head": 1e-3}},
    "round": {"join_s": 600, "quorum": 0.5, "deadline_s": 3600},
    "evaluate": 5,
    "fleet": [{"name": f"person-{n:02}"} for n in range(1, 31)],
}


class Spent(NamedTuple):
    """What both runs took: seconds by the clock, and of a watched turn, processor seconds and the largest memory."""

    wall_s: float
    cpu_s: float
    mib: float


class Turn(NamedTuple):
    """Both runs of one side. ``accuracy``: of the test set, 0..1, their mean."""

    spent: Spent
    accuracy: float


class Watch:
    """Looks at a process and all it started: processor seconds so far, and the largest sum of PSS."""

    def __init__(self, pid: int, interval_s: float = 0.25) -> None:
        self.cpu: dict[tuple[int, float], float] = {}
        self.peak = 0
        self.error: Exception | None = None
        self._root, self._interval_s, self._ended = psutil.Process(pid), interval_s, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Raises what went wrong while it looked."""
        self._ended.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _look(self) -> None:
        try:
            self._look_on()
        except Exception as error:
            self.error = error

    def _look_on(self) -> None:
        while not self._ended.wait(self._interval_s):
            total = 0
            try:
                every = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for one in every:
                try:
                    used = one.cpu_times()
                    self.cpu[one.pid, one.create_time()] = used.user + used.system
                    total += one.memory_full_info().pss
                except psutil.NoSuchProcess:
                    continue  # it has ended since the list was made; its last look counts
            self.peak = max(self.peak, total)


def carried_out(commands: Sequence[Sequence[str]], watched: bool) -> Spent:
    """What commands took, one after the other."""
    began, cpu, peak = time.monotonic(), 0.0, 0
    for command in commands:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            watch = Watch(process.pid) if watched else None
            code = process.wait()
            if watch is not None:
                watch.stop()
                cpu, peak = cpu + sum(watch.cpu.values()), max(peak, watch.peak)
        if code:
            raise SystemExit(f"{' '.join(command)} ended with {code}")
    return Spent(time.monotonic() - began, cpu, peak / 2**20)


def edgefl(folder: Path, *, watched: bool) -> Turn:
    """Two seeds' study."""
    (folder / "run.yaml").write_text(yaml.safe_dump(VALUES))
    study = {"run": "run.yaml", "grid": [{"seed": seed} for seed in SEEDS]}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    told = folder / "cells.json"
    command = [sys.executable, "-m", "edgefl.cli.main", "study", str(folder / "study.yaml")]
    command += ["--workers", str(len(SEEDS)), "--directory", str(folder / "studies")]
    command += ["--format", "json", "--output", str(told)]
    spent = carried_out([command], watched)
    found = [cell["accuracy"] for cell in json.loads(told.read_text())]
    assert len(found) == len(SEEDS)
    return Turn(spent, statistics.fmean(found))


def flower(folder: Path, *, watched: bool) -> Turn:
    """Two seeds' runs, one after the other."""
    commands = []
    for seed in SEEDS:
        (folder / f"{seed}.yaml").write_text(yaml.safe_dump(VALUES | {"seed": seed}))
        program = [sys.executable, "-m", "benchmarks.cost.flower", "--simulate", str(folder / f"{seed}.yaml")]
        commands.append([*program, str(folder / f"{seed}.json")])
    spent = carried_out(commands, watched)
    found = [json.loads((folder / f"{seed}.json").read_text())["accuracy"] for seed in SEEDS]
    return Turn(spent, statistics.fmean(found))


def turn(*, watched: bool = False) -> tuple[Turn, Turn]:
    """EdgeFL, then Flower."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        found = edgefl(Path(one), watched=watched), flower(Path(other), watched=watched)
    print(*found, sep="\n", file=sys.stderr)
    return found


def table(times: int) -> list[str]:
    """The two take turns; a last turn is watched."""
    pairs = [turn() for _ in range(times)]
    looks = turn(watched=True)
    lines = [
        "| simulation | two runs, s | processor seconds | memory of all, MiB | accuracy |",
        "|---|---|---|---|---|",
    ]
    for name, runs, look in zip(("EdgeFL", f"Flower {version('flwr')}"), zip(*pairs, strict=True), looks, strict=True):
        wall, took = statistics.median(run.spent.wall_s for run in runs), look.spent
        lines.append(f"| {name} | {wall:.1f} | {took.cpu_s:.1f} | {took.mib:,.0f} | {100 * look.accuracy:.1f}% |")
    ratios = sorted(other.spent.wall_s / own.spent.wall_s for own, other in pairs)
    spread = f"median of {times}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return [*lines, "", f"For two runs Flower takes {statistics.median(ratios):.2f} times as long ({spread})."]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a folder for runner.md")
    parser.add_argument("--simulate", type=Path, nargs=2, metavar=("RUN", "OUT"), help="Flower's part alone")
    chosen = parser.parse_args()
    if chosen.simulate:
        from benchmarks.cost.flower.simulation import simulate

        simulate(*chosen.simulate)
        return
    about = (__doc__ or "").partition("    pip")[0].strip()
    command = f"python -m benchmarks.cost.flower --times {chosen.times}"
    text = "\n".join([f"`{command}`, {os.cpu_count()} cores. {about}", "", *table(chosen.times)])
    print(text)
    if chosen.write:
        put(chosen.write / "runner.md", "Beside Flower's simulation", text, head=HEAD)


if __name__ == "__main__":
    main()
