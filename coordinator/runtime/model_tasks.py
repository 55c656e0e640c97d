"""Long work beside the loop: plans and evaluations in the worker process, aggregation in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from coordinator.core.assignments import transfer_of
from coordinator.core.moves import (
    Aggregate,
    Aggregated,
    CollectGarbage,
    Evaluate,
    Evaluated,
    Event,
    Plan,
    Planned,
)
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.clusters import wanted
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.history import load as load_memory
from edgefl.aggregation.mean import factor
from edgefl.aggregation.server_state import shared
from edgefl.errors import StoreError
from edgefl.plan.job import Candidate, Placement, RunPlan
from edgefl.plan.stages import stage_before
from edgefl.process.worker import understood
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, EvaluationRow, Manifest
from edgefl.registry import choose
from edgefl.storage.objects import ObjectStore

Report = Callable[[Event | BaseException], None]


class ModelTasks:
    """The current model state and the tasks on it. Reports a finished task as an event, a failed one as its error."""

    def __init__(
        self, plan: RunPlan, store: ObjectStore, evaluator: EvaluatorClient, clock: Callable[[], float], report: Report
    ) -> None:
        self.store = store
        self.manifest: Manifest = {}
        self._plan = plan
        self._evaluator = evaluator
        self._clock = clock
        self._report = report
        self._finals: dict[int, Manifest] = {}  # stage -> its last state
        self._states: dict[tuple[int, int], Manifest] = {}  # (stage, round) -> the state it made, while it is needed
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting: set[asyncio.Task[None]] = set()  # never broken off

    async def initial_parts(self) -> Manifest:
        """The state a new run starts from."""
        return await self._evaluator.initial_parts()

    def begin(self, manifest: Manifest, states: Mapping[tuple[int, int], Manifest]) -> None:
        """Set the states of a run that begins or resumes."""
        self.manifest = manifest
        self._states = dict(states)
        for (stage, _), state in sorted(states.items()):
            if stage:
                self._finals[stage] = state

    def advance(self, stage: int, number: int, manifest: Manifest) -> None:
        """A round has made a new state."""
        self.manifest = self._finals[stage] = self._states[stage, number] = manifest

    def base(self, attempt: Attempt) -> Manifest:
        """The state that devices of this attempt start from."""
        before = [key for key in self._states if key < (attempt.stage, attempt.round)]
        return self._states[max(before)] if before else self.manifest

    def collect(self, one: CollectGarbage, arriving: Iterable[str]) -> None:
        """Delete objects nothing points to. ``arriving``: objects of uploads that are not in the ledger yet."""
        bases = {id(base): base for base in map(self.base, one.attempts)}
        states = [self.manifest, *self._finals.values(), *bases.values()]
        self._states = {key: state for key, state in self._states.items() if any(state is kept for kept in states)}
        manifests = [*states, *(update.manifest for update in one.updates)]
        self.store.mark_garbage({ref.id for manifest in manifests for ref in manifest.values()} | set(arriving))
        task = asyncio.ensure_future(self._emptied())
        self._collecting.add(task)
        task.add_done_callback(self._collecting.discard)

    def start(self, one: Plan | Aggregate | Evaluate) -> None:
        """Begin a piece of work."""
        if isinstance(one, Plan):
            self._spawn(self._planned(one))
        elif isinstance(one, Aggregate):
            self._spawn(self._aggregated(one))
        else:
            self._spawn(self._evaluated(one))

    async def close(self) -> None:
        """Leave off."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._collecting)

    async def _emptied(self) -> None:
        try:
            await asyncio.to_thread(self.store.sweep)
        except StoreError as error:
            self._report(error)

    def _spawn(self, work: Awaitable[Event]) -> None:
        self._keep(asyncio.ensure_future(self._reported(work)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self, work: Awaitable[Event]) -> None:
        try:
            self._report(await work)
        except Exception as error:  # whatever it is, it ends the run, with its own words
            self._report(error)

    async def _planned(self, one: Plan) -> Planned:
        placements = await self._evaluator.plan_stage(one.stage, one.candidates, self.manifest)
        return Planned(self._clock(), one.ticket, placements)

    async def _aggregated(self, one: Aggregate) -> Aggregated:
        updates = [self._info(update, one.attempt) for update in one.updates]
        similarity: dict[str, float] = {}
        if choose("weight", self._plan.server).method.similarity is not None:
            models = {update.device: {**shared(self.manifest), **update.manifest} for update in updates}
            similarity = await self._evaluator.similarity(one.attempt.stage, models)
        transfer, most = transfer_of(self._plan, one.attempt), self._plan.policy.largest_share
        terms = RoundTerms(similarity, self._plan.seed, transfer, most)
        manifest, record = await asyncio.to_thread(
            aggregate_round, updates, self.store, self.manifest, self._plan.server, terms
        )
        memory = await asyncio.to_thread(load_memory, self.store, manifest)
        return Aggregated(self._clock(), one.attempt, manifest, record, memory)

    def _info(self, update: Update, attempt: Attempt) -> UpdateInfo:
        """An update as it is aggregated in ``attempt``, which may be a later one than it was made in."""
        late = attempt.round - update.attempt.round
        info = UpdateInfo(
            device=update.device,
            manifest=update.manifest,
            samples=update.samples,
            metrics=update.metrics,
            complete=update.complete,
            poverty=update.poverty,
            poverty_change=update.poverty_change,
        )
        if not late:
            return info
        damped = factor(late, self._plan.policy.alpha)
        return msgspec.structs.replace(info, staleness=late, base=self.base(update.attempt), factor=damped)

    async def _evaluated(self, one: Evaluate) -> Evaluated:
        memory = await asyncio.to_thread(load_memory, self.store, self.manifest)
        rows = await self._evaluator.evaluate(one.attempt.stage, one.attempt.round, self.manifest, memory.networks)
        return Evaluated(self._clock(), one.attempt, rows)


def payload_sizes(store: ObjectStore, manifest: Manifest) -> dict[str, int]:
    """Bytes of each part's parameters and buffers: the object without its header."""
    return {part: ref.size - _header_bytes(store.path(ref.id)) for part, ref in manifest.items()}


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


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
