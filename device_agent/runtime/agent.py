"""The agent's I/O: feeds events to the machine and performs its instructions.

One task takes events one by one; one task publishes messages in their order; the trainer and the two directions of
objects run beside them and report back as events.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from device_agent.core import state as v
from device_agent.core.machine import initial, step
from device_agent.runtime.by_url import ByUrl, Trust
from device_agent.runtime.effects import Effects, Emit
from device_agent.runtime.memory_store import MemoryStore
from device_agent.runtime.recent_lines import RecentLines
from device_agent.runtime.renewal import Renewal
from device_agent.runtime.store import AgentStore
from device_agent.runtime.trainer_process import Trainer, TrainerTasks
from device_agent.runtime.transfers import Transfers
from edgefl.errors import BrokerError, BrokerUnreachableError, MessageSizeError, ProtocolError, StoreError
from edgefl.findings import remedy
from edgefl.protocol import topics
from edgefl.protocol.messages import (
    Addresses,
    DownMessage,
    Hello,
    LogRequest,
    Offer,
    Presence,
    Renewed,
    UpMessage,
    decode_down,
    encode,
)
from edgefl.resources import control_group
from edgefl.transport.interface import Transport, Will
from edgefl.transport.link import least_wait_s
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:  # what checks signatures weighs a megabyte, which agents without an identity go without
    from edgefl.identity.device import Credentials


#: How often timers are looked at while there is work in hand; else when the next heartbeat is due, since two wake-ups
#: a second of each of 3,000 waiting agents took a whole processor.
TICK_S: Final = 0.5
#: Wait before the broker is dialled again when it was unreachable at start: doubles from the first to the last, and
#: each time some part of its second half is left out by chance: devices that got power together knock one by one.
DIAL_FIRST_S: Final = 1.0
DIAL_LAST_S: Final = 30.0
#: Time to end in: offline message to the broker, stop of the trainer. Service managers kill after 10 s or more.
LEAVE_S: Final = 5.0
#: What the agent has saved is synced this long afterwards: quick rounds save a dozen times a second, and each sync has
#: the disk write its journal. A loss of power costs the work of that time, which is trained again.
FLUSH_S: Final = 1.0


@lru_cache(maxsize=1)
def _free_bytes(look: int) -> int:
    """Free memory, looked up once for all agents of a process: it costs 0.25 ms, a quarter of a heartbeat."""
    return control_group.memory().free_bytes


def last_will(state: v.State) -> Will:
    """The MQTT last will: offline presence, published by the broker after a lost connection."""
    offline = encode(Presence(state.device, state.session, online=False))
    return Will(topics.build("presence", state.fleet, state.device), offline, retain=False)


class Agent:
    """One agent: ``run`` until ``stop`` or an error that a person must mend. Create it inside an event loop.

    ``state``: without any work; what an earlier process left is in the store. ``trust``: hosts that objects may come
    from past the broker, None for none. ``dial`` makes a transport that is not
    connected yet; a transport connects once, so each attempt takes a new one. A simulated one, whose store is in
    memory, goes on from ``state``, over a transport that is connected with all subscriptions.
    """

    def __init__(
        self,
        state: v.State,
        dial: Callable[[], Transport],
        trainer: Trainer,
        store: AgentStore | MemoryStore,
        emit: Emit,
        credentials: Credentials | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.transport = dial()
        self._dial_next = dial
        self.trainer = trainer
        self.store = store
        self.emit = emit
        self._listening = isinstance(store, MemoryStore)
        self._timer: asyncio.TimerHandle | None = None
        if isinstance(store, AgentStore):
            state = initial(state, store.load_complete(), store.load_facts())
        self.state = state
        self._events: asyncio.Queue[v.Event] = asyncio.Queue()
        self._outbox: asyncio.Queue[UpMessage] = asyncio.Queue()
        self._tasks: set[asyncio.Future[None]] = set()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard_at = 0.0  # when a message came last, seconds since the epoch
        self._flushing = False  # the disk is taking what was saved
        self._unacknowledged: list[UpMessage] = []  # by the broker
        effects = Effects(self._spawn, self._events.put_nowait, self._outbox.put_nowait, self._transmit, emit)
        self._by_url = None if trust is None else ByUrl(trust, emit)
        self._transfers = Transfers(
            self.state, store.objects, effects, lambda: self.transport, self._unacknowledged, self._by_url
        )
        self._trainer_tasks = TrainerTasks(trainer, effects, self._transfers.figures)
        self._perform = self._performers()
        self._credentials = credentials
        self.recent = RecentLines(shared=False)  # replaced where lines are kept
        self.tick_s = TICK_S
        self._renewal = None if credentials is None else Renewal(credentials, self._outbox.put_nowait, emit)
        if self._listening:
            self.transport.on_message = self.on_message
            self.transport.on_connection = self._on_connection

    async def run(self) -> None:
        """Run until ``stop``. Raises the EdgeFLError that ended it."""
        for file in self.store.set_aside:
            self.emit("warning", text=f"a file of an earlier start cannot be read; it was set aside as {file}")
        try:
            self._spawn(self._take_events())
            self._spawn(self._connect())
            await self._end
        finally:
            await self._leave()

    def stop(self) -> None:
        """End ``run`` without an error; safe in signal handlers of the loop, and twice."""
        if not self._end.done():
            self._end.set_result(None)

    def _spawn(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # what fails in a task ends the agent with its message
                if not self._end.done():
                    self._end.set_exception(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            work.close()  # a task that is cancelled at once has never looked at it

        task.add_done_callback(ended)
        return task

    async def _connect(self) -> None:
        if self._listening:
            self._spawn(self._publish())
            return
        self._events.put_nowait(v.Tick())  # lets the machine start the trainer while the broker is still being dialled
        wait_s = DIAL_FIRST_S
        while pause_s := await self._dial(random.uniform(wait_s / 2, wait_s)):
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, DIAL_LAST_S)
        await self.transport.subscribe(topics.device_subscriptions(self.state.fleet, self.state.device))
        # Of a session that an earlier release began: it listened to the chunks of all transfers.
        self.transport.unsubscribe([topics.build("shared-object", self.state.fleet, transfer="+")])
        self._listening = True
        self._spawn(self._publish())
        if self._renewal is not None:
            self._spawn(self._renewal.run(self.transport))
        self._on_connection(connected=True)

    async def _dial(self, wait_s: float) -> float:
        """Try to connect: seconds until the next try, ``wait_s`` or more; 0 once connected."""
        self.transport.on_message = self.on_message
        self.transport.on_connection = self._on_connection
        try:
            await self.transport.connect()
        except BrokerUnreachableError as error:
            wait_s = max(wait_s, least_wait_s(error))
            finding, way_out = error.finding, error.remedy
            if finding == "broker-absent" and self._credentials is not None:
                finding, way_out = "broker-idle", remedy("broker-idle")
            self.emit("unreachable", text=error.message, remedy=way_out, finding=finding, retry_s=wait_s)
            await self.transport.close()
            self.transport = self._dial_next()
            return wait_s
        return 0.0

    def _tick(self, now: float) -> None:
        state = self.state
        beats = (state.run or state.working_on) and now >= state.heartbeat_at + state.heartbeat_s
        self._step(v.Tick(_free_bytes(int(now / TICK_S)) if beats else 0, self._bytes_on_link()), now)
        self._transfers.tick(connected=self.state.connected)
        if self.state.abandoned is not None:
            self.trainer.interrupt()  # again: the first may have come before the trainer had read its order

    def _rest_s(self, now: float) -> float:
        """Seconds until timers are due again."""
        state = self.state
        if state.working_on or state.waiting or state.abandoned:
            return self.tick_s
        if not (state.connected and state.run):
            return math.inf  # until something happens
        return max(self.tick_s, state.heartbeat_at + state.heartbeat_s - now)

    def _set_timer(self, now: float) -> None:
        loop, rest_s = asyncio.get_running_loop(), self._rest_s(now)
        if self._timer is not None:
            if self._timer.when() <= loop.time() + rest_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(rest_s, self._events.put_nowait, v.Tick())

    def _bytes_on_link(self) -> int | None:
        """Bytes both ways of the connection to the broker, and of those past it that are closed."""
        own = self.transport.bytes_on_link
        return own if own is None or self._by_url is None else own + self._by_url.link_bytes

    async def _publish(self) -> None:
        """Publish queued messages in order, without waiting for acknowledgements."""
        while True:
            message = await self._outbox.get()
            self._unacknowledged.append(message)
            channel: topics.Channel = "presence" if isinstance(message, Presence) else "up"
            topic = topics.build(channel, self.state.fleet, self.state.device)
            # What is too large, by a guess after connections that were cut too, is sent again.
            self._transmit(topic, encode(message), MessageSizeError, partial(self._unacknowledged.remove, message))

    def _transmit(
        self, topic: str, payload: bytes, tolerated: type[BrokerError], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Send without waiting; an error that is not tolerated ends the agent."""
        sending = asyncio.ensure_future(self.transport.publish(topic, payload))

        def over(sending: asyncio.Future[None]) -> None:
            self._tasks.discard(sending)
            ended()
            error = None if sending.cancelled() else sending.exception()
            if isinstance(error, tolerated):
                self.emit("warning", text=error.message)
            elif error is not None and not self._end.done():
                self._end.set_exception(error)

        if sending.done():
            over(sending)
        else:
            self._tasks.add(sending)
            sending.add_done_callback(over)

    async def _take_events(self) -> None:
        while True:
            event, now = await self._events.get(), time.monotonic()
            if isinstance(event, v.Tick):
                self._timer = None
                self._tick(now)
            else:
                if now - self.state.ticked_at >= self.tick_s:
                    self._tick(now)  # the link's bytes until now are of the state until now
                self._step(event, now)
            self._set_timer(now)

    def _step(self, event: v.Event, now: float) -> None:
        self.state, instructions = step(self.state, event, now)
        for instruction in instructions:
            self._perform[type(instruction)](instruction)

    def _on_connection(self, connected: bool) -> None:
        if not self._listening:
            return  # the first connection counts once the subscriptions stand
        self.emit("connected" if connected else "disconnected", device=self.state.device)
        self._events.put_nowait(v.Connected() if connected else v.Disconnected())

    def on_message(self, topic: str, payload: bytes) -> None:
        """A message of the transport."""
        self.heard_at = time.time()
        try:
            where = topics.parse(topic)
            if topic == topics.call(self.state.fleet):
                self._events.put_nowait(v.Connected())  # repeats everything that a coordinator has to know
            elif topic == topics.build("down", self.state.fleet, self.state.device):
                self._hear(self._credentials.verifier.open(topic, payload) if self._credentials else payload)
            elif where.channel in {"down-object", "shared-object"}:
                self._transfers.chunk(where.transfer, payload)
        except ProtocolError as error:  # also a kind of message that only newer versions know
            self.emit("ignored", topic=topic, text=error.message)

    def _hear(self, body: bytes) -> None:
        message = decode_down(body)
        if isinstance(message, LogRequest):
            if (answer := self.recent.answer(self.state.device, message, time.monotonic())) is not None:
                self._outbox.put_nowait(answer)
        elif isinstance(message, Addresses):
            self._learn(message)
        elif not isinstance(message, Renewed):
            self._events.put_nowait(self._received(message))
        elif self._renewal is not None:
            self._renewal.answered(message)

    def _learn(self, message: Addresses) -> None:
        """Keep the broker's addresses, of a fleet that signs them, and dial the others where one fails."""
        if self._credentials is None:
            raise ProtocolError("addresses of a broker from nobody that this device knows")
        from edgefl.identity.device import learn_addresses

        try:
            is_new = learn_addresses(self._credentials, message.urls, message.revision)
        except StoreError as error:
            self.emit("warning", text=f"the broker's new addresses are not kept: {error.message}")
            return
        if is_new:
            record = self._credentials.record
            self.emit("addresses", broker=record.broker, others=record.others)
            if isinstance(self.transport, MqttTransport):
                self.transport.dial_also([record.broker, *record.others])
        self._events.put_nowait(v.Connected())  # its hello says what is known here

    def _with_addresses(self, message: UpMessage) -> UpMessage:
        if not isinstance(message, Hello) or self._credentials is None:
            return message
        return replace(message, addresses=self._credentials.record.revision)

    def _received(self, message: DownMessage) -> v.Received:
        if not isinstance(message, Offer):
            return v.Received(message)
        sizes = {ref.id: ref.size for ref in message.manifest.values()}
        held = {name for name in sizes if self.store.objects.has(name)}
        damaged = {name for name in held if not self.store.objects.sound(name)}  # the disk's fault: they come again
        if damaged:
            self.emit("warning", text=f"damaged objects are fetched again: {len(damaged)}, such as {min(damaged)}")
        missing = sum(size for name, size in sizes.items() if name not in held - damaged)
        return v.Received(message, v.Disk(missing, self.store.free_bytes))

    def _performers(self) -> dict[type, Callable[[Any], None]]:
        return {
            v.Send: lambda i: self._outbox.put_nowait(self._with_addresses(i.message)),
            v.Save: self._save,
            v.SaveFacts: lambda i: self.store.save_facts(i.facts),
            v.Log: lambda i: self.emit(i.event, **i.fields),
            v.CollectGarbage: self._collect,
            v.Fetch: lambda i: self._transfers.fetch(i.offer),
            v.StopFetch: lambda i: self._transfers.stop_fetch(),
            v.Serve: lambda i: self._transfers.serve(i.update, i.grant),
            v.StopServe: lambda i: self._transfers.stop_serve(),
            v.StartTrainer: lambda i: self._trainer_tasks.start(i.preparation),
            v.StopTrainer: lambda i: self._trainer_tasks.stop(i.reason),
            v.Train: self._trainer_tasks.train,
            v.Interrupt: lambda i: self.trainer.interrupt(),
        }

    def _save(self, instruction: v.Save) -> None:
        self.store.save(instruction.saved)
        if not self._flushing and not self.store.flushed:
            self._flushing = True
            self._spawn(self._flush())

    async def _flush(self) -> None:
        while not self.store.flushed:
            await asyncio.sleep(FLUSH_S)
            await asyncio.to_thread(self.store.flush)
        self._flushing = False

    def _collect(self, instruction: v.CollectGarbage) -> None:
        if freed := self.store.objects.mark_garbage(set(instruction.keep)):
            self.emit("collected", bytes=freed)
            self._spawn(asyncio.to_thread(self.store.objects.sweep))

    async def _leave(self) -> None:
        if self._listening and self.state.connected:
            will = last_will(self.state)
            with contextlib.suppress(BrokerError, asyncio.TimeoutError):
                await asyncio.wait_for(self.transport.publish(will.topic, will.payload), LEAVE_S)
        for task in list(self._tasks):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.trainer.stop()
        await self.transport.close()
        try:
            self.store.close()
        finally:
            self.emit("stopped", device=self.state.device, dropped=self.state.dropped)
