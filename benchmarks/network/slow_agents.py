"""Agents that really train, some of which take longer; for ``benchmarks.network.async_rounds``.

    python -m benchmarks.network.slow_agents OPTIONS.json SECONDS NAME …

The agents of a list of ``device_agent.runtime.connect.Options`` in one process; they share a trainer process. Those
named rest for SECONDS after each training before they hand over the update, as a device with a slow processor or link
does.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path

from benchmarks.common.agents import options_in, run_agents
from device_agent.core.state import DataFacts, Train
from device_agent.many_agents import HostedTrainer, HostedTrainers, trainer_workers
from device_agent.runtime.trainer_process import Ended, OnProgress, Trainer, TrainerSettings
from edgefl.console import guarded
from edgefl.plan.job import Preparation


class Slow:
    """``device_agent.runtime.trainer_process.Trainer`` that hands over its results ``rest_s`` later."""

    def __init__(self, inner: HostedTrainer, rest_s: float) -> None:
        self._inner = inner
        self._rest_s = rest_s

    async def warm(self, preparation: Preparation) -> DataFacts:
        """As it is."""
        return await self._inner.warm(preparation)

    async def train(self, work: Train, on_progress: OnProgress) -> Ended:
        """As it is, and later."""
        ended = await self._inner.train(work, on_progress)
        await asyncio.sleep(self._rest_s)
        return ended

    def interrupt(self) -> None:
        """As it is."""
        self._inner.interrupt()

    async def stop(self) -> None:
        """As it is."""
        await self._inner.stop()


def _trainer(
    shared: HostedTrainers, slow: frozenset[str], rest_s: float, settings: TrainerSettings, memory_total_bytes: int
) -> Trainer:
    inner = shared.trainer(settings, memory_total_bytes)
    return Slow(inner, rest_s) if settings.device in slow else inner


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("slow", nargs="*")
    chosen = parser.parse_args()

    async def run() -> None:
        shared = HostedTrainers(trainer_workers(1, chosen.options.parent))
        await run_agents(options_in(chosen.options), partial(_trainer, shared, frozenset(chosen.slow), chosen.seconds))

    with guarded():
        asyncio.run(run())


if __name__ == "__main__":
    main()
