"""Tasks beside an event loop's own: kept until they end, cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial


class Tasks:
    """Tasks beside the loop. ``failed`` takes the error of one that ends by it."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._running: set[asyncio.Future[object]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Awaitable[object], failed: Callable[[BaseException], None] | None = None) -> None:
        """Begin a piece of work. ``failed``: in place of the usual one, never before this call has ended."""
        task, ended = asyncio.ensure_future(work), partial(self._ended, failed or self._failed)
        if task.done() and (failed is None or task.cancelled() or task.exception() is None):
            ended(task)
            return
        self._running.add(task)
        task.add_done_callback(ended)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until everything that runs has ended, no longer than this."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel what runs, and what that begins as it ends."""
        while self._running:
            tasks = list(self._running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, failed: Callable[[BaseException], None], task: asyncio.Future[object]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)
