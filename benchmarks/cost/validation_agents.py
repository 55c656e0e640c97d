"""Agents that come and go by traces, for the validation of forecasts: real supervisors and trainers, of slowed devices.

    python -m benchmarks.cost.validation_agents FLEET.json

Each trains in its turn in one trainer process and then waits, until its training has taken ``slower`` times as long as
its steps took. Traces begin when the file ``begin`` is there, which has the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
import time
from pathlib import Path

import msgspec

from device_agent.core.state import DataFacts, Train
from device_agent.many_agents import HostedTrainer, HostedTrainers, open_more_files, trainer_workers
from device_agent.runtime.agent import Agent
from device_agent.runtime.connect import Options, make_agent
from device_agent.runtime.trainer_process import Ended, OnProgress, TrainerSettings
from edgefl.console import guarded
from edgefl.log_lines import line_writer
from edgefl.plan.job import Preparation
from edgefl.trace_files import read_states
from edgefl.traces import NEEDS, Traces

POLL_S = 0.01


class Fleet(msgspec.Struct, frozen=True):
    """Agents of one process; ``names``: of the whole fleet, in whose order traces are dealt with ``seed``."""

    options: list[Options]
    names: list[str]
    states: str
    seed: int
    slower: float
    begin: str
    logs: str


class SlowTrainer:
    """``device_agent.runtime.trainer_process.Trainer`` of a slower device."""

    def __init__(self, inner: HostedTrainer, slower: float) -> None:
        self._inner, self._slower, self._left = inner, slower, asyncio.Event()

    async def warm(self, preparation: Preparation) -> DataFacts:
        """Load the device's data."""
        return await self._inner.warm(preparation)

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """Train, and wait."""
        began = time.monotonic()
        ended = await self._inner.train(work, on_progress)
        figure = ended.result.figures.get("compute_s")
        rest = (figure.value or 0.0) * self._slower - (time.monotonic() - began) if figure is not None else 0.0
        with contextlib.suppress(asyncio.TimeoutError):
            if rest > 0:
                await asyncio.wait_for(self._left.wait(), rest)
        return ended

    def interrupt(self) -> None:
        """End the training, or the wait."""
        self._left.set()
        self._inner.interrupt()

    async def stop(self) -> None:
        """Leave the trainer process."""
        self._left.set()
        await self._inner.stop()


async def follow(
    fleet: Fleet, options: Options, traces: Traces, trainers: HostedTrainers, ended: asyncio.Event
) -> None:
    """One device's agent, started and stopped by its trace."""
    place = fleet.names.index(options.device)

    def trainer(settings: TrainerSettings, memory: int) -> SlowTrainer:
        return SlowTrainer(trainers.trainer(settings, memory), fleet.slower)

    began, at_ms = 0.0, 0
    with (Path(fleet.logs) / f"{options.device}.log").open("a", encoding="utf-8") as log:
        while not ended.is_set():
            agent: Agent | None = None
            if traces.there(at_ms, [place])[0]:
                agent = make_agent(options, line_writer("text", log), trainer)
                running = asyncio.create_task(agent.run())
            while not began and not ended.is_set():
                with contextlib.suppress(OSError, ValueError):
                    began = float(Path(fleet.begin).read_text())
                await asyncio.sleep(0.1)
            at = float(traces.next_edges(at_ms, [place])[0])
            left = math.inf if math.isinf(at) else began + at / 1000 - time.time()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), None if math.isinf(left) else max(0.0, left))
            if agent is not None:
                agent.stop()
                await running
            at_ms = 0 if math.isinf(at) else int(at)


async def run(fleet: Fleet) -> None:
    """All agents, until SIGTERM."""
    open_more_files()
    Path(fleet.logs).mkdir(parents=True, exist_ok=True)
    patterns, _ = read_states(Path(fleet.states), NEEDS)
    traces, ended = Traces(fleet.names, patterns, fleet.seed), asyncio.Event()
    trainers = HostedTrainers(trainer_workers(1, Path(fleet.logs)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await asyncio.gather(*(follow(fleet, one, traces, trainers, ended) for one in fleet.options))


if __name__ == "__main__":
    with guarded():
        asyncio.run(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Fleet)))
