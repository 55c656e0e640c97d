"""Workers that carry out a study's cells: as many at once as fit the memory; a cell whose process died is tried again.

A worker is a process of this machine or elsewhere, kept from cell to cell; the first that is ready takes the next cell.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from edgefl.api.study_cells import Work
from edgefl.errors import BudgetError, EdgeFLError, MissingDependencyError
from edgefl.process.worker import WorkerFailedError, WorkerProcess, understood
from edgefl.resources import control_group
from edgefl.storage.disk import is_held

#: A cell whose process was killed is taken up again so often; one that dies three times will not live the fourth.
AGAIN = 2
#: Different cells that are priced for their memory, seeds apart: a second or two each.
MOST_PRICED = 8
#: The processes of a cell that was killed end within the coordinator's grace.
FREE_S = 20.0
#: A worker ends a cell's processes in order before it ends itself.
STOP_S = 5.0
#: Of the memory that is free when a study begins: the rest is for what else the machine does meanwhile.
MEMORY_SHARE = 0.8
_MIB = 2**20


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


class Room(NamedTuple):
    """Capacity of an engine's machines: processor cores, and memory that all cells together may take, bytes."""

    cores: int
    memory_bytes: int


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


@dataclass
class Engine:
    """Where workers come from. ``make``: a worker that is not started yet, by its number from 1.

    ``end``: called when all have been stopped.
    """

    make: Callable[[int], Worker]
    room: Room
    end: Callable[[], None] = lambda: None
    workers: list[Worker] = field(default_factory=list)

    def worker(self, number: int) -> Worker:
        """The worker of this number from 1; those up to it are made."""
        self.workers += [self.make(n + 1) for n in range(len(self.workers), number)]
        return self.workers[number - 1]

    async def estimate(self, works: Sequence[Work]) -> list[Estimate]:
        """Memory of each cell that can be priced, while it runs, by the first worker. Raises EdgeFLError."""
        worker = self.worker(1)
        await worker.start()
        return understood(await worker.call("estimate", list(works)), list[Estimate])

    async def close(self) -> None:
        """End every process."""
        try:
            await asyncio.gather(*(worker.stop(STOP_S) for worker in self.workers))
        finally:
            self.end()


def local_processes(logs: Path, module: str = "edgefl.api.study_worker") -> Engine:
    """Worker processes of this machine, each with one thread for torch.

    ``module``: the program of a worker, which answers ``carry_out`` and ``estimate``.
    """
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    arguments = ["--parent", str(os.getpid())]

    def make(number: int) -> Worker:
        return WorkerProcess(module, arguments, logs / f"worker-{number}.log", threads)

    return Engine(make, local_room())


def local_room() -> Room:
    """Capacity of this machine, of its memory a share of what is free."""
    return Room(len(os.sched_getaffinity(0)), int(MEMORY_SHARE * control_group.memory().free_bytes))


class Ended(NamedTuple):
    """One cell has ended: its run's id, and the error that it failed by, "": none. ``kept``: it was done before."""

    run: str
    error: str = ""
    kept: bool = False


class Told(NamedTuple):
    """Where a study's progress goes: ``say`` takes sentences, ``ended`` each cell that has ended."""

    say: Callable[[str], None] = lambda _: None
    ended: Callable[[Ended], None] = lambda _: None


SILENT = Told()


async def fitting(engine: Engine, works: Sequence[Work], workers: int, memory_bytes: int, told: Told) -> int:
    """How many of ``workers`` may run these cells at once within ``memory_bytes``; 0: of what the engine has room for.

    Raises BudgetError, with both numbers, where not even one cell fits.
    """
    workers, allowed = workers or engine.room.cores, memory_bytes or engine.room.memory_bytes
    kinds = list({repr((_seedless(work.file), _seedless(work.overrides))): work for work in works}.values())
    for start in range(0, len(kinds), MOST_PRICED):
        if estimates := await engine.estimate(kinds[start : start + MOST_PRICED]):
            break  # where none of those can be priced, the next are
    else:
        told.say("no cell can be priced; each says why")
        return min(workers, len(works))
    largest = max(estimates, key=lambda one: one.total)
    if largest.total > allowed:
        text = f"a cell takes about {_mib(largest.total)}, of {_mib(allowed)}: {_words(largest)}"
        raise BudgetError(text, remedy="Allow more by --memory-mib, or make batches or the model smaller.")
    count = min(workers, len(works), allowed // largest.total)
    some = f"; the largest of the {len(estimates)} of {len(kinds)} kinds of cell that were priced"
    told.say(
        f"{count} of {workers} workers: a cell takes about {_mib(largest.total)} ({_words(largest)}"
        f"{some if len(estimates) < len(kinds) else ''}), of {_mib(allowed)}"
    )
    return count


def _seedless(values: object) -> object:
    return {**values, "seed": None} if isinstance(values, Mapping) else values


def _words(one: Estimate) -> str:
    others = f", {_mib(one.others)} other idle processes" if one.others else ""
    return f"{_mib(one.process)} measured when it was priced, {_mib(one.steps)} predicted for a step{others}"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"


async def carry_out_all(engine: Engine, works: Sequence[Work], workers: int, told: Told) -> dict[str, str]:
    """Carry every cell out; run -> the error that its cell failed by, "": none. Raises what concerns every cell.

    A worker that cannot start leaves the cells to the others; the last one's error is raised.
    """
    waiting = deque((work, 0) for work in works)
    errors: dict[str, str] = {}

    async def take(worker: Worker) -> EdgeFLError | None:
        while waiting:
            if (failure := await _start(worker)) is not None:
                return failure
            if not waiting:  # others have taken the rest while this one waited for room
                break
            work, lost = waiting.popleft()
            try:
                error = await _carry_out(worker, work)
            except WorkerFailedError as gone:
                if gone.status is None:
                    raise
                text = f"the process of {work.run} ended ({gone.message})"
                if lost < AGAIN:
                    told.say(f"{text}: it is taken up again, {AGAIN - lost} times at most")
                    await _let_go(Path(work.directory) / work.run)
                    waiting.append((work, lost + 1))
                    continue
                error = f"{text}, {lost + 1} times ({gone.remedy})"
            errors[work.run] = error
            told.ended(Ended(work.run, error))
        return None

    at_work = {asyncio.ensure_future(take(engine.worker(number + 1))) for number in range(workers)}
    try:
        while len(errors) < len(works):
            ended, at_work = await asyncio.wait(at_work, return_when=asyncio.FIRST_COMPLETED)
            for failure in [one for task in ended if (one := task.result()) is not None]:
                if not at_work:
                    raise failure
                told.say(f"{failure.message}; the other workers go on")
    finally:
        for task in at_work:
            task.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)
    return errors


async def _start(worker: Worker) -> EdgeFLError | None:
    """The error by which a worker does not start, tried again as a cell is: another node may have room for it."""
    failure: EdgeFLError | None = None
    for _ in range(1 + AGAIN):
        try:
            await worker.start()
            return None
        except EdgeFLError as error:
            failure = error
    return failure


async def _carry_out(worker: Worker, work: Work) -> str:
    """The error that the cell failed by, "" when its run is done. Raises WorkerFailedError."""
    try:
        return understood(await worker.call("carry_out", work), str)
    except WorkerFailedError as error:
        if error.status is not None or error.kind == MissingDependencyError.__name__:  # which is of every cell
            raise
        return f"{error.message} ({error.remedy})"


async def _let_go(directory: Path) -> None:
    """Wait until no process of a lost cell holds its directory, no longer than FREE_S."""
    loop = asyncio.get_running_loop()
    until = loop.time() + FREE_S
    while is_held(directory) and loop.time() < until:
        await asyncio.sleep(0.1)
