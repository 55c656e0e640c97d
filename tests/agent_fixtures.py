"""A coordinator that speaks the real protocol over a FaultyBroker, and a trainer without a process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque

from msgspec.structs import asdict, replace

from device_agent.core import state as v
from device_agent.runtime.agent import Agent, last_will
from device_agent.runtime.store import AgentStore, Owner
from device_agent.runtime.trainer_process import Ended
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.job import Hyper, Job, Stage
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.protocol.chunks import Chunk, decode_chunks, encode_chunk
from edgefl.records import Attempt, Figure, Refusal
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.receiver import Completed, Receiver, SendChunk, StoreChunk, VerifyObject
from edgefl.transfer.sender import Sender
from edgefl.transport.memory_broker import MemoryTransport

FLEET, DEVICE = "default", "d1"
FACTS = v.DataFacts({"acc": (32, 3)}, {"": 40, "acc": 40}, (20, 20), ("rest", "run"), base_bytes=1000)
CHUNK_BYTES = 1024


def job(batch_size=8) -> Job:
    model = ModelSpec({"acc": EncoderSpec(input_shape=(32, 3))}, stages=1, classes=2, label_names=("rest", "run"))
    return Job(model, Stage(1, 1, 3, ("acc/embed", "task"), ("task",)), Hyper(batch_size=batch_size))


class Coordinator:
    """Publishes offers, serves their parts in chunks, fetches updates with credit, acknowledges."""

    def __init__(self, broker, directory):
        self.store = ObjectStore(directory)
        self.transport = MemoryTransport(broker, "coordinator")
        self.transport.on_message = self.on_message
        self.heard: dict[type, deque] = {}
        self.news = asyncio.Event()
        self.senders: dict[str, Sender] = {}
        self.receivers: dict[str, tuple[Receiver, dict]] = {}
        self.chunk_limit: int | None = None  # chunks to send before falling silent
        self.welcomes = True
        self.taken = set()
        self.tasks = set()
        self.seal = None  # signs for a topic

    async def __aenter__(self):
        await self.transport.connect()
        await self.transport.subscribe(topics.coordinator_subscriptions(FLEET))
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.transport.close()

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def send(self, message):
        topic, body = topics.build("down", FLEET, DEVICE), m.encode(message)
        self.spawn(self.transport.publish(topic, body if self.seal is None else self.seal(topic, body)))

    def on_message(self, topic, payload):
        where = topics.parse(topic)
        if where.channel == "up-object":
            for chunk in decode_chunks(payload):
                self.on_chunk(where.transfer, chunk)
            return
        message = m.decode_up(payload)
        if isinstance(message, m.Need):
            self.carry_out(message.transfer, self.senders[message.transfer].on_need(DEVICE, message, time.monotonic()))
        elif isinstance(message, m.Hello) and self.welcomes:
            self.send(m.Welcome("c1", run="r1", heartbeat_s=0.2))
        self.heard.setdefault(type(message), deque()).append(message)
        self.news.set()

    async def expect(self, kind, timeout=5.0):
        """The next message of this kind, heard or still to come."""
        deadline = time.monotonic() + timeout
        while not self.heard.get(kind):
            self.news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.news.wait(), max(0.01, deadline - time.monotonic()))
            if not self.heard.get(kind) and time.monotonic() > deadline:
                heard = {k.__name__: len(q) for k, q in self.heard.items()}
                raise AssertionError(f"no {kind.__name__} within {timeout} s; heard {heard}")
        return self.heard[kind].popleft()

    def offer(self, number=1, attempt=1, run="r1", parts=None, **changes):
        parts = parts or {"acc/embed": b"e" * 5000, "task": b"t" * 3000}
        manifest = {name: self.store.put(data) for name, data in parts.items()}
        transfer = f"down-{run}-{number}-{attempt}"
        self.senders[transfer] = Sender(transfer, {ref.id: ref.size for ref in manifest.values()})
        message = m.Offer(Attempt(run, 1, number, attempt), 60.0, job(**changes), manifest, transfer, CHUNK_BYTES, 4)
        self.send(message)
        return message

    def fetch(self, update):
        transfer = f"up-{update.attempt.round}"
        partials = {ref.id: self.store.partial(ref, CHUNK_BYTES) for ref in update.manifest.values()}
        receiver = Receiver(
            transfer,
            DEVICE,
            list(update.manifest.values()),
            CHUNK_BYTES,
            2,
            incarnation=len(self.receivers),
        )
        self.receivers[transfer] = (receiver, partials)
        missing = {name: partial.missing() for name, partial in partials.items()}
        self.carry_out(transfer, receiver.start(missing, time.monotonic()))

    def on_chunk(self, transfer, chunk):
        receiver, _ = self.receivers[transfer]
        self.carry_out(
            transfer, receiver.on_chunk(chunk.object_id, chunk.index, len(chunk.data), time.monotonic()), chunk
        )

    def carry_out(self, transfer, instructions, chunk=None):
        for one in instructions:
            if isinstance(one, m.Need):
                self.send(m.Grant(**asdict(one)))
            elif isinstance(one, SendChunk):
                self.send_chunk(transfer, one)
            elif isinstance(one, StoreChunk):
                self.receivers[transfer][1][one.object_id].write(one.index, chunk.data)
            elif isinstance(one, VerifyObject):
                receiver, partials = self.receivers[transfer]
                if ok := partials[one.object_id].verify():
                    self.store.publish([partials[one.object_id]])
                self.carry_out(transfer, receiver.on_verified(one.object_id, ok, time.monotonic()))
            elif isinstance(one, Completed) and transfer in self.receivers:
                self.heard.setdefault(Completed, deque()).append((transfer, one))
                self.news.set()

    def send_chunk(self, transfer, one):
        if self.chunk_limit is not None:
            if self.chunk_limit == 0:
                return
            self.chunk_limit -= 1
        data = self.store.read_chunk(one.object_id, CHUNK_BYTES, one.index)
        topic = topics.build("shared-object", FLEET, transfer=transfer)
        if one.device is not None:
            topic = topics.build("down-object", FLEET, one.device, transfer)
        self.spawn(self.transport.publish(topic, encode_chunk(Chunk(one.object_id, one.index, data))))

    async def take_update(self):
        """Wait for an update, fetch its objects, acknowledge it."""
        update = await self.expect(m.Update)
        while update.attempt in self.taken:  # announced again before it was acknowledged
            update = await self.expect(m.Update)
        self.taken.add(update.attempt)
        self.fetch(update)
        await self.expect(Completed)
        self.send(m.Ack(update.attempt))
        return update


class FakeTrainer:
    """Turns the part "task" into upper case. ``hold``: trainings wait until it is set. ``ends``: outcomes to come."""

    def __init__(self, objects):
        self.objects = objects
        self.hold: asyncio.Event | None = None
        self.ends: list[Ended] = []
        self.warmed = 0
        self.trained = []
        self.interrupted = asyncio.Event()
        self.running = 0
        self.stopped = 0

    async def warm(self, preparation):
        self.warmed += 1
        return FACTS

    async def train(self, work, on_progress):
        offer = work.offer
        self.running += 1
        assert self.running == 1, "two trainings at a time"
        try:
            self.interrupted.clear()
            if self.hold is not None:
                waits = [asyncio.ensure_future(event.wait()) for event in (self.hold, self.interrupted)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                if self.interrupted.is_set():
                    return Ended(v.Result(refusal=Refusal("error", detail="left off")), alive=True)
            await asyncio.sleep(0)
            if self.ends:
                return self.ends.pop(0)
            on_progress(v.Progressed(offer.attempt, 1, 5, 5, 0.25))
            parts = {name: self.objects.read(ref.id) for name, ref in offer.manifest.items()}
            self.trained.append(offer.attempt)
            ref = self.objects.put(parts["task"].upper())
            return Ended(
                v.Result({"task": ref}, {"task": 40}, {"loss": 0.25}, {"flops": Figure(12.0, "counted")}), True
            )
        finally:
            self.running -= 1

    def interrupt(self):
        self.interrupted.set()

    async def stop(self):
        self.stopped += 1


class Running:
    """An agent in its own task, with its state directory; ``kill`` ends it without goodbye, as kill -9 would."""

    def __init__(self, broker, directory, credentials=None, **identity):
        self.broker = broker
        self.store = AgentStore(directory, Owner(DEVICE, FLEET), fingerprint="data")
        self.blank = v.State(fleet=FLEET, device=DEVICE, session=secrets.token_hex(8), profile="cpu", **identity)
        self.trainer = FakeTrainer(self.store.objects)
        self.lines = []
        self.agent = Agent(self.blank, self.dial, self.trainer, self.store, self.emit, credentials)
        self.task = None

    def dial(self):
        return MemoryTransport(self.broker, DEVICE, last_will(self.blank))

    def emit(self, event, **fields):
        self.lines.append((event, fields))

    def events(self, kind):
        return [fields for event, fields in self.lines if event == kind]

    async def __aenter__(self):
        self.task = asyncio.get_running_loop().create_task(self.agent.run())
        return self

    async def __aexit__(self, *_):
        self.agent.stop()
        await self.task

    async def kill(self):
        async def nothing(*_, **__):
            return None

        self.agent.transport.publish = nothing
        self.broker.cut(DEVICE, seconds=3600)
        self.agent.stop()
        await self.task


def asked_chunks(need):
    """How many chunks a need asks for."""
    return sum(byte.bit_count() for bitmap in need.missing.values() for byte in bitmap)


def attempt(number=1, number_of_attempt=1):
    return replace(Attempt("r1", 1, number, 1), attempt=number_of_attempt)
