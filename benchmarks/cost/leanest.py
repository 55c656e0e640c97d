"""Accuracy of the leanest setting beside end-to-end and plain layer-wise training: har, av and emoji, five seeds.

Tasks, fleets and encoders of the claims about layer-wise training (docs/results/systems.md), emoji by drawing and
description of five vendors; 30 rounds in which all devices take part. Leanest is layer-wise with low-rank terms of rank
16 in place of heads and encoder stages, changes in 4 bits by EDEN both ways, last rounds too, and weights on disk where
they are large; rates 0.004, of the others 0.001, none tuned. Runs as users start them: broker, coordinator, agents.

The last two columns: bytes and FLOPs until a run first has end-to-end training's mean accuracy after the last round
less half a point; in brackets how many of the runs ever have it.

    python -m benchmarks.cost.leanest [--seeds 5] [--task har] [--write docs/results]    # runs what has no line yet
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accuracy.encoders import FOLDER
from benchmarks.common.result_lines import add_row, rows_in
from benchmarks.common.spread import spread
from benchmarks.cost.savings import merged
from benchmarks.cost.savings_runs import Outcome, Run, Values, done, made

TASKS: dict[str, Values] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))["tasks"]
VENDORS = ("openmoji", "twemoji", "noto", "fxemoji", "openmoji_black")
FLEETS = {"har": [f"d{i}" for i in range(10)], "av": [f"d{i}" for i in range(10)], "emoji": list(VENDORS)}
PLAIN = {"lr": {"encoder": 1e-3, "head": 1e-3}}
WAYS: dict[str, dict[str, Any]] = {
    "end to end": {"recipe": "end_to_end", "training": PLAIN},
    "layer-wise": {"recipe": "lw-fedmml", "training": PLAIN},
    "leanest": {
        "recipe": "lw-fedmml",
        "model": {"lora": {"rank": 16, "where": ["*/stage*", "head/*"]}},
        "training": {"lr": {"encoder": 4e-3, "head": 4e-3}, "weights": "disk"},
        "transfer": {"up": "delta+eden4", "down": "delta+eden4", "closing": "packed"},
    },
}
LINES = Path("docs/results/leanest.jsonl")
MIB = 2**20
#: Points below end-to-end training's accuracy that are still as good.
MARGIN = 0.5


def runs(seeds: int) -> list[Run]:
    """Every run, by task and way."""
    found = []
    for task, values in TASKS.items():
        for way, changes in WAYS.items():
            whole = merged(values, changes)
            for encoder in whole["model"]["encoders"].values():
                encoder["pretrained"] = str((FOLDER / Path(encoder["pretrained"]).name).resolve())
            whole |= {"name": task, "fleet": [{"name": name} for name in FLEETS[task]]}
            found += [Run(task, way, seed, {**whole, "seed": seed}) for seed in range(1, seeds + 1)]
    return found


def accuracy(row: Outcome) -> float:
    """In percent, of the test with every modality."""
    (found,) = (100 * value for name, value in row.metrics.items() if name.endswith("|none|accuracy"))
    return found


def page(rows: list[Outcome]) -> str:
    """Markdown."""
    _, about, until, *_ = (__doc__ or "").split("\n\n")
    lines = ["# The leanest setting", "", *about.splitlines(), "", *until.splitlines(), ""]
    heads = ["task", "trained", "accuracy, %", "against end to end, seed by seed", "payload, MiB", "GFLOP"]
    heads += ["step memory, MiB", "MiB to that accuracy", "GFLOP"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for task in TASKS:
        whole = {row.seed: accuracy(row) for row in rows if (row.task, row.method) == (task, "end to end")}
        for way in WAYS:
            own = [row for row in rows if (row.task, row.method) == (task, way)]
            if not own:
                continue
            apart = [accuracy(row) - whole[row.seed] for row in own if row.seed in whole and way != "end to end"]
            cells = [
                task,
                f"{way} ({len(own)} seeds)" if len(own) > 1 else f"{way} (1 seed)",
                spread([accuracy(row) for row in own], digits=2),
                spread(apart, signed=True, digits=2) if apart else "",
                f"{statistics.mean(row.payload_bytes for row in own) / MIB:,.1f}",
                f"{statistics.mean(row.flops for row in own) / 1e9:,.0f}",
                f"{statistics.mean(row.step_peak_bytes for row in own) / MIB:,.1f}",
                *_until(own, statistics.mean(whole.values()) - MARGIN if whole else None),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "`python -m benchmarks.cost.leanest --write docs/results`", ""])


def _until(rows: list[Outcome], wanted: float | None) -> tuple[str, str]:
    """Mean bytes and FLOPs to this accuracy in percent, of the runs that have it."""
    if wanted is None:
        return "", ""
    points = [next((p for p in row.points if 100 * p.accuracy >= wanted), None) for row in rows]
    found = [point for point in points if point is not None]
    if not found:
        return f"(0 of {len(rows)})", ""
    payload = statistics.mean(point.payload_bytes for point in found) / MIB
    return f"{payload:,.1f} ({len(found)} of {len(rows)})", f"{statistics.mean(p.flops for p in found) / 1e9:,.0f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", action="append", choices=list(TASKS), default=[])
    parser.add_argument("--way", action="append", choices=list(WAYS), default=[])
    parser.add_argument("--jsonl", type=Path, default=LINES, help="a line of JSON a run")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, help="folder for leanest.md")
    options = parser.parse_args()
    wanted = runs(options.seeds)
    for run in wanted:
        chosen = run.task in (options.task or TASKS) and run.saving in (options.way or WAYS)
        if chosen and not options.page and not done([run], rows_in(options.jsonl, Outcome)):
            row = made(run)
            add_row(options.jsonl, row)
            sys.stderr.write(f"{run.task}, {run.saving}, {run.seed}: {row.error or f'{accuracy(row):.2f}'}\n")
    text = page(done(wanted, rows_in(options.jsonl, Outcome)))
    sys.stdout.write(text)
    if options.write is not None:
        (options.write / "leanest.md").write_text(text)


if __name__ == "__main__":
    main()
