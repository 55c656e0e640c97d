"""Publishes the coordinator's messages and serves its transfers: bytes and topics. Offers: ``core.assignments``."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from coordinator.core import moves as do
from coordinator.core.assignments import (
    in_progress,
    offer_for,
    separate_figures,
    served_parts,
    transfer_name,
    visible_parts,
)
from coordinator.core.moves import UpdateInvalid, UpdateStored
from coordinator.core.state import Phase, State
from coordinator.runtime.chunk_size import Chunking, ChunkSizer
from coordinator.runtime.record import row_of
from coordinator.runtime.uploads import Uploads
from coordinator.runtime.validate_update import Own, Rules
from edgefl.aggregation.clusters import wanted
from edgefl.errors import MessageSizeError
from edgefl.plan.job import RunPlan
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.protocol.messages import Need
from edgefl.records import Attempt, Figure, Figures, Manifest
from edgefl.registry import choose
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import chunk_count
from edgefl.transfer.disk_driver import DiskSender
from edgefl.transport.interface import Transport

Report = Callable[[Any], None]


class Publisher:
    """Publishes without waiting: messages are idempotent, and a broker that is away must not stop the loop."""

    def __init__(
        self,
        plan: RunPlan,
        transport: Transport,
        fleet: str,
        store: ObjectStore,
        clock: Callable[[], float],
        heartbeat_s: float,
        report: Report,
        seal: Callable[[str, bytes], bytes] | None = None,
    ) -> None:
        """``seal``: signs a message for its topic; None: messages travel unsigned."""
        self._seal = seal
        self._plan = plan
        self._transport = transport
        self._fleet = fleet
        self._store = store
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._report = report
        self._session = secrets.token_hex(8)  # by which devices see that this process has not met them
        self._posts: set[asyncio.Task[None]] = set()
        self._downloads: dict[str, Downloads] = {}  # by transfer: of the open attempt, and of earlier ones at work
        self._chunks = (0, 0)  # of the newest downloads: bytes, and how many may be in flight
        self._sizer = ChunkSizer(plan.chunk_bytes, plan.credit)
        self._prototypes = choose("prototypes", plan.server).method
        options = next(iter(plan.server.get("prototypes", {}).values()), {})
        self._min_count = float(options.get("min_count", 1))  # a run begun before there was such an option has none
        self.chunking = Chunking(transport, fleet, self._sizer, self._warn)
        self._offers: dict[str, m.Offer] = {}  # device -> what it was last offered
        self.uploads = self._make_uploads()

    def facts(self) -> dict[str, object]:
        """The connection's limits and the chunk size, for an event in the ledger."""
        limits = self._transport.limits
        return {
            "mqtt": limits.version,
            "receive_maximum": limits.receive_maximum,
            "maximum_packet_size": limits.packet_bytes or None,
            "chunk_bytes": self._sizer.of(())[0],
        }

    def send(self, one: do.Send, manifest: Manifest, state: State) -> None:
        """Publish a message of the machine."""
        if isinstance(one, do.DrainAll):
            for device in state.devices:
                final = state.phase is Phase.FINISHED
                self.post(device, m.Drain(self._plan.run, one.reason, state.made_ms, final))
        elif isinstance(one, do.SendDrain):
            self.post(one.device, m.Drain(self._plan.run, one.reason, state.made_ms))
        elif isinstance(one, do.SendWelcome):
            run, made_ms, beat = self._plan.run, state.made_ms, self._heartbeat_s
            self.post(one.device, m.Welcome(self._session, run=run, made_ms=made_ms, heartbeat_s=beat))
        elif isinstance(one, do.SendAbort):
            self.uploads.cancel(one.device)
            self.away(one.device)
            self.post(one.device, m.Abort(one.attempt, one.reason))
        elif isinstance(one, do.SendAck):
            if not one.accepted:
                self.uploads.cancel(one.device, one.attempt)
            self.post(one.device, m.Ack(one.attempt, one.accepted, one.refusal))
        else:
            self.uploads.cancel(one.device)
            self._offer(one, manifest, state)

    def fetch(self, update: m.Update, manifest: Manifest, state: State) -> None:
        """Get the objects of an update to the state ``manifest``, or go on with it."""
        seen = manifest | visible_parts(manifest, update.device, state)
        own = Own(state.devices[update.device].claim, self._min_count, self._prototypes.classes)
        self.uploads.fetch(update, seen, transfer_name("u", update.attempt, update.device), own)

    def on_need(self, device: str, need: m.Need, base: Callable[[Attempt], Manifest], state: State) -> None:
        """A device asks for objects of the state that its attempt starts from, which ``base`` gives.

        An earlier process may have offered them. Nothing is served of attempts that no device is at work on.
        """
        if need.transfer not in self._downloads:
            for attempt, expected in in_progress(state).items():
                if transfer_name("d", attempt) == need.transfer:
                    self._serve(attempt, expected, base(attempt))
        if need.transfer in self._downloads:
            self._downloads[need.transfer].on_need(device, need, self._clock())

    def away(self, device: str) -> None:
        """A device is offline or busy: the others' downloads do not wait for it. It may ask again."""
        for downloads in self._downloads.values():
            downloads.drop(device, self._clock())

    def tick(self) -> None:
        """Time passed, and the broker is there."""
        for downloads in list(self._downloads.values()):
            downloads.on_tick(self._clock())
        self.uploads.on_tick()
        self.chunking.tick()

    def call(self) -> None:
        """Call for hellos: which devices are online, what they work on, which chunks they lack."""
        self.publish(topics.call(self._fleet), b"")

    def end_transfers(self) -> None:
        """All attempts are closed: end their transfers."""
        self._downloads = {}
        self._offers = {}
        self.uploads.clear()

    async def flush(self, timeout_s: float) -> None:
        """Wait for messages that are being published, no longer than this."""
        if self._posts:
            await asyncio.wait(self._posts, timeout=timeout_s)

    async def close(self) -> None:
        """Drop messages that have not been sent."""
        self.end_transfers()
        await self.uploads.close()
        await self.chunking.close()
        for task in list(self._posts):
            task.cancel()
        await asyncio.gather(*self._posts, return_exceptions=True)

    def _make_uploads(self) -> Uploads:
        return Uploads(
            self._store,
            self._sizer,
            Rules(wanted(self._plan.server), self._plan.transfer),
            clock=self._clock,
            grant=self.post,
            report=self._report_upload,
        )

    def _report_upload(self, event: UpdateStored | UpdateInvalid | BaseException) -> None:
        if isinstance(event, UpdateStored):
            figures = event.figures | self._download_figures(event.device, event.attempt)
            event = msgspec.structs.replace(event, figures=figures)
        self._report(event)

    def _download_figures(self, device: str, attempt: Attempt) -> Figures:
        """Bytes sent to a device in its attempt; prototypes and the layer of its personal model also by themselves."""
        source = "chunks the coordinator sent"
        downloads = self._downloads.get(transfer_name("d", attempt))
        sent = downloads.payload_bytes(device) if downloads is not None else 0
        figures = {"payload_down_bytes": Figure(float(sent), "counted", source)}
        again = downloads.resent_bytes(device) if downloads is not None else 0
        figures["resent_down_bytes"] = Figure(float(again), "counted", "chunks the coordinator sent more than once")
        if downloads is not None:
            if self._prototypes.local is not None:  # in the run's first round there are none yet
                figures["prototypes_down_bytes"] = Figure(0.0, "counted", source)
            offered = self._offers[device].manifest if device in self._offers else {}
            for part, name in separate_figures(self._plan).items():
                if part in offered:
                    size = downloads.payload_bytes(device, offered[part].id)
                    figures[name] = Figure(float(size), "counted", source)
        return figures

    def _offer(self, one: do.SendOffer, manifest: Manifest, state: State) -> None:
        transfer = transfer_name("d", one.attempt)
        if transfer not in self._downloads:
            working = in_progress(state)
            names = {transfer_name("d", attempt) for attempt in working}
            self._downloads = {name: found for name, found in self._downloads.items() if name in names}
            self._serve(one.attempt, working.get(one.attempt, [one.device]), manifest)
        offer = self._in_chunks(offer_for(one, manifest, state))
        self._offers[one.device] = offer
        self.post(one.device, offer)

    def _repeat_offers(self) -> None:
        """Repeat the offers in progress, with chunks that the broker takes."""
        for name, downloads in self._downloads.items():
            downloads.restart()
            for device, offer in self._offers.items():
                if offer.transfer == name:
                    self._chunks = self._sizer.of([device])
                    self._offers[device] = again = self._in_chunks(offer)
                    self.post(device, again)

    def _in_chunks(self, offer: m.Offer) -> m.Offer:
        return msgspec.structs.replace(offer, chunk_bytes=self._chunks[0], credit=self._chunks[1])

    def _serve(self, attempt: Attempt, expected: list[str], manifest: Manifest) -> None:
        """Serve the parts of an attempt."""
        name = transfer_name("d", attempt)
        self._downloads[name] = Downloads(
            name,
            served_parts(manifest),
            expected,
            store=self._store,
            fleet=self._fleet,
            publish=partial(self.publish, chunks=True),
        )
        self._chunks = self._sizer.of(expected)

    def _warn(self, text: str) -> None:
        self._report(row_of(do.EmitEvent("warning", data={"text": text})))

    def post(self, device: str, message: m.DownMessage) -> None:
        """Send a device a message, signed where the fleet signs."""
        topic, body = topics.down(self._fleet, device), m.encode(message)
        self.publish(topic, body if self._seal is None else self._seal(topic, body))

    def publish(self, topic: str, payload: bytes, *, chunks: bool = False) -> None:
        """Send without waiting; what the broker refuses is reported. ``chunks``: or sent again in smaller ones."""
        task = asyncio.ensure_future(self._transport.publish(topic, payload))
        self._posts.add(task)
        task.add_done_callback(partial(self._published, chunks=chunks))

    def _published(self, task: asyncio.Task[None], *, chunks: bool) -> None:
        self._posts.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        try:
            if not (chunks and isinstance(error, MessageSizeError)):
                self._report(error)
            elif self.chunking.refused(error):
                self._repeat_offers()
        except MessageSizeError as final:
            self._report(final)


_LOG = logging.getLogger(__name__)


class Downloads:
    """Serves the objects of one manifest. ``publish`` takes a topic and a message of chunks."""

    def __init__(
        self,
        transfer: str,
        manifest: Manifest,
        expected: Collection[str],
        *,
        store: ObjectStore,
        fleet: str,
        publish: Callable[[str, bytes], None],
    ) -> None:
        self.transfer = transfer
        self._sizes = {ref.id: ref.size for ref in manifest.values()}
        self._expected = expected
        self._asked: dict[str, dict[str, int]] = {}  # device -> object -> bytes it lacked when it first asked
        self._store = store
        self._fleet = fleet
        self._publish = publish
        self.restart()

    def restart(self) -> None:
        """Forget what was sent to each device: devices ask again, in chunks of another size."""
        self._sender = DiskSender(self.transfer, self._sizes, self._store, self._publish_to, self._expected)

    def on_need(self, device: str, need: Need, now: float) -> None:
        """A device says what it lacks, or how far it is."""
        if need.transfer != self.transfer:
            return
        ignored = self._sender.dropped
        failed = self._sender.on_need(device, need, now)
        if self._sender.dropped == ignored:
            asked = self._asked.setdefault(device, {})
            for name, bitmap in need.missing.items():
                if name in self._sizes and name not in asked:
                    asked[name] = lacking_bytes(bitmap, self._sizes[name], need.chunk_bytes)
        for one in failed:
            _LOG.warning("%s asked for what is not offered: %s", device, one.reason)

    def on_tick(self, now: float) -> None:
        """Time passed, and the broker is there."""
        self._sender.on_tick(now)

    def drop(self, device: str, now: float) -> None:
        """The others no longer wait for this device; it may ask again."""
        self._sender.drop(device, now)

    def payload_bytes(self, device: str, of: str = "") -> int:
        """Bytes of tensors the device lacked and was sent, repetitions after losses not counted; ``of`` one object."""
        asked = self._asked.get(device, {})
        return asked.get(of, 0) if of else sum(asked.values())

    def resent_bytes(self, device: str) -> int:
        """Bytes of the chunks that a device was sent more than once."""
        return self._sender.resent_bytes(device)

    def _publish_to(self, device: str | None, message: bytes) -> None:
        to = topics.shared_object(self._fleet, self.transfer)
        if device is not None:
            to = topics.down_object(self._fleet, device, self.transfer)
        self._publish(to, message)


def lacking_bytes(bitmap: bytes, size: int, chunk_bytes: int) -> int:
    """Bytes of the chunks whose bits are set; bits that belong to no chunk count nothing."""
    count = chunk_count(size, chunk_bytes)
    bits = int.from_bytes(bitmap, "little") & ((1 << count) - 1)
    last = bits >> (count - 1) if count else 0
    return bits.bit_count() * chunk_bytes - last * (count * chunk_bytes - size)
