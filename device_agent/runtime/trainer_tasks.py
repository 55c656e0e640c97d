"""Tasks of the trainer: get ready, train, end; one at a time, each ending as an event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import replace

from device_agent.core import state as v
from device_agent.core.agent_timeouts import TRAINER_RESTART_S, TRAINER_RESTARTS
from device_agent.runtime.effects import Effects
from device_agent.runtime.trainer_process import Trainer
from edgefl import errors
from edgefl.process.worker import WorkerFailedError
from edgefl.protocol.messages import Offer
from edgefl.records import Figures


class TrainerTasks:
    """One trainer's tasks. ``supervisor_cost``: the supervisor's own figures for a training that has just ended."""

    def __init__(
        self, trainer: Trainer, effects: Effects, supervisor_cost: Callable[[Offer, v.Result], Figures]
    ) -> None:
        self._trainer = trainer
        self._effects = effects
        self._supervisor_cost = supervisor_cost
        self._deaths = 0
        self._job: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Let it load torch and the data; ends in TrainerReady or TrainerLost."""
        self._job = self._effects.spawn(self._warm(self._job))

    def stop(self) -> None:
        """Give its memory back."""
        self._effects.emit("trainer-stopped", reason="the run is over")
        self._job = self._effects.spawn(self._trainer.stop())

    def train(self, work: v.Train) -> None:
        """Ends in TrainingEnded, whatever happens."""
        self._job = self._effects.spawn(self._train(work))

    def interrupt(self) -> None:
        """Ask the training to end after its step."""
        self._trainer.interrupt()

    async def _warm(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # it may still be stopping
        started = time.monotonic()
        try:
            facts = await self._trainer.warm()
        except WorkerFailedError as error:
            self._deaths += 1
            if named(error) is not None or self._deaths >= TRAINER_RESTARTS:
                raise as_own_kind(error) from error
            await self._trainer.stop()  # it may live, with half its libraries loaded
            wait_s = TRAINER_RESTART_S * 2 ** (self._deaths - 1)
            self._effects.emit("trainer-lost", text=error.message, retry_s=wait_s)
            await asyncio.sleep(wait_s)
            self._effects.post(v.TrainerLost())
            return
        self._deaths = 0
        seconds, samples = time.monotonic() - started, facts.samples.get("", 0)
        self._effects.emit("trainer-ready", seconds=seconds, base_bytes=facts.base_bytes, samples=samples)
        self._effects.post(v.TrainerReady(facts))

    async def _train(self, work: v.Train) -> None:
        offer = work.offer
        self._effects.emit("training", attempt=str(offer.attempt))
        result, alive = await self._trainer.train(work, self._effects.post)
        if not alive:
            text = result.refusal.detail if result.refusal else ""
            self._effects.emit("trainer-lost", attempt=str(offer.attempt), text=text)
        if result.refusal is None:
            result = replace(result, figures={**result.figures, **self._supervisor_cost(offer, result)})
        self._effects.post(v.TrainingEnded(offer.attempt, result, alive))


def named(error: WorkerFailedError) -> type[errors.EdgeFLError] | None:
    """The class of an error the trainer raised on purpose: a person must mend that. None: it died or stumbled."""
    kind = getattr(errors, error.kind, None)
    return kind if isinstance(kind, type) and issubclass(kind, errors.EdgeFLError) else None


def as_own_kind(error: WorkerFailedError) -> errors.EdgeFLError:
    """The trainer's own error (such as DataError), so that the agent ends with its message and exit code."""
    kind = named(error)
    if kind is None:
        return error
    own = errors.EdgeFLError(error.message, remedy=error.remedy)
    own.exit_code = kind.exit_code
    return own
