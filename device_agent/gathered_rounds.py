"""Rounds of simulated devices, gathered for the thread that takes their steps together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple

from device_agent.core.state import NOTHING_TRAINED, Result
from device_agent.runtime.trainer_process import TrainerSettings, TrainRequest
from edgefl.process.inline_worker import InlineWorker
from edgefl.process.worker import Note, WorkerFailedError
from edgefl.records import Refusal

#: Between looks for devices that are on their way: fetching a model takes milliseconds.
LOOK_S = 0.002


class _Waiting(NamedTuple):
    request: TrainRequest
    note: Note
    answer: asyncio.Future[object]


class GatheredRounds:
    """Rounds of devices, begun together once no other device is on its way to one.

    ``coming``: whether one is; ``leave_off``: has a round that is begun end early.
    """

    def __init__(
        self,
        worker: InlineWorker,
        coming: Callable[[], bool],
        leave_off: Callable[[TrainerSettings], None],
        spawn: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self.worker = worker
        self._coming = coming
        self._leave_off = leave_off
        self._spawn = spawn
        self._waiting: dict[TrainerSettings, _Waiting] = {}
        self._running = False

    def member(self, settings: TrainerSettings) -> GatheredWorker:
        """The worker of one device."""
        return GatheredWorker(self, settings)

    async def train(self, request: TrainRequest, note: Note) -> object:
        """The result of a device's round. Raises WorkerFailedError."""
        one = _Waiting(request, note, asyncio.get_running_loop().create_future())
        self._waiting[request.settings] = one
        if not self._running:
            self._running = True
            self._spawn(self._run())
        try:
            return await one.answer
        except asyncio.CancelledError:
            self.interrupt(request.settings)
            raise

    def interrupt(self, settings: TrainerSettings) -> None:
        """End a device's round early; before it is begun at once."""
        if (one := self._waiting.pop(settings, None)) is None:
            self._leave_off(settings)
        elif not one.answer.done():
            refusal = Refusal("abandoned", detail="left off before its turn")
            one.answer.set_result(Result(refusal=refusal, figures=NOTHING_TRAINED))

    async def _run(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)
                while self._coming():
                    await asyncio.sleep(LOOK_S)
                await asyncio.sleep(0)  # the task of the last one has yet to begin
                # By name, not as they came: the same devices go together whenever the run is repeated.
                await self._train(sorted(self._waiting.values(), key=lambda one: one.request.settings.device))
        finally:
            self._running = False

    async def _train(self, due: Sequence[_Waiting]) -> None:
        self._waiting.clear()

        def noted(notes: Mapping[int, object]) -> None:
            for place, said in notes.items():
                due[place].note(said)

        answers = await self.worker.together([one.request for one in due], noted)
        for one, answer in zip(due, answers, strict=True):
            if one.answer.done():
                continue
            if isinstance(answer, WorkerFailedError):
                one.answer.set_exception(answer)
            else:
                one.answer.set_result(answer)


class GatheredWorker:
    """A device's worker, as ``device_agent.runtime.trainer_process.TrainerWorker``."""

    def __init__(self, rounds: GatheredRounds, settings: TrainerSettings) -> None:
        self._rounds = rounds
        self._settings = settings

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def call(self, method: str, body: object, on_note: Note | None = None) -> object:
        """See ``WorkerProcess.call``."""
        if isinstance(body, TrainRequest):
            return await self._rounds.train(body, on_note or (lambda _: None))
        return await self._rounds.worker.call(method, body, on_note)

    def interrupt(self) -> None:
        """Ask the device's round to end early."""
        self._rounds.interrupt(self._settings)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Part from what is kept for the device."""
        await self._rounds.worker.call("leave", self._settings)
