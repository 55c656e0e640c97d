"""The coordinator's requests to its worker, which holds torch: initial parts, plans, evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from edgefl.aggregation.clusters import wanted
from edgefl.aggregation.server_state import shared
from edgefl.plan.job import Candidate, Placement, RunPlan
from edgefl.plan.stages import stage_before
from edgefl.process.worker import understood
from edgefl.records import EvaluationRow, Manifest
from edgefl.registry import choose


class Worker(Protocol):
    """The part of :class:`edgefl.process.worker.WorkerProcess` that the coordinator uses; tests replace it."""

    async def call(self, method: str, body: object) -> object:
        """The answer. Raises WorkerError."""
        ...

    async def stop(self) -> None:
        """End the worker."""
        ...


class EvaluatorClient:
    """Typed requests about one run. ``store``: the directory of the object store both processes use."""

    def __init__(self, worker: Worker, plan: RunPlan, store: Path) -> None:
        self._worker = worker
        self._plan = plan
        self._store = str(store)

    async def initial_parts(self) -> Manifest:
        """The weights the run starts from, written into the store."""
        body = {"model": self._plan.model, "seed": self._plan.seed, "store": self._store}
        return understood(await self._worker.call("initial_parts", body), Manifest)

    async def plan_stage(
        self, stage: int, candidates: tuple[Candidate, ...], manifest: Manifest
    ) -> tuple[Placement, ...]:
        """What each candidate can train in stage number ``stage``."""
        body = {
            "model": self._plan.model,
            "stage": self._plan.stages[stage - 1],
            "hyper": self._plan.hypers[stage - 1],
            "slots": self._plan.slots,
            "candidates": candidates,
            "part_bytes": {part: ref.size for part, ref in manifest.items()},
            "transfer": self._plan.transfer,
            "signature": wanted(self._plan.server),
            "before": stage_before(self._plan.stages, self._plan.stages[stage - 1]),
        }
        return understood(await self._worker.call("plan_stage", body), tuple[Placement, ...])

    async def similarity(self, stage: int, models: dict[str, Manifest]) -> dict[str, float]:
        """The devices' weights by how alike their models see the probe samples (slot weight)."""
        body = {
            "model": self._plan.model,
            "stage": self._plan.stages[stage - 1],
            "models": models,
            "store": self._store,
            "test": self._plan.test,
            "weight": self._plan.server.get("weight", {}),
        }
        return understood(await self._worker.call("similarity", body), dict[str, float])

    async def evaluate(
        self, stage: int, number: int, state: Manifest, networks: dict[str, dict[str, float]]
    ) -> tuple[EvaluationRow, ...]:
        """The global model of ``state`` on the test set, after round ``number`` of stage number ``stage``.

        ``networks``: the matcher networks, as ``Memory`` names them.
        """
        members = {name for weights in networks.values() for name in weights}
        manifest = shared(state) | {name: state[name] for name in members}
        body = {
            "model": self._plan.model,
            "stage": self._plan.stages[stage - 1],
            "manifest": manifest,
            "store": self._store,
            "test": self._plan.test,
            "prototypes": "prototypes" in manifest and choose("prototypes", self._plan.server).method.classes,
            "slots": self._plan.slots,
            "networks": networks,
            "probes": choose("weight", self._plan.server).method.similarity is not None,
        }
        rows = understood(await self._worker.call("evaluate", body), tuple[EvaluationRow, ...])
        return tuple(msgspec.structs.replace(row, stage=stage, round=number) for row in rows)
