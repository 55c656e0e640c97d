"""Tiny runs for tests: made-up sensors whose class shows, over a whole fleet in this process (edgefl.api)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import inprocess
from coordinator.ledger.ledger import Ledger
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.plan.stages import sent
from edgefl.protocol.tensors import decode_part
from edgefl.records import Budget, Manifest
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore

torch.set_num_threads(1)

SHAPES = {"a": (8, 2), "b": (12, 1), "c": (8, 1)}
NAMES = ("x", "y", "z")

RUN = """
name: tiny
seed: 3
recipe: {recipe}
data: {{test: test.npz}}
model:
  stages: 2
  encoders:
{encoders}
  head: {{width: 12, out: 8, dropout: 0.0}}
  fusion_width: 8
training: {{rounds: [1, 1], batch_size: 6, holdout: 0.2}}
round: {{devices: {devices}, join_s: 20, quorum: 0.5}}
"""
_ENCODER = "    {m}: {{kind: sensor, width: 8, depth: 2, heads: 2, patch: 4}}"


def share(rows: int, present: Mapping[str, float], seed: int, labelled: bool = True) -> Dataset:
    """Samples whose class shows in the mean of every modality; ``present[m]``: the share of them that have m."""
    draw = np.random.default_rng(seed)
    labels = np.arange(rows, dtype=np.int64) % len(NAMES)
    values, flags = {}, {}
    for m, part in present.items():
        flags[m] = draw.random(rows) < part
        noise = draw.normal(size=(rows, *SHAPES[m]))
        values[m] = ((labels - 1)[:, None, None] + 0.4 * noise).astype(np.float32) * flags[m][:, None, None]
    if len(present) > 1:  # nobody has nothing
        first = next(iter(present))
        nothing = ~np.any(list(flags.values()), axis=0)
        flags[first] |= nothing
        values[first][nothing] = (labels[nothing] - 1)[:, None, None]
    ids = [str(row) for row in range(rows)]
    return Dataset(values, flags, labels if labelled else None, NAMES if labelled else (), ids)


def plan_of(directory: Path, recipe: str, modalities: str, devices: int, overrides: list[str]) -> RunPlan:
    """A tiny run of ``recipe`` over sensors named by ``modalities``; writes the test set."""
    share(30, dict.fromkeys(modalities, 1.0), seed=99).save_npz(directory / "test.npz")
    encoders = "\n".join(_ENCODER.format(m=m) for m in modalities)
    text = RUN.format(recipe=recipe, encoders=encoders, devices=devices)
    (directory / "run.yaml").write_text(text)
    config, chosen = load_run(str(directory / "run.yaml"), overrides)
    shapes = {m: SHAPES[m] for m in modalities}
    test = str(directory / "test.npz")
    return compile_run(config, chosen, run="tiny", shapes=shapes, label_names=NAMES, test=test)


def run_fleet(
    directory: Path,
    plan: RunPlan,
    shares: Mapping[str, Dataset],
    seconds: float = 120.0,
    budgets: Mapping[str, Budget] | None = None,
) -> RunReport:
    """The run's report. The last state: ``state_of``. ``budgets``: of the devices that have one."""
    for device, data in shares.items():
        data.save_npz(directory / f"{device}.npz")
    return inprocess.run_fleet(
        directory, plan, {device: directory / f"{device}.npz" for device in shares}, seconds, budgets
    )


def check_trained(directory: Path, plan: RunPlan) -> None:
    """Every part that devices send and that has tensors differs from the first state, and between audiences."""
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        states = ledger.states("tiny")
    first, last = states[0, 0], states[max(states)]
    store, _ = state_of(directory)
    made: dict[str, list[str]] = {
        part: [] for stage in plan.stages if stage.rounds for part in sent(stage, plan.slots.exchange)
    }
    for key, ref in last.items():
        part = key.partition("/")[2] if key.startswith(("@", "#")) else key
        if part in made:
            made[part].append(ref.id)
    for part, objects in made.items():
        assert objects, f"{part} is not in the state"
        if decode_part(store.read(objects[0])):
            assert first[part].id not in objects, f"{part} is as it was at the start"
            assert len(set(objects)) == len(objects), f"{part} is the same for two audiences"


def state_of(directory: Path) -> tuple[ObjectStore, Manifest]:
    """The object store of a finished run, and its last state."""
    return inprocess.state_of(directory, "tiny")
