"""Supervisor's end of the trainer process: starts it, gives it work, watches its memory, reports how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from device_agent.core.agent_timeouts import TRAINER_STOP_S
from device_agent.core.state import DataFacts, Progressed, Result, Train
from edgefl.process.worker import WorkerFailedError, WorkerProcess, understood
from edgefl.protocol.messages import Offer
from edgefl.records import GPU, HOST, Attempt, Budget, Figure, Figures, Manifest, Refusal
from edgefl.resources.process_memory import PERIOD_S, Ceiling, ceiling_bytes, resident_bytes

OnProgress = Callable[[Progressed], None]


class TrainRequest(msgspec.Struct, frozen=True):
    """Body of the trainer's ``train``."""

    offer: Offer
    device: str = ""
    retained: Manifest = {}  # what its last round left on this device


class Ended(NamedTuple):
    """End of one training. ``alive``: the trainer still runs."""

    result: Result
    alive: bool


class Trainer(Protocol):
    """Interface of a trainer; tests have one without a process."""

    async def warm(self) -> DataFacts:
        """Load torch and the data. Raises WorkerFailedError: ``status`` is None when it refused, else it died."""
        ...

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """One round; never raises for what the trainer does."""
        ...

    def interrupt(self) -> None:
        """Ask the training to end after its step."""
        ...

    async def stop(self) -> None:
        """End the trainer and give its memory back."""
        ...


class TrainerSettings(NamedTuple):
    """Settings that the child is started with."""

    device: str
    data: str
    store: Path
    log: Path
    budget: Budget = Budget()
    bad_samples: str = "error"
    torch_device: str = "auto"
    module: str = "device_agent.trainer.process"


class TrainerProcess:
    """The real trainer: a child process under a memory ceiling."""

    def __init__(self, settings: TrainerSettings, memory_total_bytes: int) -> None:
        self.settings = settings
        self._total = memory_total_bytes
        self._base_bytes = 0
        self._gpu = ""
        self._card = False
        arguments = ["--data", settings.data, "--bad-samples", settings.bad_samples]
        arguments += ["--store", str(settings.store), "--device", settings.torch_device]
        arguments += ["--parent", str(os.getpid())]
        arguments += ["--budget", msgspec.json.encode(settings.budget).decode()]
        self._worker = WorkerProcess(settings.module, arguments, settings.log)

    async def warm(self) -> DataFacts:
        """See ``Trainer.warm``."""
        facts = understood(await self._worker.call("warm", None), DataFacts)
        self._base_bytes = facts.base_bytes
        self._gpu = facts.gpu
        self._card = facts.gpu_memory_bytes > 0
        return facts

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """See ``Trainer.train``. Over the ceiling the child is killed, which is a refusal with both numbers."""
        if self._worker.pid is None:  # a cold one has torch to load first, which belongs to no round
            await self._worker.start()
            with contextlib.suppress(WorkerFailedError):  # ``train`` says what is wrong
                await self._worker.call("warm", None)
        pid = self._worker.pid
        if pid is None:
            return Ended(Result(refusal=Refusal("error", detail="the trainer did not start")), alive=False)
        # Idle size now: some MB above the first one after the first rounds; below it when the child was just restarted.
        base = max(self._base_bytes, resident_bytes(pid) or 0)
        limit = ceiling_bytes(self.settings.budget, base, card=self._card)
        # Without a limit nothing is killed below the machine's whole memory, and the peak is known if the kernel kills.
        with Ceiling(pid, self._total if limit is None else limit, refuse=not self._gpu) as ceiling:
            try:
                reply = await self._worker.call(
                    "train",
                    TrainRequest(work.offer, self.settings.device, work.retained),
                    lambda note: on_progress(progressed(work.offer.attempt, note)),
                )
                result = understood(reply, Result)
            except WorkerFailedError as error:
                return failed(error, ceiling, self.settings.budget, self._total, card=self._card)
        return Ended(_with_limit(result, limit), alive=True)

    def interrupt(self) -> None:
        """See ``Trainer.interrupt``."""
        if (pid := self._worker.pid) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the child at once."""
        self._worker.kill()

    async def stop(self) -> None:
        """See ``Trainer.stop``."""
        await self._worker.stop(TRAINER_STOP_S)


def progressed(attempt: Attempt, note: object) -> Progressed:
    """A trainer's note of its progress, decoded. Raises WorkerFailedError for anything else."""
    return understood({**understood(note, dict[str, Any]), "attempt": attempt}, Progressed)


def _with_limit(result: Result, limit: int | None) -> Result:
    """An allocation that was refused has its second number: the process' ceiling, which the trainer does not know."""
    refusal = result.refusal
    if refusal is None or refusal.reason != "memory" or refusal.allowed is not None or limit is None:
        return result
    if refusal.where == GPU:
        return result
    needed = refusal.needed if refusal.needed is not None and refusal.needed > limit else None  # it was never touched
    return msgspec.structs.replace(
        result, refusal=msgspec.structs.replace(refusal, needed=needed, allowed=float(limit))
    )


def failed(
    error: WorkerFailedError, ceiling: Ceiling, budget: Budget, memory_total_bytes: int, *, card: bool = False
) -> Ended:
    """The refusal for a trainer that raised (it lives) or died (both numbers: peak seen, and what was allowed).

    ``card``: tensors are in a GPU's own memory, so that it was the process' that ran out.
    """
    if error.status is None:
        reason = "disk" if error.kind == "StoreError" else "error"
        return Ended(Result(refusal=Refusal(reason, detail=error.message[:500])), alive=True)
    ceiling.stop()
    figures = _last_seen(ceiling)
    where = HOST if card else ""
    if ceiling.refusal is not None:
        refusal = msgspec.structs.replace(ceiling.refusal, where=where)
        return Ended(Result(refusal=refusal, figures=figures), alive=False)
    allowed = float(min(ceiling.limit_bytes, memory_total_bytes))
    peak = float(ceiling.peak_bytes) if ceiling.peak_bytes else None
    if error.status == -signal.SIGKILL:  # not by us: the kernel ran out of memory, or another process did it
        detail = "the trainer was killed from outside, most likely because the machine ran out of memory"
        return Ended(Result(refusal=Refusal("memory", peak, allowed, "B", detail, where), figures=figures), alive=False)
    return Ended(
        Result(refusal=Refusal("error", peak, allowed, "B", error.message[:500]), figures=figures), alive=False
    )


def _last_seen(ceiling: Ceiling) -> Figures:
    source = f"VmRSS every {PERIOD_S * 1000:.0f} ms until the trainer ended"
    if not ceiling.peak_bytes:
        return {"process_peak_bytes": Figure(source=source, reason="the trainer ended before it was looked at")}
    return {"process_peak_bytes": Figure(float(ceiling.peak_bytes), "measured", source)}
