"""A whole fleet in this process: the real coordinator, agents, trainers and evaluator over the in-memory transport.

What needs torch takes turns in one thread (``edgefl.process.inline_worker``): a run gives, bit for bit, what the same
fleet gives as processes with a broker. Figures of a single process are not measured: a trainer's memory, and bytes at a
socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.core.timeouts import Timeouts
from device_agent.many_agents import HostedTrainers, check_shared, logged_agent, open_more_files
from device_agent.runtime.connect import Options, Simulated
from device_agent.trainer.process import Trainers
from edgefl.config.settings import RunConfig
from edgefl.errors import ConfigError, Problem
from edgefl.plan.job import RunPlan
from edgefl.process.inline_worker import InlineWorker
from edgefl.resources.hardware import capabilities
from edgefl.resources.torch_threads import set_threads
from edgefl.run_records import EventRow, RunReport
from edgefl.storage.disk import make_private, store_errors
from edgefl.transport.memory_broker import MemoryBroker, MemoryTransport

if TYPE_CHECKING:
    from coordinator.runtime.start import RunOptions
    from device_agent.runtime.agent import Agent

#: The agent's device, and what ended it.
Lost = Callable[[str, Exception], None]
OPTION = "--in-process"
#: No device is lost for its silence, which says how busy this machine is and would change what a run gives; one that
#: ends says so. So nothing needs its heartbeats.
SIMULATED = Timeouts(heartbeat_s=math.inf, silence_s=math.inf)


def check_in_process(config: RunConfig, every: Sequence[Options], file: object, others: Sequence[str]) -> None:
    """Raise ConfigError for what takes processes: a broker elsewhere, memory budgets, other options of the coordinator.

    ``others``: those options as they were given.
    """
    if "://" in config.broker:
        text = "names a broker, and a run in one process has none"
        raise ConfigError(str(file), [Problem("broker", text)], remedy=f"Leave {OPTION} away, or --set broker=auto.")
    if others:
        problem = Problem(others[0].partition("=")[0], "needs the coordinator's own process")
        raise ConfigError(str(file), [problem], remedy=f"Leave {OPTION} away, or this option.")
    for one in every:
        check_shared(one.device, one.budget, OPTION)


async def execute(options: RunOptions, every: Sequence[Options], emit: Callable[[EventRow], None], lost: Lost) -> None:
    """``coordinator.runtime.start.execute`` and the agents of a local fleet, in this event loop. Raises EdgeFLError."""
    from coordinator.runtime import start
    from coordinator.runtime.observers import tracked

    plan, _ = start.planned(options, lambda _: None)
    directory = options.directory / plan.run
    make_private(directory)
    start.write_run_file(plan, directory / start.RUN_FILE)
    with tracked(emit, options.track, plan, directory) as shown:
        await run_fleet(plan, directory, every, shown, lost, resume=bool(options.resume))


async def run_fleet(
    plan: RunPlan,
    directory: Path,
    every: Sequence[Options],
    emit: Callable[[EventRow], None],
    lost: Lost,
    *,
    resume: bool = False,
) -> RunReport:
    """Carry out ``plan`` in ``directory`` with an agent for each of ``every``, all of one fleet; its report.

    Nothing is decided by the clock: rounds have no deadline, and the first waits for every agent that is joining.
    ``lost`` is called for an agent that ends by itself; an error that it raises ends the run. Raises EdgeFLError.
    """
    from coordinator.runtime import evaluator
    from coordinator.runtime.environment import Environment
    from coordinator.runtime.runner import run as coordinate

    plan = msgspec.structs.replace(plan, policy=msgspec.structs.replace(plan.policy, deadline_s=0.0))
    open_more_files()
    logs, broker, trainers = directory / "logs", MemoryBroker(), Trainers(alone=False)
    with store_errors("create", logs):
        logs.mkdir(parents=True, exist_ok=True)
    machine = capabilities(logs)
    async with _one_thread() as thread:
        worker = InlineWorker(evaluator.handlers, thread, logs / "evaluator.log")
        hosted = HostedTrainers([InlineWorker(trainers.handlers, thread, logs / "trainers.log", trainers.leave_off)])
        with contextlib.ExitStack() as stack:
            agents = {
                one.device: stack.enter_context(
                    logged_agent(one, logs, hosted, Simulated(partial(MemoryTransport, broker, one.device), machine))
                )
                for one in (msgspec.structs.replace(one, heartbeat_s=SIMULATED.heartbeat_s) for one in every)
            }
            joining = set(agents.values())
            transport, fleet = MemoryTransport(broker, "coordinator"), every[0].fleet if every else "default"
            environment = Environment(directory, transport, fleet, emit, worker=worker, timeouts=SIMULATED)
            environment = environment._replace(expects=partial(_expects, joining))
            run = asyncio.create_task(coordinate(plan, environment, resume=resume))
            return await _together(run, agents, joining, lost)


def _expects(joining: set[Agent]) -> bool:
    """Whether an agent has yet to join the run; members, and agents it does not want, leave ``joining``."""
    while joining:
        agent = next(iter(joining))
        if not agent.state.drained and not (agent.state.run and agent.state.prepared):
            return True
        joining.discard(agent)
    return False


@contextlib.asynccontextmanager
async def _one_thread() -> AsyncIterator[ThreadPoolExecutor]:
    """The thread that loads torch, and in which it then computes by itself."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "edgefl-torch") as thread:
        before = await loop.run_in_executor(thread, set_threads, 1)
        try:
            yield thread
        finally:
            thread.submit(set_threads, before)


async def _together(
    run: asyncio.Task[RunReport], agents: dict[str, Agent], joining: set[Agent], lost: Lost
) -> RunReport:
    """The run's report, once its agents have ended as well. One that ends leaves ``joining``."""

    async def watched(device: str, agent: Agent) -> None:
        try:
            await agent.run()
        except Exception as error:  # as of a process that has ended: the run decides what that means
            try:
                lost(device, error)
            except BaseException:
                run.cancel()
                raise
        finally:
            joining.discard(agent)

    tasks = [asyncio.create_task(watched(device, agent)) for device, agent in agents.items()]
    try:
        return await run
    finally:
        for agent in agents.values():
            agent.stop()
        for one in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(one, Exception):
                raise one
