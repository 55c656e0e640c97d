"""Engines that carry out a study's cells: the interface, and worker processes of this machine.

An engine knows nothing of grids, of what is done already or of tries again; ``edgefl.api.study_queue`` does.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from edgefl.errors import MissingDependencyError, RunError
from edgefl.process.worker import WorkerFailedError, WorkerProcess, understood

#: A worker ends a cell's processes in order before it ends itself.
STOP_S = 5.0


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


class Engine(Protocol):
    """Carries cells out, one at a time for each of its workers, which are numbered from 0."""

    async def carry_out(self, worker: int, work: Work) -> str:
        """The error that the cell failed by, "" when its run is done. Raises CellLostError."""
        ...

    async def estimate(self, work: Work) -> Estimate:
        """Memory of the cell while it runs. Raises EdgeFLError."""
        ...

    async def close(self) -> None:
        """End every worker."""
        ...


class _Slot(NamedTuple):
    process: WorkerProcess
    turn: asyncio.Lock


class LocalProcesses:
    """Worker processes of this machine, each with one thread for torch, kept from cell to cell.

    ``module``: the program of a worker, which answers ``carry_out`` and ``estimate``.
    """

    def __init__(self, workers: int, logs: Path, module: str = "edgefl.api.study_worker") -> None:
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        arguments = ["--parent", str(os.getpid())]
        self._slots = [
            _Slot(
                WorkerProcess(module, arguments, logs / f"worker-{n + 1}.log", threads),
                asyncio.Lock(),
            )
            for n in range(workers)
        ]

    async def carry_out(self, worker: int, work: Work) -> str:
        """See ``Engine.carry_out``."""
        return understood(await self._call(worker, "carry_out", work), str)

    async def estimate(self, work: Work) -> Estimate:
        """See ``Engine.estimate``; the first worker prices it."""
        return understood(await self._call(0, "estimate", work), Estimate)

    async def close(self) -> None:
        """See ``Engine.close``."""
        await asyncio.gather(*(slot.process.stop(STOP_S) for slot in self._slots))

    async def _call(self, worker: int, method: str, work: Work) -> object:
        process, turn = self._slots[worker]
        async with turn:
            try:
                return await process.call(method, work)
            except WorkerFailedError as error:
                if error.status is not None:
                    text = f"the process of {work.run} ended ({error.message})"
                    raise CellLostError(text, remedy=error.remedy) from error
                if error.kind == MissingDependencyError.__name__:  # of every cell
                    raise
                if method == "estimate":
                    raise
                return f"{error.message} ({error.remedy})"
