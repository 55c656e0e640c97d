"""The page of the finished runs: what each paper claims and whether it holds, then every figure, and the plots."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.table import measures
from benchmarks.accuracy.table.claims import Comparison, Finding, claims, judge
from benchmarks.accuracy.table.collect import Outcome, Results
from benchmarks.accuracy.table.grid import Grid
from benchmarks.accuracy.table.plots import draw

_INTRODUCTION = """# All systems on real data

`{command}` on {machine}, {date}: {count} runs of the table and {tried} of tuning. Each run is a fleet: a broker,
a coordinator, and an agent for each device, which take turns in a shared trainer (`edgefl run --trainers`).

Every method trains encoders of the same size for the same number of rounds, with the same share of the devices in a
round; what a method adds (joint attention, small networks) or leaves away (PmcmFL's heads) is its own. Its learning
rate and own setting were chosen by {budget} runs for each method and task (PmcmFL: one more; 50 % missing,
pretrained start, a seed of its own): two learning rates, then the method's own alternative, else a third rate
beyond the better one. What counted was the models' accuracy (retrieval: RSum) on samples that the devices set apart
(15 %), never the test set; runs from random weights take the same settings, variants of a method take that
method's. Small encoders (3 blocks, width 32), so that all of it can be run again on a small machine: the accuracies
are not those of the papers. Figures are means ± standard deviations over seeds. Claims are judged on the pretrained
start: a comparison is decided where the interval of 95 % of its differences, paired by seed, leaves out the bound
that is claimed, else *undecided*; a claim is *yes* when all its comparisons are, *no* when one of them is. The lines
are kept in `systems/runs.jsonl`.

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
* FedMVP weighs devices by their outputs on one test sample a class, which its test then leaves out.
* *pretrained*: encoders that were trained on one modality alone, on a part of the training samples
  (`benchmarks/accuracy/pretrain.py`); else random weights, at 50 % missing only. AproMFL and FedMVP never train their
  encoders: from random weights they are far behind on the emoji, less so on the others.
* ~~Struck out~~: made before a fault was mended that touches the figure; the reason stands with the claim. Such rows
  are in no plot, and what they were compared for is not judged until they are run again.
"""


def write(grid: Grid, runs: Results, tried: Results, path: Path, command: str) -> None:
    """The page at ``path``, its plots beside it."""
    struck = grid.struck()
    standing = runs.only(lambda row: row.method not in struck)
    plots = draw(grid, standing, path.parent / path.stem)
    lines = [_introduction(grid, runs, tried, command), "## What the papers claim", ""]
    lines += _claims(runs, grid.values.get("notes", {}), struck)
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


def _claims(runs: Results, notes: Mapping[str, str], struck: Mapping[str, str]) -> list[str]:
    def rows(task: str, method: str, rate: float) -> Sequence[Outcome]:
        wanted = (task, method, rate, "pretrained")
        return [row for row in runs.rows if (row.task, row.method, row.rate, row.start) == wanted and not row.error]

    found = [(claim, judge(claim, rows)) for claim in claims()]
    lines = ["| system | claim | here |", "|---|---|---|"]
    lines += [f"| {claim.system} | {claim.text} | {_verdict(findings, struck)} |" for claim, findings in found]
    for claim, findings in found:
        gone = _reasons(findings, struck)
        lines += ["", f"**{claim.system}: {claim.text}.** {_verdict(findings, struck)}"]
        lines += ["", *gone] if gone else _evidence(findings)
        lines += ["", notes[claim.key].strip()] if claim.key in notes and not gone else []
    return [*lines, ""]


def _verdict(findings: Sequence[Finding], struck: Mapping[str, str]) -> str:
    return "struck out: to be run again" if _reasons(findings, struck) else verdict(findings)


def _reasons(findings: Sequence[Finding], struck: Mapping[str, str]) -> list[str]:
    """Why a claim's runs no longer stand; none where they do."""
    methods = [name for one in findings for name in (one.comparison.left, one.comparison.right)]
    return list(dict.fromkeys(struck[name] for name in methods if name in struck))


def verdict(findings: Sequence[Finding]) -> str:
    """yes when every comparison is, no when one is, else undecided; and how many are what."""
    known = [one.verdict for one in findings if one.verdict]
    if not known:
        return "not run"
    whole = "" if len(known) == len(findings) else f" (of {len(findings)}, the others are not run)"
    if set(known) == {"yes"}:
        return f"yes{whole}"
    counts = [f"{known.count(one)} {one}" for one in ("yes", "no", "undecided") if one in known]
    return f"{'no' if 'no' in known else 'undecided'}: of {len(known)} comparisons {', '.join(counts)}{whole}"


def _evidence(findings: Sequence[Finding]) -> list[str]:
    lines = [
        "",
        "| task | missing | compared | | against | by | [95 %] | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in findings:
        if one.left is None or one.right is None or one.gain is None:
            continue
        asked = one.comparison
        left, right = f"{asked.left} {one.left.text()}", f"{asked.right} {one.right.text()}"
        lines.append(
            f"| {asked.task} | {asked.rate:.0%} | {asked.what} | {left} | {right} | "
            f"{_difference(one)} | {_ends(one.gain, asked)} | {one.verdict} |"
        )
    return lines if len(lines) > 3 else []


def _ends(gain: measures.Interval, asked: Comparison) -> str:
    """The interval of left minus right, and of how many seeds."""
    if gain.seeds == 1:
        return "one seed"
    ends = sorted((-gain.low, -gain.high) if asked.lower else (gain.low + asked.margin, gain.high + asked.margin))
    return f"{ends[0]:+.1f} to {ends[1]:+.1f}, {gain.seeds} seeds"


def _difference(one: Finding) -> str:
    if one.left is None or one.right is None or not one.right.mean:
        return ""
    if one.comparison.lower and not one.comparison.falling:
        return f"÷ {one.right.mean / one.left.mean:.1f}"
    return f"{one.left.mean - one.right.mean:+.1f}"


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
    struck = method in grid.struck()
    cells = [f"{method} ({says})" if says else method, start]
    for rate in rates:
        at = [row for row in rows if row.rate == rate]
        cells += [_text(measures.summary(at, measure)) for _, measure in shown]
    highest = [row for row in rows if row.rate == rates[-1]] or list(rows)
    cells.append(str(highest[0].rounds))
    cells += [_text(measures.summary(highest, measure), spread=False) for _, measure in _COST]
    cells.append(str(len({row.seed for row in rows})))
    return [f"~~{cell}~~" if struck else cell for cell in cells]


def _text(found: measures.Summary | None, *, spread: bool = True) -> str:
    if found is None:
        return "–"
    return found.text() if spread else f"{found.mean:.1f}"


def _failures(runs: Results) -> list[str]:
    failed = [row for row in runs.rows if row.error and not runs.of(row.cell)]
    if not failed:
        return []
    return ["## Runs that failed", "", *(f"* `{row.cell.key}`: {row.error}" for row in failed)]
