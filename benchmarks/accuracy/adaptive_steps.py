"""Whether a global model after an adaptive server step evaluates as its own copy with statistics of training data.

The settings of the table (benchmarks/accuracy/one_regime.yaml): av_digits at 20 % missing, har_hapt at 50 %, 12 rounds,
pretrained encoders, server rate 0.05. Every run is the product's coordinator and agents in one process
(benchmarks/common/inprocess.py).
*Evaluated*: the accuracy with all modalities that the run reports. *Recalibrated*: the same weights, with the running
statistics of every batch norm replaced by those of 256 training samples a device and modality.

    python -m benchmarks.accuracy.adaptive_steps --task av --method mmic --norm batch --seed 1  # one run
    python -m benchmarks.accuracy.adaptive_steps --jsonl FILE  # what FILE lacks of the grid
    python -m benchmarks.accuracy.adaptive_steps --jsonl FILE --before FILE --page docs/results/adaptive_steps.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import yaml
from scipy.stats import t
from torch import nn

from benchmarks.accuracy.pretrain import make
from benchmarks.accuracy.table.grid import EPOCHS, SHARE, Cell, Grid, Settings
from benchmarks.common.inprocess import run_fleet, state_of
from benchmarks.common.result_lines import rows_in
from edgefl.api.run_inputs import shares_of
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.staged import StagedModel, build
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.protocol.tensors import decode_part
from edgefl.run_records import RunReport
from edgefl.training.batches import input_of
from edgefl.training.evaluate import Criteria, evaluate, load_test_set

#: Training samples a device and modality that the recalibrated copy's statistics are of.
SAMPLES = 256
#: task -> (missing rate, local learning rate of the adaptive steps, of FedAvg)
TASKS = {"av": (0.2, 1e-3, 2.5e-4), "har": (0.5, 4e-3, 4e-3)}
SERVER_RATE = 0.05
#: MMiC's clusters unless a variant says otherwise: those of the first runs. The recipe has 3.
CLUSTERS = 8
#: method -> (method of one_regime.yaml, the server's step)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavgm": ("fedavg", {"momentum": {"lr": 1.0, "beta": 0.9}}),
    "fedadagrad": ("fedadagrad", {"fedadagrad": {"lr": SERVER_RATE}}),
    "fedadam": ("fedadam", {"fedadam": {"lr": SERVER_RATE}}),
    "fedyogi": ("fedyogi", {"fedyogi": {"lr": SERVER_RATE}}),
    "mmic": ("mmic", {"fedadagrad_mpo": {"lr": SERVER_RATE}}),
}
#: MMiC with clusters so few that each has two devices in a round of six, and without its parts: name -> slots.
VARIANTS: dict[str, dict[str, Any]] = {
    "3 clusters": {},
    "3 clusters, no substitution": {"repair": "none"},
    "3 clusters, random devices": {"select": {"random": {"share": 0.2}}},
    "3 clusters, neither": {"repair": "none", "select": {"random": {"share": 0.2}}},
}
#: Forty rounds, the first third of them with devices drawn at random, as the paper's 100 of 300: name -> slots of MMiC.
LONG: dict[str, dict[str, Any]] = {
    "40 rounds": {},
    "40 rounds, 3 clusters": {"cluster": {"lsh": {"clusters": 3}}},
}
LONG_ROUNDS = (14, 13, 13)
LONG_WARMUP = 13
NORMS = ("layer", "batch")
#: norm asked for -> its name on the page; "": as the recipe has it.
NAMES = {"": "recipe's own", "batch": "batch", "layer": "layer"}
SEEDS = (1, 2, 3)


class Row(msgspec.Struct, frozen=True):
    """One run. Accuracies in [0, 1]; ``by_round``: as evaluated after each round."""

    task: str
    method: str
    norm: str
    seed: int
    evaluated: float
    recalibrated: float
    by_round: tuple[float, ...] = ()
    repaired: int = 0
    incomplete: int = 0
    seconds: float = 0.0
    variant: str = ""

    @property
    def cell(self) -> tuple[str, str, str, int, str]:
        """What the run was of."""
        return self.task, self.method, self.norm, self.seed, self.variant


def run_file(task: str, method: str, norm: str, seed: int, variant: str = "") -> dict[str, Any]:
    """The run file of one cell. ``norm`` "": as the recipe has it; ``variant``: a key of ``VARIANTS``."""
    grid = Grid()
    rate, lr, plain = TASKS[task]
    name, step = METHODS[method]
    cell = Cell(task, name, "pretrained", rate, seed)
    for encoder in grid.encoders(cell):
        if not encoder.path.exists():
            make(
                {encoder.source: encoder.options},
                {encoder.modality: encoder.config},
                encoder.path,
                share=SHARE,
                epochs=EPOCHS,
            )
    values = grid.run_file(cell, Settings(plain if method == "fedavg" else lr))
    if step:
        values["slots"]["optimise"] = step
    if method == "mmic":
        values["slots"]["cluster"] = {"lsh": {"clusters": CLUSTERS}}
    if variant in LONG:
        values["training"]["rounds"] = list(LONG_ROUNDS)
        if method == "mmic":
            values["slots"]["select"]["banzhaf"]["warmup_rounds"] = LONG_WARMUP
            values["slots"] |= LONG[variant]
    elif variant:
        values["slots"] |= {"cluster": {"lsh": {"clusters": 3}}, **VARIANTS[variant]}
    if norm:
        values["model"]["head"]["norm"] = norm
    return {**values, "evaluate": "round"}


def measured(task: str, method: str, norm: str, seed: int, variant: str = "") -> Row:
    """One run from the data to the recalibrated copy."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgefl-adaptive-") as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(yaml.safe_dump(run_file(task, method, norm, seed, variant)))
        config, recipe = load_run(str(folder / "run.yaml"))
        prepared = shares_of(config, [device.name for device in config.fleet], folder / "shares")
        plan = compile_run(
            config, recipe, run="run", shapes=prepared.signature, label_names=prepared.label_names, test=prepared.test
        )
        paths = {share.device: Path(share.path) for share in prepared.shares}
        report = run_fleet(folder, plan, paths, seconds=3600)
        store, state = state_of(folder, "run")
        parts = {part: decode_part(store.read(state[part].id)) for part in plan.stages[-1].present}
        test = load_test_set(prepared.test, plan.model)
        copy = recalibrated(plan, parts, [Dataset.load_npz(path) for path in paths.values()])
        again = accuracy(plan, copy, test)
    curve = by_round(report, plan)
    done, asked = repairs(report)
    return Row(task, method, norm, seed, curve[-1], again, curve, done, asked, time.monotonic() - started, variant)


def accuracy(plan: RunPlan, parts: Mapping[str, Any], test: Dataset) -> float:
    """With all modalities."""
    rows = evaluate(plan.model, plan.stages[-1], parts, test, Criteria())
    return next(r.value for r in rows if r.metric == "accuracy" and r.available == tuple(plan.model.encoders))


def by_round(report: RunReport, plan: RunPlan) -> tuple[float, ...]:
    """Accuracy with all modalities after each round, as the run reports it."""
    every = tuple(plan.model.encoders)
    rows = [r for r in report.evaluations if r.metric == "accuracy" and r.available == every and r.missing == "none"]
    return tuple(r.value for r in sorted(rows, key=lambda row: (row.stage, row.round)))


def repairs(report: RunReport) -> tuple[int, int]:
    """(substitutions made, incomplete updates that asked for one)."""
    told = [one for row in report.rounds for one in row.record.get("repaired", {}).values()]
    return sum("donors" in one for one in told), len(told)


def recalibrated(plan: RunPlan, parts: Mapping[str, Any], shares: Sequence[Dataset]) -> dict[str, Any]:
    """The parts with statistics of ``SAMPLES`` training samples a share and modality; weights untouched."""
    model = build(plan.model, plan.stages[-1].present)
    for name in plan.stages[-1].present:
        load_part(model, name, parts[name])
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    if not norms:
        return dict(parts)
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    with torch.no_grad():
        for share in shares:
            for modality in plan.model.encoders:
                _pass(model, modality, share, plan.stages[-1].depth)
    return {name: part_tensors(model, name) for name in plan.stages[-1].present}


def _pass(model: StagedModel, modality: str, share: Dataset, depth: int) -> None:
    rows = np.flatnonzero(share.has(modality))
    rows = np.random.default_rng(0).permutation(rows)[:SAMPLES]
    if len(rows) > 1:
        model.project(modality, model.encode(modality, input_of(share, modality, rows, torch.device("cpu")), depth))


_READING = """\
Percent; mean ± deviation over the seeds; *last four*: mean of the last four rounds as evaluated. *Apart*:
evaluated minus recalibrated, the largest over the seeds. *Before* is 8515bcb, which had batch norm in every
head and evaluated with the devices' statistics. *Recipe's own* is layer norm, but for FedAvg, whose weights are
the devices' mean: batch norm. *Batch*: batch norm, with statistics taken at the weights that are evaluated.
*Lent*: poverty layers replaced, of those that devices named."""


def page(rows: Sequence[Row], before: Sequence[Row]) -> str:
    """Markdown: a table a task, means and deviations over the seeds. ``before``: rows of the code before."""
    lines = ["# Adaptive server steps", "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += _READING.splitlines()
    for task, (rate, lr, plain) in TASKS.items():
        lines += ["", f"## {task}, {rate:.0%} missing, local rate {lr:g} (FedAvg {plain:g})", ""]
        lines += ["| method | heads | evaluated | recalibrated | apart | last four | lent | seeds |", "|---" * 8 + "|"]
        for method in METHODS:
            for label, found in (("before", before), *((NAMES[norm], rows) for norm in NAMES)):
                norm = "" if label == "before" else next(n for n, name in NAMES.items() if name == label)
                if own := [row for row in found if row.cell[:3] == (task, method, norm) and not row.variant]:
                    lines.append(_line(method, label, own))
    lines += ["", "## MMiC's parts beside FedAdagrad, har, 50% missing, local rate 0.004", "", _PARTS, ""]
    lines += ["| MMiC | heads | evaluated | minus FedAdagrad | last four minus FedAdagrad | seeds |", "|---" * 6 + "|"]
    for variant in ("", *VARIANTS):
        for norm in NORMS:
            lines += _beside(rows, variant, norm)
    lines += ["", "## Forty rounds, har, 50% missing, local rate 0.004, layer norm", "", _LONG, ""]
    lines += [
        "| MMiC | FedAdagrad, 14 to 40 | MMiC, 14 to 40 | minus FedAdagrad | last round minus | seeds |",
        "|---" * 6 + "|",
    ]
    lines += [line for variant in LONG for line in _long(rows, variant)]
    return "\n".join(lines) + "\n"


_PARTS = """\
Of 8 clusters a round of six devices reaches three; with 3, as the recipe has it, every cluster has two devices in every
round, as the paper's section 4.2 draws a subset of each cluster. Differences are paired by seed:
mean and 95 % interval (Student). *layer*: the recipes' own heads."""


_LONG = """\
The recipes' own heads. The first 13 rounds draw devices at random, a third as in the paper; compared is the mean of
rounds 14 to 40, in which MMiC selects: momentum 0.9 at a constant rate lets the accuracy of both methods swing by two
points over ten rounds. Differences are paired by seed: mean and 95 % interval (Student)."""


def _long(rows: Sequence[Row], variant: str) -> list[str]:
    """MMiC against FedAdagrad over forty rounds, as a line of the table; none without runs."""
    mean = {
        method: {
            row.seed: (statistics.mean(row.by_round[LONG_WARMUP:]), row.by_round[-1])
            for row in rows
            if (row.task, row.method, row.variant) == ("har", method, name)
        }
        for method, name in (("fedadagrad", "40 rounds"), ("mmic", variant))
    }
    seeds = sorted(mean["mmic"].keys() & mean["fedadagrad"].keys())
    if len(seeds) < 2:
        return []
    figures = [_spread([mean[method][seed][0] for seed in seeds]) for method in mean]
    figures += [_interval([mean["mmic"][s][at] - mean["fedadagrad"][s][at] for s in seeds]) for at in (0, 1)]
    clusters = "3 clusters, as the recipe" if LONG[variant] else "8 clusters"
    return [f"| {clusters} | {' | '.join(figures)} | {len(seeds)} |"]


def _beside(rows: Sequence[Row], variant: str, norm: str) -> list[str]:
    """MMiC in a variant against FedAdagrad with the same heads and seeds, as a line of the table; none without runs."""
    asked = {norm} | ({""} if norm == "layer" else set())
    har = [row for row in rows if row.task == "har" and row.norm in asked]
    reference = {row.seed: row for row in har if (row.method, row.variant) == ("fedadagrad", "")}
    own = {row.seed: row for row in har if (row.method, row.variant) == ("mmic", variant) and row.seed in reference}
    if not own:
        return []
    last = [row.evaluated - reference[seed].evaluated for seed, row in own.items()]
    four = [
        statistics.mean(row.by_round[-4:]) - statistics.mean(reference[seed].by_round[-4:]) for seed, row in own.items()
    ]
    found = f"{_spread([row.evaluated for row in own.values()])} | {_interval(last)} | {_interval(four)}"
    return [f"| {variant or '8 clusters'} | {norm} | {found} | {len(own)} |"]


def _interval(values: Sequence[float]) -> str:
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * statistics.mean(values):+.1f} ± {100 * half:.1f}"


def _line(method: str, label: str, rows: Sequence[Row]) -> str:
    apart = max((row.evaluated - row.recalibrated for row in rows), key=abs)
    lent = f"{sum(r.repaired for r in rows)} of {sum(r.incomplete for r in rows)}" if method == "mmic" else ""
    late = _spread([statistics.mean(r.by_round[-4:]) for r in rows])
    figures = [
        _spread([r.evaluated for r in rows]),
        _spread([r.recalibrated for r in rows]),
        f"{100 * apart:+.1f}",
        late,
    ]
    return f"| {method} | {label} | " + " | ".join(figures) + f" | {lent} | {len(rows)} |"


def _spread(values: Sequence[float]) -> str:
    deviation = 100 * statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {deviation:.1f}"


def kept(path: Path | None) -> list[Row]:
    """The rows in a file, one JSON object a line; none where there is no file."""
    return [] if path is None else rows_in(path, Row)


def main() -> None:
    """Run one cell, what a file lacks of the grid, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, nargs="+")
    parser.add_argument("--method", choices=METHODS, nargs="+")
    parser.add_argument("--norm", choices=("", *NORMS), nargs="+", help="'': as the recipe has it")
    parser.add_argument("--seed", type=int, nargs="+")
    parser.add_argument("--variant", choices=("", *VARIANTS, *LONG), nargs="+", help="of MMiC on har")
    parser.add_argument("--jsonl", type=Path, help="where rows are kept: what it holds is not run again")
    parser.add_argument("--page", type=Path, help="write the page of the rows in --jsonl and end")
    parser.add_argument("--before", type=Path, help="for the page: rows that the code before the mending made")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = kept(given.jsonl)
    if given.page:
        says = given.jsonl.parent / "says.md" if given.jsonl else Path()  # what the figures say, in a person's words
        given.page.write_text(page(rows, kept(given.before)) + ("\n" + says.read_text() if says.is_file() else ""))
        return
    asked = [
        (task, method, norm, seed, variant)
        for seed in given.seed or SEEDS
        for task in given.task or TASKS
        for method in given.method or METHODS
        for norm in given.norm or NORMS
        for variant in given.variant or ("",)
    ]
    for cell in asked:
        if cell in {row.cell for row in rows}:
            continue
        row = measured(*cell)
        rows.append(row)
        line = msgspec.json.encode(row)
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.flush()
        if given.jsonl:
            with given.jsonl.open("ab") as file:
                file.write(line + b"\n")


if __name__ == "__main__":
    main()
