"""Several agents in one process, as benchmarks need them: real supervisors, with trainers of the caller's choice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device_agent.runtime.agent import Agent
from device_agent.runtime.connect import MakeTrainer, Options, make_agent
from edgefl.log_lines import line_writer
from edgefl.resources.process_memory import keep_for_chunks

#: Seconds between looks at whether agents are connected, and how many may not be yet.
_POLL_S, _CONNECTING = 0.02, 8


def options_in(file: Path) -> list[Options]:
    """The agents that a file names, with the broker of the environment."""
    broker = os.environ.pop("EDGEFL_BROKER", "")
    every = msgspec.json.decode(file.read_bytes(), type=list[Options])
    return [msgspec.structs.replace(one, broker=broker) for one in every]


async def run_agents(every: Sequence[Options], make: MakeTrainer) -> None:
    """Until SIGTERM; each agent writes its lines beside its state, and starts once all but a few are connected.

    Thousands that start at once on a few processors take longer than a broker waits for any of them.
    """
    keep_for_chunks()
    if len(every) > 1:
        gc.set_threshold(10_000)  # as device_agent.many_agents has it, whose import a single agent is spared
    sys.setswitchinterval(0.1)  # threads of a thousand links that dial would ask for their turn each 5 ms
    agents: list[Agent] = []
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        for agent in agents:
            agent.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    with contextlib.ExitStack() as stack:
        running: list[asyncio.Task[None]] = []
        connecting: list[tuple[Agent, asyncio.Task[None]]] = []
        for options in every:
            log = stack.enter_context(Path(options.state).with_suffix(".log").open("a", encoding="utf-8"))
            agents.append(make_agent(options, line_writer("json", log), make))
            running.append(asyncio.create_task(agents[-1].run()))
            connecting.append((agents[-1], running[-1]))
            await asyncio.sleep(0)
            while len(connecting) >= _CONNECTING and not stopped.is_set():
                connecting = [(one, task) for one, task in connecting if not (one.state.connected or task.done())]
                if len(connecting) >= _CONNECTING:
                    await asyncio.sleep(_POLL_S)
            if stopped.is_set():
                agents[-1].stop()
                break
        await asyncio.gather(*running)
