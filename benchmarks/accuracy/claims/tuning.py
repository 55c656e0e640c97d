"""Fair tuning: the same number of trials for every method, by successive halving, on data that holds no test sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.accuracy.claims.carry import Job, Limits, carry_out
from benchmarks.accuracy.claims.judge import MEASURES
from benchmarks.accuracy.claims.outcome import Outcome, Results
from benchmarks.accuracy.claims.study import Cell, Study, Trial, Values, digest
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load

#: Training samples of the tasks, from which tuning runs hold out their own test.
DATA = Path("build") / "claims" / "data"


def tune(study: Study, cells: list[Cell], tried: Results, limits: Limits) -> bool:
    """Spend the budget on every method and task that ``cells`` need; True when it is spent.

    Ends the program where no trial of a method ended well: a setting that nobody has tried would stand for it.
    """
    wanted = list(dict.fromkeys(study.tuned_as(cell) for cell in cells))
    first = [one for cell in wanted for one in study.trials(cell)]
    if not carry_out(due(study, first, tried), tried, limits, "tuning"):
        return False
    if untried := [cell for cell in wanted if not ranked(study, study.trials(cell), tried)]:
        raise SystemExit(f"no trial ended well of {', '.join(cell.key for cell in untried)}: see the lines above")
    finals = [one for cell in wanted for one in study.finals(ranked(study, study.trials(cell), tried))]
    return carry_out(due(study, finals, tried), tried, limits, "tuning, all rounds")


def chosen(study: Study, cell: Cell, tried: Results) -> Values:
    """The settings that won for a cell: of those tried with all rounds, else of the first turn, else the middle one."""
    asked = study.trials(study.tuned_as(cell))
    first = ranked(study, asked, tried)
    finals = ranked(study, study.finals(first), tried)
    best = (finals or first or [asked[len(asked) // 2]])[0]
    return best.settings


def decisive(study: Study, tried: Results) -> list[Outcome]:
    """The trials that the study's settings are chosen by; others in the file are of settings it no longer tries."""
    found = []
    for cell in dict.fromkeys(study.tuned_as(cell) for cell in study.cells()):
        first = ranked(study, study.trials(cell), tried)
        found += [row for one in (*first, *study.finals(first)) if (row := _row(study, one, tried)) is not None]
    return found


def ranked(study: Study, trials: list[Trial], tried: Results) -> list[Trial]:
    """Those that have been run, the best score first."""
    found = [(score(study, row), one) for one in trials if (row := _row(study, one, tried)) is not None]
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def score(study: Study, row: Outcome) -> float:
    """A trial's score: the measure that the task's claims are judged by."""
    value = MEASURES[study.tasks[row.task]["measure"]](row)
    return float("-inf") if value is None else value


def due(study: Study, trials: list[Trial], tried: Results) -> list[Job]:
    """Trials that have no result yet; their data are there then."""
    jobs = [Job(one, _values(study, one)) for one in trials if _row(study, one, tried) is None]
    for task in {job.trial.cell.task for job in jobs}:
        path, test = training_data(study, task), held_out_data(study, task)
        if path.exists() and (test is None or test.exists()):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        source = study.tasks[task]["run"]["data"]["source"]
        if test is None:
            load(source).save_npz(path)
        else:
            for samples, file in zip(apart(source, study.tasks[task]["held_out"]), (path, test), strict=True):
                samples.save_npz(file)
    return jobs


def apart(source: Values, share: float) -> tuple[Dataset, Dataset]:
    """(trials' training samples, trials' test samples): the training part of ``source``, split by whole families.

    The test has about ``share`` of each group's families, drawn as the option ``reserve`` draws them; what the source
    reserves already is in neither, as a larger share holds a smaller one.
    """
    ((name, options),) = source.items()
    reserved = options.get("reserve", 0.0)
    larger = {**options, "reserve": reserved + share * (1.0 - reserved)}
    held = load({name: {**larger, "part": "reserved"}})
    if reserved:
        kept = load({name: {**options, "part": "reserved"}})
        held = held.subset(~np.isin(held.ids, kept.ids))
    return load({name: larger}), held


def training_data(study: Study, task: str) -> Path:
    """Where the task's training samples lie by themselves: a run of them holds its own test out.

    Other options of the source are another file, and so another trial.
    """
    told = {"source": study.tasks[task]["run"]["data"]["source"]}
    if "held_out" in study.tasks[task]:
        told["held_out"] = study.tasks[task]["held_out"]
    return (DATA / f"{study.paper}-{task}-{digest(told)[:8]}.npz").resolve()


def held_out_data(study: Study, task: str) -> Path | None:
    """Where what trials are tested on lies, if the task says ``held_out``; None: a run holds it out of its samples."""
    path = training_data(study, task)
    return path.with_name(f"{path.stem}-test.npz") if "held_out" in study.tasks[task] else None


def _values(study: Study, trial: Trial) -> Values:
    task = trial.cell.task
    return study.trial_file(trial, training_data(study, task), held_out_data(study, task))


def _row(study: Study, trial: Trial, tried: Results) -> Outcome | None:
    return tried.of(trial.cell, digest(_values(study, trial)))
