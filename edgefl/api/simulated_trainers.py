"""Trainer processes of a simulated fleet: requests with names of objects, and bytes in files of the run's directory.

The objects of simulated devices are in the memory of the process that holds the fleet. A trainer process reads those of
an offer from the coordinator's directory, and what is not a file there from ``HANDED``, where it leaves what it made.
Files that are gone within milliseconds are not written to the disk: they cost two copies in memory, which is less than
frames of a pipe.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from device_agent.core.state import Result
from device_agent.runtime.memory_store import Pool
from device_agent.runtime.trainer_process import TRAINER_RESTARTS, TRAINER_STOP_S, TrainRequest
from edgefl.errors import StoreError
from edgefl.process.worker import Note, WorkerFailedError, WorkerProcess, understood
from edgefl.storage.disk import make_private, store_errors, write_new
from edgefl.storage.objects import object_id

#: In the run's directory: objects on their way between the processes, a directory for each trainer process.
HANDED = "handed"
#: Objects that are larger together are read and checked in a thread: a millisecond of the event loop's.
_IN_LOOP_BYTES = 2**20


class Order(msgspec.Struct, frozen=True):
    """A device's round. ``has``: its objects, name -> bytes."""

    request: TrainRequest
    has: Mapping[str, int] = {}


class Trained(msgspec.Struct, frozen=True):
    """Result of an order. ``made``: new objects of the device, name -> bytes; ``removed``: damaged ones."""

    result: Result
    made: Mapping[str, int] = {}
    removed: tuple[str, ...] = ()


def wanted_objects(request: TrainRequest) -> set[str]:
    """Names of the objects that a round reads, where the device has them."""
    offer = request.offer
    packed = {name for one in offer.packed.values() for name in (one.ref.id, one.base)}
    return {ref.id for ref in (*offer.manifest.values(), *request.retained.values())} | packed


class SimulatedTrainers:
    """A trainer process of a simulated fleet, as ``device_agent.runtime.trainer_process.TrainerWorker``.

    One that dies is started again, and does again what it was asked: the same, since a round follows from its request.
    ``warn`` takes a sentence on that.
    """

    def __init__(self, number: int, run: Path, pool: Pool, warn: Callable[[str], None]) -> None:
        self._name = f"trainer process {number}"
        self._folder = run / HANDED / str(number)
        self._pool = pool
        self._warn = warn
        self._listening: int | None = None  # process that has answered, and may be interrupted
        arguments = ["--parent", str(os.getpid()), str(run), str(self._folder)]
        log = run / "logs" / f"trainers-{number}.log"
        self._process = WorkerProcess("edgefl.api.simulated_training", arguments, log)

    @property
    def pid(self) -> int | None:
        """Process id while the process runs, else None."""
        return self._process.pid

    async def start(self) -> None:
        """Let it load torch, while others are busy."""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        with store_errors("create", self._folder):
            make_private(self._folder)
        await self._process.start()

    async def call(self, method: str, body: object, on_note: Note | None = None) -> object:
        """See ``WorkerProcess.call``; the objects of a round come with its answer."""
        for deaths in itertools.count(1):
            try:
                order = self._order(body) if isinstance(body, TrainRequest) else body
                answer = await self._process.call(method, order, on_note)
                self._listening = self.pid
                return await self._taken(body, answer) if isinstance(body, TrainRequest) else answer
            except WorkerFailedError as error:
                if error.status is None or deaths == TRAINER_RESTARTS:
                    raise
                self._warn(f"{self._name} has ended ({error.message}); it is started again, and does that again")
            except StoreError as error:
                raise WorkerFailedError(error.message, kind="StoreError", remedy=error.remedy) from error
        raise AssertionError("counts without end")

    def interrupt(self) -> None:
        """Ask the request under way to end early; one that is still starting does not hear it."""
        if self._listening is not None and self._listening == self.pid:
            self._process.interrupt()

    async def stop(self, grace_s: float = TRAINER_STOP_S) -> None:
        """End the process."""
        await self._process.stop(grace_s)

    def _order(self, request: TrainRequest) -> Order:
        """The request, with its objects where the process finds them."""
        store = self._pool.stores[request.settings.device]
        places = (self._pool.source, store.directory, self._folder)
        for name in wanted_objects(request) & store.sizes.keys():
            if not any((place / name).is_file() for place in places):
                with store_errors("write", self._folder / name):
                    write_new(self._folder / name, store.read(name), durable=False)
        return Order(request, store.sizes)

    async def _taken(self, request: TrainRequest, answer: object) -> Result:
        """The result of a round, whose objects are the device's now."""
        trained = understood(answer, Trained)
        store = self._pool.stores[request.settings.device]
        if sum(trained.made.values()) > _IN_LOOP_BYTES:
            made = await asyncio.to_thread(self._read, trained.made)
        else:
            made = self._read(trained.made)
        for name in trained.removed:
            store.remove(name)
        for name, data in made.items():
            store.take(name, trained.made[name], data)
        return trained.result

    def _read(self, made: Mapping[str, int]) -> dict[str, bytes | None]:
        """Bytes of the objects that the process made, and all else in its directory gone."""
        found: dict[str, bytes | None] = dict.fromkeys(made)
        with os.scandir(self._folder) as files:
            for file in files:
                if file.name in found:
                    found[file.name] = data = Path(file.path).read_bytes()
                    if len(data) != made[file.name] or object_id(data) != file.name:
                        raise WorkerFailedError(f"{self._name} left an object that is not what it is named by")
                Path(file.path).unlink()
        return found
