"""Several agents in one process, as benchmarks need them: real supervisors, with trainers of the caller's choice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device_agent.runtime.agent import Agent
from device_agent.runtime.connect import MakeTrainer, Options, make_agent
from edgefl.log_lines import line_writer
from edgefl.resources.process_memory import keep_for_chunks


def options_in(file: Path) -> list[Options]:
    """The agents that a file names, with the broker of the environment."""
    broker = os.environ.pop("EDGEFL_BROKER", "")
    every = msgspec.json.decode(file.read_bytes(), type=list[Options])
    return [msgspec.structs.replace(one, broker=broker) for one in every]


async def run_agents(every: Sequence[Options], make: MakeTrainer) -> None:
    """Until SIGTERM; each agent writes its lines beside its state."""
    keep_for_chunks()
    with contextlib.ExitStack() as stack:
        agents: list[Agent] = []
        for options in every:
            log = stack.enter_context(Path(options.state).with_suffix(".log").open("a", encoding="utf-8"))
            agents.append(make_agent(options, line_writer("json", log), make))

        def stop() -> None:
            for agent in agents:
                agent.stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await asyncio.gather(*(agent.run() for agent in agents))
