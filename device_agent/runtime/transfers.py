"""Both directions of objects at one agent: the offer that is fetched, the update that is served, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import xxhash

from device_agent.core import state as v
from device_agent.core.attempt_cost import Bill, Meters, unknown
from device_agent.runtime.incarnation import Identity
from device_agent.runtime.log import Emit
from device_agent.runtime.trainer_tasks import Spawn
from device_agent.runtime.transfer_driver import Download, Upload
from edgefl.errors import BrokerError, ProtocolError, StoreError
from edgefl.protocol import topics
from edgefl.protocol.messages import Grant, Need, Offer, Update, UpMessage
from edgefl.records import Attempt, Figures, Refusal
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import PartialObject
from edgefl.transport.base import Transport


class Transfers:
    """Performs the machine's fetching and serving; ends of fetches come back as events."""

    def __init__(
        self,
        identity: Identity,
        transport: Callable[[], Transport],
        objects: ObjectStore,
        spawn: Spawn,
        post: Callable[[v.Event], None],
        send: Callable[[Need], None],
        emit: Emit,
        leaving: Collection[UpMessage],
        restored: Attempt | None = None,
    ) -> None:
        """``leaving``: what was said and the broker has not acknowledged.

        ``restored``: accepted by an earlier process, which took its counters with it.
        """
        self._identity = identity
        self._restored = restored
        self._transport = transport
        self._objects = objects
        self._spawn = spawn
        self._post = post
        self._send = send
        self._emit = emit
        self._leaving = leaving
        self._download: Download | None = None
        self._upload: Upload | None = None
        self._bill: Bill | None = None

    def fetch(self, offer: Offer) -> None:
        """Ask for what the offer's manifest names and is not here; again for the same offer: ask again."""
        now = time.monotonic()
        if self._download is not None and self._download.offer == offer:
            asking = (one for one in self._leaving if isinstance(one, Need) and one.missing)
            if all(one.transfer != offer.transfer for one in asking):
                self._download.again(now)  # else the transport says it, as soon as it can
            return
        if self._bill is None or self._bill.attempt != offer.attempt:
            self._bill = Bill(offer.attempt, self._meters())
        self.stop_fetch()
        bill = self._bill

        def failed(refusal: Refusal) -> None:
            self._post(v.FetchFailed(offer.attempt, refusal))

        async def store(partials: list[PartialObject], fetched_bytes: int) -> None:
            try:
                await asyncio.to_thread(self._objects.publish, partials)
            except StoreError as error:
                failed(Refusal("disk", detail=error.message))
                return
            self._emit("fetched", attempt=str(offer.attempt), bytes=fetched_bytes, seconds=time.monotonic() - now)
            self._post(v.Fetched(offer.attempt))

        def done(partials: list[PartialObject], fetched_bytes: int) -> None:
            bill.fetched_bytes += fetched_bytes
            self._spawn(store(partials, fetched_bytes))

        try:
            self._download = Download(offer, self._identity.device, self._objects, self._send, done, failed)
            self._download.start(now)
        except ProtocolError as error:  # an offer that makes no sense, such as chunks of no size
            failed(Refusal("transfer", detail=error.message))

    def stop_fetch(self) -> None:
        """Nobody needs what is being fetched; what has arrived stays on disk."""
        if self._download is not None:
            self._download.stop()
            self._download = None

    def chunk(self, transfer: str, payload: bytes) -> None:
        """A chunk arrived. Raises ProtocolError when it is malformed."""
        if self._download is not None:
            self._download.chunk(transfer, payload, time.monotonic())

    def serve(self, update: Update, grant: Grant) -> None:
        """The coordinator says what it lacks of an update, or how far it is."""
        if self._upload is None or (self._upload.transfer, self._upload.update) != (grant.transfer, update):
            topic = topics.up_object(self._identity.fleet, self._identity.device, grant.transfer)
            self._upload = Upload(update, grant.transfer, self._objects, self._publish_on(topic))
        if trouble := self._upload.grant(self._identity.device, grant, time.monotonic()):
            self._emit("warning", text=trouble)

    def stop_serve(self) -> None:
        """The update is delivered, or not wanted."""
        self._upload = None

    def tick(self, *, connected: bool) -> None:
        """Time passed.

        Nothing is asked for again before the broker has all that was said: a link that is cut would carry every
        repetition once it is back, and each would be answered with all that is missing.
        """
        now = time.monotonic()
        if self._download is not None:
            if self._leaving:
                self._download.wait(now)
            else:
                self._download.tick(now)
        if self._upload is not None and connected:
            self._upload.tick(now)

    def figures(self, offer: Offer, result: v.Result) -> Figures:
        """What the attempt cost this device beside the training itself."""
        if self._bill is None or self._bill.attempt != offer.attempt or self._restored == offer.attempt:
            return unknown()
        topic = topics.up_object(self._identity.fleet, self._identity.device, offer.transfer)  # about as long
        return self._bill.figures(self._meters(), result.manifest, topic, offer.chunk_bytes)

    def _meters(self) -> Meters:
        transport = self._transport()
        return Meters(time.monotonic(), transport.bytes_sent, transport.bytes_received)

    def _publish_on(self, topic: str) -> Callable[[bytes], None]:
        leaving: set[int] = set()

        async def publish(name: int, payload: bytes) -> None:
            try:
                await self._transport().publish(topic, payload)
            except BrokerError as error:  # too large for this broker, or denied: the round is lost, the agent is not
                self._emit("warning", text=error.message)
            finally:
                leaving.discard(name)

        def spawn(payload: bytes) -> None:
            """What is asked for again while it is leaving is not sent twice: it is late, or the link is cut,
            after which the transport itself sends it again.
            """
            name = xxhash.xxh3_64_intdigest(payload)
            if name not in leaving:
                leaving.add(name)
                self._spawn(publish(name, payload))

        return spawn
