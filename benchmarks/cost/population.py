"""A population of up to a million simulated users in one process: processor seconds, memory, and what grows with them.

50,000 synthetic windows of a sensor ([32, 3]: six classes' means and noise) are there once; each user draws 20 of them
by its name. 20 users are asked a round for one epoch in batches of 5, with the ledger and every bill. Seconds are user
and system time of the process; memory is its largest resident size (VmHWM), torch's import included. The model is
tested after the last round alone; the comparison with simple models after a run is left out.

    python -m benchmarks.cost.population [--users 100000 1000000] [--rounds 100] [--write docs/results]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.sections import put
from edgefl.resources.process_memory import status_bytes

SAMPLES, TESTED, CLASSES, SHAPE = 50_000, 1_000, 6, (32, 3)
ASKED, EACH, BATCH = 20, 20, 5
HEAD = """# A large population in one process

"""
TITLE = "Users, asked or not"
COLUMNS = "users | rounds | CPU s to round 1 | CPU s a round | CPU s | wall s | MiB | ledger MiB | met | accuracy"


class Measured(NamedTuple):
    """One run. ``parameters``: of the model; ``met``: users that have introduced themselves."""

    users: int
    rounds: int
    parameters: int
    begin_cpu_s: float
    begin_s: float
    round_cpu_s: float
    round_s: float
    cpu_s: float
    wall_s: float
    peak_bytes: int
    ledger_bytes: int
    met: int
    accuracy: float


def write_samples(folder: Path) -> None:
    """``train.npz`` and ``test.npz``."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, SAMPLES + TESTED)
    means = rng.normal(size=(CLASSES, *SHAPE))
    windows = (means[labels] + rng.normal(size=(len(labels), *SHAPE))).astype(np.float32)
    np.savez(folder / "train.npz", sensor=windows[:SAMPLES], label=labels[:SAMPLES])
    np.savez(folder / "test.npz", sensor=windows[SAMPLES:], label=labels[SAMPLES:])


def run_file(folder: Path, users: int, rounds: int) -> dict[str, Any]:
    """The run's fields."""
    return {
        "name": "population",
        "seed": 1,
        "recipe": "end_to_end",
        "slots": {"select": {"random": {"share": min(1.0, ASKED / users)}}},
        "data": {
            "source": str(folder / "train.npz"),
            "test": str(folder / "test.npz"),
            "partition": {"drawn": {"each": EACH}},
        },
        "model": {
            "stages": 1,
            "encoders": {"sensor": {"kind": "sensor", "width": 32, "depth": 1, "heads": 2, "patch": 4}},
            "head": {"width": 32, "out": 16},
            "fusion_width": 32,
        },
        "training": {"rounds": [rounds], "batch_size": BATCH},
        "evaluate": "stage",
        "fleet": {"devices": users},
    }


def cpu_s() -> float:
    """Seconds of processor that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one(folder: Path, users: int, rounds: int) -> Measured:
    """A run of ``rounds`` in this process, which has done nothing before."""
    began = time.time()
    from edgefl.api import running
    from edgefl.api.local_run import LocalOptions

    marks: list[tuple[float, float]] = []

    def seen(event: Any) -> None:
        if event.kind in {"round_started", "round_closed"}:
            marks.append((cpu_s(), time.time() - began))

    setattr(running, "referenced", lambda report, directory: report)  # noqa: B010 - see above
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        options = LocalOptions(run_file(folder, users, rounds), runs=Path(runs), in_process=True)
        run = running.carried_out(options, seen, running.Made(export=False, page=False))
        ledger = sum(file.stat().st_size for file in run.directory.glob("ledger*"))
    record = run.report.record
    (begin_cpu, begin), (end_cpu, end) = marks[0], marks[-1]
    return Measured(
        users=users,
        rounds=rounds,
        parameters=sum(record.part_bytes.values()) // 4,
        begin_cpu_s=begin_cpu,
        begin_s=begin,
        round_cpu_s=(end_cpu - begin_cpu) / rounds,
        round_s=(end - begin) / rounds,
        cpu_s=cpu_s(),
        wall_s=time.time() - began,
        peak_bytes=status_bytes("VmHWM") or 0,  # ru_maxrss has what the process was started from
        ledger_bytes=ledger,
        met=len(record.devices),
        accuracy=run.accuracy or 0.0,
    )


def apart(folder: Path, users: int, rounds: int) -> Measured:
    """``one`` in a process of its own."""
    program = [sys.executable, "-m", "benchmarks.cost.population", "--one", str(folder), str(users), str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, env=environment)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def text(found: Sequence[Measured]) -> Iterable[str]:
    """The section's lines: one sentence, then the table."""
    largest = max(found, key=lambda each: (each.users * each.rounds, each.users))
    minutes = largest.wall_s / 60
    yield (
        f"{largest.rounds} rounds with {largest.users:,} users took {largest.cpu_s:.0f} s of one processor "
        f"({minutes:.1f} minutes) and {largest.peak_bytes / 2**20:,.0f} MiB; a user that is not asked costs a name.\n"
    )
    yield f"| {COLUMNS} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for each in found:
        yield (
            f"| {each.users:,} | {each.rounds} | {each.begin_cpu_s:.1f} | {each.round_cpu_s:.2f} | {each.cpu_s:.0f} | "
            f"{each.wall_s:.0f} | {each.peak_bytes / 2**20:,.0f} | {each.ledger_bytes / 2**20:.1f} | {each.met:,} | "
            f"{100 * each.accuracy:.1f}% |"
        )
    yield f"\nA model of {largest.parameters:,} parameters. {' '.join((__doc__ or '').split('    python')[0].split())}"


def main() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--write", type=Path, help="a folder for population.md")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        folder, users, rounds = chosen.one
        sys.stdout.write(json.dumps(one(Path(folder), int(users), int(rounds))._asdict()) + "\n")
        return
    found = []
    with tempfile.TemporaryDirectory() as place:
        write_samples(Path(place))
        for users in chosen.users:
            found.append(apart(Path(place), users, chosen.rounds))
            sys.stderr.write(f"{found[-1]}\n")
    lines = "\n".join(text(found))
    if chosen.write:
        given = f"--users {' '.join(map(str, chosen.users))} --rounds {chosen.rounds}"
        lines += f"\n\n`python -m benchmarks.cost.population {given}`"
        put(chosen.write / "population.md", TITLE, lines, head=HEAD)
    sys.stdout.write(f"{lines}\n")


if __name__ == "__main__":
    main()
