"""EdgeFL's run in one process: coordinator, an agent for each user, trainer and evaluator, ledger and bill."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import edgefl
from benchmarks.cost.simulators.task import BATCH, COHORT, MODELS, RATE, USERS, Net, Rounds, asked
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.models.checkpoints import initial_parts
from edgefl.plan.compile import compile_run


def run_file(folder: Path, model: str, rounds: Rounds) -> dict[str, Any]:
    """The run's fields. The module is the encoder; without a head its layer norm and the classifier are the rest."""
    make, width, modality, shape = MODELS[model]
    return {
        "name": "simulators",
        "recipe": "end_to_end",
        "seed": 1,
        "data": {"source": str(folder / "train.npz"), "test": str(folder / "test.npz"), "partition": "uniform"},
        "slots": {"fusion": "mean", "select": {"random": {"share": COHORT / USERS}}},
        "model": {
            "stages": 1,
            "encoders": {modality: edgefl.encoder(make, input_shape=shape)},
            "head": {"kind": "none", "out": width},
        },
        "training": {
            "rounds": [rounds.all],
            "epochs": 1,
            "batch_size": BATCH,
            "optimizer": "sgd",
            "momentum": 0.0,
            "lr": {"encoder": RATE, "head": RATE},
            "weight_decay": {"encoder": 0.0, "head": 0.0},
        },
        "round": {"join_s": 600, "quorum": 0.5, "deadline_s": 3600},
        "evaluate": 10**6,
        "fleet": [{"name": f"user-{user:04}"} for user in range(USERS)],
    }


def write_first_weights(folder: Path, model: str) -> None:
    """``<model>.npz``: the first weights of EdgeFL's run, by their names in ``Net``."""
    config, recipe = load_run(run_file(folder, model, Rounds(1, 1)), ())
    test = Dataset.load_npz(folder / "test.npz")
    plan = compile_run(config, recipe, run="simulators", shapes=test.signature(), label_names=test.label_names)
    tensors: dict[str, np.ndarray] = {}
    for part, named in initial_parts(plan.model, plan.seed):
        for name, value in named.items():
            tensors[name_in_net(part, name)] = value
    assert tensors.keys() == Net(model).state_dict().keys(), (sorted(tensors), sorted(Net(model).state_dict()))
    np.savez(folder / f"{model}.npz", **tensors)  # type: ignore[arg-type]


def name_in_net(part: str, name: str) -> str:
    """The name in ``Net`` of a part's tensor."""
    if part == "task":
        return f"last.{name}"
    return name if part.endswith("/norm") else name.replace("blocks.0.stage", "encoder")


def main(*, joint_steps: bool = False) -> None:
    """The rounds. ``joint_steps``: the devices of a round take their steps together, where that pays."""
    folder, model, rounds = given = asked()
    journal = given.journal

    def seen(event: edgefl.EventRow) -> None:
        if event.kind == "round_closed":
            journal.ended(event.round)

    with tempfile.TemporaryDirectory(dir=folder) as runs:
        fields = run_file(folder, model, rounds)
        options: dict[str, Any] = {"directory": runs, "in_process": True, "joint_steps": joint_steps, "on_event": seen}
        run = edgefl.run(fields, export=False, page=False, **options)
        assert run.accuracy is not None
        journal.write(run.accuracy)
