"""The page of benchmarks/accuracy/default.py: every training against the bar, paired by seed, and a picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.accuracy.default import STARTS, TRAININGS, Row
from benchmarks.accuracy.table.measures import Interval, interval
from benchmarks.accuracy.unseen import MODALITIES
from benchmarks.common.plotting import COLOURS, plot

BAR = ("zeros", "zero")
TESTS = ("known", "unseen")
#: (training, served by) of the picture and the first table; the others are variants.
MAIN = (("zeros", "prototype"), ("zeros, dropout", "zero"), ("contrast", "zero"), ("prototypes", "prototype"))
#: Stand-ins that are served -> how they are called on the page.
SERVED = {"zero": "zeros", "prototype": "prototypes"}


class Difference(NamedTuple):
    """Percentage points to the bar with one modality or all, paired by seed. ``each``: seed -> its own."""

    task: str
    test: str
    given: str
    points: Interval
    each: Mapping[int, float]

    @property
    def alone(self) -> bool:
        """Whether one modality is given."""
        return "+" not in self.given

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return self.points.mean

    def __str__(self) -> str:
        return in_words(self.points)


def in_words(points: Interval) -> str:
    """Mean and half the interval's width; whether all of it is on one side of the bar."""
    spread = "" if points.seeds == 1 else f" ± {points.high - points.mean:.1f}"
    told = " **worse**" if points.high < 0 else " **better**" if points.low > 0 else ""
    return f"{points.mean:+.1f}{spread}{told}"


def paired(rows: Sequence[Row], training: str, served: str, start: str) -> list[Difference]:
    """Every test and modality of each task that both trainings have seeds of."""
    by_cell = {row.cell: row.figures for row in rows}
    found = []
    for task, modalities in MODALITIES.items():
        pairs = {
            cell[3]: (by_cell[cell], by_cell[task, start, BAR[0], cell[3]])
            for cell in by_cell
            if cell[:3] == (task, start, training) and (task, start, BAR[0], cell[3]) in by_cell
        }
        for test in TESTS:
            for given in (*modalities, "+".join(sorted(modalities))):
                ours, bar = (f"{test}/{given}/{'none' if '+' in given else by}" for by in (served, BAR[1]))
                each = {seed: 100 * (one[ours] - other[bar]) for seed, (one, other) in pairs.items() if ours in one}
                if points := interval(list(each.values())):
                    found.append(Difference(task, test, given, points, each))
    return found


def averaged(found: Sequence[Difference]) -> Interval | None:
    """The mean of several differences seed by seed, of the seeds that all of them have; None: they share no seed."""
    if not found:
        return None
    shared = sorted(set[int].intersection(*(set(one.each) for one in found)))
    return interval([statistics.fmean(one.each[seed] for one in found) for seed in shared])


def compared(rows: Sequence[Row], start: str) -> dict[tuple[str, str], list[Difference]]:
    """(training, served by) -> its differences to the bar, which itself is left out."""
    every = {(name, by): paired(rows, name, by, start) for name in TRAININGS for by in SERVED}
    shown = {key: found for key, found in every.items() if any(one.alone for one in found)}
    return {key: found for key, found in shown.items() if key != BAR}


def table(rows: Sequence[Row], start: str, task: str) -> list[str]:
    """Markdown: the bar's accuracies, then each training's differences to them."""
    columns = [(test, given) for test in TESTS for given in (*MODALITIES[task], "+".join(sorted(MODALITIES[task])))]
    own = [row.figures for row in rows if row.cell[:3] == (task, start, BAR[0])]
    if not own:
        return []
    bar = [
        statistics.mean(100 * one[f"{test}/{given}/{'none' if '+' in given else BAR[1]}"] for one in own)
        for test, given in columns
    ]
    lines = [
        "| trained with | served by | " + " | ".join(f"{test}: {given}" for test, given in columns) + " | seeds |",
        "|---" * (len(columns) + 3) + "|",
        "| **zeros** | **zeros: the bar, %** | " + " | ".join(f"{value:.1f}" for value in bar) + f" | {len(own)} |",
    ]
    for (training, served), found in compared(rows, start).items():
        here = {(one.test, one.given): one for one in found if one.task == task}
        if here:
            cells = " | ".join(str(here[column]) if column in here else "" for column in columns)
            lines.append(f"| {training} | {SERVED[served]} | {cells} | {next(iter(here.values())).points.seeds} |")
    return lines


def summary(rows: Sequence[Row], keys: Container[tuple[str, str]]) -> list[str]:
    """Markdown: mean and lowest differences over all tasks. ``keys``: (training, served by)."""
    columns = ["trained with", "served by", "start", "one: known", "one: unseen", "all: known", "all: unseen"]
    columns += ["lowest of one", "below: mean, interval", "seeds"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for start in STARTS:
        for (training, served), found in compared(rows, start).items():
            if (training, served) not in keys:
                continue
            alone, whole = ([one for one in found if one.alone is wanted] for wanted in (True, False))
            means = [averaged([one for one in some if one.test == test]) for some in (alone, whole) for test in TESTS]
            cells = " | ".join(in_words(one) if one else "" for one in means)
            worst = min(alone, key=lambda one: one.mean)
            below = sum(one.mean < 0 for one in alone)
            decided = sum(one.points.high < 0 for one in alone)
            seeds = sorted({one.points.seeds for one in alone})
            lines.append(
                f"| {training} | {SERVED[served]} | {start} | {cells} | {worst.mean:+.1f}: "
                f"{worst.given}, {worst.test} | {below}, {decided} of {len(alone)} | {'-'.join(map(str, seeds))} |"
            )
    return lines


def picture(rows: Sequence[Row], path: Path) -> None:
    """MAIN by start. A small dot a task, modality and test; the average of each test with its interval.

    Filled where devices hold the group, hollow where none does.
    """
    every = [(key, start, found) for start in STARTS for key, found in compared(rows, start).items() if key in MAIN]
    with plot(path, "one modality alone: points of accuracy against zeros", "", height=1.4 + 0.45 * len(every)) as axes:
        for y, (_, _, found) in enumerate(reversed(every)):
            for at, test in ((y + 0.16, "known"), (y - 0.16, "unseen")):
                own = [one for one in found if one.alone and one.test == test]
                for one in own:
                    colour = COLOURS[list(MODALITIES).index(one.task)]
                    face = colour if test == "known" else "none"
                    axes.scatter(one.mean, at, s=18, facecolor=face, edgecolor=colour)
                if (mean := averaged(own)) and mean.seeds > 1:
                    face = "#222222" if test == "known" else "white"
                    spread = mean.high - mean.mean
                    axes.errorbar(
                        mean.mean, at, xerr=spread, fmt="D", markersize=5, color="#222222", markerfacecolor=face
                    )
        axes.axvline(0, color="#444444", linewidth=0.8)
        names = [f"{name}, by {SERVED[by]}\n{start}" for (name, by), start, _ in reversed(every)]
        axes.set_yticks(range(len(every)), names, fontsize=8)
        for at, task in enumerate(MODALITIES):
            axes.scatter([], [], s=18, color=COLOURS[at], label=task)
        for face, test in (("#222222", "known: average"), ("white", "unseen: average")):
            axes.errorbar([], [], xerr=[], fmt="D", markersize=5, color="#222222", markerfacecolor=face, label=test)
        axes.legend(fontsize=8, loc="lower left")


def write(rows: Sequence[Row], path: Path) -> None:
    """The page and, beside it, its picture; ``says.md`` in the rows' folder is what the figures say in words."""
    import benchmarks.accuracy.default as command
    from benchmarks.accuracy import unseen

    picture(rows, path.with_suffix(".svg"))
    said = (path.with_suffix("") / "says.md").read_text(encoding="utf-8")
    first, _, rest = said.partition("\n\n")
    lines = ["# One modality alone: a default that is safe", "", first, ""]
    hours = sum(row.seconds for row in rows) / 3600
    lines += [
        f"![Differences to the bar: a dot a task and modality, and their averages with intervals]({path.stem}.svg)",
        "",
        f"`python -m benchmarks.accuracy.default` ({hours:.1f} h of runs on two",
        "shared cores), then `--page`. Points of accuracy; *unseen*: groups that no device holds. ±: the 95 % interval",
        "of the mean difference, paired by seed; **worse**, **better**: all of it lies below, above the bar. *One*,",
        "*all*: with one modality and with all, averaged over the tasks. *Below*: of how many comparisons with one,",
        "each of a task, modality and test, the mean is below the bar, and of how many the interval.",
        "",
        *summary(rows, MAIN),
        "",
        "<details><summary>The other trainings and services</summary>",
        "",
        *summary(rows, {(training, by) for training in TRAININGS for by in SERVED} - set(MAIN)),
        "",
        "</details>",
        "",
    ]
    lines += [rest.strip(), "", "## What was run", "", *(command.__doc__ or "").split("\n\n")[1].splitlines(), ""]
    lines += [*(unseen.__doc__ or "").split("\n\n")[1].splitlines(), ""]
    for start in STARTS:
        for task in MODALITIES:
            if found := table(rows, start, task):
                lines += [f"<details><summary>{task}, {start}</summary>", "", *found, "", "</details>", ""]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
