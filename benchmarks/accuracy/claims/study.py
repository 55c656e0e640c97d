"""The study of one paper: tasks, methods, and the run file of each cell, from a YAML file of this folder."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.accuracy.claims.eligible import limited

FOLDER = Path(__file__).resolve().parent
#: The seed of tuning runs, which no run of the table has.
TUNING_SEED = 100
#: Tuning's first turn, and a real fleet beside the study's runner, have this part of the rounds.
SHORT = 3
#: A preview has this part of them, rounded up: all its runs in ten minutes, and every stage.
PREVIEW = 6
#: The one device of a method that trains on all data in one place.
ALONE = "all"
#: A setting that no field has: the encoders' part of the learning rate in each stage.
BY_STAGE = "encoder rates by stage"
Values = dict[str, Any]


def papers(folder: Path = FOLDER) -> list[str]:
    """The names of the studies, the one on top of the page first."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    return sorted(names, key=lambda name: not Study(name, folder).values.get("first", False))


class Cell(NamedTuple):
    """One run of the table. ``condition``: which data are missing, by the task's name for it."""

    paper: str
    task: str
    condition: str
    method: str
    seed: int

    @property
    def key(self) -> str:
        """Names it on the terminal."""
        return "/".join(map(str, self))


class Trial(NamedTuple):
    """Settings on trial for a method and task. ``settings``: field -> value; ``short``: with a part of the rounds."""

    cell: Cell
    settings: Values
    short: bool

    @property
    def key(self) -> str:
        """Names it on the terminal."""
        told = " ".join(f"{field}={value}" for field, value in self.settings.items())
        return f"{self.cell.key} {told}{' short' if self.short else ''}"


class Study:
    """The study of a paper. ``values``: its file. ``quick``: one seed and a part of the rounds, to look at."""

    def __init__(self, paper: str, folder: Path = FOLDER, *, quick: bool = False) -> None:
        self.paper = paper
        self.quick = quick
        self.values: Values = yaml.safe_load((folder / f"{paper}.yaml").read_text(encoding="utf-8"))
        self.tasks: dict[str, Values] = self.values["tasks"]
        self.methods: dict[str, Values] = self.values["methods"]
        self.seeds: list[int] = self.values["seeds"][: 1 if quick else None]

    def cells(self) -> Iterator[Cell]:
        """Every run, one seed of everything before the next: a table that is cut short is short of seeds.

        A method may have seeds of its own, else a condition.
        """
        found = []
        for task, values in self.tasks.items():
            for condition, missing in values["conditions"].items():
                for name, method in self.methods.items():
                    seeds = method.get("seeds", missing.get("seeds", self.seeds))[: 1 if self.quick else None]
                    own = {"tasks": self.tasks, "conditions": values["conditions"], **method}
                    if task in own["tasks"] and condition in own["conditions"]:
                        found += [Cell(self.paper, task, condition, name, seed) for seed in seeds]
        yield from sorted(found, key=lambda cell: cell.seed)

    def tuned_as(self, cell: Cell) -> Cell:
        """The cell that is tuned for this one: of the method whose settings a variant takes."""
        task = self.tasks[cell.task]
        method = self.methods[cell.method].get("tuned_as", cell.method)
        return Cell(self.paper, cell.task, task["tuned_at"], method, TUNING_SEED)

    def trials(self, cell: Cell) -> list[Trial]:
        """What tuning tries first: as many settings for one method as for another."""
        task, method = self.tasks[cell.task], self.methods[cell.method]
        rates, own = task["rates"], method.get("own", [{}])
        budget = self.values["tuning"]["settings"]
        middle = sorted(range(len(rates)), key=lambda i: (abs(i - (len(rates) - 1) / 2), i))
        chosen = [rates[i] for i in sorted(middle[: max(1, budget // len(own))])]
        found = [{"lr": rate, **alternative} for alternative in own for rate in chosen]
        return [Trial(cell, settings, short=True) for settings in found[:budget]]

    def finals(self, best: list[Trial]) -> list[Trial]:
        """What is tried with all rounds: the best of the first turn."""
        return [one._replace(short=False) for one in best[: self.values["tuning"]["finals"]]]

    def devices(self, task: str) -> list[str]:
        """The names of a task's devices."""
        fleet = self.tasks[task]["fleet"]
        return list(fleet) if isinstance(fleet, list) else [f"device-{i:02d}" for i in range(1, fleet + 1)]

    def run_file(self, cell: Cell, settings: Values, *, short: bool | None = None, source: Values | str = "") -> Values:
        """The run file of a cell. ``settings``: its learning rate ``lr`` and other fields by dotted names.

        ``short``: with a part of the rounds; None: as the study is, a preview with less. ``source``: data in place of
        the task's, without its test set.
        """
        task, method = self.tasks[cell.task], self.methods[cell.method]
        values: Values = copy.deepcopy(task["run"])
        devices = [ALONE] if method.get("alone") else self.devices(cell.task)
        values["data"]["missing"] = {} if method.get("alone") else _missing(task["conditions"][cell.condition], devices)
        if method.get("alone"):
            values["data"]["partition"] = "uniform"
        by_stage = settings.get(BY_STAGE)
        encoder = [settings["lr"] * part for part in by_stage] if by_stage else settings["lr"]
        values["training"]["lr"] = {"encoder": encoder, "head": settings["lr"]}
        values |= {"seed": cell.seed, "recipe": method["recipe"], "name": cell.task.replace("_", "-")}
        values["fleet"] = [{"name": name} for name in devices]
        if eligible := method.get("eligible"):
            values["fleet"] = limited(devices, eligible, task["budget"], cell.seed)
        values["round"] = {"join_s": 600, "quorum": 0.5, "deadline_s": 3600}
        for name, value in self._fields(cell, settings).items():
            set_field(values, name, value)
        if short:
            values["training"]["rounds"] = [n // SHORT for n in values["training"]["rounds"]]
        elif self.quick and short is None:
            values["training"]["rounds"] = [math.ceil(n / PREVIEW) for n in values["training"]["rounds"]]
        if source:
            values["data"]["source"] = source
            values["data"].pop("test", None)
        return values

    def _fields(self, cell: Cell, settings: Values) -> Values:
        """What a method sets, by dotted names; a variant's own in place of what was tuned for another."""
        task, method = self.tasks[cell.task], self.methods[cell.method]
        tuned = {name: value for name, value in settings.items() if name not in {"lr", BY_STAGE}}
        own = method.get("set", {})
        if "tuned_as" in method:  # last, so that it can set an option of what was tuned
            return {**task.get("slots", {}), **tuned, **own}
        return {**task.get("slots", {}), **own, **tuned}

    def trial_file(self, trial: Trial, source: Path, test: Path | None = None) -> Values:
        """The run file of a trial, on data that holds nothing of the test set; ``test``: what it is tested on."""
        values = self.run_file(trial.cell, trial.settings, short=trial.short, source=str(source))
        if test is not None:
            values["data"]["test"] = str(test)
        return values


def _missing(condition: Values, devices: list[str]) -> Values:
    """A condition as fields of data.missing. ``incomplete``: share of the devices that lose samples' modalities."""
    found = {name: value for name, value in condition.items() if name not in {"incomplete", "seeds"}}
    if "incomplete" in condition:
        count = round(condition["incomplete"] * len(devices))
        step = len(devices) / max(count, 1)
        chosen = {int(i * step) for i in range(count)}
        found["complete"] = [name for i, name in enumerate(devices) if i not in chosen]
    return found


def set_field(values: Values, name: str, value: object) -> None:
    """Set a field by its dotted name; None takes it away."""
    *path, last = name.split(".")
    for step in path:
        found = values.get(step)
        values[step] = found if isinstance(found, dict) else {}
        values = values[step]
    if value is None:
        values.pop(last, None)
    else:
        values[last] = copy.deepcopy(value)


def digest(values: Values) -> str:
    """Of a run file, wherever the files that it names lie."""
    told = json.dumps(_named(values), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _named(value: object) -> object:
    if isinstance(value, dict):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_named(one) for one in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value
