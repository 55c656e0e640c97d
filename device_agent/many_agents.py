"""Many agents in one process with a few shared trainer processes: a whole fleet on one machine.

Each agent is the same as one in a process of its own: its own connection to the broker, state directory and messages.
Devices with a memory budget need a trainer of their own, or it could not be enforced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device_agent.core.state import NOTHING_TRAINED, DataFacts, Progressed, Result, Train
from device_agent.runtime.agent import Agent
from device_agent.runtime.connect import Options, Simulated, make_agent, simulated_agent
from device_agent.runtime.recent_lines import RecentLines
from device_agent.runtime.trainer_process import (
    TRAINER_STOP_S,
    Ended,
    OnProgress,
    TrainerSettings,
    TrainerWorker,
    WarmRequest,
    raised,
    train_in,
    trainer_worker,
)
from edgefl.console import guarded
from edgefl.errors import ConfigError, EdgeFLError, Problem
from edgefl.log_lines import line_writer
from edgefl.plan.job import Preparation
from edgefl.process.worker import WorkerFailedError, WorkerProcess, understood
from edgefl.records import Budget, Figure, Refusal
from edgefl.resources.process_memory import keep_for_chunks

#: New objects after which cyclic garbage is looked for. With Python's 700, that took a twentieth of the time of a
#: process with 1,000 agents.
COLLECT_AFTER = 10_000


def trainer_workers(count: int, log: Path) -> list[WorkerProcess]:
    """Trainer processes, not yet started."""
    return [trainer_worker(log / f"trainers-{i + 1}.log") for i in range(count)]


def check_shared(device: str, budget: Budget, option: str) -> None:
    """Raise ConfigError for a memory budget, which needs a trainer process of the device's own."""
    limits = ("memory_bytes", "step_memory_bytes", "gpu_memory_bytes")
    held = [field for field in limits if getattr(budget, field) is not None]
    if held:
        problem = Problem(f"budget.{held[0]}", f"{device} shares its trainer's process with others")
        raise ConfigError(device, [problem], remedy=f"Leave {option} away, or the device's memory budget.")


class HostedTrainers:
    """Shared trainer processes. Devices are assigned in turn, for good.

    ``own``: makes a worker for each device instead.
    """

    def __init__(
        self, workers: Sequence[TrainerWorker], own: Callable[[TrainerSettings], TrainerWorker] | None = None
    ) -> None:
        self._own = own
        self._workers = [_SharedWorker(worker) for worker in workers]
        self._dealt = 0

    def trainer(self, settings: TrainerSettings, memory_total_bytes: int) -> HostedTrainer:
        """A device's trainer. Raises ConfigError for a device with a memory budget."""
        check_shared(settings.device, settings.budget, "--trainers")
        if self._own is not None:
            return HostedTrainer(settings, _SharedWorker(self._own(settings)))
        worker = self._workers[self._dealt % len(self._workers)]
        self._dealt += 1
        return HostedTrainer(settings, worker)


class _SharedWorker:
    """A shared trainer process: lock for the turn, active device, and devices in need of it."""

    def __init__(self, process: TrainerWorker) -> None:
        self.process = process
        self.turn = asyncio.Lock()
        self.active: TrainerSettings | None = None
        self.needed: set[TrainerSettings] = set()


class HostedTrainer:
    """A device's trainer in a shared process; see ``device_agent.runtime.trainer_process.Trainer``.

    A round's step memory is still measured: one round at a time, above what the process held when it began. What the
    whole process holds belongs to no single device, and is not reported as one device's.
    """

    def __init__(self, settings: TrainerSettings, worker: _SharedWorker) -> None:
        self._settings = settings
        self._worker = worker
        self._interrupted = False  # since ``train`` was called last

    async def warm(self, preparation: Preparation) -> DataFacts:
        """Load torch and the device's data in its turn; see ``Trainer.warm``."""
        self._worker.needed.add(self._settings)
        async with self._worker.turn:
            request = WarmRequest(self._settings, preparation)
            return understood(await self._worker.process.call("warm", request), DataFacts)

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """Train one round in its turn. A dead process loses the other devices' data, too: they load it again."""
        self._worker.needed.add(self._settings)
        self._interrupted = False

        def progress(made: Progressed) -> None:
            if self._interrupted:  # the process may have had another's request before this one
                self._worker.process.interrupt()
            on_progress(made)

        async with self._worker.turn:
            try:
                # Only a warm process may be interrupted: the signal would kill a cold one. Others know that themselves.
                if isinstance(self._worker.process, WorkerProcess):
                    await self._worker.process.call("warm", WarmRequest(self._settings, offer=work.offer))
                if self._interrupted:
                    refusal = Refusal("abandoned", detail="left off before its turn")
                    return Ended(Result(refusal=refusal, figures=NOTHING_TRAINED), alive=True)
                self._worker.active = self._settings
                result = await train_in(self._worker.process, self._settings, work, progress)
            except WorkerFailedError as error:
                return Ended(Result(refusal=raised(error)), alive=error.status is None)
            finally:
                self._worker.active = None
        shared = Figure(source="trainers shared by devices", reason="the process holds the data of other devices, too")
        return Ended(replace(result, figures={**result.figures, "process_peak_bytes": shared}), alive=True)

    def interrupt(self) -> None:
        """Ask the training to end after its step; before its turn it does not begin."""
        self._interrupted = True
        if self._worker.active == self._settings:
            self._worker.process.interrupt()

    async def stop(self) -> None:
        """Leave the process, which ends with its last device."""
        self._worker.needed.discard(self._settings)
        async with self._worker.turn:  # a process that is ending serves no other device
            if not self._worker.needed:
                await self._worker.process.stop(TRAINER_STOP_S)
            elif self._worker.process.pid is not None:
                with contextlib.suppress(WorkerFailedError):  # it has died, and the data with it
                    await self._worker.process.call("leave", self._settings)


def open_more_files() -> None:
    """Raise this process's limit of open files to the maximum: each device needs several."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def logged_agent(
    options: Options, logs: Path, trainers: HostedTrainers, simulated: Simulated | None = None
) -> Iterator[Agent]:
    """An agent, not yet running, logging to ``logs``/<device>.log. ``simulated``: what it goes on from, if it is."""
    with (logs / f"{options.device}.log").open("a", encoding="utf-8") as stream:
        recent = RecentLines(stream, shared=not options.no_logs)
        emit = line_writer("text", recent)
        if simulated is None:
            yield make_agent(options, emit, trainers.trainer, recent)
        else:
            yield simulated_agent(options, emit, trainers.trainer, recent, simulated)


async def run_agents(every: Sequence[Options], trainers: int, logs: Path) -> None:
    """Run agents until SIGTERM or SIGINT; one that ends by itself has failed, and ends the others.

    Each writes its lines to ``logs``/<device>.log. Raises the EdgeFLError of the agent that failed.
    """
    keep_for_chunks()
    gc.set_threshold(COLLECT_AFTER)
    open_more_files()
    shared = HostedTrainers(trainer_workers(trainers, logs))
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(logged_agent(options, logs, shared)) for options in every]
        tasks = [asyncio.create_task(agent.run()) for agent in agents]

        def stop() -> None:
            for agent in agents:
                agent.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stop()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for options, one in zip(every, ended, strict=True):
        if isinstance(one, EdgeFLError):
            one.message = f"{options.device}: {one.message}"
        if isinstance(one, BaseException):
            raise one


def main() -> None:
    """Entry of the process: OPTIONS (JSON list of ``Options``), LOGS; the broker from EDGEFL_BROKER."""
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=Path)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--trainers", type=int, default=1)
    chosen = parser.parse_args()
    with guarded():
        broker = os.environ.pop("EDGEFL_BROKER", "")  # no child inherits the password
        every = [
            replace(options, broker=broker)
            for options in msgspec.json.decode(chosen.options.read_bytes(), type=list[Options])
        ]
        asyncio.run(run_agents(every, chosen.trainers, chosen.logs))


if __name__ == "__main__":
    main()
