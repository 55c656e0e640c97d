"""A run in one process and the same as processes with a broker, in turns: processor seconds, of all their processes.

`demo` with four devices without memory budgets, which only processes can be held to, and `har` with six people, one
round a stage, one epoch, without bundles and page, as a study runs them. Processor seconds are user and system time of
the command and all that it started (getrusage, RUSAGE_CHILDREN). Both must end in the same state, to the last bit. The
last column is a cell of `edgefl study` with four seeds and one worker, which loads torch and traces prices once.

    python -m benchmarks.cost.runner [--times 3] [--write docs/results]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.sections import put
from coordinator.ledger.ledger import Ledger
from edgefl.config.yaml_files import override, yaml_text
from edgefl.records import Manifest
from edgefl.storage.disk import LEDGER

HEAD = "# A run in one process\n\nWhat `edgefl run --in-process` and `edgefl study` save ([studies.md](../studies.md))."
PEOPLE = [f"person-{n:02}" for n in range(1, 7)]
#: Name of the run file -> its settings here.
TASKS = {
    "demo": ["fleet=[{name: one}, {name: two}, {name: three}, {name: four}]"],
    "har": [
        "data.source={har_hapt: {clients: 6}}",
        f"fleet=[{', '.join(f'{{name: {name}}}' for name in PEOPLE)}]",
        "data.missing.devices={person-03: [gyro], person-06: [gyro]}",
    ],
}
#: Cells of the study.
SEEDS = 4
SHORT = ["training.rounds=[1, 1, 1, 1, 1, 1]", "training.epochs=1", "broker=mosquitto"]


class Spent(NamedTuple):
    """Seconds of a run, by processors and by the clock, and its last state."""

    cpu_s: float
    wall_s: float
    state: Manifest


def spent(task: str, options: Sequence[str]) -> Spent:
    """One run by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "edgefl.cli.main", "run", task, "--runs", folder, "--no-export", "--no-page"]
        for setting in (*TASKS[task], *SHORT):
            command += ["--set", setting]
        before, began = processors_s(), time.monotonic()
        subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=True)
        cpu_s, wall_s = processors_s() - before, time.monotonic() - began
        (run,) = Path(folder).iterdir()
        with Ledger(run / LEDGER, create=False) as ledger:
            return Spent(cpu_s, wall_s, ledger.position(run.name).manifest)


def cell_s(task: str) -> float:
    """Processor seconds of a cell in a study of SEEDS cells."""
    with tempfile.TemporaryDirectory() as folder:
        settings = override({}, [*TASKS[task], *SHORT])
        grid = [{"seed": seed} for seed in range(1, SEEDS + 1)]
        file = Path(folder) / "study.yaml"
        file.write_text(yaml_text({"run": task, "overrides": _dotted(settings), "grid": grid}))
        command = [sys.executable, "-m", "edgefl.cli.main", "study", str(file), "--workers", "1"]
        before = processors_s()
        subprocess.run([*command, "--directory", folder + "/studies"], stdout=subprocess.DEVNULL, check=True)
        return (processors_s() - before) / SEEDS


def _dotted(settings: Mapping[str, object]) -> dict[str, object]:
    """Fields of sections, each by its whole name, so that the run file keeps the others."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        inner = value if isinstance(value, Mapping) else {}
        found |= {f"{name}.{key}": one for key, one in inner.items()} if inner else {name: value}
    return found


def processors_s() -> float:
    """Processor seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(task: str, times: int) -> str:
    """A line of the table; the two kinds of run take turns."""
    pairs = [(spent(task, []), spent(task, ["--in-process"])) for _ in range(times)]
    for one, other in pairs:
        if one.state != other.state:
            raise SystemExit(f"{task}: the two ended in different states")
    fleets, inside = zip(*pairs, strict=True)
    fleet, own = (statistics.median(run.cpu_s for run in runs) for runs in (fleets, inside))
    ratios = sorted(one.cpu_s / other.cpu_s for one, other in pairs)
    walls = [statistics.median(run.wall_s for run in runs) for runs in (fleets, inside)]
    return (
        f"| {task} | {fleet:.1f} | {own:.1f} | ÷ {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}) "
        f"| {walls[0]:.0f} | {walls[1]:.0f} | {(cell := cell_s(task)):.1f} (÷ {fleet / cell:.1f}) |"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--write", type=Path, help="folder for runner.md, whose section is made anew")
    chosen = parser.parse_args()
    about = (__doc__ or "").partition("    python")[0].strip()
    command = f"python -m benchmarks.cost.runner --times {chosen.times} --tasks {' '.join(chosen.tasks)}"
    lines = [
        f"`{command}`, {os.cpu_count()} cores. {about}",
        "",
        "| run | processes, CPU s | one, CPU s | ratio, median (range) | processes, s | one, s | study's cell, CPU s |",
        "|---|---|---|---|---|---|---|",
        *(row(task, chosen.times) for task in chosen.tasks),
        "",
        "The clock's seconds say how busy the machine was with other work.",
    ]
    text = "\n".join(lines)
    print(text)
    if chosen.write:
        put(chosen.write / "runner.md", "Processor seconds", text, head=HEAD)


if __name__ == "__main__":
    main()
