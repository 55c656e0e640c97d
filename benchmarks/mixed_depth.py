"""Devices that end-to-end training would exclude take part with what they can train (LW-FedMML's Table V in small).

har_hapt, ten people as devices; 10, 5 or 3 of them may train everything, the others' FLOPs budget allows part of it.
The same rounds once with the others excluded, as by a pure end-to-end run, and once in mixed depth: each device trains
the deepest part of the model that it can pay, in the same rounds, averaged part by part.

    python -m benchmarks.mixed_depth [--seeds 3] [--write docs/results]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.fleet import accuracy, run
from benchmarks.plotting import COLOURS, plot
from edgefl.cli.planning import price_run

DEVICES = 10
ELIGIBLE = (10, 5, 3)
#: Of the FLOPs of end-to-end training: what the other devices may spend on a round. One stage of three takes half.
SHARE = 0.6
ROUNDS = 12
#: A budget that nothing fits.
NOTHING = 1.0


class Result(msgspec.Struct, frozen=True):
    """One run: accuracy with both sensors, and how many devices trained in each round."""

    eligible: int
    mixed: bool
    seed: int
    accuracy: float
    devices: float


def run_file(seed: int, eligible: int, others: float | None) -> dict[str, Any]:
    """``others``: FLOPs a round of the devices that can not train everything; None: all can."""
    encoder = {"kind": "sensor", "size": "tiny", "depth": 3, "patch": 16}
    names = [f"person-{i + 1:02d}" for i in range(DEVICES)]
    fleet: list[dict[str, Any]] = [{"name": name} for name in names]
    for device in fleet[eligible:] if others is not None else ():
        device["budget"] = {"flops": others}
    return {
        "name": "mixed-depth",
        "seed": seed,
        "recipe": "end_to_end",
        "data": {"source": {"har_hapt": {"clients": DEVICES}}, "partition": "natural"},
        "model": {
            "stages": 3,
            "encoders": {"acc": encoder, "gyro": encoder},
            "head": {"width": 64, "out": 32, "dropout": 0.0},
            "fusion_width": 32,
        },
        "training": {"rounds": [0, 0, ROUNDS], "batch_size": 16, "lr": {"encoder": 1e-3, "head": 1e-3}},
        "round": {"devices": DEVICES, "join_s": 300, "quorum": 0.1},
        "evaluate": "stage",
        "fleet": fleet,
    }


def measured(folder: Path, seed: int, eligible: int, *, mixed: bool) -> Result:
    """One run through broker, coordinator and agents."""
    file = folder / "mixed-depth.yaml"
    file.write_text(yaml.safe_dump(run_file(seed, DEVICES, None)))
    whole = price_run(str(file), [], profiles=[], samples=None, trainer_base="").devices
    dearest = max(device.placement.cost.flops for device in whole)
    file.write_text(yaml.safe_dump(run_file(seed, eligible, SHARE * dearest if mixed else NOTHING)))
    report = run(
        str(file), label=f"{eligible} of {DEVICES}, {'mixed' if mixed else 'the others excluded'}, seed {seed}"
    )
    trained = [len(row.participants) for row in report.rounds if row.status == "done"]
    return Result(eligible, mixed, seed, accuracy(report, ("acc", "gyro"), "none"), statistics.mean(trained))


def page(results: Sequence[Result]) -> str:
    """Markdown: one row a number of eligible devices."""
    lines = [
        "# Mixed depth",
        "",
        *((__doc__ or "").split("\n\n")[1].splitlines()),
        "",
        "| can train everything | accuracy, others excluded | mixed depth | gain, seed by seed | devices a round |",
        "|---|---|---|---|---|",
    ]
    for eligible in ELIGIBLE:
        alone = {one.seed: one for one in results if one.eligible == eligible and not one.mixed}
        mixed = {one.seed: one for one in results if one.eligible == eligible and one.mixed}
        if not alone:
            continue
        gains = [100 * (mixed[s].accuracy - alone[s].accuracy) for s in alone if s in mixed]
        cells = [
            f"{eligible} of {DEVICES}",
            _spread([100 * one.accuracy for one in alone.values()]),
            _spread([100 * one.accuracy for one in mixed.values()]) if mixed else "the same",
            _spread(gains, signed=True) if gains else "",
            " and ".join(
                f"{statistics.mean(one.devices for one in some.values()):.0f}" for some in (alone, mixed) if some
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """Accuracy by how many devices may train everything, both ways."""
    with plot(path, f"devices of {DEVICES} that may train everything", "accuracy with both sensors, %") as axes:
        for mixed, name, colour in ((False, "the others excluded", COLOURS[1]), (True, "mixed depth", COLOURS[0])):
            at = [e for e in ELIGIBLE if _of(results, e, mixed=mixed)]
            means = [statistics.mean(_of(results, e, mixed=mixed)) for e in at]
            errors = [statistics.stdev(found) if len(found := _of(results, e, mixed=mixed)) > 1 else 0.0 for e in at]
            axes.errorbar(at, means, yerr=errors, color=colour, marker="o", capsize=3, linewidth=1, label=name)
        axes.set_xticks(sorted(ELIGIBLE))
        axes.legend()


def _of(results: Sequence[Result], eligible: int, *, mixed: bool) -> list[float]:
    """Accuracies in percent; where all devices are eligible both ways are the same."""
    own = [one for one in results if one.eligible == eligible]
    return [100 * one.accuracy for one in own if one.mixed == mixed or eligible == DEVICES]


def _spread(values: Sequence[float], *, signed: bool = False) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if signed else ''}.1f}{deviation}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="folder for mixed_depth.md")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        for seed in range(1, options.seeds + 1):
            for eligible in ELIGIBLE:
                ways = (False, True) if eligible < DEVICES else (False,)
                results += [measured(Path(folder), seed, eligible, mixed=mixed) for mixed in ways]
    text = page(results)
    if options.write is not None:
        draw(results, options.write / "mixed_depth.svg")
        text += "\n![Accuracy by how many devices may train everything](mixed_depth.svg)\n"
        (options.write / "mixed_depth.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
