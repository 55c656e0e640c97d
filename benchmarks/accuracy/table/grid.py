"""The grid of ``benchmarks/accuracy/one_regime.yaml``: which runs there are, and the run file of each."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

GRID = Path(__file__).resolve().parents[1] / "one_regime.yaml"
#: Where the encoders of the start "pretrained" are kept, from the repository's root.
PRETRAINED = Path("build") / "pretrained"
STARTS = ("pretrained", "scratch")
MULTIWAY = "multiway"
#: Of the training part that encoders are pretrained on: three people, a speaker, a vendor. And passes over it.
SHARE, EPOCHS = 0.1, 20
Values = dict[str, Any]


class Cell(NamedTuple):
    """One run of the table."""

    task: str
    method: str
    start: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Names it in files and on the terminal."""
        return f"{self.task}/{self.method}/{self.start}/{self.rate:g}/{self.seed}"


class Settings(NamedTuple):
    """What tuning chooses: the learning rate of everything that is trained, and slots in place of the method's own."""

    lr: float
    slots: Values = {}  # noqa: RUF012 - never changed


class Encoder(NamedTuple):
    """What has to be pretrained: "multiway" stands for all modalities of a task together."""

    source: str
    options: Values
    modality: str
    config: Values

    @property
    def path(self) -> Path:
        """Where it is kept: another configuration is another file."""
        told = json.dumps([self, SHARE, EPOCHS], sort_keys=True)
        return PRETRAINED / f"{self.source}-{self.modality}-{hashlib.sha256(told.encode()).hexdigest()[:8]}.safetensors"


class Grid:
    """Tasks, methods, rates and seeds. ``quick``: one seed, the highest rate, few methods and rounds."""

    def __init__(self, path: Path = GRID, *, quick: bool = False) -> None:
        self.values: Values = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.quick = quick
        self.tasks: dict[str, Values] = self.values["tasks"]
        self.methods: dict[str, Values] = self.values["methods"]
        self.rates: list[float] = self.values["rates"][-1:] if quick else self.values["rates"]
        self.seeds: list[int] = self.values["seeds"][:1] if quick else self.values["seeds"]

    def cells(self) -> Iterator[Cell]:
        """Every run, one seed of everything before the next: a table that is cut short is short of seeds."""
        for seed in self.seeds:
            for rate in reversed(self.rates):
                for start in STARTS:
                    for method, values in self.methods.items():
                        for task in values["tasks"]:
                            if self._wanted(cell := Cell(task, method, start, rate, seed)):
                                yield cell

    def _wanted(self, cell: Cell) -> bool:
        task, method, scratch = self.tasks[cell.task], self.methods[cell.method], self.values["scratch"]
        if any(cell.rate not in asked.get("rates", self.rates) for asked in (task, method)):
            return False
        if cell.start == "scratch":
            asked = method.get("scratch") and cell.task in scratch["tasks"] and cell.rate in scratch["rates"]
            return bool(asked) and not self.quick
        return not self.quick or bool(method.get("quick") and not task.get("slow"))

    def tuned_as(self, cell: Cell) -> Cell:
        """The cell whose settings this one takes."""
        task = self.tasks[cell.task].get("tuned_as", cell.task)
        method = self.methods[cell.method].get("tuned_as", cell.method)
        return Cell(task, method, "pretrained", self.values["tuning"]["rate"], self.values["tuning"]["seed"])

    def devices(self, task: str) -> list[str]:
        """The names of a task's devices."""
        fleet = self.tasks[task]["fleet"]
        if "names" in fleet:
            return list(fleet["names"])
        return [f"{fleet['prefix']}{i:0{fleet['digits']}d}" for i in range(1, fleet["count"] + 1)]

    def run_file(self, cell: Cell, settings: Settings) -> Values:
        """The run file of a cell. Raises KeyError for a task or method that is not in the grid."""
        task, method = self.tasks[cell.task], self.methods[cell.method]
        values: Values = copy.deepcopy(task["run"])
        devices = self.devices(cell.task)
        for field, more in method.get("model", {}).items():
            values["model"][field] = {**values["model"][field], **more} if isinstance(more, dict) else more
        values["training"] |= method.get("training", {})
        missing = {**values["data"].get("missing", {}), "rate": cell.rate}
        if every := task.get("incomplete"):
            missing["complete"] = [name for i, name in enumerate(devices) if i % every]
        values["data"]["missing"] = missing
        values["training"]["lr"] = {"encoder": settings.lr * task.get("encoder_lr", 1.0), "head": settings.lr}
        if self.quick:
            values["training"] |= self.values["quick"]["training"]
        if cell.start == "pretrained":
            for encoder in self.encoders(cell):
                for m in values["model"]["encoders"] if encoder.modality == MULTIWAY else [encoder.modality]:
                    values["model"]["encoders"][m]["pretrained"] = str(encoder.path.resolve())
        return {
            "name": cell.task.replace("_", "-"),
            "seed": cell.seed,
            "recipe": method["recipe"],
            "slots": {**self._select(task, method), **_slots(method, settings)},
            **values,
            "round": {"join_s": 600, "quorum": 0.5, "deadline_s": 1800},
            "evaluate": "stage",
            "fleet": [{"name": name} for name in devices],
        }

    def encoders(self, cell: Cell) -> list[Encoder]:
        """What a cell with the start "pretrained" begins with."""
        values = self.tasks[cell.task]["run"]
        ((source, options),) = values["data"]["source"].items()
        configs = values["model"]["encoders"]
        if self.methods[cell.method].get("multiway"):
            return [Encoder(source, options, MULTIWAY, configs)]
        return [Encoder(source, options, m, c) for m, c in configs.items() if "pretrained" not in c]

    def trials(self, cell: Cell) -> list[Settings]:
        """What tuning tries for a cell before it knows which learning rate is best."""
        return [Settings(lr) for lr in self.values["tuning"]["lr"]]

    def more_trials(self, cell: Cell, best: Settings, tried: list[Settings]) -> list[Settings]:
        """The rest of the budget: the method's own alternatives, else the learning rate on the better side."""
        known = list(tried)
        left = self.values["tuning"]["runs"] - len(known)
        own = [Settings(best.lr, slots) for slots in self.methods[cell.method].get("tune", [])]
        rates = sorted(one.lr for one in known)
        beyond = {rates[0]: rates[0] / 4, rates[-1]: rates[-1] * 4}.get(best.lr, best.lr * 2)
        return [one for one in [*own, Settings(round(beyond, 6))] if one not in known][: max(left, 0)]

    def default(self, cell: Cell) -> Settings:
        """Settings without tuning: the highest learning rate."""
        rates = self.values["tuning"]["lr"]
        return Settings(rates[-1])

    def _select(self, task: Values, method: Values) -> Values:
        """The same share of the devices in each round for every method, and no more clusters than make sense."""
        share = task["share"]
        if not method.get("banzhaf"):
            return {"select": {"random": {"share": share}}}
        clusters = {"lsh": {"clusters": task.get("clusters", 8)}}
        return {"select": {"banzhaf": {"share": share, "warmup_rounds": 5, "temperature": 2.0}}, "cluster": clusters}


def _slots(method: Values, settings: Settings) -> Values:
    """What tuning chose instead of the method's own; a variant's own instead of what tuning chose for another."""
    own: Values = method.get("slots", {})
    return {**settings.slots, **own} if "tuned_as" in method else {**own, **settings.slots}
