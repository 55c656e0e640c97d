"""A worker without a process of its own: the same handlers in a thread of this one, with the same errors.

torch has one random generator for a process, so all workers of one process share one thread: their requests are
answered one after the other, and a seeded request gives what it gives in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import msgspec

from edgefl.process.worker import Answer, Handler, Note, Request, answered, reply_of


class InlineWorker:
    """``edgefl.process.worker.WorkerProcess`` without the process.

    ``handlers``: makes them, when the first request comes; ``leave_off``: has the request under way end early.
    ``thread``: an executor of one thread. ``log`` takes tracebacks.
    """

    def __init__(
        self,
        handlers: Callable[[], dict[str, Handler]],
        thread: Executor,
        log: Path,
        leave_off: Callable[[], None] = lambda: None,
    ) -> None:
        self.log = log
        self.interrupt = leave_off
        self._make = handlers
        self._handlers: dict[str, Handler] | None = None
        self._thread = thread

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def call(self, method: str, body: object, on_note: Note | None = None) -> object:
        """See ``WorkerProcess.call``. A call that is cancelled is asked to end early, and its answer dropped."""
        loop = asyncio.get_running_loop()

        def note(said: object) -> None:
            if on_note is not None:
                loop.call_soon_threadsafe(on_note, msgspec.to_builtins(said))

        request = Request(method, msgspec.to_builtins(body))
        try:
            frame = await loop.run_in_executor(self._thread, self._answer, request, note)
        except asyncio.CancelledError:
            self.interrupt()
            raise
        return reply_of(frame, self.log)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Part from the handlers and what they keep."""
        self._handlers = None

    def _answer(self, request: Request, note: Note) -> Answer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            handlers = self._handlers = self._handlers or self._make()
            return answered(handlers, request, note, log)
