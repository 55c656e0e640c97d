"""Long work beside the loop: plans and evaluations in the worker process, aggregation in a thread."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from coordinator.core.assignments import transfer_of, visible_parts
from coordinator.core.moves import Aggregate, Aggregated, CollectGarbage, Evaluate, Evaluated, Event, Plan, Planned
from coordinator.core.periods import makes_model
from coordinator.runtime.environment import Worker
from coordinator.runtime.evaluator import Request
from coordinator.runtime.record import warning
from coordinator.runtime.validate_update import clipped_change, is_whole, nothing_of, opposed
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.history import load as load_memory
from edgefl.aggregation.layer_round import exchange_layers, exchangeable_layers
from edgefl.aggregation.mean import factor
from edgefl.aggregation.server_state import shared
from edgefl.plan.job import Placement, RunPlan
from edgefl.plan.periods import period_length
from edgefl.plan.privacy import planned_rounds
from edgefl.plan.stages import is_closing, stage_in
from edgefl.process.tasks import Tasks
from edgefl.process.worker import WorkerFailedError, understood
from edgefl.protocol.messages import Update
from edgefl.records import Attempt, EvaluationRow, Manifest
from edgefl.registry import choose
from edgefl.run_records import EventRow
from edgefl.storage.objects import ObjectStore

T = TypeVar("T")

#: Times that the worker does one thing before it is given up: memory that others took for a moment is free again.
TRIES = 3
_MEMORY = "as the kernel does where memory runs out (dmesg says so)"


class ModelTasks:
    """The current model state and the tasks on it. Reports a finished task as an event, a failed one as its error."""

    def __init__(
        self,
        plan: RunPlan,
        store: ObjectStore,
        worker: Worker,
        report: Callable[[Event | EventRow | BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.manifest: Manifest = {}
        self.plan = plan
        self._worker = worker
        self._report = report
        self._clock = clock
        self._finals: dict[int, Manifest] = {}  # stage -> its last state
        self._states: dict[tuple[int, int], Manifest] = {}  # (stage, round) -> the state it made, while it is needed
        self._tasks = Tasks(report)
        self._collecting = Tasks(report)  # never broken off

    async def initial_parts(self) -> Manifest:
        """The state a new run starts from, written into the store."""
        return await self._ask("initial_parts", Manifest, Request(self.plan, str(self.store.root)))

    def begin(self, manifest: Manifest, states: Mapping[tuple[int, int], Manifest]) -> None:
        """Set the present state and earlier rounds' states, at the begin or resumption of a run."""
        self.manifest = manifest
        self._states = dict(states)
        self._finals = {stage: state for (stage, _), state in sorted(states.items()) if stage}

    def advance(self, stage: int, number: int, manifest: Manifest) -> None:
        """A round has made a new state."""
        self.manifest = self._finals[stage] = self._states[stage, number] = manifest

    def go_back(self, attempt: Attempt, *, again: bool) -> None:
        """Withdraw a round: restore the state before it, also as its result unless it is repeated (``again``)."""
        self.manifest = self.base(attempt)
        self._states = {key: one for key, one in self._states.items() if key < (attempt.stage, attempt.round)}
        if not again:
            self._states[attempt.stage, attempt.round] = self.manifest
        self._finals = {stage: one for (stage, _), one in sorted(self._states.items()) if stage}

    def base(self, attempt: Attempt) -> Manifest:
        """Model state offered in this attempt."""
        before = [key for key in self._states if key < (attempt.stage, attempt.round)]
        return self._states[max(before)] if before else self.manifest

    def collect(self, one: CollectGarbage, arriving: Iterable[str]) -> None:
        """Delete objects nothing points to. ``arriving``: objects of uploads that are not in the ledger yet."""
        bases = {id(base): base for base in map(self.base, one.attempts)}
        states = [self.manifest, *self._finals.values(), *bases.values()]
        self._states = {key: state for key, state in self._states.items() if any(state is kept for kept in states)}
        manifests = [*states, *one.states, *(update.manifest for update in one.updates)]
        self.store.mark_garbage({ref.id for manifest in manifests for ref in manifest.values()} | set(arriving))
        self._collecting.spawn(asyncio.to_thread(self.store.sweep))

    def start(self, one: Plan | Aggregate | Evaluate) -> None:
        """Begin a piece of work."""
        if isinstance(one, Plan):
            self._tasks.spawn(self._reported(self._planned(one)))
        elif isinstance(one, Aggregate):
            self._tasks.spawn(self._reported(self._aggregated(one)))
        else:
            self._tasks.spawn(self._reported(self.evaluated(one)))

    async def close(self) -> None:
        """Cancel the tasks; wait for garbage collection."""
        await self._tasks.close()
        await self._collecting.wait()

    async def _reported(self, work: Awaitable[Event]) -> None:
        self._report(await work)

    async def _ask(self, method: str, kind: type[T], request: Request, where: tuple[int, int] = (0, 0)) -> T:
        """Call the worker, with restarts after SIGKILL, and decode its answer.

        Raises WorkerFailedError at the ``TRIES``-th kill, or at once for other failures. ``where``: stage and round,
        for the warning.
        """
        tries = 0
        while True:
            try:
                return understood(await self._worker.call(method, request), kind)
            except WorkerFailedError as error:
                if not _killed(error):
                    raise
                tries += 1
                what = f"the evaluator was killed (SIGKILL) while it did '{method}'"
                if tries == TRIES:
                    remedy = f"{_MEMORY[0].upper()}{_MEMORY[1:]}: give this machine more, then go on with --resume."
                    remedy = f"{remedy} {error.remedy}"
                    raise WorkerFailedError(f"{what}, {tries} times", status=error.status, remedy=remedy) from error
                self._report(warning(f"{what}, {_MEMORY}; it is started again, and asked again", *where))

    async def _planned(self, one: Plan) -> Planned:
        request = Request(self.plan, str(self.store.root), one.stage, shared(self.manifest), candidates=one.candidates)
        placements = await self._ask("plan_stage", tuple[Placement, ...], request)
        return Planned(self._clock(), one.ticket, placements)  # now: a round's deadline begins when it is offered

    async def _aggregated(self, one: Aggregate) -> Aggregated:
        if one.clips:
            one = await asyncio.to_thread(self._clipped, one)
        stage, single = stage_in(self.plan, one.attempt.stage, one.attempt.round), dict[str, int]()
        if period_length(self.plan, stage) > 1:
            single = await asyncio.to_thread(exchangeable_layers, self.store, self.manifest, stage.trained)
        updates = [self._info(update, one.attempt, single) for update in one.updates]
        clipped = {info.name: own for info, own in zip(updates, one.clips, strict=bool(one.clips)) if own}
        if not makes_model(self.plan, one.attempt.stage, one.attempt.round):
            given = (updates, self.store, self.manifest, self.plan.server, self.plan.seed, one.signatures)
            manifest, record = await asyncio.to_thread(exchange_layers, *given)
            record |= {"clipped": clipped} if clipped else {}
            memory = await asyncio.to_thread(load_memory, self.store, manifest)
            return Aggregated(self._clock(), one.attempt, manifest, record, memory)
        similarity: dict[str, float] = {}
        if choose("weight", self.plan.server).method.similarity is not None:
            models = {update.device: {**shared(self.manifest), **update.manifest} for update in updates}
            arrived = {ref.id for update in updates for ref in update.manifest.values()}
            await asyncio.to_thread(self.store.settle, arrived)  # the worker reads them from the disk
            request = Request(self.plan, str(self.store.root), one.attempt.stage, models=models)
            similarity = await self._ask("similarity", dict[str, float], request)
        transfer, most = transfer_of(self.plan, one.attempt), self.plan.policy.largest_share
        judged = 0 if is_closing(stage) else stage.index
        planned = self.plan.policy.devices, planned_rounds(self.plan), one.attempt.attempt
        terms = RoundTerms(similarity, self.plan.seed, transfer, most, one.signatures, judged, stage.trained, *planned)
        manifest, record = await asyncio.to_thread(
            aggregate_round, updates, self.store, self.manifest, self.plan.server, terms
        )
        record |= {"clipped": clipped} if clipped else {}
        memory = await asyncio.to_thread(load_memory, self.store, manifest)
        return Aggregated(self._clock(), one.attempt, manifest, record, memory)

    def _clipped(self, one: Aggregate) -> Aggregate:
        """The instruction with clipped updates, in new objects; changes opposed to the others' become zero."""
        memory, updates = load_memory(self.store, self.manifest), list(one.updates)
        offered = [visible_parts(self.base(update.attempt), update.device, memory) for update in updates]
        sent = [(update.manifest, base) for update, base in zip(updates, offered, strict=True)]
        whole = [index for index, factors in enumerate(one.clips) if is_whole(factors)]
        against = opposed(self.store, sent, whole)
        clips = [nothing_of(updates[i].manifest) if i in against else own for i, own in enumerate(one.clips)]
        for index in (i for i, factors in enumerate(clips) if factors):
            manifest = clipped_change(self.store, updates[index].manifest, offered[index], clips[index])
            updates[index] = msgspec.structs.replace(updates[index], manifest=manifest)
        return msgspec.structs.replace(one, updates=tuple(updates), clips=tuple(clips))

    def _info(self, update: Update, attempt: Attempt, single: Mapping[str, int]) -> UpdateInfo:
        """An update with its facts for the aggregation of ``attempt``, possibly later than its own.

        ``single``: the layers that may be exchanged alone.
        """
        late = attempt.round - update.attempt.round
        info = UpdateInfo(
            device=update.device,
            manifest=update.manifest,
            samples=update.samples,
            metrics=update.metrics,
            complete=update.complete,
            poverty=update.poverty,
            poverty_change=update.poverty_change,
            layer=self._layer(update, single),
            retained=update.base,
        )
        if not late:
            return info
        damped = factor(late, self.plan.policy.alpha)
        return msgspec.structs.replace(info, staleness=late, base=self.base(update.attempt), factor=damped)

    def _layer(self, update: Update, single: Mapping[str, int]) -> str:
        """Layer to repair by an update's report, if open to single exchange; "" for none."""
        stage = self.plan.stages[update.attempt.stage - 1]
        if not update.layer or period_length(self.plan, stage) == 1:
            return ""
        if update.layer in single:
            return update.layer
        named = f"{update.device} names a poverty layer that may not be exchanged alone: {update.layer[:120]!a}"
        self._report(warning(named, stage.index, update.attempt.round))
        return ""

    async def evaluated(self, one: Evaluate) -> Evaluated:
        """Evaluation of the global model on the test set, with matcher networks and the chosen k if any."""
        memory = await asyncio.to_thread(load_memory, self.store, self.manifest)
        networks = memory.networks
        members = {name: self.manifest[name] for weights in networks.values() for name in weights}
        state, stage = shared(self.manifest) | members, one.attempt.stage
        request = Request(self.plan, str(self.store.root), stage, state, networks=networks, k=memory.k)
        where = (stage, one.attempt.round)
        try:
            rows = await self._ask("evaluate", tuple[EvaluationRow, ...], request, where)
        except WorkerFailedError as error:
            if not _killed(error):
                raise
            text = f"this round has no evaluation: the evaluator was killed {TRIES} times (SIGKILL), {_MEMORY}"
            way_out = "free memory on this machine, give a smaller data.test, or evaluate: stage; the run goes on"
            self._report(warning(f"{text}; {way_out}", *where))
            return Evaluated(self._clock(), one.attempt)
        numbered = (msgspec.structs.replace(row, stage=stage, round=one.attempt.round) for row in rows)
        return Evaluated(self._clock(), one.attempt, tuple(numbered))


def _killed(error: WorkerFailedError) -> bool:
    return error.status == -signal.SIGKILL  # any other signal is a defect, which trying again does not mend


def payload_sizes(store: ObjectStore, manifest: Manifest) -> dict[str, int]:
    """Bytes of each part's parameters and buffers: the object without its header."""
    sizes = {}
    for part, ref in manifest.items():
        with store.file_of(ref.id) as file:
            sizes[part] = ref.size - 8 - int.from_bytes(file.read(8), "little")
    return sizes
