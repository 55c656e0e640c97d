"""A trainer process for several devices of one machine: they take turns, each with its own data and object store.

For fleets of many devices on one machine (``edgefl run --trainers``), where a torch in each would fill it. Training is
that of ``device_agent.trainer.process``. A round's step memory is still measured: one round at a time, above what the
process held when it began. What the whole process holds belongs to no single device, and is not reported as one
device's.
"""

from __future__ import annotations

import argparse
import resource
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from device_agent.core.state import DataFacts, Result
from device_agent.runtime.trainer_process import TrainRequest
from device_agent.trainer.process import Trainer
from edgefl.process.parent_death import die_with_parent
from edgefl.process.worker import Note, serve
from edgefl.records import Budget, Figure
from edgefl.resources.process_memory import give_back_at_once

if TYPE_CHECKING:
    from edgefl.training.flop_cache import FlopCounts


class Tenant(msgspec.Struct, frozen=True):
    """A device's place in a trainer process."""

    device: str
    data: str
    store: str
    bad_samples: str = "error"
    torch_device: str = "auto"
    budget: Budget = Budget()


class TenantRequest(msgspec.Struct, frozen=True):
    """Body of every request: whose it is and, to train, the work."""

    tenant: Tenant
    work: TrainRequest | None = None


class TrainerHost:
    """The trainers by device, and which of them works."""

    def __init__(self) -> None:
        self._trainers: dict[Tenant, Trainer] = {}
        self._active: Trainer | None = None
        self._counts: FlopCounts | None = None  # steps that any device has counted need not be counted again

    def leave_off(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: the round that is under way ends after its step."""
        if self._active is not None:
            self._active.leave_off(signum, frame)

    def warm(self, body: object, note: Note) -> DataFacts:
        """As ``Trainer.warm``, of the device that asks."""
        return self._trainer(msgspec.convert(body, TenantRequest).tenant).warm()

    def train(self, body: object, note: Note) -> Result:
        """As ``Trainer.train``, of the device that asks."""
        request = msgspec.convert(body, TenantRequest)
        self._active = self._trainer(request.tenant)
        self._active.counts = self._counts
        try:
            result = self._active.train(request.work, note)
            self._counts = self._active.counts
        finally:
            self._active = None
        return msgspec.structs.replace(result, figures={**result.figures, "process_peak_bytes": _shared()})

    def leave(self, body: object, note: Note) -> None:
        """The device does not need its trainer any more."""
        self._trainers.pop(msgspec.convert(body, TenantRequest).tenant, None)

    def _trainer(self, tenant: Tenant) -> Trainer:
        if tenant not in self._trainers:
            self._trainers[tenant] = Trainer(
                tenant.data, tenant.bad_samples, Path(tenant.store), tenant.torch_device, tenant.budget
            )
        return self._trainers[tenant]


def _shared() -> Figure:
    return Figure(source="trainers shared by devices", reason="the process holds the data of other devices, too")


def main() -> None:
    """``python -m device_agent.trainer.shared``, started by the agents' host."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=0)
    die_with_parent(parser.parse_args().parent, signal.SIGKILL, "the trainer")
    give_back_at_once()
    # Each device's rows are in open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host = TrainerHost()
    signal.signal(signal.SIGUSR1, host.leave_off)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the agents decide when this ends
    serve({"warm": host.warm, "train": host.train, "leave": host.leave})


if __name__ == "__main__":
    main()
