"""Devices that take part in a task's runs: those of its fleet that the planner does not refuse for want of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from benchmarks.accuracy.claims.study import Cell, Study, Values, digest
from edgefl.api.run_inputs import PlanOptions, price_of

#: File of the counts in the folder of results.
FILE = "devices.json"


class TakingPart(msgspec.Struct, frozen=True):
    """A count: ``devices`` of the fleet take part in a run with these ``data``, a digest of what decides it."""

    data: str
    devices: int


def own_run(study: Study, task: str, condition: str, seed: int) -> Values:
    """The run file of the paper's own method; its learning rate decides nothing here."""
    own = study.values.get("own_method", study.paper)
    return study.run_file(Cell(study.paper, task, condition, own, seed), {"lr": 1e-3})


def key(values: Values) -> str:
    """Digest of what decides who has samples enough."""
    training = values["training"]
    told = {name: values[name] for name in ("data", "fleet", "seed")}
    return digest({**told, "batch_size": training["batch_size"], "holdout": training.get("holdout", 0.0)})


def kept(path: Path) -> dict[str, int]:
    """The counts in a file, by ``key``; none where it does not exist."""
    rows = msgspec.json.decode(path.read_bytes(), type=list[TakingPart]) if path.is_file() else []
    return {row.data: row.devices for row in rows}


def fill(study: Study, tasks: Iterable[str], path: Path) -> None:
    """Count what the file lacks for these tasks, and add it: a second of planning each."""
    found = kept(path)
    for task in tasks:
        if "budget" in study.tasks[task]:
            continue  # memory decides there, and each run's line has who was refused
        for condition in study.tasks[task]["conditions"]:
            for seed in study.seeds:
                values = own_run(study, task, condition, seed)
                if key(values) not in found:
                    found[key(values)] = counted(values)
                    rows = [TakingPart(*row) for row in found.items()]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def counted(values: Values) -> int:
    """How many devices the planner refuses in no stage."""
    plans = price_of(values, (), PlanOptions()).devices
    return len({plan.device for plan in plans} - {plan.device for plan in plans if plan.placement.refusal is not None})


def told(study: Study, task: str, counts: Mapping[str, int]) -> list[int]:
    """The counts by seed, of the task's first condition; empty where one is not known."""
    condition = next(iter(study.tasks[task]["conditions"]))
    found = [counts.get(key(own_run(study, task, condition, seed))) for seed in study.seeds]
    return [one for one in found if one is not None] if None not in found else []
