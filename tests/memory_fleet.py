"""A whole fleet in one process: the real coordinator, agents, trainer and evaluator over the in-memory transport.

Trainers take turns (torch's random generator is the process's), so that a run is the same every time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from coordinator.evaluator import Evaluator
from coordinator.runner import run as coordinate
from device_agent.identity import Identity
from device_agent.runner import Agent
from device_agent.store import AgentStore, Owner
from device_agent.trainer import Trainer
from device_agent.trainer_link import Ended, TrainRequest
from device_agent.values import DataFacts, Progressed, Result
from edgefl.config.load import load_run
from edgefl.data.dataset import Dataset
from edgefl.objects import ObjectStore
from edgefl.plan.compile import compile_run
from edgefl.plan.values import RunPlan
from edgefl.report.rows import RunReport
from edgefl.transport.memory import MemoryBroker, MemoryTransport

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


class InlineTrainer:
    """The real trainer without a process of its own."""

    def __init__(self, data: Path, store: Path, turn: asyncio.Lock) -> None:
        self._trainer = Trainer(str(data), "error", store, "cpu")
        self._turn = turn

    async def warm(self) -> DataFacts:
        async with self._turn:
            return await asyncio.to_thread(self._trainer.warm)

    async def train(self, work: Any, on_progress: Any) -> Ended:
        def note(values: Mapping[str, Any]) -> None:
            loop.call_soon_threadsafe(on_progress, Progressed(work.offer.attempt, **values))

        loop = asyncio.get_running_loop()
        request = TrainRequest(work.offer, self._trainer_name, work.kept)
        async with self._turn:
            result: Result = await asyncio.to_thread(self._trainer.train, request, note)
        return Ended(result, alive=True)

    def interrupt(self) -> None:
        self._trainer.leave_off(0, None)

    async def stop(self) -> None:
        pass

    _trainer_name = ""

    def named(self, device: str) -> InlineTrainer:
        self._trainer_name = device
        return self


class InlineWorker:
    """The real evaluator without a process of its own."""

    def __init__(self, turn: asyncio.Lock) -> None:
        self._evaluator = Evaluator()
        self._turn = turn

    async def call(self, method: str, body: Any) -> Any:
        async with self._turn:
            answer = getattr(self._evaluator, method)
            found = await asyncio.to_thread(answer, msgspec.to_builtins(body), lambda _: None)
        return msgspec.to_builtins(found)

    async def stop(self) -> None:
        pass


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


def run_fleet(directory: Path, plan: RunPlan, shares: Mapping[str, Dataset], seconds: float = 120.0) -> RunReport:
    """The run's report. The last state: ``state_of``."""
    # What measures a trainer's memory, and warms it for that, has no meaning in a process that holds all of them.
    with mock.patch("device_agent.trainer._first_round"), mock.patch("device_agent.trainer.settle"):
        return asyncio.run(asyncio.wait_for(_run(directory, plan, shares), seconds))


async def _run(directory: Path, plan: RunPlan, shares: Mapping[str, Dataset]) -> RunReport:
    broker, turn = MemoryBroker(), asyncio.Lock()
    tasks = []
    with contextlib.ExitStack() as stack:
        for device, data in shares.items():
            data.save_npz(directory / f"{device}.npz")
            store = AgentStore(directory / "agents" / device, Owner(device, "default"))
            stack.callback(store.close)
            identity = Identity("default", device, fingerprint=device).started()
            trainer = InlineTrainer(directory / f"{device}.npz", store.objects.root, turn).named(device)
            agent = Agent(
                identity,
                lambda device=device, identity=identity: MemoryTransport(broker, device, identity.will()),
                trainer,
                store,
                lambda event, **fields: None,
            )
            tasks.append((agent, asyncio.create_task(agent.run())))
        run = asyncio.create_task(
            coordinate(
                plan,
                directory=directory / "run",
                transport=MemoryTransport(broker, "coordinator"),
                fleet="default",
                emit=lambda row: None,
                resume=False,
                worker=InlineWorker(turn),
            )
        )
        try:  # an agent that ends by itself has failed, and the run would wait for it in vain
            await asyncio.wait([run, *(task for _, task in tasks)], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for agent, _ in tasks:
                agent.stop()
            ended = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
            if any(isinstance(one, Exception) for one in ended):
                run.cancel()
        for one in ended:
            if isinstance(one, Exception):
                raise one
        return await run


def state_of(directory: Path) -> tuple[ObjectStore, dict[str, Any]]:
    """The object store of a finished run, and its last state."""
    from coordinator.ledger import Ledger

    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        return ObjectStore(directory / "run" / "objects"), ledger.position("tiny").manifest
