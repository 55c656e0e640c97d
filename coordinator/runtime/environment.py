"""Environment of a run: its directory, its link to the fleet, its worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from coordinator.core.state import Crowd
from coordinator.core.timeouts import Timeouts
from coordinator.runtime.virtual_time import VirtualTime
from edgefl.run_records import EventRow
from edgefl.storage.shared import Shared
from edgefl.transport.interface import Transport

if TYPE_CHECKING:  # runs without an identity load no cryptography, those without an endpoint no web server
    from coordinator.runtime.control import Control
    from coordinator.runtime.fleet_auth import Guard
    from coordinator.runtime.object_endpoint import ObjectEndpoint


class Watch:
    """Link between a run and its live page. ``signs``: new signs of life by device. ``phase``: the machine's.

    ``followers``: number of browsers on the page. ``control``: for the page's requests.
    """

    def __init__(self) -> None:
        self.signs: dict[str, tuple[float, str, bool]] = {}
        self.phase: Callable[[], str] = str
        self.followers: Callable[[], int] = int
        self.control: Control | None = None


class Worker(Protocol):
    """The part of :class:`edgefl.process.worker.WorkerProcess` that the coordinator uses; tests replace it."""

    async def call(self, method: str, body: object) -> object:
        """The answer. Raises WorkerError."""
        ...

    async def stop(self) -> None:
        """End the worker."""
        ...


class Environment(NamedTuple):
    """Surroundings of a run. ``directory``: its own. ``transport``: not connected yet. ``emit`` takes its events.

    ``ledger_url``: a database, default ``ledger.sqlite`` in the directory. ``broker``: its address, for the event log.
    ``worker``: in place of the process that holds torch. ``guard``: the fleet's identity, if it has one.
    ``watch``: link to the live page, if there is one; ``endpoint``: of large objects, past the broker. Of simulated
    fleets alone: ``expects``: whether a device has yet to join; until none has, the time to join does not begin, since
    it says how busy their machine is; ``crowd``: devices that introduce themselves when they are called; ``shared``:
    objects in memory, where one process is coordinator and devices; only the ledger and states are then durable;
    ``virtual``: time in place of the machine's clock, by devices' traces.
    """

    directory: Path
    transport: Transport
    fleet: str
    emit: Callable[[EventRow], None]
    ledger_url: str = ""
    broker: str = ""
    worker: Worker | None = None
    timeouts: Timeouts = Timeouts()
    guard: Guard | None = None
    watch: Watch | None = None
    expects: Callable[[], bool] = bool
    crowd: Crowd | None = None
    shared: Shared | None = None
    endpoint: ObjectEndpoint | None = None
    virtual: VirtualTime | None = None
