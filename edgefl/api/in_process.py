"""A whole fleet in this process: the real coordinator, agents, trainers and evaluator over the in-memory transport.

What needs torch takes turns in one thread (``edgefl.process.inline_worker``): a run gives, bit for bit, what the same
fleet gives as processes with a broker. Figures of a single process are not measured: a trainer's memory, and bytes at a
socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from coordinator.core.crowd import crowd_of, meets_all
from coordinator.core.state import Crowd
from coordinator.core.timeouts import Timeouts
from coordinator.runtime.virtual_time import VirtualTime
from device_agent.many_agents import check_shared, open_more_files
from device_agent.runtime.connect import Options
from device_agent.runtime.memory_store import Pool
from device_agent.simulated import Devices, Lost, Surroundings
from device_agent.trainer.process import Trainers
from edgefl.api.simulated_trainers import HANDED, SimulatedTrainers
from edgefl.config.settings import RunConfig, SizedFleet
from edgefl.data.population import Population
from edgefl.errors import ConfigError, Problem
from edgefl.plan.job import RunPlan
from edgefl.plan.preparation import preparation_of
from edgefl.process.inline_worker import ComputeThread, InlineWorker
from edgefl.process.worker import Handler
from edgefl.resources.hardware import capabilities
from edgefl.resources.torch_threads import set_threads
from edgefl.run_records import EventRow, RunReport
from edgefl.sequences import Made, place_of
from edgefl.storage.disk import JOINT_STEPS, make_private, store_errors, write_new
from edgefl.traces import Traces
from edgefl.transport.memory_broker import MemoryBroker, MemoryTransport

if TYPE_CHECKING:
    from coordinator.runtime.start import RunOptions

replace = msgspec.structs.replace

OPTION = "--in-process"
#: No device is lost for its silence, which says how busy this machine is and would change what a run gives; one that
#: ends says so. So nothing needs its heartbeats.
SIMULATED = Timeouts(heartbeat_s=math.inf, silence_s=math.inf)


class CrowdData(NamedTuple):
    """Data of a fleet's devices: their shares, and the number of each one's profile and budget."""

    population: Population
    kinds: Sequence[int]


def check_in_process(
    config: RunConfig,
    kinds: Sequence[Options],
    file: object,
    others: Sequence[str],
    workers: int = 0,
    *,
    joint: bool = False,
) -> None:
    """Raise ConfigError for what takes processes: a broker elsewhere, memory budgets, other options of the coordinator.

    ``kinds``: a device of each kind; ``others``: those options as they were given. With ``workers`` also for rounds
    whose result follows from the order in which updates come, and with ``joint`` steps.
    """
    if "://" in config.broker:
        text = "names a broker, and a run in one process has none"
        raise ConfigError(str(file), [Problem("broker", text)], remedy=f"Leave {OPTION} away, or --set broker=auto.")
    if others:
        problem = Problem(others[0].partition("=")[0], "needs the coordinator's own process")
        raise ConfigError(str(file), [problem], remedy=f"Leave {OPTION} away, or this option.")
    if workers and config.rounds == "async":
        problem = Problem("rounds", "async takes updates as they come, which is by chance from several processes")
        raise ConfigError(str(file), [problem], remedy="Leave --workers away, or set rounds: lockstep.")
    if isinstance(config.fleet, SizedFleet) and config.fleet.trace is not None and config.rounds == "async":
        problem = Problem("fleet.trace", "is of rounds that wait for their devices, and rounds is async")
        raise ConfigError(str(file), [problem], remedy="Leave out the trace, or set rounds: lockstep.")
    if joint and (workers or config.rounds == "async"):
        problem = Problem("--joint-steps", "takes the devices of a round together, in one process")
        raise ConfigError(str(file), [problem], remedy="Leave it out, or --workers, and set rounds: lockstep.")
    for one in kinds:
        check_shared(one.device, one.budget, OPTION)


async def execute(
    options: RunOptions,
    every: Sequence[Options],
    emit: Callable[[EventRow], None],
    lost: Lost,
    shared_out: Awaitable[None],
    crowd: CrowdData | None = None,
    workers: int = 0,
    traces: Traces | None = None,
    *,
    joint: bool = False,
) -> None:
    """``coordinator.runtime.start.execute`` and the agents of a local fleet, in this event loop. Raises EdgeFLError.

    ``shared_out``: before the first round, the data are.
    """
    from coordinator.runtime import start
    from coordinator.runtime.observers import tracked

    plan, _ = start.planned(options, lambda _: None)
    directory = options.directory / plan.run
    make_private(directory)
    start.write_run_file(plan, directory / start.RUN_FILE)
    await shared_out
    with tracked(emit, options.track, plan, directory) as shown:
        resume = bool(options.resume)
        await run_fleet(
            plan,
            directory,
            every,
            shown,
            lost,
            resume=resume,
            crowd=crowd,
            workers=workers,
            traces=traces,
            joint=joint,
        )


async def run_fleet(
    plan: RunPlan,
    directory: Path,
    every: Sequence[Options],
    emit: Callable[[EventRow], None],
    lost: Lost,
    *,
    resume: bool = False,
    crowd: CrowdData | None = None,
    workers: int = 0,
    traces: Traces | None = None,
    joint: bool = False,
) -> RunReport:
    """Carry out ``plan`` in ``directory`` with an agent for each of ``every``, all of one fleet; its report.

    Nothing is decided by the clock: rounds have no deadline, and the first waits for every agent that is joining.
    ``lost`` is called for an agent that ends by itself; an error that it raises ends the run. ``crowd``: has the
    shares of ``every``, in their order, None: files of their own. With it devices that are never asked do nothing,
    unless the run has to know all of them first. ``workers``: processes that train, 0: this one does; ``joint``: here
    the devices of a round take their steps together where that pays. ``traces``: of the devices, by whose virtual time
    rounds have deadlines. Raises EdgeFLError.
    """
    from coordinator.runtime import evaluator
    from coordinator.runtime.environment import Environment
    from coordinator.runtime.runner import run as coordinate

    if traces is None:
        plan = replace(plan, policy=replace(plan.policy, deadline_s=0.0))
    open_more_files()
    logs, broker, pool = directory / "logs", MemoryBroker(), Pool(directory / "objects")
    share = (lambda device: crowd.population.share(device).as_saved()) if crowd is not None else None
    trainers = Trainers(alone=False, store=lambda settings: pool.stores[settings.device], share=share)
    order, names, met = _in_order(plan, crowd, len(every))
    virtual = VirtualTime(traces, crowd=met is not None) if traces is not None else None
    quiet = Made(len(every), lambda place: _quiet(every[order[place]], traces))
    with store_errors("create", logs):
        logs.mkdir(parents=True, exist_ok=True)
    async with _processes(workers, directory, pool, emit) as processes, _one_thread() as thread:
        worker = InlineWorker(evaluator.handlers, thread, logs / "evaluator.log")
        handlers = trainers.handlers
        if joint:
            handlers = partial(_joint_handlers, trainers, _joint_file(directory), _teller(emit))
        training = InlineWorker(handlers, thread, logs / "trainers.log", trainers.leave_off)
        around = Surroundings(broker, training, pool, capabilities(logs), preparation_of(plan), logs, lost)
        around = around._replace(trainers=processes, leave_off=trainers.leave_off_one if joint else None)
        devices = Devices(quiet, around, names, met.firsts if met is not None else None)
        transport, fleet = MemoryTransport(broker, "coordinator"), every[0].fleet if every else "default"
        environment = Environment(directory, transport, fleet, emit, worker=worker, timeouts=SIMULATED, crowd=met)
        away = virtual.held if virtual is not None else ()
        expects = partial(devices.expects, away)
        environment = environment._replace(expects=expects, shared=pool, virtual=virtual)
        await devices.listen()
        run = asyncio.create_task(coordinate(plan, environment, resume=resume))
        return await _together(run, devices)


def _quiet(options: Options, traces: Traces | None) -> Options:
    """An agent's options, without heartbeats and with its trace's link."""
    if traces is not None:
        place = place_of(traces.names, options.device) or 0
        options = replace(options, speed=traces.with_link(place, options.speed))
    return replace(options, heartbeat_s=SIMULATED.heartbeat_s)


def _in_order(plan: RunPlan, crowd: CrowdData | None, count: int) -> tuple[Sequence[int], Sequence[str], Crowd | None]:
    """Places of the devices in the order of their names, these, and the crowd as the coordinator knows it.

    Without a crowd that the run can have, the order is the given one.
    """
    order: Sequence[int] = range(count)
    if crowd is None or meets_all(plan):
        return order, (), None
    names, samples = crowd.population.devices, crowd.population.kinds()
    if any(before > after for before, after in itertools.pairwise(names)):
        order = sorted(order, key=names.__getitem__)
        names = [names[place] for place in order]
    profiles = np.array(list(crowd.kinds))
    kinds = (samples * (profiles.max() + 1) + profiles)[np.asarray(order)]
    return order, names, crowd_of(plan, names, kinds)


def _teller(emit: Callable[[EventRow], None]) -> Callable[[str], None]:
    """Sentences on joint steps, from another thread."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(emit, EventRow(time.time(), "joint_steps", data={"text": text}))

    return tell


def _joint_file(directory: Path) -> Path:
    """By which a run that goes on knows the way it went."""
    file = directory / JOINT_STEPS
    if not file.is_file():
        with store_errors("write", file):
            write_new(file, b"{}")
    return file


def _joint_handlers(trainers: Trainers, file: Path, tell: Callable[[str], None]) -> dict[str, Handler]:
    """Handlers of trainers that take requests together. Loads torch."""
    from device_agent.trainer.joint_rounds import JointRounds
    from edgefl.training.joint_trial import JointSteps

    return {**trainers.handlers(), "together": JointRounds(trainers, JointSteps(file, tell)).together}


@contextlib.asynccontextmanager
async def _processes(
    count: int, directory: Path, pool: Pool, emit: Callable[[EventRow], None]
) -> AsyncIterator[list[SimulatedTrainers]]:
    """Trainer processes, which load torch meanwhile."""

    def warn(text: str) -> None:
        emit(EventRow(time.time(), "warning", data={"text": text}))

    processes = [SimulatedTrainers(number, directory, pool, warn) for number in range(1, count + 1)]
    try:
        for one in processes:
            await one.start()
        yield processes
    finally:
        await asyncio.gather(*(one.stop() for one in processes))
        shutil.rmtree(directory / HANDED, ignore_errors=True)


@contextlib.asynccontextmanager
async def _one_thread() -> AsyncIterator[ComputeThread]:
    """The thread in which torch computes, as in this one, by itself."""
    loop = asyncio.get_running_loop()
    with ComputeThread("edgefl-torch") as thread:
        before = await loop.run_in_executor(thread, set_threads, 1)
        set_threads(1)
        try:
            yield thread
        finally:
            set_threads(before)


async def _together(run: asyncio.Task[RunReport], devices: Devices) -> RunReport:
    """The run's report, once its agents have ended as well."""
    beside = asyncio.create_task(devices.run())
    beside.add_done_callback(lambda _: run.cancel())
    try:
        return await run
    finally:
        beside.cancel()
        (why,) = await asyncio.gather(beside, return_exceptions=True)
        await devices.stop()
        if isinstance(why, Exception):
            raise why
