"""Engines that carry out a study's cells: the interface, and a pool of workers, such as this machine's processes.

An engine knows nothing of grids, of what is done already or of tries again; ``edgefl.api.study_queue`` does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from edgefl.errors import MissingDependencyError, RunError
from edgefl.process.worker import WorkerFailedError, WorkerProcess, understood
from edgefl.resources import control_group

#: A worker ends a cell's processes in order before it ends itself.
STOP_S = 5.0
#: Of the memory that is free when a study begins: the rest is for what else the machine does meanwhile.
MEMORY_SHARE = 0.8


class Work(msgspec.Struct, frozen=True):
    """A cell as an engine gets it. ``file``: as of ``edgefl.run``, in plain values; ``run``: its run's id.

    ``directory``: where the study's runs are. ``trainers``, ``in_process``, ``export``: as of ``edgefl.run``.
    """

    file: str | dict[str, object] = ""
    overrides: dict[str, object] = {}
    run: str = ""
    directory: str = ""
    trainers: int = 0
    in_process: bool = False
    export: bool = False


class Estimate(msgspec.Struct, frozen=True):
    """Memory of a cell, bytes. ``process``: largest size of a worker that has read the data and priced the cell.

    ``steps``: predicted peak of the step that runs, in processes of those that run at once; ``others``: the idle sizes
    of the cell's other processes, none in one process.
    """

    process: int = 0
    steps: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.process + self.steps + self.others


class CellLostError(RunError):
    """The process that carried a cell out is gone: the cell can be taken up again where it stopped."""


class Room(NamedTuple):
    """Capacity of an engine's machines: processor cores, and memory that all cells together may take, bytes."""

    cores: int
    memory_bytes: int


class Engine(Protocol):
    """Carries cells out, each in a process of its own, as many at once as it is called for."""

    room: Room

    async def carry_out(self, work: Work) -> str:
        """The error that the cell failed by, "" when its run is done. Raises CellLostError."""
        ...

    async def estimate(self, works: Sequence[Work]) -> list[Estimate]:
        """Memory of each cell that can be priced, while it runs. Raises EdgeFLError."""
        ...

    async def close(self) -> None:
        """End every process."""
        ...


class Worker(Protocol):
    """A process that does what it is called for, one call at a time, kept from cell to cell."""

    async def start(self) -> None:
        """Return when it is ready, which may be never where it must wait for room. Raises EdgeFLError."""
        ...

    async def call(self, method: str, body: object) -> object:
        """The answer of ``carry_out`` or ``estimate``. Raises WorkerFailedError, with a status if it is gone."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End it."""
        ...


class Workers:
    """An engine of workers, one more started when a cell waits and none is idle; the first that is ready takes it.

    ``make``: a worker that is not started yet, by its number from 1; ``end``: called when all have been stopped.
    """

    def __init__(self, make: Callable[[int], Worker], room: Room, end: Callable[[], None] = lambda: None) -> None:
        self.room = room
        self._make, self._end = make, end
        self._every: list[Worker] = []
        self._idle: list[Worker] = []
        self._waiting = 0  # calls without a worker
        self._coming = 0  # workers that start, and those in the queue
        self._ready: asyncio.Queue[Worker | Exception] = asyncio.Queue()
        self._starts: set[asyncio.Task[None]] = set()

    async def carry_out(self, work: Work) -> str:
        """See ``Engine.carry_out``."""
        try:
            return understood(await self._call("carry_out", work, work.run), str)
        except WorkerFailedError as error:
            if error.kind == MissingDependencyError.__name__:  # of every cell
                raise
            return f"{error.message} ({error.remedy})"

    async def estimate(self, works: Sequence[Work]) -> list[Estimate]:
        """See ``Engine.estimate``."""
        return understood(await self._call("estimate", list(works), "pricing"), list[Estimate])

    async def close(self) -> None:
        """See ``Engine.close``."""
        for task in self._starts:
            task.cancel()
        try:
            await asyncio.gather(*self._starts, return_exceptions=True)
            await asyncio.gather(*(worker.stop(STOP_S) for worker in self._every))
        finally:
            self._end()

    async def _call(self, method: str, body: object, name: str) -> object:
        worker = await self._take()
        try:
            return await worker.call(method, body)
        except WorkerFailedError as error:
            if error.status is None:
                raise
            text = f"the process of {name} ended ({error.message})"
            raise CellLostError(text, remedy=error.remedy) from error
        finally:
            if self._waiting:  # also where others are starting: they may have to wait for room
                self._start(worker)
            else:
                self._idle.append(worker)

    async def _take(self) -> Worker:
        self._waiting += 1
        try:
            if self._coming < self._waiting:
                self._start(self._idle.pop() if self._idle else self._one_more())
            found = await self._ready.get()
        finally:
            self._waiting -= 1
        self._coming -= 1
        if isinstance(found, Exception):
            raise found
        return found

    def _one_more(self) -> Worker:
        worker = self._make(len(self._every) + 1)
        self._every.append(worker)
        return worker

    def _start(self, worker: Worker) -> None:
        async def start() -> None:
            try:
                await worker.start()
            except Exception as error:
                self._idle.insert(0, worker)  # the others are taken first
                if self._waiting < self._coming:  # whoever waited has had another worker
                    self._coming -= 1
                else:  # raised by the call that takes it from the queue
                    self._ready.put_nowait(error)
            else:
                self._ready.put_nowait(worker)

        self._coming += 1
        task = asyncio.ensure_future(start())
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)


def local_processes(logs: Path, module: str = "edgefl.api.study_worker") -> Workers:
    """Worker processes of this machine, each with one thread for torch.

    ``module``: the program of a worker, which answers ``carry_out`` and ``estimate``.
    """
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    arguments = ["--parent", str(os.getpid())]

    def make(number: int) -> Worker:
        return WorkerProcess(module, arguments, logs / f"worker-{number}.log", threads)

    return Workers(make, local_room())


def local_room() -> Room:
    """Capacity of this machine, of its memory a share of what is free."""
    return Room(len(os.sched_getaffinity(0)), int(MEMORY_SHARE * control_group.memory().free_bytes))
