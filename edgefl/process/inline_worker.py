"""A worker without a process of its own: the same handlers in a thread of this one, with the same errors.

torch has one random generator for a process, so all workers of one process share one thread: their requests are
answered one after the other, and a seeded request gives what it gives in a process of its own. Quick requests are
answered in the event loop's thread while that one idles: two threads that take turns with the interpreter's lock cost
a small model a tenth of its round.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from edgefl.process.worker import Answer, Handler, Note, Request, WorkerFailedError, answered, reply_of

#: Least time between notes that are passed on, but for a request's last: each wakes the event loop, at a tenth of a
#: millisecond, and a small model's step takes five.
NOTE_S = 0.2
#: Seconds for which a request may hold the event loop's thread. Judged by the last ones of the method, so many that
#: a fleet of different devices is known by them.
QUICK_S, JUDGED_BY = 0.25, 32


class SpacedNotes:
    """A request's progress notes, limited to a few a second. ``waiting``: the last one, where it was held back."""

    def __init__(self, pass_on: Note) -> None:
        self.waiting: list[object] = []
        self._pass_on = pass_on
        self._at = 0.0

    def __call__(self, said: object) -> None:
        self.waiting[:] = [said]
        if (now := time.monotonic()) - self._at >= NOTE_S:
            self._at = now
            self._pass_on(self.waiting.pop())


class ComputeThread(ThreadPoolExecutor):
    """One thread for every computation of a process."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name)
        self._last: Future[Any] | None = None

    @property
    def idle(self) -> bool:
        """True if all that was submitted is done, so that its caller may compute."""
        return self._last is None or self._last.done()

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        """See ``Executor.submit``."""
        self._last = super().submit(*call, **named)
        return self._last


class InlineWorker:
    """``edgefl.process.worker.WorkerProcess`` without the process.

    ``handlers``: makes them, when the first request comes; ``leave_off``: has the request under way end early.
    ``thread``: shared by all workers of the process. ``log`` takes tracebacks.
    """

    def __init__(
        self,
        handlers: Callable[[], dict[str, Handler]],
        thread: ComputeThread,
        log: Path,
        leave_off: Callable[[], None] = lambda: None,
    ) -> None:
        self.log = log
        self.interrupt = leave_off
        self._make = handlers
        self._handlers: dict[str, Handler] | None = None
        self._thread = thread
        self._took: dict[str, deque[float]] = {}  # seconds of each method's last requests

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def call(self, method: str, body: object, on_note: Note | None = None) -> object:
        """See ``WorkerProcess.call``. A call that is cancelled is asked to end early, and its answer dropped."""
        loop, noted = asyncio.get_running_loop(), on_note or _dropped

        def pass_on(said: object) -> None:
            loop.call_soon_threadsafe(noted, msgspec.to_builtins(said))

        here = self._thread.idle and max(self._took.get(method, (QUICK_S,))) < QUICK_S
        notes = SpacedNotes((lambda said: noted(msgspec.to_builtins(said))) if here else pass_on)
        if here:
            (frame,) = self._answer([Request(method, body)], notes)
        else:
            try:
                (frame,) = await loop.run_in_executor(self._thread, self._answer, [Request(method, body)], notes)
            except asyncio.CancelledError:
                self.interrupt()
                raise
        for said in notes.waiting:
            noted(msgspec.to_builtins(said))
        return reply_of(frame, self.log)

    async def calls(self, requests: Sequence[tuple[str, object]]) -> list[object]:
        """Answers to many requests (method, body), one after the other in the thread; errors are among them."""
        loop = asyncio.get_running_loop()
        each = [Request(method, body) for method, body in requests]
        answers: list[object] = []
        for frame in await loop.run_in_executor(self._thread, self._answer, each, _dropped):
            try:
                answers.append(reply_of(frame, self.log))
            except WorkerFailedError as error:
                answers.append(error)
        return answers

    async def together(
        self, bodies: Sequence[object], on_notes: Callable[[Mapping[int, object]], None]
    ) -> list[object]:
        """Answers to requests that the handler "together" takes at once; errors are among them. Notes are by place.

        The handler answers with a function for each, which returns the answer or raises.
        """
        answers: list[object] = []
        try:
            given = cast("Sequence[Callable[[], object]]", await self.call("together", bodies, cast("Any", on_notes)))
        except WorkerFailedError as error:
            return [error] * len(bodies)
        with self.log.open("a", encoding="utf-8") as log:
            for one in given:
                frame = answered({"": partial(_given, one)}, Request(), _dropped, log, as_it_is=True)
                try:
                    answers.append(reply_of(frame, self.log))
                except WorkerFailedError as error:
                    answers.append(error)
        return answers

    async def stop(self, grace_s: float = 0.0) -> None:
        """Part from the handlers and what they keep."""
        self._handlers = None

    def _answer(self, requests: Sequence[Request], note: Note) -> list[Answer]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            handlers = self._handlers = self._handlers or self._make()
            answers = []
            for request in requests:
                began = time.monotonic()
                answers.append(answered(handlers, request, note, log, as_it_is=True))
                self._took.setdefault(request.method, deque(maxlen=JUDGED_BY)).append(time.monotonic() - began)
            return answers


def _given(answer: Callable[[], object], body: object, note: Note) -> object:
    return answer()


def _dropped(said: object) -> None:
    """Drop a note."""
