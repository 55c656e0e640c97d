"""The page of the finished runs: every figure, task by task, and the plots."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.table import measures
from benchmarks.accuracy.table.collect import Outcome, Results
from benchmarks.accuracy.table.grid import Grid
from benchmarks.accuracy.table.plots import draw

_INTRODUCTION = """# Systems in one regime

One set of tasks, rounds and shares for every method. What the papers claim is tested in the regime of each:
[systems](systems.md).

`{command}` on {machine}, {date}: {count} runs of the table and {tried} of tuning. Each run is a fleet: a broker,
a coordinator, and an agent for each device, which take turns in a shared trainer (`edgefl run --trainers`).

Every method trains encoders of the same size for the same number of rounds, with the same share of the devices in a
round; what a method adds (joint attention, small networks) or leaves away (PmcmFL's heads) is its own. Its learning
rate and own setting were chosen by {budget} runs for each method and task (PmcmFL: one more; 50 % missing,
pretrained start, a seed of its own): two learning rates, then the method's own alternative, else a third rate
beyond the better one. What counted was the models' accuracy (retrieval: RSum) on samples that the devices set apart
(15 %), never the test set; runs from random weights take the same settings, variants of a method take that
method's. Small encoders (3 blocks, width 32), so that all of it can be run again on a small machine: the accuracies
are not those of the papers. Figures are means ± standard deviations over seeds. The lines are
kept in `one_regime/runs.jsonl`.

* *all*: test samples with all modalities. *as trained*: expected on test samples that have what the fleet's training
  samples have. *one*: the mean over the modalities of the accuracy with that one alone, the other filled in as the
  method does; methods that train with noise or with generated samples have only zeros, or an absent token, then.
* *own*: each device's model after its last training, on samples that it set apart; mean over devices. On har_hapt these
  windows overlap by half with windows that were trained on: *own* is flattered there. The same
  samples are set apart for every method, whatever it leaves out or completes.
* *payload*: tensors sent and received by all devices in the whole run. *step memory*: what training adds to the idle
  trainer, median over devices and rounds of the stage that takes most.
* *GFLOP* and *step memory* were measured before devices stored what frozen encoder parts make of their samples
  (docs/decisions/0012): layer-wise methods, AproMFL and FedMVP take less now, for the same payload.
* *pretrained*: encoders that were trained on one modality alone, on a part of the training samples
  (`benchmarks/accuracy/pretrain.py`); else random weights, at 50 % missing only. AproMFL and FedMVP never train their
  encoders: from random weights they are far behind on the emoji, less so on the others.
"""


def write(grid: Grid, runs: Results, tried: Results, path: Path, command: str) -> None:
    """The page at ``path``, its plots beside it."""
    plots = draw(grid, runs, path.parent / path.stem)
    lines = [_introduction(grid, runs, tried, command)]
    for task, values in grid.tasks.items():
        rows = [row for row in runs.rows if row.task == task and not row.error]
        if rows:
            lines += [f"## {values['title']}", "", values["says"], "", *_table(grid, task, rows), ""]
            lines += [f"![{text}]({path.stem}/{name})" for name, text in plots.get(task, [])] + [""]
    lines += _failures(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _introduction(grid: Grid, runs: Results, tried: Results, command: str) -> str:
    machine = f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}, Python {platform.python_version()})"
    return _INTRODUCTION.format(
        command=command,
        machine=machine,
        date=time.strftime("%Y-%m"),
        count=sum(not row.error for row in runs.rows),
        tried=len(tried.rows),
        budget=grid.values["tuning"]["runs"],
    )


Columns = tuple[tuple[str, measures.Measure], ...]
_CLASSIFICATION: Columns = (
    ("all", measures.complete),
    ("as trained", measures.as_trained),
    ("one", measures.alone),
    ("own", measures.own_accuracy),
)
_RETRIEVAL: Columns = (
    ("RSum, known", measures.known_rsum),
    ("own RSum", measures.own_rsum),
    ("RSum, unseen", measures.rsum),
)
_MIXED: Columns = (
    ("own accuracy", measures.own_accuracy),
    ("own recall at 1", measures.own_recall),
)
_COST: Columns = (
    ("payload, MiB", measures.payload_mib),
    ("GFLOP", measures.gflop),
    ("step memory, MiB", measures.step_mib),
)


def _table(grid: Grid, task: str, rows: Sequence[Outcome]) -> list[str]:
    kind = grid.tasks[task].get("metric", "accuracy")
    shown = {"accuracy": _CLASSIFICATION, "rsum": _RETRIEVAL, "mixed": _MIXED}[kind]
    rates = sorted({row.rate for row in rows})
    heads = ["method", "start"]
    heads += [f"{name}, {rate:.0%} missing" for rate in rates for name, _ in shown]
    heads += ["rounds", *(name for name, _ in _COST), "seeds"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for start in ("scratch", "pretrained"):
        for method in grid.methods:
            own = [row for row in rows if (row.method, row.start) == (method, start)]
            if own:
                lines.append("| " + " | ".join(_line(grid, method, start, own, shown, rates)) + " |")
    return lines


def _line(
    grid: Grid,
    method: str,
    start: str,
    rows: Sequence[Outcome],
    shown: Columns,
    rates: Sequence[float],
) -> list[str]:
    says = grid.methods[method].get("says", "")
    cells = [f"{method} ({says})" if says else method, start]
    for rate in rates:
        at = [row for row in rows if row.rate == rate]
        cells += [_text(measures.summary(at, measure)) for _, measure in shown]
    highest = [row for row in rows if row.rate == rates[-1]] or list(rows)
    cells.append(str(highest[0].rounds))
    cells += [_text(measures.summary(highest, measure), spread=False) for _, measure in _COST]
    cells.append(str(len({row.seed for row in rows})))
    return cells


def _text(found: measures.Summary | None, *, spread: bool = True) -> str:
    if found is None:
        return "–"
    return found.text() if spread else f"{found.mean:.1f}"


def _failures(runs: Results) -> list[str]:
    failed = [row for row in runs.rows if row.error and not runs.of(row.cell)]
    if not failed:
        return []
    return ["## Runs that failed", "", *(f"* `{row.cell.key}`: {row.error}" for row in failed)]
