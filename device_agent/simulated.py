"""Simulated devices of one process: an agent for each that has been asked, the bare machine of each that has not.

Most devices of a large fleet are never asked to train. Until one is, it has a connection and the agent's state machine;
its data are read once, for the sample counts in its hello, and freed. The first offer makes its agent, which takes over
that state and that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from device_agent.core import state as v
from device_agent.core.machine import initial, step
from device_agent.gathered_rounds import GatheredRounds
from device_agent.many_agents import HostedTrainers, check_shared, logged_agent
from device_agent.runtime.agent import Agent
from device_agent.runtime.connect import Options, Simulated, blank_state, settings_of
from device_agent.runtime.memory_store import Pool, saved_in
from device_agent.runtime.trainer_process import TrainerSettings, TrainerWorker, WarmRequest
from edgefl.errors import ProtocolError
from edgefl.log_lines import line_writer
from edgefl.plan.job import Preparation
from edgefl.process.inline_worker import InlineWorker
from edgefl.process.tasks import Tasks
from edgefl.process.worker import WorkerFailedError, understood
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.records import Capabilities
from edgefl.transport.memory_broker import MemoryBroker, MemoryTransport

#: The device, and what ended it.
Lost = Callable[[str, Exception], None]
#: Devices whose data are read in one call to the thread that does it: between calls messages are taken.
READ_AT_ONCE = 10


class Surroundings(NamedTuple):
    """Shared surroundings of a fleet's devices.

    ``worker``: reads data, and trains where there are no ``trainers``; ``machine``: capabilities, probed once;
    ``preparation``: the run's, by which data are read at once; ``lost`` is called for a device that ends by itself, and
    may raise. ``leave_off``: ends one device's round in the worker, which takes rounds together; None: one by one.
    """

    broker: MemoryBroker
    worker: InlineWorker
    pool: Pool
    machine: Capabilities
    preparation: Preparation
    logs: Path
    lost: Lost
    trainers: Sequence[TrainerWorker] = ()
    leave_off: Callable[[TrainerSettings], None] | None = None


class _Device:
    """A device that has not been asked yet."""

    __slots__ = ("early", "options", "state", "transport")

    def __init__(self, options: Options, state: v.State, transport: MemoryTransport) -> None:
        self.options = options
        self.state = state
        self.transport = transport
        self.early: list[tuple[str, bytes]] = []  # messages that ask for work while its data are read


class Devices:
    """The devices of a fleet. ``listen``, and ``run`` until ``stop``; ``agents``: of those that have been asked.

    ``firsts``: devices that connect at once, None: all; the others, when they are called, by ``names``, which are
    sorted, and those of ``every``.
    """

    def __init__(
        self,
        every: Sequence[Options],
        surroundings: Surroundings,
        names: Sequence[str] = (),
        firsts: Sequence[str] | None = None,
    ) -> None:
        self.agents: dict[str, Agent] = {}
        self._around = surroundings
        self._stack = contextlib.ExitStack()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._fail)
        worker, leave_off, own = surroundings.worker, surroundings.leave_off, None
        if leave_off is not None:
            own = GatheredRounds(worker, self._any_coming, leave_off, self._tasks.spawn).member
        self._hosted = HostedTrainers(surroundings.trainers or [worker], own)
        self._unread: dict[str, Preparation] = {}
        self._every, self._names = every, names
        self._waiting = {one.device: self._device(one) for one in (every if firsts is None else map(self._of, firsts))}
        self._joining = set(self._waiting)
        self._lost = set[str]()
        self._caller = MemoryTransport(surroundings.broker, "caller") if firsts is not None else None

    async def listen(self) -> None:
        """Hear whom the coordinator calls; before it begins, since a run that goes on calls devices at once."""
        if self._caller is not None:
            self._caller.on_message = self._called
            await self._caller.connect()
            await self._caller.subscribe([topics.build("down", self._every[0].fleet, "+")])

    async def run(self) -> None:
        """Connect every device, and go on until an error that ``lost`` raises."""
        for device in list(self._waiting.values()):
            await self._sign_on(device)
        await asyncio.wait([self._ended])  # which is not cancelled with this
        self._ended.result()

    async def _sign_on(self, device: _Device) -> None:
        await device.transport.connect()
        await device.transport.subscribe(topics.device_subscriptions(device.options.fleet, device.options.device))
        self._take(device, v.Connected())

    def _called(self, topic: str, payload: bytes) -> None:
        """A message for any device: one that has not been asked before introduces itself."""
        name = topics.parse(topic).device
        if name not in self._waiting and name not in self.agents and name not in self._lost:
            device = self._waiting[name] = self._device(self._of(name))
            self._tasks.spawn(self._sign_on(device))

    def _of(self, name: str) -> Options:
        """The options of a device."""
        return self._every[bisect_left(self._names, name)]

    def expects(self, away: Container[str] = ()) -> bool:
        """True while a device has yet to join that has neither ended nor been turned away, and is not ``away``."""
        while self._joining:
            name = next(iter(self._joining))
            state = self.agents[name].state if name in self.agents else self._waiting[name].state
            if not state.drained and not (state.run and state.prepared) and name not in away:
                return True
            self._joining.discard(name)
        return False

    def _any_coming(self) -> bool:
        """True while a device has an offer and has not begun to train."""
        tasks = (agent.state.task for name, agent in self.agents.items() if name not in self._lost)
        return any(task is not None and task.phase is not v.TaskPhase.TRAINING for task in tasks)

    async def stop(self) -> None:
        """End every agent. Raises what one of them ended by."""
        gc.unfreeze()
        self._unread.clear()
        if self._caller is not None:
            self._caller.on_message = _ignored
        for device in self._waiting.values():  # an agent made now would not be stopped
            device.transport.on_message = _ignored
        for agent in self.agents.values():
            agent.stop()
        await self._tasks.wait()
        self._stack.close()
        if self._ended.done():
            self._ended.result()

    def _device(self, options: Options) -> _Device:
        check_shared(options.device, options.budget, "--in-process")
        state = blank_state(options, self._around.machine)
        transport = MemoryTransport(self._around.broker, options.device)
        if Path(options.state).is_dir():  # of a run that is resumed
            state = initial(state, saved_in(Path(options.state)), None)
        device = _Device(options, state, transport)
        transport.on_message = partial(self._heard, device)
        return device

    def _heard(self, device: _Device, topic: str, payload: bytes) -> None:
        """A message for a device without an agent."""
        try:
            if topic == topics.call(device.options.fleet):
                self._take(device, v.Connected())
            elif (message := self._decoded(device, topic, payload)) is None:
                return
            elif isinstance(message, m.Welcome | m.Drain):
                self._take(device, v.Received(message))
            elif device.state.trainer is v.TrainerPhase.WARMING:
                device.early.append((topic, payload))
            else:
                self._promote(device).on_message(topic, payload)
        except Exception as error:  # as of an agent that ends: the run decides what that means
            self._lose(device.options.device, error)

    def _decoded(self, device: _Device, topic: str, payload: bytes) -> m.DownMessage | None:
        """The message decoded; None, with a line in the log, where that fails."""
        try:
            return m.decode_down(payload)
        except ProtocolError as error:
            self._log(device, "ignored", topic=topic, text=error.message)
            return None

    def _log(self, device: _Device, event: str, **fields: object) -> None:
        with (self._around.logs / f"{device.options.device}.log").open("a", encoding="utf-8") as log:
            line_writer("text", log)(event, **fields)

    def _take(self, device: _Device, event: v.Event) -> None:
        """Step a device's machine. Of what it asks for, only its messages and the reading of its data matter yet."""
        device.state, instructions = step(device.state, event, time.monotonic())
        for one in instructions:
            if isinstance(one, v.Send):
                channel: topics.Channel = "presence" if isinstance(one.message, m.Presence) else "up"
                topic = topics.build(channel, device.options.fleet, device.options.device)
                self._tasks.spawn(device.transport.publish(topic, m.encode(one.message)))
            elif isinstance(one, v.StartTrainer):
                if not self._unread:
                    self._tasks.spawn(self._read())
                asked = one.preparation if one.preparation.id else self._around.preparation
                self._unread[device.options.device] = asked
            elif isinstance(one, v.Log) and one.event == "data-unusable":
                self._log(device, one.event, **one.fields)

    async def _read(self) -> None:
        """Read the data of the devices that are due, for their facts."""
        await asyncio.sleep(0)  # what is due with the first
        while self._unread:
            due = [(self._waiting[name], self._unread[name]) for name in list(self._unread)[:READ_AT_ONCE]]
            requests: list[tuple[str, object]] = []
            for device, preparation in due:
                settings = settings_of(device.options)
                requests += [("warm", WarmRequest(settings, preparation)), ("leave", settings)]
            answers = await self._around.worker.calls(requests)
            for (device, _), found in zip(due, answers[::2], strict=True):
                if self._unread.pop(device.options.device, None) is None:
                    continue  # it has ended meanwhile
                if isinstance(found, WorkerFailedError):
                    self._lose(device.options.device, found)
                    continue
                self._take(device, v.TrainerReady(understood(found, v.DataFacts)))
                early, device.early = device.early, []
                for topic, payload in early:
                    device.transport.on_message(topic, payload)

    def _promote(self, device: _Device) -> Agent:
        """Make the agent of a device, and let it run."""
        if not self.agents:  # what there is now stays: to look through it took a fortieth of each round
            gc.freeze()
        name = device.options.device
        simulated = Simulated(device.transport, device.state, self._around.pool)
        agent = self._stack.enter_context(logged_agent(device.options, self._around.logs, self._hosted, simulated))
        self.agents[name] = agent
        self._waiting.pop(name)
        self._tasks.spawn(self._watched(name, agent))
        return agent

    async def _watched(self, name: str, agent: Agent) -> None:
        try:
            await agent.run()
        except Exception as error:
            self._lose(name, error)
        finally:
            self._joining.discard(name)

    def _lose(self, name: str, error: Exception) -> None:
        """A device has ended by itself."""
        self._joining.discard(name)
        self._lost.add(name)
        self._unread.pop(name, None)
        if (device := self._waiting.pop(name, None)) is not None:
            gone = m.Presence(name, device.state.session, online=False)
            topic = topics.build("presence", device.options.fleet, name)
            self._tasks.spawn(device.transport.publish(topic, m.encode(gone)))
            device.transport.on_message = _ignored
        try:
            self._around.lost(name, error)
        except BaseException as raised:
            self._fail(raised)

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


def _ignored(topic: str, payload: bytes) -> None:
    """Drop a message for an ended device."""
