"""Mixed depth with a few devices a round, from pretrained encoders.

The tasks of benchmarks/accuracy/one_regime.yaml without missing modalities: av_digits with 3 of 12 devices a round,
har_hapt with 6 of 30. A third of the devices, drawn by the seed, may train everything; of the others, by turns, one may
spend 0.8 and one 0.6 of the FLOPs of a round of end-to-end training. 12 rounds. *Everybody whole*: end to end without
budgets.
*Mixed*: schedule mixed, 4 rounds a stage, with the devices that left a stage out counted as keeping it (combine: {mean:
{absent: keep}}) or left out of its mean (leave_out). Every run is the product's coordinator and agents in one process.

    python -m benchmarks.accuracy.mixed_few --jsonl FILE [--seeds 2] [--write docs/results]    # runs what FILE lacks
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
import numpy as np
import yaml

from benchmarks.accuracy.mixed_depth import FEW, PAGE, SHARES
from benchmarks.accuracy.pretrain import make
from benchmarks.accuracy.table.grid import EPOCHS, SHARE, Cell, Grid, Settings
from benchmarks.common.inprocess import run_values
from benchmarks.common.result_lines import add_row, rows_in
from benchmarks.common.spread import spread
from edgefl.api.run_inputs import PlanOptions, price_of
from edgefl.plan.job import Stage
from edgefl.plan.stages import trained_stages
from edgefl.records import Budget
from edgefl.run_records import RunReport

#: task -> learning rate.
TASKS = {"av": 1e-3, "har": 1e-3}
#: way -> its slots.
WAYS: dict[str, dict[str, Any]] = {
    "everybody whole": {"schedule": "end_to_end"},
    "mixed, keep": {"schedule": "mixed", "combine": {"mean": {"absent": "keep"}}},
    "mixed, leave_out": {"schedule": "mixed", "combine": {"mean": {"absent": "leave_out"}}},
}


class Row(msgspec.Struct, frozen=True):
    """One run. ``by_round``: accuracy with both modalities after each round, in [0, 1]."""

    task: str
    way: str
    seed: int
    by_round: tuple[float, ...]
    trained: dict[int, dict[str, int]] = {}  # stage -> encoder stages -> updates that trained these

    @property
    def fall(self) -> float:
        """The largest from one round to the next."""
        return max(before - after for before, after in zip(self.by_round, self.by_round[1:], strict=False))


def run_file(task: str, way: str, seed: int) -> dict[str, Any]:
    """Without budgets."""
    grid = Grid()
    cell = Cell(task, "fedavg", "pretrained", 0.0, seed)
    for encoder in grid.encoders(cell):
        if not encoder.path.exists():
            config = {encoder.modality: encoder.config}
            make({encoder.source: encoder.options}, config, encoder.path, share=SHARE, epochs=EPOCHS)
    values = grid.run_file(cell, Settings(TASKS[task]))
    values["slots"] |= WAYS[way]
    if WAYS[way]["schedule"] == "end_to_end":
        values["training"]["rounds"] = [0, 0, sum(values["training"]["rounds"])]
    return {**values, "evaluate": "round"}


def budgets(file: Path, task: str, seed: int) -> dict[str, float]:
    """device -> FLOPs it may spend, of the two thirds that have a budget."""
    file.write_text(yaml.safe_dump(run_file(task, "everybody whole", seed)))
    plans = price_of(str(file), [], PlanOptions()).devices
    whole = {plan.device: plan.placement.cost.flops for plan in plans}
    names = sorted(whole)
    others = [names[i] for i in np.random.default_rng(seed).permutation(len(names))[len(names) // 3 :]]
    return {name: SHARES[turn % len(SHARES)] * whole[name] for turn, name in enumerate(others)}


def measured(task: str, way: str, seed: int) -> Row:
    """One run, from the data on."""
    with tempfile.TemporaryDirectory(prefix="edgefl-mixed-") as name:
        folder = Path(name)
        allowed = budgets(folder / "run.yaml", task, seed) if WAYS[way]["schedule"] == "mixed" else {}
        limits = {device: Budget(flops=flops) for device, flops in allowed.items()}
        plan, report = run_values(folder, run_file(task, way, seed), limits)
    return Row(task, way, seed, _by_round(report, tuple(plan.model.encoders)), _trained(report))


def _by_round(report: RunReport, every: tuple[str, ...]) -> tuple[float, ...]:
    rows = [r for r in report.evaluations if r.metric == "accuracy" and r.available == every and r.missing == "none"]
    return tuple(r.value for r in sorted(rows, key=lambda row: (row.stage, row.round)))


def _trained(report: RunReport) -> dict[int, dict[str, int]]:
    """Stage -> encoder stages trained -> how many updates, of all rounds."""
    found: dict[int, dict[str, int]] = {}
    for row in report.assignments:
        if row.status == "done":
            numbers = [n for n in trained_stages(Stage(trained=row.trained)) if n]
            counts = found.setdefault(row.stage, {})
            name = "-".join(str(n) for n in sorted({numbers[0], numbers[-1]}))
            counts[name] = counts.get(name, 0) + 1
    return found


def section(rows: Sequence[Row]) -> str:
    """Markdown: a row a task and way, means and deviations over the seeds."""
    lines = [FEW, "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += [
        "Accuracy with both modalities in percent, mean and deviation over the seeds. *Last four*: mean of the last",
        "four rounds. *Fall*: the largest from one round to the next, of all seeds.",
        "",
        "| task | way | last round | last four | fall | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for way in WAYS:
            if found := [row for row in rows if (row.task, row.way) == (task, way)]:
                last = spread([100 * row.by_round[-1] for row in found])
                four = spread([100 * statistics.mean(row.by_round[-4:]) for row in found])
                fall = 100 * max(row.fall for row in found)
                lines.append(f"| {task} | {way} | {last} | {four} | {fall:.1f} | {len(found)} |")
    lines += ["", "By round, seed by seed:", ""]
    for row in sorted(rows, key=lambda one: (one.task, one.seed, list(WAYS).index(one.way))):
        lines.append(f"* {row.task}, seed {row.seed}, {row.way}: " + " ".join(f"{100 * v:.0f}" for v in row.by_round))
    lines += ["", "What was trained in *mixed*, updates of all rounds of seed 1:", ""]
    for row in (one for one in rows if one.seed == 1 and one.way == "mixed, keep"):
        for stage, counts in sorted(row.trained.items()):
            told = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
            lines.append(f"* {row.task}, stage {stage}: encoder stages {told}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", type=Path, help=f"folder of {PAGE}, whose last section this is")
    options = parser.parse_args()
    rows = rows_in(options.jsonl, Row)
    done = {(row.task, row.way, row.seed) for row in rows}
    for seed in range(1, options.seeds + 1):
        for task, way in ((task, way) for task in TASKS for way in WAYS if (task, way, seed) not in done):
            rows.append(measured(task, way, seed))
            add_row(options.jsonl, rows[-1])
    text = section(rows)
    if options.write is not None:
        page = options.write / PAGE
        page.write_text(page.read_text().partition(FEW)[0].rstrip() + "\n\n" + text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
