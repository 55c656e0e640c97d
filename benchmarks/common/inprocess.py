"""A whole fleet in one process: the real coordinator, agents, trainer and evaluator over the in-memory transport.

Trainers take turns (torch's random generator is the process's), so that a run is the same every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from coordinator.ledger.ledger import Ledger
from coordinator.runtime.environment import Environment
from coordinator.runtime.evaluator import Evaluator
from coordinator.runtime.runner import run as coordinate
from device_agent.core.state import DataFacts, Progressed, Result, State
from device_agent.runtime.agent import Agent, last_will
from device_agent.runtime.store import AgentStore, Owner
from device_agent.runtime.trainer_process import Ended, TrainerSettings, TrainRequest
from device_agent.trainer.local_trainer import LocalTrainer
from edgefl.data.sources import load
from edgefl.plan.job import Preparation, RunPlan
from edgefl.records import Budget, Manifest
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore
from edgefl.transport.memory_broker import MemoryBroker, MemoryTransport


class InlineTrainer:
    """The real trainer without a process of its own."""

    def __init__(self, device: str, data: Path, store: Path, turn: asyncio.Lock) -> None:
        settings = TrainerSettings(device, str(data), str(store), torch_device="cpu")
        self._trainer = LocalTrainer(settings, load(settings.data))
        self._turn = turn

    async def warm(self, preparation: Preparation) -> DataFacts:
        async with self._turn:
            return await asyncio.to_thread(self._trainer.describe, preparation)

    async def train(self, work: Any, on_progress: Any) -> Ended:
        def note(values: Mapping[str, Any]) -> None:
            loop.call_soon_threadsafe(on_progress, Progressed(work.offer.attempt, **values))

        loop = asyncio.get_running_loop()
        request = TrainRequest(self._trainer.settings, work.offer, work.retained)
        async with self._turn:
            result: Result = await asyncio.to_thread(self._trainer.train, request, note)
        return Ended(result, alive=True)

    def interrupt(self) -> None:
        self._trainer.left_off = True

    async def stop(self) -> None:
        pass


class InlineWorker:
    """The real evaluator without a process of its own."""

    def __init__(self, turn: asyncio.Lock) -> None:
        self._evaluator = Evaluator()
        self._turn = turn

    async def call(self, method: str, body: Any) -> Any:
        async with self._turn:
            found = await asyncio.to_thread(self._evaluator.answer, method, msgspec.to_builtins(body))
        return msgspec.to_builtins(found)

    async def stop(self) -> None:
        pass


def run_fleet(
    directory: Path,
    plan: RunPlan,
    shares: Mapping[str, Path],
    seconds: float,
    budgets: Mapping[str, Budget] | None = None,
) -> RunReport:
    """Run ``plan`` in ``directory`` with one agent a share (device -> .npz) and give its report; at most ``seconds``.

    ``budgets``: device -> what it may spend; others have no limit. The last state: ``state_of``.
    """
    # What measures a trainer's memory, and warms it for that, has no meaning in a process that holds all of them.
    with (
        mock.patch("device_agent.trainer.local_trainer._first_round"),
        mock.patch("device_agent.trainer.local_trainer.give_back"),
    ):
        return asyncio.run(asyncio.wait_for(_run(directory, plan, shares, budgets or {}), seconds))


async def _run(directory: Path, plan: RunPlan, shares: Mapping[str, Path], budgets: Mapping[str, Budget]) -> RunReport:
    broker, turn = MemoryBroker(), asyncio.Lock()
    tasks = []
    with contextlib.ExitStack() as stack:
        for device, data in shares.items():
            store = AgentStore(directory / "agents" / device, Owner(device, "default"), fingerprint=device)
            stack.callback(store.close)
            state = State("default", device, session=secrets.token_hex(8), budget=budgets.get(device, Budget()))
            trainer = InlineTrainer(device, data, store.objects.root, turn)
            agent = Agent(
                state,
                lambda device=device, state=state: MemoryTransport(broker, device, last_will(state)),
                trainer,
                store,
                lambda event, **fields: None,
            )
            tasks.append((agent, asyncio.create_task(agent.run())))
        run = asyncio.create_task(
            coordinate(
                plan,
                Environment(
                    directory=directory / "run",
                    transport=MemoryTransport(broker, "coordinator"),
                    fleet="default",
                    emit=lambda row: None,
                    worker=InlineWorker(turn),
                ),
                resume=False,
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


def state_of(directory: Path, run: str) -> tuple[ObjectStore, Manifest]:
    """The object store of a finished run, and its last state."""
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        return ObjectStore(directory / "run" / "objects"), ledger.position(run).manifest
