"""A tiny run, a worker without torch, and devices that speak the real protocol but train by adding a constant."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from faulty_broker import FaultyBroker

from coordinator.runtime.evaluator import Request
from edgefl import PROTOCOL_VERSION
from edgefl.budget.fit import OF_NO_SIZE
from edgefl.models.spec import EncoderSpec, ModelSpec, part_names
from edgefl.plan.job import Candidate, Hyper, Placement, RoundPolicy, RunPlan, Stage
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.protocol.chunks import Chunk, decode_chunks, encode_chunk
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Attempt, Budget, Capabilities, Cost, EvaluationRow, Figure, Manifest, ObjectRef, Refusal
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.receiver import Completed, Receiver, SendChunk, StoreChunk, VerifyObject
from edgefl.transfer.sender import Sender
from edgefl.transport.interface import Will
from edgefl.transport.memory_broker import MemoryTransport

FLEET = "test"
#: Elements of each part's only tensor: two chunks of 1 KiB.
SIZE = 400
STEP_BYTES = 1000
MODEL = ModelSpec(encoders={"acc": EncoderSpec(input_shape=(8, 3), depth=2)}, stages=2, classes=2)


#: (manifest, samples, store) -> the same, spoiled.
Breaking = Callable[[Manifest, dict[str, int], ObjectStore], tuple[Manifest, dict[str, int]]]


def a_plan(**changes: Any) -> RunPlan:
    """Two stages of 1 and 2 rounds; stage k trains encoder stage k and the task head."""
    present = part_names(MODEL)
    stages = tuple(
        Stage(
            index=k,
            depth=k,
            rounds=k,
            present=tuple(p for p in present if "stage" not in p or int(p[-1]) <= k),
            trained=(f"acc/stage{k}", "task"),
        )
        for k in (1, 2)
    )
    plan = RunPlan(
        run="r1",
        name="tiny",
        recipe="layerwise",
        model=MODEL,
        stages=stages,
        hypers=(Hyper(batch_size=4), Hyper(batch_size=4)),
        policy=RoundPolicy(devices=2, join_s=2.0, quorum=0.5, deadline_s=20.0),
        test="test.npz",
        chunk_bytes=1024,
        credit=4,
        config={"seed": 0},
    )
    return msgspec.structs.replace(plan, **changes)


class FakeWorker:
    """Answers as the evaluator would, with ``place`` below."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.planned: list[Candidate] = []
        self.evaluated: list[Manifest] = []
        self.stopped = False

    async def call(self, method: str, body: Any) -> Any:
        self.calls.append(method)
        await asyncio.sleep(0)
        return msgspec.to_builtins(getattr(self, method)(body))

    async def stop(self) -> None:
        self.stopped = True

    def initial_parts(self, request: Request) -> Manifest:
        store = ObjectStore(Path(request.store))
        tensors = {part: np.full(SIZE, 10 * n, np.float32) for n, part in enumerate(part_names(request.plan.model))}
        return {part: store.put(encode_part({"w": tensor})) for part, tensor in tensors.items()}

    def plan_stage(self, request: Request) -> list[Placement]:
        self.planned += request.candidates
        stage, hyper = request.plan.stages[request.stage - 1], request.plan.hypers[request.stage - 1]
        return [place(stage, hyper, candidate) for candidate in request.candidates]

    def evaluate(self, request: Request) -> list[EvaluationRow]:
        self.evaluated.append(request.manifest)
        return [EvaluationRow(available=("acc",), value=0.5, samples=10)]


def place(stage: Stage, hyper: Hyper, candidate: Candidate) -> Placement:
    """The whole batch, then half of it; each declined size is not offered again."""
    allowed = candidate.budget.step_memory_bytes
    for micro in (0, hyper.batch_size // 2):
        size = micro or hyper.batch_size
        need = STEP_BYTES * size // hyper.batch_size
        if allowed is not None and need > allowed:
            refusal = Refusal("step_memory", float(need), float(allowed), "B")
            continue
        if any(size >= was.micro_batch for was in candidate.declined if was.refusal.reason not in OF_NO_SIZE):
            refusal = candidate.declined[-1].refusal
            continue
        predicted = {"step_peak_bytes": Figure(float(need), "predicted", "test")}
        chosen = msgspec.structs.replace(hyper, micro_batch=micro)
        return Placement(candidate.device, stage, chosen, Cost(step_peak_bytes=need), predicted)
    return Placement(candidate.device, stage, refusal=refusal)


class FakeDevice:
    """An agent in one class.

    ``add``: what training adds to every value; ``metrics``, ``beside``: metrics beside the loss, parts beside the
    model's; ``breaking`` spoils updates.
    """

    def __init__(
        self,
        broker: FaultyBroker,
        name: str,
        directory: Path,
        *,
        add: float = 1.0,
        samples: int = 10,
        budget: Budget | None = None,
        decline: list[Refusal] | None = None,
        hold: bool = False,
        spoil: bool = False,
        metrics: dict[str, float] | None = None,
        beside: dict[str, bytes] | None = None,
        breaking: Breaking | None = None,
        class_counts: tuple[int, ...] = (),
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        self.name = name
        self.store = ObjectStore(directory / name)
        self.session = secrets.token_hex(4)
        will = Will(topics.build("presence", FLEET, name), m.encode(m.Presence(name, self.session, False)), True)
        self.transport = MemoryTransport(broker, name, will)
        self.add, self.samples, self.budget = add, samples, budget or Budget()
        self.decline = list(decline or [])
        self.hold, self.spoil = hold, spoil
        self.metrics = dict(metrics or {})
        self.beside = dict(beside or {})
        self.breaking = breaking
        self.class_counts = class_counts
        self.protocol = protocol
        self.offers: list[m.Offer] = []
        self.acks: list[m.Ack] = []
        self.aborts: list[m.Abort] = []
        self.drained = asyncio.Event()
        self.offered = asyncio.Event()
        self.offer: m.Offer | None = None
        self.update: m.Update | None = None
        self.receiver: Receiver | None = None
        self.sender: Sender | None = None
        self.grant_transfer = ""
        self.downloaded: list[tuple[str, int]] = []
        self._met = ""
        self._greeting = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.transport.on_message = self._on_message
        self.transport.on_connection = self._on_connection
        await self.transport.connect()
        shared = topics.build("shared-object", FLEET, transfer="+")
        await self.transport.subscribe([*topics.device_subscriptions(FLEET, self.name), shared])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.transport.close()

    @property
    def working_on(self) -> Attempt | None:
        if self.update is not None:
            return self.update.attempt
        return self.offer.attempt if self.offer is not None else None

    def say(self, message: m.UpMessage, topic: str = "") -> None:
        self._publish(topic or topics.build("up", FLEET, self.name), m.encode(message))

    def beat(self) -> None:
        self.say(m.Heartbeat(self.name, self.session, 1, self.working_on))

    def hello(self) -> None:
        self._greeting = True
        self.say(
            m.Hello(
                device=self.name,
                session=self.session,
                profile="test",
                capabilities=Capabilities(cores=1),
                budget=self.budget,
                modalities={"acc": (8, 3)},
                samples={"": self.samples, "acc": self.samples},
                class_counts=self.class_counts,
                protocol=self.protocol,
                working_on=self.working_on,
            )
        )

    def train(self) -> None:
        """Make the update of the offer in hand, and announce it."""
        offer = self.offer
        assert offer is not None
        manifest: dict[str, ObjectRef] = {}
        for part in offer.job.stage.trained:
            values = decode_part(self.store.read(offer.manifest[part].id))["w"] + np.float32(self.add)
            if self.spoil:
                values[0] = np.nan
            manifest[part] = self.store.put(encode_part({"w": values}))
        samples = dict.fromkeys(manifest, self.samples)
        manifest |= {part: self.store.put(data) for part, data in self.beside.items()}
        if self.breaking is not None:
            manifest, samples = self.breaking(manifest, samples, self.store)
        figures = {"step_peak_bytes": Figure(900.0, "measured", "test"), "energy_j": Figure(reason="no sensor")}
        self.update = m.Update(self.name, offer.attempt, manifest, samples, {"loss": self.add, **self.metrics}, figures)
        self.offer = None
        self.say(self.update)

    def _publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        task = asyncio.ensure_future(self.transport.publish(topic, payload, retain=retain))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_connection(self, connected: bool) -> None:
        if connected:
            online = m.Presence(self.name, self.session, online=True)
            self._publish(topics.build("presence", FLEET, self.name), m.encode(online), retain=True)
            self.hello()

    def _on_message(self, name: str, payload: bytes) -> None:
        topic = topics.parse(name)
        if topic.channel in {"down-object", "shared-object"}:
            self._on_object(topic.transfer, payload)
            return
        message = m.decode_down(payload)
        if isinstance(message, m.Welcome):
            if not self._greeting or self._met not in {"", message.coordinator}:
                self.hello()
            else:
                self._greeting = False
            self._met = message.coordinator
        elif isinstance(message, m.Offer):
            self._on_offer(message)
        elif isinstance(message, m.Grant):
            self._on_grant(message)
        elif isinstance(message, m.Ack):
            self.acks.append(message)
            if self.update is not None and self.update.attempt == message.attempt:
                self.update = None
        elif isinstance(message, m.Abort):
            self.aborts.append(message)
            if self.working_on == message.attempt:
                self.offer = self.update = None
        elif isinstance(message, m.Drain):
            self.drained.set()

    def _on_offer(self, offer: m.Offer) -> None:
        self.offers.append(offer)
        self.offered.set()
        if self.decline:
            self.say(m.Decline(self.name, offer.attempt, self.decline.pop(0)))
            return
        repeated = self.offer is not None and (self.offer.attempt, self.offer.job) == (offer.attempt, offer.job)
        self.offer = offer
        self.say(m.Accept(self.name, offer.attempt))
        if repeated and self.receiver is not None:
            return
        if self.update is not None and self.update.attempt == offer.attempt:
            self.offer = None
            self.say(self.update)
            return
        refs = list({ref.id: ref for ref in offer.manifest.values()}.values())
        life = secrets.randbelow(2**31)
        self.receiver = Receiver(offer.transfer, self.name, refs, offer.chunk_bytes, offer.credit, incarnation=life)
        missing = {r.id: self._partial(r.id).missing() for r in refs if not self.store.has(r.id)}
        self._perform(self.receiver.start(missing, 0.0))

    def _partial(self, name: str) -> Any:
        assert self.offers
        sizes = {ref.id: ref for ref in self.offers[-1].manifest.values()}
        return self.store.partial(sizes[name], self.offers[-1].chunk_bytes)

    def _on_object(self, transfer: str, payload: bytes) -> None:
        if not payload:
            self.hello()  # the coordinator calls
        for chunk in decode_chunks(payload) if payload else ():
            self._on_chunk(transfer, chunk)

    def _on_chunk(self, transfer: str, chunk: Chunk) -> None:
        if self.receiver is not None and self.receiver.transfer == transfer:
            self.downloaded.append((chunk.object_id, chunk.index))
            self._perform(self.receiver.on_chunk(chunk.object_id, chunk.index, len(chunk.data), 0.0), chunk)

    def _perform(self, instructions: list[Any], chunk: Chunk | None = None) -> None:
        for one in instructions:
            if isinstance(one, m.Need):
                self.say(one)
            elif isinstance(one, StoreChunk) and chunk is not None:
                self._partial(one.object_id).write(one.index, chunk.data)
            elif isinstance(one, VerifyObject):
                assert self.receiver is not None
                partial = self._partial(one.object_id)
                if ok := partial.verify():
                    self.store.publish([partial])
                self._perform(self.receiver.on_verified(one.object_id, ok, 0.0))
            elif isinstance(one, Completed) and self.offer is not None and not self.hold:
                self.train()

    def _on_grant(self, grant: m.Grant) -> None:
        if self.update is None:
            return
        if self.sender is None or self.grant_transfer != grant.transfer:
            self.sender = Sender(grant.transfer, {r.id: r.size for r in self.update.manifest.values()})
            self.grant_transfer = grant.transfer
        for one in [*self.sender.on_need(self.name, grant, 0.0), *self.sender.on_tick(10.0)]:
            if isinstance(one, SendChunk):
                data = self.store.read_chunk(one.object_id, grant.chunk_bytes, one.index)
                topic = topics.build("up-object", FLEET, self.name, grant.transfer)
                self._publish(topic, encode_chunk(Chunk(one.object_id, one.index, data)))
