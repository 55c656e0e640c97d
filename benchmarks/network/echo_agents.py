"""Agents for the echo benchmark: the real supervisor, whose trainer sends back what it was sent, hardly changed.

    python -m benchmarks.network.echo_agents OPTIONS.json           agents of a list of ``runtime.connect.Options``
    python -m benchmarks.network.echo_agents --parent PID           its trainer, started by its supervisor

One agent has its trainer in a process of its own, as in the field; several in one process have theirs in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import struct
import zlib
from pathlib import Path

import msgspec

from benchmarks.common.agents import options_in, run_agents
from device_agent.core.state import DataFacts, Result, Train
from device_agent.runtime.trainer_process import Ended, OnProgress, TrainerProcess, TrainerSettings, TrainRequest
from edgefl.console import guarded
from edgefl.plan.job import Preparation
from edgefl.process.worker import Note, serve
from edgefl.storage.objects import ObjectStore

MODALITY, SHAPE, CLASSES = "acc", (16, 3), ("a", "b", "c")
SAMPLES = 60
#: Names the module that trainers run.
TRAINER = "EDGEFL_ECHO_TRAINER"
FACTS = DataFacts(
    modalities={MODALITY: SHAPE},
    samples={MODALITY: SAMPLES, "": SAMPLES},
    class_counts=(SAMPLES // 3,) * 3,
    label_names=CLASSES,
    base_bytes=1,
    runtime="echo",
    torch_device="cpu",
)


def echo(request: TrainRequest, store: ObjectStore) -> Result:
    """Every trained part with one value moved a little, so that each device's objects are others than it was sent."""
    manifest = {}
    for part in request.offer.job.stage.trained:
        data = bytearray(store.read(request.offer.manifest[part].id))
        (value,) = struct.unpack_from("<f", data, len(data) - 4)
        nudge = 1e-6 * (1 + zlib.crc32(request.settings.device.encode()) % 65536)
        struct.pack_into("<f", data, len(data) - 4, value + nudge)
        manifest[part] = store.put(data)
    return Result(manifest=manifest, samples=dict.fromkeys(manifest, SAMPLES), metrics={"loss": 0.0})


class InlineEcho:
    """``device_agent.runtime.trainer_process.Trainer`` in a thread."""

    def __init__(self, settings: TrainerSettings, memory_total_bytes: int) -> None:
        self._settings = settings
        self._store: ObjectStore | None = None

    async def warm(self, preparation: Preparation) -> DataFacts:
        """Nothing to load."""
        return FACTS

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """See ``echo``."""
        self._store = self._store or ObjectStore(Path(self._settings.store), durable=False)
        request = TrainRequest(self._settings, work.offer, work.retained)
        return Ended(await asyncio.to_thread(echo, request, self._store), alive=True)

    def interrupt(self) -> None:
        """It is over sooner than anybody could ask."""

    async def stop(self) -> None:
        """Nothing runs."""


def apart(settings: TrainerSettings, memory_total_bytes: int) -> TrainerProcess:
    """The real link to a child process, which is this module unless the environment names another."""
    module = os.environ.get(TRAINER, "benchmarks.network.echo_agents")
    return TrainerProcess(settings, memory_total_bytes, module)


def serve_echo() -> None:
    """The child: answers until its supervisor closes the pipe."""

    def train(body: object, note: Note) -> Result:
        request = msgspec.convert(body, TrainRequest)
        return echo(request, ObjectStore(Path(request.settings.store), durable=False))

    serve({"warm": lambda body, note: FACTS, "train": train})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=Path, nargs="?")
    parser.add_argument("--parent", type=int)
    chosen = parser.parse_args()
    if chosen.parent is not None:
        serve_echo()
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with guarded():
        every = options_in(chosen.options)
        asyncio.run(run_agents(every, apart if len(every) == 1 else InlineEcho))


if __name__ == "__main__":
    main()
