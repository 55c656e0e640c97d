"""Simulators of a fleet beside a bare loop in torch, in turns: processor seconds a round, start and memory.

1,000 users with 50 synthetic samples each (ten classes' means and noise; a window of 32 x 6 sensor values, or a picture
of 32 x 32 x 3), of whom 20 are asked a round for one epoch of SGD in batches of 10; the average of the models is the
next round's. A fifth of the labels is drawn at random, so none can be above 82 %. Nothing is evaluated inside the
clock. All have the same module, first weights, samples, version of torch and one thread; which users are asked, and the
order of their samples, each draws itself.

Processor seconds are user and system time of a simulator's processes, all of them, between the ends of two rounds of
one run, so that its start is apart. Memory is the largest sum of their proportional set sizes (PSS), looked at twice a
second. Accuracy is of the test set after the last round.

    python -m benchmarks.cost.simulators [--times 3] [--write docs/results]

The first call installs pfl and Flower into build/simulators-environment, beside the torch that EdgeFL has here.
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
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks.common.sections import put
from benchmarks.cost.simulators.task import MODELS, Mark, Net, Rounds, write_samples
from benchmarks.cost.simulators.with_edgefl import write_first_weights

HEAD = """# A large fleet in one process

What a round of a simulated fleet costs, as a multiple of the training alone.
"""
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / "build" / "simulators-environment"
PACKAGES = ("pfl==0.6.0", "flwr[simulation]==1.42.0", "psutil")
#: Rounds of each model; the largest one's last longer.
ROUNDS = {"sensor": Rounds(3, 20), "lenet": Rounds(3, 20), "cnn": Rounds(2, 6)}
LOOK_S = 0.5
NAMED = {
    "sensor": "A transformer of three blocks for sensors",
    "lenet": "LeNet-5",
    "cnn": "The CNN of pfl's benchmarks, without dropout",
}


class Simulator(NamedTuple):
    """Name on the page, module of this package that runs it, and whether it is EdgeFL's environment that has it."""

    name: str
    module: str
    own: bool
    about: str


SIMULATORS = (
    Simulator("bare loop", "bare", own=True, about="nothing"),
    Simulator(
        "pfl 0.6.0", "with_pfl", own=False, about="sampling of users, weights and metrics; no messages, nothing on disk"
    ),
    Simulator("Flower 1.42.0", "with_flower", own=False, about="messages, through an actor a core; nothing on disk"),
    Simulator(
        "EdgeFL",
        "with_edgefl",
        own=True,
        about="checked messages; a ledger on disk, from which a run goes on; FLOPs, bytes and seconds of each device",
    ),
    Simulator("EdgeFL, joint steps", "with_joint_steps", own=True, about="the same; equal to it to rounding"),
)


class Turn(NamedTuple):
    """One run: seconds of the processor and of the clock a round, until the first has ended, MiB, accuracy in 0..1."""

    cpu_s: float
    wall_s: float
    start_s: float
    mib: float
    accuracy: float


def environment() -> Path:
    """The Python that has pfl and Flower, made where there is none."""
    python, ready = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    wanted = "\n".join([f"torch=={torch.__version__.partition('+')[0]}", *PACKAGES])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"Installing into {ENVIRONMENT.relative_to(ROOT)}: some minutes, once.", file=sys.stderr)
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        first, *rest = wanted.split("\n")
        for packages in ([first], rest):  # torch first: the others take the one that is there
            install = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *packages]
            subprocess.run(install, check=True)
        ready.write_text(wanted)
    return python


def peak_bytes(process: psutil.Process, ended: threading.Event, peak: list[int]) -> None:
    """Note the largest sum of PSS of a process and all it started in ``peak``."""
    while not ended.wait(LOOK_S):
        total = 0
        try:
            for one in [process, *process.children(recursive=True)]:
                total += one.memory_full_info().pss
        except psutil.Error:  # one has ended since the list was made, or may not be looked at
            continue
        peak.append(total)


def turn(simulator: Simulator, python: Path, folder: Path, model: str, rounds: Rounds) -> Turn:
    """One run of a simulator. Raises SystemExit with the end of its log where it fails."""
    journal, log = folder / "journal.json", folder / "log.txt"
    journal.unlink(missing_ok=True)
    program = f"from benchmarks.cost.simulators.{simulator.module} import main; main()"  # Ray's actors import it, too
    words = [str(folder), model, *map(str, rounds)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    peak, ended = [0], threading.Event()
    began = time.monotonic()
    with log.open("w") as out:
        process = psutil.Popen([python, "-c", program, *words], stdout=out, stderr=out, env=variables, cwd=folder)
        look = threading.Thread(target=peak_bytes, args=(process, ended, peak))
        look.start()
        code = process.wait()
    ended.set()
    look.join()
    if code or not journal.exists():
        raise SystemExit(f"{simulator.name} ended with {code}:\n{log.read_text()[-3000:]}")
    told = json.loads(journal.read_text())
    return measured([Mark(*mark) for mark in told["marks"]], began, max(peak) / 2**20, told["accuracy"])


def measured(marks: Sequence[Mark], began_s: float, mib: float, accuracy: float) -> Turn:
    """A turn by the marks of its first round, of the last before the clock, and of the last one."""
    first, warm, last = marks
    rounds = last.round - warm.round
    cpu_s, wall_s = (last.cpu_s - warm.cpu_s) / rounds, (last.at_s - warm.at_s) / rounds
    return Turn(cpu_s, wall_s, first.at_s - began_s, mib, accuracy)


def rows(turns: Sequence[Sequence[Turn]]) -> Iterable[str]:
    """Lines of a model's table; ``turns``: of each turn every simulator's, the bare loop's first."""
    yield "| simulator | CPU s a round | by the bare loop's (range) | s a round | s to round 1's end | MiB | accuracy |"
    yield "|---|---|---|---|---|---|---|"
    for place, simulator in enumerate(SIMULATORS):
        every = [one[place] for one in turns]
        ratios = sorted(one[place].cpu_s / one[0].cpu_s for one in turns)
        cpu, wall, start = (statistics.median(getattr(one, f) for one in every) for f in ("cpu_s", "wall_s", "start_s"))
        right, mib = sorted(100 * one.accuracy for one in every), max(one.mib for one in every)
        share = f"× {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        yield (
            f"| {simulator.name} | {cpu:.3f} | {share} | {wall:.2f} | {start:.1f} | {mib:,.0f} "
            f"| {right[0]:.1f} to {right[-1]:.1f}% |"
        )


def heading(model: str, times: int, rounds: Rounds) -> str:
    """What a model's table is of."""
    weights = sum(weight.numel() for weight in Net(model).parameters())
    turns = f"{rounds.timed} rounds on the clock after {rounds.warm}; {times} turn{'s' * (times > 1)}."
    return f"**{NAMED[model]}, {weights:,} parameters.** {turns}\n"


def table(times: int, rounds: Rounds | None, folder: Path) -> Iterable[str]:
    """Each model's, every simulator in turns."""
    python = environment()
    for model, (_, _, modality, shape) in MODELS.items():
        write_samples(folder, modality, shape)
        write_first_weights(folder, model)
        own = rounds or ROUNDS[model]
        turns = []
        for _ in range(times):
            pythons = [Path(sys.executable) if one.own else python for one in SIMULATORS]
            turns.append([turn(one, by, folder, model, own) for one, by in zip(SIMULATORS, pythons, strict=True)])
            print(*turns[-1], sep="\n", file=sys.stderr)
        yield heading(model, times, own)
        yield from rows(turns)
        yield ""


def section(chosen: argparse.Namespace, lines: Iterable[str]) -> str:
    """The page's section in Markdown."""
    about = (__doc__ or "").partition("    python")[0].strip()
    shorter = f" --rounds {chosen.rounds[0]} {chosen.rounds[1]}" if chosen.rounds else ""
    command = f"python -m benchmarks.cost.simulators --times {chosen.times}{shorter}"
    does = ["What each does beside training and averaging:\n", *(f"* {one.name}: {one.about}." for one in SIMULATORS)]
    return "\n".join([f"`{command}`, {os.cpu_count()} cores. {about}\n", *lines, *does])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, nargs=2, metavar=("WARM", "TIMED"), help="at least 2 and 1; default: each model's own"
    )
    parser.add_argument("--write", type=Path, help="a folder for simulators.md")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = section(chosen, table(chosen.times, Rounds(*chosen.rounds) if chosen.rounds else None, Path(folder)))
    print(text)
    if chosen.write:
        put(chosen.write / "simulators.md", "Beside other simulators", text, head=HEAD)


if __name__ == "__main__":
    main()
