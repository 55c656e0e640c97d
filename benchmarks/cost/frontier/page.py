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
from benchmarks.cost.frontier.figures import MARGINS, REFERENCE, Row, rows_of, within
from benchmarks.cost.frontier.plots import frontier
from edgefl.pricing.round_price import REMAINDER_MOST

COMMAND = "python -m benchmarks.cost.frontier"


class Least(NamedTuple):
    """How many times less than end-to-end training a schedule has to take; ``lighter``: less step memory, too."""

    gflop: float
    mib: float = 0.0
    lighter: bool = False


#: What is asked of a schedule beside accuracy.
ASKED = {
    "half the FLOPs": Least(2.0),
    "half the FLOPs, a third of the bytes and less step memory": Least(2.0, 3.0, lighter=True),
}
_INTRODUCTION = """# What a schedule costs, and where it gets

{sentence}

![Last accuracy against the bytes and FLOPs of the whole run, task by task]({folder}/frontier.svg)

{summary}

A dot is the mean over seeds of a run's last model, a line the way there. Every run's rates fall by a cosine to nearly
0 over its own rounds (`training.lr_fall: cosine`), end-to-end training's too; a shorter run is a run of its own, not
a longer one broken off. `end-to-end 18` and `12` are the plain alternative: the same training, fewer rounds. Freeze
k+n: k rounds end-to-end, then n of the last of three stages; 6+6+24 freezes one stage after another. Heads: fusion
and classifier alone. ×n: n passes over a device's samples a round, in place of one; layer-wise ×n trains the embeddings
in its first stage wherever they come from. The most accurate of a task is picked afterwards, of up to {methods}, and
the schedules with several passes were made up after a look at a dozen of them with seeds 1 and 2: the intervals leave
both out.

`{command}` on {machine}, {date}: {runs} runs and {tried} trials of tuning, {hours:.1f} hours of training steps. Every
kind of schedule is tuned by the same {settings} rates on training samples that are held out, each for a third of its
rounds, the best {finals} for all; one with other rounds has its kind's rate. Bytes are tensors down and up, FLOPs as
counted; all devices, whole runs, filling of stored prefixes included. Step memory is predicted, of a run's dearest
stage, up to {libraries:.1f} MiB of it what libraries take for any step.
{measured}
No packing: it divides the bytes of all alike ([savings.md](savings.md)). Encoders are small (three blocks, 32 or 64
wide).
"""
_HEAD = (
    "| schedule | last accuracy, % | against end-to-end 36, points | within 0.5 | within 2 "
    "| MiB (÷) | GFLOP (÷) | step memory, MiB (÷) | there −0.5: MiB, GFLOP | there −2: MiB, GFLOP | seeds |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


class Shown(NamedTuple):
    """Runs that stand, how many trials of tuning there were, and what fleets measured of step memory, in words."""

    outcomes: Sequence[Outcome]
    tried: int
    measured: str


def write(study: Study, shown: Shown, path: Path) -> None:
    """The page at ``path``, its plot beside it."""
    outcomes = shown.outcomes
    folder = path.parent / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    by_task = {task: [one for one in outcomes if one.task == task] for task in study.tasks}
    tables = {task: rows for task, runs in by_task.items() if (rows := rows_of(runs, list(study.methods)))}
    titles = {task: study.tasks[task]["title"] for task in tables}
    kinds = {name: method["kind"] for name, method in study.methods.items()}
    frontier({titles[task]: (by_task[task], rows) for task, rows in tables.items()}, kinds, folder)
    lines = [
        _INTRODUCTION.format(
            sentence=sentence(tables),
            summary="\n".join(summary({titles[task]: rows for task, rows in tables.items()})),
            folder=path.stem,
            command=COMMAND,
            machine=f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()})",
            date=time.strftime("%Y-%m"),
            settings=study.values["tuning"]["settings"],
            finals=study.values["tuning"]["finals"],
            measured=shown.measured,
            libraries=REMAINDER_MOST / 2**20,
            methods=max((len(rows) - 1 for rows in tables.values()), default=0),
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
    lines += _lacking(study, tables)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


_TOLD = (
    "*Against*: mean difference over paired seeds and its interval of 95 % (Student's t); *within* is *undecided* "
    "where the interval holds the margin. *There*: the median cost at the first evaluation whose trailing mean of "
    "three is no more than the margin below end-to-end 36's last accuracy of the same seed; in how many runs it came."
)


def best(rows: Sequence[Row], least: Least) -> Row | None:
    """Of what takes so many times less than end-to-end training: shown within half a point, then the most accurate."""
    fit = [
        row
        for row in rows
        if row.less.mib >= least.mib and row.less.gflop >= least.gflop and (row.memory.less > 1 or not least.lighter)
    ]
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
    return f"{row.method}: FLOPs ÷{row.less.gflop:.1f}, bytes ÷{row.less.mib:.1f}, memory ÷{row.memory.less:.1f}"


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


def _line(row: Row) -> str:
    seeds = row.difference.seeds
    reference = row.method == REFERENCE
    against = "" if reference else _points(row).replace(" points", "")
    kept = ["" if reference else within(row.difference, margin) for margin in MARGINS]
    costs = [
        f"{value:,.{digits}f}" + ("" if reference else f" (÷{less:.1f})")
        for value, less, digits in zip(row.total[:2], row.less[:2], (0, 1), strict=True)
    ]
    costs.append(f"{row.memory.mib:.1f}" + ("" if reference else f" (÷{row.memory.less:.1f})"))
    there = [_there(row, margin, seeds) for margin in MARGINS]
    return "| " + " | ".join([row.method, row.last.text(), against, *kept, *costs, *there, str(seeds)]) + " |"


def _there(row: Row, margin: float, seeds: int) -> str:
    at = row.reached[margin]
    if at is None:
        return "never"
    share = "" if row.reaching[margin] == seeds else f" ({row.reaching[margin]} of {seeds})"
    return f"{at.mib:,.0f}, {at.gflop:,.1f}{share}"
