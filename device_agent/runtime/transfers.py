"""Transfers of one agent: the offer that is fetched, the update that is served, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import xxhash

from device_agent.core import state as v
from device_agent.core.attempt_cost import AttemptCost, Counters, unknown_cost
from device_agent.runtime.effects import Effects
from device_agent.runtime.incarnation import Identity
from edgefl.errors import BrokerError, ProtocolError, StoreError
from edgefl.protocol import topics
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_CREDIT, decode_chunks
from edgefl.protocol.messages import Grant, Need, Offer, Update, UpMessage
from edgefl.records import Attempt, Figures, ObjectRef, Refusal
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.disk_driver import DiskReceiver, DiskSender, End, Superseded
from edgefl.transfer.receiver import Failed
from edgefl.transport.interface import Transport


class _Fetch(NamedTuple):
    offer: Offer
    receiver: DiskReceiver
    cost: AttemptCost
    began: float


class Transfers:
    """Fetches offers and serves updates as the machine says; ends of fetches come back as events.

    ``unacknowledged``: messages that the broker has not acknowledged. ``restored``: an attempt that an earlier process
    accepted, which took its counters with it.
    """

    def __init__(
        self,
        identity: Identity,
        objects: ObjectStore,
        effects: Effects,
        transport: Callable[[], Transport],
        unacknowledged: Collection[UpMessage],
        restored: Attempt | None = None,
    ) -> None:
        self._identity = identity
        self._objects = objects
        self._effects = effects
        self._transport = transport
        self._unacknowledged = unacknowledged
        self._restored = restored
        self._fetch: _Fetch | None = None
        self._served: tuple[Update, DiskSender] | None = None
        self._cost: AttemptCost | None = None

    def fetch(self, offer: Offer) -> None:
        """Ask for what the offer's manifest names and is not here; again for the same offer: ask again."""
        now = time.monotonic()
        if self._fetch is not None and self._fetch.offer == offer:
            asking = (one for one in self._unacknowledged if isinstance(one, Need) and one.missing)
            if all(one.transfer != offer.transfer for one in asking):
                self._fetch.receiver.ask_again(now)  # else the transport sends it, as soon as it can
            return
        if self._cost is None or self._cost.attempt != offer.attempt:
            self._cost = AttemptCost(offer.attempt, self._counters())
        refs = wanted(offer, self._objects)
        receiver = DiskReceiver(offer.transfer, self._identity.device, refs, self._objects, self._effects.send)
        self._fetch = _Fetch(offer, receiver, self._cost, now)
        self._start(self._fetch)

    def stop_fetch(self) -> None:
        """Stop fetching; what has arrived stays on disk."""
        self._fetch = None

    def chunk(self, transfer: str, payload: bytes) -> None:
        """A message of chunks arrived. Raises ProtocolError when it is malformed."""
        fetch = self._fetch
        if fetch is None or fetch.offer.transfer != transfer:
            return
        try:
            for chunk in decode_chunks(payload):
                self._ended(fetch, fetch.receiver.on_chunk(chunk, time.monotonic()))
        except StoreError as error:
            self._failed(fetch, "disk", error.message)

    def serve(self, update: Update, grant: Grant) -> None:
        """The coordinator says what it lacks of an update, or how far it is."""
        served, sender = self._served or (None, None)
        if sender is None or (served, sender.transfer) != (update, grant.transfer):
            topic = topics.build("up-object", self._identity.fleet, self._identity.device, grant.transfer)
            sizes = {ref.id: ref.size for ref in update.manifest.values()}
            sender = DiskSender(grant.transfer, sizes, self._objects, self._publish_on(topic))
            self._served = update, sender
        for failed in sender.on_need(self._identity.device, grant, time.monotonic()):
            self._effects.emit("warning", text=f"object {failed.object_id[:12]}: {failed.reason}")

    def stop_serve(self) -> None:
        """The update is delivered, or not wanted."""
        self._served = None

    def tick(self, *, connected: bool) -> None:
        """Time passed.

        Nothing is asked for again before the broker has acknowledged every message: a link that is cut would carry
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
        """Cost of the attempt at this device beside the training itself."""
        if self._cost is None or self._cost.attempt != offer.attempt or self._restored == offer.attempt:
            return unknown_cost()
        topic = topics.build("up-object", self._identity.fleet, self._identity.device, offer.transfer)  # about as long
        return self._cost.figures(self._counters(), result.manifest, topic, offer.chunk_bytes)

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
            fetch.cost.fetched_bytes += fetch.receiver.received_bytes
            self._effects.spawn(self._store(fetch))

    def _failed(self, fetch: _Fetch, reason: str, detail: str) -> None:
        if self._fetch is fetch:
            self._fetch = None
        self._effects.post(v.FetchFailed(fetch.offer.attempt, Refusal(reason, detail=detail)))

    async def _store(self, fetch: _Fetch) -> None:
        try:
            await asyncio.to_thread(self._objects.publish, fetch.receiver.partials.values())
        except StoreError as error:
            self._failed(fetch, "disk", error.message)
            return
        attempt, seconds = fetch.offer.attempt, time.monotonic() - fetch.began
        self._effects.emit("fetched", attempt=str(attempt), bytes=fetch.receiver.received_bytes, seconds=seconds)
        self._effects.post(v.Fetched(attempt))

    def _counters(self) -> Counters:
        transport = self._transport()
        return Counters(time.monotonic(), transport.bytes_sent, transport.bytes_received)

    def _publish_on(self, topic: str) -> Callable[[str | None, bytes], None]:
        under_way: set[int] = set()

        async def publish(name: int, payload: bytes) -> None:
            try:
                await self._transport().publish(topic, payload)
            except BrokerError as error:  # too large for this broker, or denied: the round is lost, the agent is not
                self._effects.emit("warning", text=error.message)
            finally:
                under_way.discard(name)

        def spawn(device: str | None, payload: bytes) -> None:
            """Send a message unless the same one is under way: then it is late, or the link is cut, after which the
            transport itself sends it again.
            """
            name = xxhash.xxh3_64_intdigest(payload)
            if name not in under_way:
                under_way.add(name)
                self._effects.spawn(publish(name, payload))

        return spawn


def wanted(offer: Offer, store: ObjectStore) -> list[ObjectRef]:
    """The objects to have before training: each part's own, or the packed one where what that is based on is here."""
    refs = []
    for part, ref in offer.manifest.items():
        packed = offer.packed.get(part)
        based = packed is not None and (not packed.base or store.has(packed.base))
        refs.append(packed.ref if packed is not None and based and not store.has(ref.id) else ref)
    return refs
