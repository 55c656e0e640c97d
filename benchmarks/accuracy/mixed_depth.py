"""Devices that end-to-end training would exclude take part with what they can train (LW-FedMML's Table V in small).

har_hapt, ten people as devices, an encoder of three stages for each sensor. 10, 5 or 3 of them, drawn by the seed, may
train everything; of the others, by turns, one may spend 0.8 and one 0.6 of the FLOPs of a round of end-to-end training.
The same 12 rounds in three ways. *Excluded*: only who can train everything takes part, as in a pure end-to-end run.
*Last stages*: schedule end_to_end, in which others train the last stages of the whole model. *Mixed*: schedule mixed,
4 rounds a stage, in which others train as in progressive where they can, else fewer stages, down to layer-wise.
Whoever takes part is in every round: nothing here says how *mixed* does where few of a fleet are drawn for a round,
so that one device alone may train a part; the next section does.

    python -m benchmarks.accuracy.mixed_depth [--seeds 3] [--absent leave_out] [--write docs/results]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from benchmarks.common.fleet import accuracy, largest, run
from benchmarks.common.plotting import COLOURS, plot
from benchmarks.common.spread import spread
from benchmarks.cost.device_pages import UNTESTED
from benchmarks.cost.resource_table import MIB
from edgefl.api.run_inputs import PlanOptions, price_of
from edgefl.plan.job import Stage
from edgefl.plan.stages import trained_stages
from edgefl.run_records import RunReport

DEVICES = 10
ELIGIBLE = (10, 5, 3)
#: Of the FLOPs of a round of end-to-end training: what the other devices may spend, by turns.
SHARES = (0.8, 0.6)
STAGES = 3
ROUNDS = 12
#: A budget that nothing fits.
NOTHING = 1.0
#: Where the page's next section begins, whose script is in the history alone.
FEW = "## A few devices a round"
PAGE = "mixed_depth.md"
#: absent -> what the page says of it.
ABSENT = {
    "keep": "Devices that left a part out count as keeping it (combine: {mean: {absent: keep}}).",
    "leave_out": "Each part is averaged over those that trained it (combine: {mean: {absent: leave_out}}).",
}
#: way -> schedule
WAYS = {"excluded": "end_to_end", "last stages": "end_to_end", "mixed": "mixed"}


class Result(msgspec.Struct, frozen=True):
    """One run: accuracy with both sensors, devices a round, and stage -> what its devices trained -> how many."""

    eligible: int
    way: str
    seed: int
    accuracy: float
    devices: float
    trained: dict[int, dict[str, int]]
    reserved_bytes: float = 0.0  # most that torch's allocator held, on a GPU


def run_file(
    seed: int, eligible: int, way: str, whole: Mapping[str, float], device: str = "cpu", absent: str = "keep"
) -> dict[str, Any]:
    """``whole``: FLOPs of a round of end-to-end training, by device."""
    encoder = {"kind": "sensor", "size": "tiny", "depth": STAGES, "patch": 16}
    names = [f"person-{i + 1:02d}" for i in range(DEVICES)]
    fleet: list[dict[str, Any]] = [{"name": name, "profile": device} for name in names]
    others = np.random.default_rng(seed).permutation(DEVICES)[eligible:]
    for turn, index in enumerate(others):
        flops = NOTHING if way == "excluded" else SHARES[turn % len(SHARES)] * whole[names[index]]
        fleet[index]["budget"] = {"flops": flops}
    rounds = [ROUNDS // STAGES] * STAGES if WAYS[way] == "mixed" else [0] * (STAGES - 1) + [ROUNDS]
    return {
        "name": "mixed-depth",
        "seed": seed,
        "recipe": "end_to_end",
        "slots": {"schedule": WAYS[way], "combine": {"mean": {"absent": absent}}},
        "data": {"source": {"har_hapt": {"clients": DEVICES}}, "partition": "natural"},
        "model": {
            "stages": STAGES,
            "encoders": {"acc": encoder, "gyro": encoder},
            "head": {"width": 64, "out": 32, "dropout": 0.0},
            "fusion_width": 32,
        },
        "training": {
            "rounds": rounds,
            "batch_size": 16,
            "lr": {"encoder": 1e-3, "head": 1e-3},
        },
        "round": {"devices": DEVICES, "join_s": 300, "quorum": 0.1},
        "evaluate": "stage",
        "fleet": fleet,
    }


def measured(folder: Path, seed: int, eligible: int, way: str, device: str, absent: str) -> Result:
    """One run through broker, coordinator and agents."""
    file = folder / "mixed-depth.yaml"
    file.write_text(yaml.safe_dump(run_file(seed, DEVICES, "excluded", {}, device)))
    plans = price_of(str(file), [], PlanOptions()).devices
    whole = {plan.device: plan.placement.cost.flops for plan in plans}
    file.write_text(yaml.safe_dump(run_file(seed, eligible, way, whole, device, absent)))
    report = run(str(file), label=f"{eligible} of {DEVICES}, {way}, seed {seed}")
    took_part = [len(row.participants) for row in report.rounds if row.status == "done"]
    score = accuracy(report, ("acc", "gyro"), "none")
    reserved = largest(report, "cuda_reserved_peak_bytes") if device == "cuda" else 0.0
    return Result(eligible, way, seed, score, statistics.mean(took_part), depths(report), reserved)


def depths(report: RunReport) -> dict[int, dict[str, int]]:
    """Stage -> encoder stages that its devices trained in its first round -> how many devices."""
    found: dict[int, dict[str, int]] = {}
    for row in report.assignments:
        if row.status == "done" and row.round == 1:
            numbers = [n for n in trained_stages(Stage(trained=row.trained)) if n]
            name = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
            counts = found.setdefault(row.stage, {})
            counts[name] = counts.get(name, 0) + 1
    return found


def page(results: Sequence[Result], absent: str) -> str:
    """Markdown: accuracy by how many are eligible and by way; then what the devices of the first seed trained."""
    lines = [
        "# Mixed depth",
        "",
        *((__doc__ or "").split("\n\n")[1].splitlines()),
        ABSENT[absent],
        "",
        "Accuracy with both sensors in percent, mean and deviation over the seeds; gain over *excluded*, seed by seed.",
        "",
        "| can train everything | way | accuracy | gain | devices a round |",
        "|---|---|---|---|---|",
    ]
    for eligible in ELIGIBLE:
        alone = {one.seed: one for one in _of(results, eligible, "excluded")}
        for way in WAYS:
            if not (found := _of(results, eligible, way)):
                continue
            gains = [100 * (one.accuracy - alone[one.seed].accuracy) for one in found if way != "excluded"]
            cells = [
                f"{eligible} of {DEVICES}",
                way if eligible < DEVICES else "nobody is excluded",
                spread([100 * one.accuracy for one in found]),
                spread(gains, signed=True) if gains else "",
                f"{statistics.mean(one.devices for one in found):.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"What was trained, seed {min(one.seed for one in results)}:", ""]
    lines += ["| can train everything | way | stage | encoder stages trained (devices) |", "|---|---|---|---|"]
    for one in sorted(results, key=lambda one: -one.eligible):
        if one.seed == min(other.seed for other in results):
            for stage, counts in sorted(one.trained.items()):
                told = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
                lines.append(f"| {one.eligible} of {DEVICES} | {one.way} | {stage} | {told} |")
    reserved = max(one.reserved_bytes for one in results)
    told = f"On a GPU; torch's allocator held at most {reserved / MIB:,.1f} MiB." if reserved else UNTESTED
    return "\n".join([*lines, "", told]) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """Accuracy by how many devices may train everything, each way."""
    with plot(path, f"devices of {DEVICES} that may train everything", "accuracy with both sensors, %") as axes:
        for way, colour in zip(WAYS, (COLOURS[1], COLOURS[2], COLOURS[0]), strict=True):
            ways = {e: "excluded" if e == DEVICES else way for e in sorted(ELIGIBLE)}  # there they are the same
            points = {e: found for e in ways if (found := [100 * one.accuracy for one in _of(results, e, ways[e])])}
            means = [statistics.mean(found) for found in points.values()]
            errors = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in points.values()]
            places = [e + 0.08 * (list(WAYS).index(way) - 1) for e in points]  # beside each other
            axes.errorbar(places, means, yerr=errors, color=colour, marker="o", capsize=3, linewidth=1, label=way)
        axes.set_xticks(sorted(ELIGIBLE))
        axes.legend()


def _of(results: Sequence[Result], eligible: int, way: str) -> list[Result]:
    """Where all devices are eligible, nobody is excluded and all train everything: one run stands for all ways."""
    return [one for one in results if one.eligible == eligible and one.way == way]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the trainers compute")
    parser.add_argument("--absent", choices=tuple(ABSENT), default="keep", help="see the option of combine: mean")
    parser.add_argument("--write", type=Path, help=f"folder for {PAGE}")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the fleets, too: a run file leaves it to what there is
    results = []
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        for seed in range(1, options.seeds + 1):
            for eligible in ELIGIBLE:
                ways = WAYS if eligible < DEVICES else ("excluded",)
                results += [measured(Path(folder), seed, eligible, way, options.device, options.absent) for way in ways]
    text = page(results, options.absent)
    if options.write is not None:
        draw(results, options.write / "mixed_depth.svg")
        text += "\n![Accuracy by how many devices may train everything](mixed_depth.svg)\n"
        file = options.write / PAGE
        _, heading, few = file.read_text().partition(FEW) if file.exists() else ("", "", "")
        file.write_text(text + (f"\n{heading}{few}" if few else ""))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
