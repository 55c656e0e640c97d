"""The page of the frontier: a sentence, accuracy against cumulated cost, then what each schedule took to get where."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.accuracy.claims.outcome import Outcome
from benchmarks.accuracy.claims.study import Study
from benchmarks.cost.frontier.figures import MARGINS, REFERENCE, Row, Spent, rows_of, within
from benchmarks.cost.frontier.plots import frontier

COMMAND = "python -m benchmarks.cost.frontier"
#: What is asked of a schedule beside accuracy: how many times less of what it takes than end-to-end training.
ASKED = {
    "half the FLOPs": Spent(mib=0.0, gflop=2.0, seconds=0.0),
    "half the FLOPs and a third of the bytes": Spent(mib=3.0, gflop=2.0, seconds=0.0),
}
_INTRODUCTION = """# What a schedule costs, and where it gets

{sentence}

![Last accuracy against the bytes and FLOPs of the whole run, task by task]({folder}/frontier.svg)

{summary}

A dot is the mean over seeds of a run's last model, a line the way there. Every run's rates fall by a cosine to nearly
0 over its own rounds (`training.lr_fall: cosine`), end-to-end training's too; a shorter run is a run of its own, not
a longer one broken off. `end-to-end 18` and `12` are the plain alternative: the same training, fewer rounds. Freeze
k+n: k rounds end-to-end, then n of the last of three stages; 6+6+24 freezes one stage after another. Heads: fusion
and classifier alone. The most accurate of a task is picked afterwards, of up to thirteen: its interval leaves that out.

`{command}` on {machine}, {date}: {runs} runs and {tried} trials of tuning, {hours:.1f} hours of training steps. Every
kind of schedule is tuned by the same {settings} rates, each for a third of its rounds, on training samples that are
held out; one with other rounds has its kind's rate. Bytes are tensors down and up, FLOPs as counted; all devices, whole
runs, filling of stored prefixes included. No packing: it divides the bytes of all
alike ([savings.md](savings.md)). Encoders are small (three blocks, 32 or 64 wide).
"""
_HEAD = (
    "| schedule | last accuracy, % | against end-to-end 36, points | within 0.5 | within 2 "
    "| MiB (÷) | GFLOP (÷) | there −0.5: MiB, GFLOP | there −2: MiB, GFLOP | seeds |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


class Shown(NamedTuple):
    """Runs that stand, how many trials of tuning there were; task -> step memory in MiB by what is trained."""

    outcomes: Sequence[Outcome]
    tried: int
    memory: Mapping[str, Mapping[str, float]] = {}


def write(study: Study, shown: Shown, path: Path) -> None:
    """The page at ``path``, its plot beside it."""
    outcomes = shown.outcomes
    folder = path.parent / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    by_task = {task: [one for one in outcomes if one.task == task] for task in study.tasks}
    tables = {task: rows for task, runs in by_task.items() if (rows := rows_of(runs, list(study.methods)))}
    titles = {task: study.tasks[task]["title"] for task in tables}
    frontier({titles[task]: (by_task[task], rows) for task, rows in tables.items()}, list(study.methods), folder)
    lines = [
        _INTRODUCTION.format(
            sentence=sentence(tables),
            summary="\n".join(summary({titles[task]: rows for task, rows in tables.items()})),
            folder=path.stem,
            command=COMMAND,
            machine=f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()})",
            date=time.strftime("%Y-%m"),
            settings=study.values["tuning"]["settings"],
            runs=len(outcomes),
            tried=shown.tried,
            hours=sum(one.cpu_s for one in outcomes) / 3600,
        )
    ]
    for task, rows in tables.items():
        told = _rates(by_task[task], study.tasks[task]["rates"])
        lines += [f"## {titles[task]}\n", study.tasks[task]["says"], "", told, "", _HEAD]
        lines += [_line(row) for row in rows]
        lines += ["", _TOLD, ""]
        lines += [_memory(shown.memory[task]), ""] if task in shown.memory else []
    lines += _lacking(study, tables)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


_TOLD = (
    "*Against*: mean difference over paired seeds and its interval of 95 % (Student's t); *within* is *undecided* "
    "where the interval holds the margin. *There*: the median cost at the first evaluation whose trailing mean of "
    "three is no more than the margin below end-to-end 36's last accuracy of the same seed; in how many runs it came."
)


def best(rows: Sequence[Row], least: Spent) -> Row | None:
    """Of what takes so many times less than end-to-end training: shown within half a point, then the most accurate."""
    fit = [row for row in rows if row.less.mib >= least.mib and row.less.gflop >= least.gflop]
    return max(fit, key=lambda row: (within(row.difference, MARGINS[0]) == "yes", row.difference.mean), default=None)


def sentence(tables: Mapping[str, Sequence[Row]]) -> str:
    """In how many tasks a schedule that saves what is asked is as accurate, by its interval and by its mean."""
    told = []
    for name, least in ASKED.items():
        found = [row for rows in tables.values() if (row := best(rows, least)) is not None]
        shown = sum(within(row.difference, MARGINS[0]) == "yes" for row in found)
        mean = sum(row.difference.mean >= -MARGINS[0] for row in found)
        told.append(f"with {name} in {mean} by the mean and {shown} by the interval")
    tasks = "1 task" if len(tables) == 1 else f"{len(tables)} tasks"
    return f"**Of {tasks}, a schedule is within half a point of end-to-end training {'; '.join(told)}.**"


def summary(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """A line for each task (title -> rows): the most accurate schedule that saves what is asked."""
    lines = ["| task | " + " | ".join(f"{name}: the most accurate | points" for name in ASKED) + " |"]
    lines.append("|---" * (1 + 2 * len(ASKED)) + "|")
    for title, rows in tables.items():
        cells = []
        for least in ASKED.values():
            row = best(rows, least)
            cells += ["none", ""] if row is None else [_costs(row), _points(row).replace(" points", "")]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def _costs(row: Row) -> str:
    return f"{row.method}: FLOPs ÷{row.less.gflop:.1f}, bytes ÷{row.less.mib:.1f}"


def _points(row: Row) -> str:
    mean, low, high, seeds = row.difference
    return f"{mean:+.1f} points" + (f" ({low:+.1f} to {high:+.1f})" if seeds > 1 else "")


def _rates(runs: Sequence[Outcome], tried: Sequence[float]) -> str:
    chosen = {one.method: one.settings["lr"] for one in runs}
    told = ", ".join(f"{method} {lr:g}" for method, lr in chosen.items())
    ends = {f"{lr:g}" for lr in chosen.values() if lr in {min(tried), max(tried)}}
    return f"Rates chosen: {told}." + (f" At the end of what was tried: {', '.join(sorted(ends))}." if ends else "")


def _lacking(study: Study, tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """What the study names and nobody has run to its end yet."""
    found = []
    for task, values in study.tasks.items():
        every = {name for name, method in study.methods.items() if task in method.get("tasks", study.tasks)}
        lacking = every - {row.method for row in tables.get(task, ())}
        if lacking:
            which = "everything" if lacking == every else ", ".join(sorted(lacking))
            found.append(f"* {values['title']}: {which}")
    return ["## Not run yet\n", *found, ""] if found else []


def _memory(peaks: Mapping[str, float]) -> str:
    told = "; ".join(f"{what}: {mib:.2f}" for what, mib in peaks.items())
    return f"Step memory, MiB of tensors in a batch that has everything (predicted on shapes): {told}."


def _line(row: Row) -> str:
    seeds = row.difference.seeds
    reference = row.method == REFERENCE
    against = "" if reference else _points(row).replace(" points", "")
    kept = ["" if reference else within(row.difference, margin) for margin in MARGINS]
    costs = [
        f"{value:,.{digits}f}" + ("" if reference else f" (÷{less:.1f})")
        for value, less, digits in zip(row.total[:2], row.less[:2], (0, 1), strict=True)
    ]
    there = [_there(row, margin, seeds) for margin in MARGINS]
    return "| " + " | ".join([row.method, row.last.text(), against, *kept, *costs, *there, str(seeds)]) + " |"


def _there(row: Row, margin: float, seeds: int) -> str:
    at = row.reached[margin]
    if at is None:
        return "never"
    share = "" if row.reaching[margin] == seeds else f" ({row.reaching[margin]} of {seeds})"
    return f"{at.mib:,.0f}, {at.gflop:,.1f}{share}"
