"""The supervisor's side of the trainer: child process under a memory ceiling, and tasks that end as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from device_agent.core.state import (
    NOTHING_TRAINED,
    DataFacts,
    Progressed,
    Result,
    Train,
    TrainerLost,
    TrainerReady,
    TrainingEnded,
)
from device_agent.runtime.effects import Effects
from edgefl.models.spec import EncoderSpec
from edgefl.plan.job import Preparation
from edgefl.process.worker import Note, WorkerFailedError, WorkerProcess, understood
from edgefl.protocol.messages import Offer
from edgefl.records import GPU, HOST, Attempt, Budget, Figure, Figures, Manifest, Refusal
from edgefl.resources.process_memory import PERIOD_S, Ceiling, ceiling_bytes, resident_bytes, without_caches

#: The idle trainer gets this long to end after its input is closed, before it is killed.
TRAINER_STOP_S: Final = 3.0
#: First wait before a trainer that died while it was getting ready is started again; doubles each time.
TRAINER_RESTART_S: Final = 1.0
#: What libraries may take with a step's first kernels, 2 to 9 MiB as measured: part of the idle size after a rehearsal.
REHEARSAL_BYTES: Final = 16 * 2**20
#: After so many deaths in a row while getting ready, the agent gives up: importing torch does not heal by itself.
TRAINER_RESTARTS: Final = 3
OnProgress = Callable[[Progressed], None]


class TrainerSettings(msgspec.Struct, frozen=True):
    """A device's trainer: body of the trainer's ``warm`` and ``leave``. Paths are strings, as they cross the pipe."""

    device: str = ""
    data: str = ""
    store: str = ""
    log: str = ""
    budget: Budget = Budget()
    bad_samples: str = "error"
    torch_device: str = "auto"
    code: str = ""  # of the device's owner, FILE.py:FUNCTION, in place of EdgeFL's own training


class WarmRequest(msgspec.Struct, frozen=True):
    """Body of the trainer's ``warm``. ``offer``: a round to load modules for; ``rehearse``: a warm-up of it, too."""

    settings: TrainerSettings
    preparation: Preparation = Preparation()
    offer: Offer | None = None
    rehearse: bool = False


def library_encoders(offer: Offer) -> tuple[EncoderSpec, ...]:
    """Encoders of an offer built from a library's modules, such as transformers'."""
    return tuple(encoder for encoder in offer.job.model.encoders.values() if encoder.config)


class TrainRequest(msgspec.Struct, frozen=True):
    """Body of the trainer's ``train``."""

    settings: TrainerSettings
    offer: Offer
    retained: Manifest = {}  # what its last round left on this device


class TrainerWorker(Protocol):
    """A worker that trains: ``edgefl.process.worker.WorkerProcess``, or ``InlineWorker`` in this process."""

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        ...

    async def call(self, method: str, body: object, on_note: Note | None = None) -> object:
        """The worker's answer to a request. Raises WorkerFailedError."""
        ...

    def interrupt(self) -> None:
        """Ask the request under way to end early."""
        ...

    async def stop(self, grace_s: float = ...) -> None:
        """End the worker within ``grace_s`` seconds."""
        ...


class Ended(NamedTuple):
    """End of one training. ``alive``: the trainer still runs."""

    result: Result
    alive: bool


class Trainer(Protocol):
    """Interface of a trainer; tests have one without a process."""

    async def warm(self, preparation: Preparation) -> DataFacts:
        """Load torch and the data; facts of the data as read by ``preparation``.

        Raises WorkerFailedError: ``status`` is None when it refused, else it died.
        """
        ...

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """Train one round; a failing trainer ends it as a refusal, never as an error."""
        ...

    def interrupt(self) -> None:
        """Ask the training to end after its step."""
        ...

    async def stop(self) -> None:
        """End the trainer and give its memory back."""
        ...


def trainer_worker(log: Path, module: str = "device_agent.trainer.process") -> WorkerProcess:
    """The worker process for trainers, not yet started; it ends with this process."""
    return WorkerProcess(module, ["--parent", str(os.getpid())], log, without_caches())


class TrainerProcess:
    """The real trainer: a child process under a memory ceiling."""

    def __init__(
        self, settings: TrainerSettings, memory_total_bytes: int, module: str = "device_agent.trainer.process"
    ) -> None:
        self.settings = settings
        self._total = memory_total_bytes
        self._facts = DataFacts()
        self._rehearses = True
        self._left_off = False
        self._worker = trainer_worker(Path(settings.log), module)

    async def warm(self, preparation: Preparation) -> DataFacts:
        """Start the child if needed and load the data; see ``Trainer.warm``."""
        request = WarmRequest(self.settings, preparation)
        self._facts = understood(await self._worker.call("warm", request), DataFacts)
        return self._facts

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """Train one round; a child over the memory ceiling is killed, a refusal with both numbers."""
        self._left_off = False
        await self._start(work.offer)
        if self._rehearses:
            await self._rehearse(work.offer)
        if self._left_off:
            refusal = Refusal("abandoned", detail="left off before its first step")
            return Ended(Result(refusal=refusal, figures=NOTHING_TRAINED), alive=True)
        pid, card = self._worker.pid, self._facts.gpu_memory_bytes > 0
        if pid is None:
            return Ended(Result(refusal=Refusal("error", detail="the trainer did not start")), alive=False)
        limit = self._limit(pid, self.settings.budget)
        # Without a limit nothing is killed below the machine's whole memory, and the peak is known if the kernel kills.
        with self._ceiling(pid, limit) as ceiling:
            try:
                result = await train_in(self._worker, self.settings, work, on_progress)
            except WorkerFailedError as error:
                return failed(error, ceiling, self._total, card=card)
        return Ended(_within_budget(_with_limit(result, limit), self.settings.budget, card=card), alive=True)

    async def _start(self, offer: Offer) -> None:
        """Start a child that is gone, and load what belongs to no round: torch, data, a library's modules.

        ``train`` says what is wrong with a child that does not get ready.
        """
        with contextlib.suppress(WorkerFailedError):
            await self._worker.call("warm", WarmRequest(self.settings, offer=offer))

    async def _rehearse(self, offer: Offer) -> None:
        """Rehearse an offer's round under a ceiling; one that ends the child is this trainer's last."""
        pid, step = self._worker.pid, self.settings.budget.step_memory_bytes
        if pid is None:
            return
        budget = replace(self.settings.budget, step_memory_bytes=None if step is None else step + REHEARSAL_BYTES)
        with self._ceiling(pid, self._limit(pid, budget)) as ceiling, contextlib.suppress(WorkerFailedError):
            await self._worker.call("warm", WarmRequest(self.settings, offer=offer, rehearse=True))
        if ceiling.breached:  # it may have answered first, and seem to run
            await self._worker.stop()
        if self._worker.pid is None:
            self._rehearses = False
            await self._start(offer)

    def _limit(self, pid: int, budget: Budget) -> int | None:
        """Size in bytes that the child may have; None: no limit."""
        # Idle size now: some MB above the first one after the first rounds; below it when the child was just restarted.
        base = max(self._facts.base_bytes, resident_bytes(pid) or 0)
        return ceiling_bytes(budget, base, card=self._facts.gpu_memory_bytes > 0)

    def _ceiling(self, pid: int, limit: int | None) -> Ceiling:
        return Ceiling(pid, self._total if limit is None else limit, refuse=not self._facts.gpu)

    def interrupt(self) -> None:
        """Ask the child to end the training after its step; see ``Trainer.interrupt``."""
        self._left_off = True
        self._worker.interrupt()

    async def stop(self) -> None:
        """End the child to free its memory; see ``Trainer.stop``."""
        await self._worker.stop(TRAINER_STOP_S)


async def train_in(worker: TrainerWorker, settings: TrainerSettings, work: Train, on_progress: OnProgress) -> Result:
    """One round of a device in a trainer's process. Raises WorkerFailedError."""
    request = TrainRequest(settings, work.offer, work.retained)
    return understood(
        await worker.call("train", request, lambda note: on_progress(progressed(work.offer.attempt, note))), Result
    )


def progressed(attempt: Attempt, note: object) -> Progressed:
    """Decode a trainer's progress note. Raises WorkerFailedError for anything else."""
    return understood({**understood(note, dict[str, object]), "attempt": attempt}, Progressed)


#: Reason of a refusal for an error of this kind; "error" for any other.
REASONS = {"StoreError": "disk", "DamagedObjectError": "damaged", "DivergedError": "diverged"}


def raised(error: WorkerFailedError) -> Refusal:
    """The refusal of a trainer that raised."""
    return Refusal(REASONS.get(error.kind, "error"), detail=error.message[:500])


def failed(error: WorkerFailedError, ceiling: Ceiling, memory_total_bytes: int, *, card: bool = False) -> Ended:
    """End of a training with a trainer that raised (alive) or died (refusal with peak and limit).

    ``card``: tensors are in a GPU's own memory, so that host memory ran out.
    """
    if error.status is None:
        return Ended(Result(refusal=raised(error)), alive=True)
    ceiling.stop()
    where = HOST if card else ""
    allowed = float(min(ceiling.limit_bytes, memory_total_bytes))
    peak = float(ceiling.peak_bytes) if ceiling.peak_bytes else None
    if ceiling.refusal is not None:
        refusal = replace(ceiling.refusal, where=where)
    elif error.status == -signal.SIGKILL:  # not by us: the kernel ran out of memory, or another process did it
        detail = "the trainer was killed from outside, most likely because the machine ran out of memory"
        refusal = Refusal("memory", peak, allowed, "B", detail, where)
    else:
        refusal = Refusal("error", peak, allowed, "B", error.message[:500])
    unseen = "" if peak else "the trainer ended before it was looked at"
    source = f"VmRSS + VmSwap every {PERIOD_S * 1000:.0f} ms until the trainer ended"
    figures: Figures = {"process_peak_bytes": Figure(peak, source=source, reason=unseen)}
    return Ended(Result(refusal=refusal, figures=figures), alive=False)


def _with_limit(result: Result, limit: int | None) -> Result:
    """The result with the process ceiling as the limit of a memory refusal, unknown to the trainer."""
    refusal = result.refusal
    if refusal is None or refusal.reason != "memory" or refusal.allowed is not None or limit is None:
        return result
    if refusal.where == GPU:
        return result
    needed = refusal.needed if refusal.needed is not None and refusal.needed > limit else None  # it was never touched
    return replace(result, refusal=replace(refusal, needed=needed, allowed=float(limit)))


def _within_budget(result: Result, budget: Budget, *, card: bool) -> Result:
    """The result, or a refusal for a measured peak over the memory budget, too short for the ceiling's samples."""
    allowed = {
        "process_peak_bytes": budget.memory_bytes,
        "step_peak_bytes": None if card else budget.step_memory_bytes,
    }
    for name, limit in allowed.items():
        peak = figure.value if (figure := result.figures.get(name)) is not None else None
        if result.refusal is None and limit is not None and peak is not None and peak > limit:
            detail = "a short peak passed the memory budget; the round is not sent"
            return Result(refusal=Refusal("ceiling", peak, float(limit), "B", detail), figures=result.figures)
    return result


class TrainerTasks:
    """Tasks of one trainer: warm, train, stop; one at a time, each ending as an event.

    ``supervisor_cost``: the supervisor's own figures for a training that has just ended.
    """

    def __init__(self, trainer: Trainer, effects: Effects, supervisor_cost: Callable[[Offer, Result], Figures]) -> None:
        self._trainer = trainer
        self._effects = effects
        self._supervisor_cost = supervisor_cost
        self._deaths = 0
        self._job: asyncio.Task[None] | None = None

    def start(self, preparation: Preparation) -> None:
        """Start loading torch and the data; ends as the event TrainerReady or TrainerLost."""
        self._job = self._effects.spawn(self._warm(self._job, preparation))

    def stop(self, reason: str) -> None:
        """Stop the trainer to free its memory."""
        self._effects.emit("trainer-stopped", reason=reason or "there is no run for this device")
        self._job = self._effects.spawn(self._trainer.stop())

    def train(self, work: Train) -> None:
        """Start training an offer; always ends as the event TrainingEnded."""
        self._job = self._effects.spawn(self._train(work))

    async def _warm(self, before: asyncio.Task[None] | None, preparation: Preparation) -> None:
        if before is not None:
            await asyncio.wait([before])  # it may still be stopping
        started = time.monotonic()
        try:
            facts = await self._trainer.warm(preparation)
        except WorkerFailedError as error:
            self._deaths += 1
            if error.on_purpose or self._deaths >= TRAINER_RESTARTS:
                raise  # what it raised on purpose, such as a DataError, a person must mend
            await self._trainer.stop()  # it may live, with half its libraries loaded
            wait_s = TRAINER_RESTART_S * 2 ** (self._deaths - 1)
            self._effects.emit("trainer-lost", text=error.message, retry_s=wait_s)
            await asyncio.sleep(wait_s)
            self._effects.post(TrainerLost())
            return
        self._deaths = 0
        seconds, samples = time.monotonic() - started, facts.samples.get("", 0)
        self._effects.emit("trainer-ready", seconds=seconds, base_bytes=facts.base_bytes, samples=samples)
        self._effects.post(TrainerReady(facts))

    async def _train(self, work: Train) -> None:
        offer = work.offer
        self._effects.emit("training", attempt=str(offer.attempt))
        result, alive = await self._trainer.train(work, self._effects.post)
        if not alive:
            text = result.refusal.detail if result.refusal else ""
            self._effects.emit("trainer-lost", attempt=str(offer.attempt), text=text)
        if result.refusal is None:
            result = replace(result, figures={**result.figures, **self._supervisor_cost(offer, result)})
        self._effects.post(TrainingEnded(offer.attempt, result, alive))
