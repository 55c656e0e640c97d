"""Devices that send poisoned updates beside honest ones: accuracy by round, and who was rejected, clipped or blamed.

Four activities by two sensors (sktime's basic_motions, step 5), shared out at random; shipped defaults, one process. An
attacker trains as the others and sends  theta + f (theta_k - theta)  in place of theta_k: f = -10 flips the sign of its
change and makes it ten times as long. It holds where no honest device was rejected or is in quarantine and accuracy
ends within five points of the run without attackers.

    python -m benchmarks.crash.poisoned                                # every case
    python -m benchmarks.crash.poisoned --devices 5 --attackers 1 --factor -50
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.common import inprocess
from device_agent.trainer import local_trainer
from edgefl.models.spec import is_scheduled
from edgefl.run_records import RunReport
from edgefl.training.local_round import Halting, RoundResult, begin_round

#: (devices, attackers, factor) of the cases.
CASES = [(5, 1, -10.0), (5, 1, -50.0), (10, 2, -10.0)]
#: Points of accuracy that may be lost.
MARGIN = 5.0
TINY = {"kind": "sensor", "width": 32, "depth": 2, "heads": 2, "patch": 5}


class Outcome(NamedTuple):
    """What came of a run: accuracy (%) after each round, and devices by what was said of them."""

    accuracy: tuple[float, ...]
    rejected: frozenset[str]
    quarantined: frozenset[str]
    clipped: frozenset[str]


def run_values(devices: int, seed: int, rounds: Sequence[int] = (4, 4)) -> dict[str, Any]:
    """The run file of so many devices, with the shipped defaults of a round."""
    return {
        "name": "poisoned",
        "seed": seed,
        "recipe": "lw-zeros",
        "data": {"source": {"basic_motions": {"window": 50, "step": 5}}, "partition": "uniform"},
        "model": {
            "stages": len(rounds),
            "encoders": {"acc": TINY, "gyro": TINY},
            "head": {"width": 32, "out": 16, "dropout": 0.0},
            "fusion_width": 16,
        },
        "training": {"rounds": list(rounds), "epochs": 2, "batch_size": 16, "lr": {"encoder": 1e-3, "head": 1e-3}},
        "evaluate": "round",
        "fleet": [{"name": f"d{i}", "profile": "cpu"} for i in range(devices)],
    }


@contextmanager
def attacked(attackers: Sequence[str], factor: float) -> Iterator[None]:
    """Trainers of this process send the change of ``attackers`` times ``factor``; "d0/1/2": in stage 1, round 2."""

    def training(
        job: Any, dataset: Any, parts: Mapping[str, Any], *rest: Any, salt: str = "", **more: Any
    ) -> Halting[RoundResult]:
        result = yield from begin_round(job, dataset, parts, *rest, salt=salt, **more)
        if not any(f"{salt}/".startswith(f"{one}/") for one in attackers):
            return result
        sent = {}
        for part, tensors in result.parts.items():
            before = parts.get(part, {}) if is_scheduled(part) else {}
            sent[part] = {
                name: (before[name] + factor * (value - before[name])).astype(value.dtype)
                if name in before and value.dtype.kind == "f"
                else value
                for name, value in tensors.items()
            }
        return dataclasses.replace(result, parts=sent)

    with patch.object(local_trainer, "begin_round", training):
        yield


def outcome_of(report: RunReport, of: Sequence[str] = ("acc", "gyro")) -> Outcome:
    """What a run's report says; accuracy with the modalities ``of``."""
    rows = [row for row in report.evaluations if row.metric == "accuracy" and set(row.available) == set(of)]
    ordered = sorted(rows, key=lambda row: (row.stage, row.round))

    def told(*statuses: str) -> frozenset[str]:
        return frozenset(row.device for row in report.assignments if row.status in statuses)

    clipped = {device.partition("~")[0] for row in report.rounds for device in row.record.get("clipped", {})}
    accuracy = tuple(round(100 * row.value, 1) for row in ordered)
    return Outcome(accuracy, told("rejected"), told("quarantined"), frozenset(clipped))


def played(devices: int, attackers: int, factor: float, seed: int = 1) -> Outcome:
    """One run; the first devices attack."""
    with tempfile.TemporaryDirectory() as folder, attacked([f"d{i}" for i in range(attackers)], factor):
        _, report = inprocess.run_values(Path(folder), run_values(devices, seed))
    return outcome_of(report)


def verdict(found: Outcome, clean: Outcome, attackers: int) -> str:
    """ "holds", or what does not."""
    evil = {f"d{i}" for i in range(attackers)}
    if blamed := sorted((found.rejected | found.quarantined) - evil):
        return f"honest devices are rejected: {', '.join(blamed)}"
    lost = clean.accuracy[-1] - found.accuracy[-1]
    return "holds" if lost <= MARGIN else f"{lost:.1f} points are lost"


def _line(found: Outcome) -> str:
    names = {"rejected": found.rejected, "quarantined": found.quarantined, "clipped": found.clipped}
    told = "; ".join(f"{what} {', '.join(sorted(who))}" for what, who in names.items() if who) or "nothing said"
    *before, last = found.accuracy
    return f"{' '.join(f'{value:.0f}' for value in before)} {last:.1f}  {told}"


def main() -> int:
    """Run the cases. Returns how many do not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--attackers", type=int, default=1)
    parser.add_argument("--factor", type=float, default=-10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cases = [(args.devices, args.attackers, args.factor)] if args.devices else CASES
    clean: dict[int, Outcome] = {}
    broken = 0
    for devices, attackers, factor in cases:
        if devices not in clean:
            clean[devices] = played(devices, 0, 1.0, args.seed)
            print(f"{devices} devices: {_line(clean[devices])}", flush=True)
        found = played(devices, attackers, factor, args.seed)
        said = verdict(found, clean[devices], attackers)
        broken += said != "holds"
        print(f"{attackers} of {devices}, change x {factor:g}: {_line(found)}\n  {said}", flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main())
