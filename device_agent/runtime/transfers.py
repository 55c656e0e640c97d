"""Transfers of one agent: download of an offer, upload of an update, and their cost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import xxhash
from msgspec.structs import replace

from device_agent.core import state as v
from device_agent.runtime.by_url import ByUrl, Puts
from device_agent.runtime.effects import Effects
from device_agent.runtime.memory_store import MemoryObjects, Objects
from edgefl.errors import BrokerError, ProtocolError, StoreError
from edgefl.protocol import topics
from edgefl.protocol.chunks import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_CREDIT,
    HEADER_BYTES,
    Chunk,
    bundled_bytes,
    decode_chunks,
)
from edgefl.protocol.messages import Grant, Need, Offer, Update, UpMessage
from edgefl.records import Attempt, Figure, Figures, ObjectRef, Refusal
from edgefl.transfer.disk_driver import DiskReceiver, DiskSender, End, Superseded
from edgefl.transfer.receiver import Failed
from edgefl.transport.interface import Transport

#: An MQTT PUBLISH besides topic and payload: fixed header 1 + 4, topic length 2, packet id 2, MQTT 5 properties 1.
_PUBLISH_BYTES = 10


class _Counters(NamedTuple):
    """Counters at one moment: seconds, and bytes sent and received at the socket."""

    at: float
    sent: int
    received: int


@dataclass
class _Cost:
    """Cost of an attempt at this device since its offer was accepted."""

    attempt: Attempt
    begin: _Counters
    fetched_bytes: int = 0


class _Fetch(NamedTuple):
    offer: Offer
    receiver: DiskReceiver[Any]
    cost: _Cost
    began: float
    urls: dict[str, str]  # of objects that come past the broker


class Transfers:
    """Fetches offers and serves updates as the machine says; ends of fetches come back as events.

    ``state``: the agent's at its start; an attempt in hand by then was accepted by an earlier process, which took its
    counters with it. ``unacknowledged``: messages that the broker has not acknowledged. ``by_url``: the way past the
    broker, of agents with a network of their own.
    """

    def __init__(
        self,
        state: v.State,
        objects: Objects,
        effects: Effects,
        transport: Callable[[], Transport],
        unacknowledged: Collection[UpMessage],
        by_url: ByUrl | None = None,
    ) -> None:
        self._by_url = by_url
        self._getting: asyncio.Task[None] | None = None
        self._puts = None if by_url is None else Puts(by_url, objects, effects)
        self._fleet, self._device = state.fleet, state.device
        self._restored = state.task.attempt if state.task is not None else None
        self._objects = objects
        self._effects = effects
        self._transport = transport
        self._unacknowledged = unacknowledged
        self._fetch: _Fetch | None = None
        self._listened = ""  # transfer whose shared chunks the broker passes on to this device
        self._served: tuple[Update, DiskSender] | None = None
        self._cost: _Cost | None = None

    def fetch(self, offer: Offer) -> None:
        """Request the missing objects of an offer; for the same offer again, repeat the request."""
        now = time.monotonic()
        if self._fetch is not None and self._fetch.offer == offer:
            asking = (one for one in self._unacknowledged if isinstance(one, Need) and one.missing)
            if all(one.transfer != offer.transfer for one in asking):
                self._fetch.receiver.ask_again(now)  # else the transport sends it, as soon as it can
            return
        if self._cost is None or self._cost.attempt != offer.attempt:
            self._cost = _Cost(offer.attempt, self._counters())
        self.stop_fetch(listen=offer.transfer)
        refs = wanted(offer, self._objects)
        receiver = DiskReceiver(offer.transfer, self._device, refs, self._objects, self._effects.send)
        urls = {} if self._by_url is None else self._by_url.usable(offer.urls, {ref.id for ref in refs})
        receiver.set_aside(urls)
        self._fetch = _Fetch(offer, receiver, self._cost, now, urls)
        self._start(self._fetch)
        if urls and self._by_url is not None and self._fetch is not None:  # it may have failed at once
            self._getting = self._effects.spawn(self._get(self._fetch, self._by_url))

    def stop_fetch(self, listen: str = "") -> None:
        """Stop fetching; what has arrived stays on disk. ``listen``: the transfer that is fetched instead."""
        self._fetch = None
        self._listen(listen)
        if self._getting is not None:
            self._getting.cancel()
            self._getting = None

    def chunk(self, transfer: str, payload: bytes) -> None:
        """Handle a message of chunks. Raises ProtocolError if malformed."""
        fetch = self._fetch
        if fetch is None or fetch.offer.transfer != transfer:
            return
        self._take(fetch, decode_chunks(payload))

    def _take(self, fetch: _Fetch, chunks: Iterable[Chunk]) -> None:
        try:
            for chunk in chunks:
                self._ended(fetch, fetch.receiver.on_chunk(chunk, time.monotonic()))
        except StoreError as error:
            self._failed(fetch, "disk", error.message)

    async def _get(self, fetch: _Fetch, by_url: ByUrl) -> None:
        """Fetch what has URLs; what does not come that way is asked for as chunks."""
        receiver, size = fetch.receiver, fetch.receiver.chunk_bytes
        came = Counter[str]()
        async with by_url.exchange() as exchange:
            for name, url in fetch.urls.items():

                def take(begin: int, data: bytes, name: str = name) -> None:
                    came[name] += len(data)
                    self._take(fetch, [Chunk(name, begin // size, data)])

                if not await exchange.get(url, partial(receiver.gap, name), take, size):
                    break
        if any(receiver.gap(name) for name in fetch.urls):
            receiver.set_aside(())
            receiver.ask_again(time.monotonic())
        self._effects.emit("by-url", fetched_bytes=came.total())

    def serve(self, update: Update, grant: Grant) -> None:
        """Send chunks of an update by the coordinator's request or acknowledgement (``grant``)."""
        served, sender = self._served or (None, None)
        if sender is None or (served, sender.transfer) != (update, grant.transfer):
            topic = topics.build("up-object", self._fleet, self._device, grant.transfer)
            sizes = {ref.id: ref.size for ref in update.manifest.values()}
            sender = DiskSender(grant.transfer, sizes, self._objects, self._publish_on(topic))
            self.stop_serve()
            self._served = update, sender
        if self._puts is not None and (apart := self._puts.take(update, grant)):
            grant = replace(grant, missing={name: bits for name, bits in grant.missing.items() if name not in apart})
            if not grant.missing:
                return
        self._transport().admit(grant.chunk_bytes + HEADER_BYTES)  # as MQTT 3.1.1 tells no limit, and others are asked
        for failed in sender.on_need(self._device, grant, time.monotonic()):
            self._effects.emit("warning", text=f"object {failed.object_id[:12]}: {failed.reason}")

    def stop_serve(self) -> None:
        """Stop sending the update: delivered or not wanted."""
        self._served = None
        if self._puts is not None:
            self._puts.stop()

    def tick(self, *, connected: bool) -> None:
        """Advance the transfers with time.

        Nothing is requested again before the broker has acknowledged every message: a link that is cut would carry
        every repetition once it is back, and each would be answered with all that is missing.
        """
        now = time.monotonic()
        if self._fetch is not None:
            if self._unacknowledged:
                self._fetch.receiver.on_unheard(now)
            else:
                self._fetch.receiver.on_tick(now)
        if self._served is not None and connected:
            self._served[1].on_tick(now)

    def figures(self, offer: Offer, result: v.Result) -> Figures:
        """Cost of the attempt at this device beside the training: time, payload and bytes on the wire.

        Without values for an attempt that an earlier process of this agent accepted. The upload is still ahead, so it
        is counted, not measured.
        """
        if self._cost is None or self._cost.attempt != offer.attempt or self._restored == offer.attempt:
            names = ("wall_s", "payload_down_bytes", "wire_down_bytes", "wire_up_bytes")
            return {name: Figure(reason="the agent was restarted during the round") for name in names}
        begin, end = self._cost.begin, self._counters()
        sizes = {ref.id: ref.size for ref in result.manifest.values()}.values()
        messages, upload = bundled_bytes(sizes, offer.chunk_bytes) if offer.chunk_bytes > 0 else (0, sum(sizes))
        topic = topics.build(
            "up-object", self._fleet, self._device, offer.transfer
        )  # about as long as the upload's own
        upload += end.sent - begin.sent + messages * (len(topic.encode()) + _PUBLISH_BYTES)
        return {
            "wall_s": Figure(end.at - begin.at, "measured", "monotonic clock, acceptance to announcement"),
            "payload_down_bytes": Figure(
                float(self._cost.fetched_bytes), "counted", "chunks of objects this device lacked"
            ),
            "payload_up_bytes": Figure(float(sum(sizes)), "counted", "objects of the update"),
            **self._wire(end.received - begin.received, upload),
        }

    def _wire(self, down: int, up: int) -> Figures:
        """Figures of bytes on the wire; without values for a transport in this process."""
        if not self._transport().wired:
            none = Figure(reason="messages do not leave this process")
            return {"wire_down_bytes": none, "wire_up_bytes": none}
        source = "socket, acceptance to announcement"
        return {
            "wire_down_bytes": Figure(float(down), "measured", source),
            "wire_up_bytes": Figure(float(up), "counted", f"{source} + the upload's chunks with their framing"),
        }

    def _listen(self, transfer: str) -> None:
        """Subscribe to the shared chunks of this transfer only; "" for none."""
        if transfer == self._listened:
            return
        transport, before, self._listened = self._transport(), self._listened, transfer
        if before:
            transport.unsubscribe([topics.build("shared-object", self._fleet, transfer=before)])
        if transfer:  # sent before what is asked for, on the same connection: no chunk is missed
            self._effects.spawn(transport.subscribe([topics.build("shared-object", self._fleet, transfer=transfer)]))

    def _start(self, fetch: _Fetch) -> None:
        chunk_bytes, credit = fetch.offer.chunk_bytes or DEFAULT_CHUNK_BYTES, fetch.offer.credit or DEFAULT_CREDIT
        try:
            self._ended(fetch, fetch.receiver.start(chunk_bytes, credit, time.monotonic()))
        except StoreError as error:
            self._failed(fetch, "disk", error.message)
        except ProtocolError as error:  # an offer that makes no sense, such as chunks of no size
            self._failed(fetch, "transfer", error.message)

    def _ended(self, fetch: _Fetch, end: End | None) -> None:
        if end is None or self._fetch is not fetch:
            return
        if isinstance(end, Superseded):
            self._start(fetch)
        elif isinstance(end, Failed):
            self._failed(fetch, "transfer", f"object {end.object_id[:12]}: {end.reason}")
        else:
            self._listen("")
            fetch.cost.fetched_bytes += fetch.receiver.received_bytes
            self._effects.spawn(self._store(fetch))

    def _failed(self, fetch: _Fetch, reason: str, detail: str) -> None:
        if self._fetch is fetch:
            self.stop_fetch()
        self._effects.post(v.Fetched(fetch.offer.attempt, Refusal(reason, detail=detail)))

    async def _store(self, fetch: _Fetch) -> None:
        try:
            publish = partial(self._objects.publish, fetch.receiver.partials.values())
            if isinstance(self._objects, MemoryObjects):
                publish()
            else:
                await asyncio.to_thread(publish)
        except StoreError as error:
            self._failed(fetch, "disk", error.message)
            return
        attempt, seconds = fetch.offer.attempt, time.monotonic() - fetch.began
        self._effects.emit("fetched", attempt=str(attempt), bytes=fetch.receiver.received_bytes, seconds=seconds)
        self._effects.post(v.Fetched(attempt))

    def _counters(self) -> _Counters:
        transport, more = self._transport(), self._by_url
        sent, received = (more.sent, more.received) if more is not None else (0, 0)
        return _Counters(time.monotonic(), transport.bytes_sent + sent, transport.bytes_received + received)

    def _publish_on(self, topic: str) -> Callable[[str | None, bytes], None]:
        under_way: set[int] = set()

        def send(device: str | None, payload: bytes) -> None:
            """Send a message unless an identical one is under way, which the transport repeats
            after a lost link.
            """
            name = xxhash.xxh3_64_intdigest(payload)
            if name not in under_way:
                under_way.add(name)
                # Too large for this broker, or denied: the round is lost, the agent is not.
                self._effects.transmit(topic, payload, BrokerError, partial(under_way.discard, name))

        return send


def wanted(offer: Offer, store: Objects) -> list[ObjectRef]:
    """Objects to fetch for an offer: each part's, or the packed one if its base is here."""
    refs = []
    for part, ref in offer.manifest.items():
        packed = offer.packed.get(part)
        based = packed is not None and (not packed.base or store.has(packed.base))
        refs.append(packed.ref if packed is not None and based and not store.has(ref.id) else ref)
    return refs
