"""Publishes the coordinator's messages and serves its transfers: bytes and topics. Offers: ``core.assignments``."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from coordinator.core import moves as do
from coordinator.core.assignments import (
    assignment_of,
    in_progress,
    offer_for,
    separate_figures,
    served_parts,
    transfer_name,
    visible_parts,
)
from coordinator.core.moves import Event, UpdateInvalid, UpdateStored
from coordinator.core.state import Link, Phase, State
from coordinator.core.timeouts import slowed
from coordinator.runtime.chunk_size import Chunking, ChunkSizer
from coordinator.runtime.environment import Environment
from coordinator.runtime.link_rates import LinkRates, Moved
from coordinator.runtime.object_urls import Method
from coordinator.runtime.record import warning
from coordinator.runtime.traffic import SENT, Traffic, counted
from coordinator.runtime.uploads import Uploads
from coordinator.runtime.validate_update import Own, Rules
from edgefl import __version__
from edgefl.aggregation.weights import wanted
from edgefl.errors import MessageSizeError
from edgefl.plan.job import WHOLE_ROUND, RunPlan
from edgefl.plan.preparation import preparation_of
from edgefl.process.tasks import Tasks
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.records import Attempt, Figures, Manifest
from edgefl.registry import choose
from edgefl.run_records import OPEN, EventRow
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.disk_driver import DiskSender
from edgefl.transfer.sender import Sent

_LOG = logging.getLogger(__name__)
#: Links are told from this long before a deadline on: what closes the round may be another event than a tick. Before
#: that they are looked at as often, and many devices more seldom: a look at each of a thousand at every tick was a
#: tenth of all that is done.
LOOK_S, LOOKED_AT = 1.0, 500


class Publisher:
    """Publishes without waiting: messages are idempotent, and a broker that is away must not stop the loop."""

    def __init__(
        self,
        plan: RunPlan,
        environment: Environment,
        store: ObjectStore,
        report: Callable[[Event | EventRow | BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self.plan = plan
        self._ids = {shown: name for name, shown in plan.names.items()}
        self._fleet, self._transport = environment.fleet, environment.transport
        self._heartbeat_s = environment.timeouts.heartbeat_s
        self._seal = environment.guard.seal if environment.guard is not None else None
        self._endpoint = environment.endpoint
        self._store = store
        self._report = report
        self._clock = clock
        self._session = secrets.token_hex(8)  # by which devices see that this process has not met them
        self._posts = Tasks(report)
        self._downloads: dict[str, DiskSender] = {}  # by transfer: of the open attempt, and of earlier ones at work
        self._offers: dict[str, m.Offer] = {}  # device -> what it was last offered
        self._sizer = ChunkSizer(plan.chunk_bytes, plan.credit)
        self._chunks = (0, 0)  # of the newest downloads: bytes, and how many may be in flight
        self._prototypes = choose("prototypes", plan.server).method
        options = next(iter(plan.server.get("prototypes", {}).values()), {})
        self._min_count = float(options.get("min_count", 1))  # a run begun before there was such an option has none
        self._rates, self._looked_at = LinkRates(), -math.inf
        self.traffic = Traffic()
        self.chunking = Chunking(self._transport, self._fleet, self._sizer, lambda text: report(warning(text)))
        rules = Rules(wanted(plan.server), plan.transfer)
        self.uploads = Uploads(
            store,
            self._sizer,
            rules,
            self.traffic,
            clock=clock,
            grant=self.post,
            report=self._report_upload,
            urls=partial(self._urls, "PUT"),
        )

    def facts(self) -> dict[str, object]:
        """The connection's limits and the chunk size, for an event in the ledger."""
        limits = self._transport.limits
        return {
            "mqtt": limits.version,
            "receive_maximum": limits.receive_maximum,
            "maximum_packet_size": limits.packet_bytes or None,
            "chunk_bytes": self._sizer.of(())[0],
            **({} if self._endpoint is None else {"objects_at": self._endpoint.base}),
        }

    def send(self, one: do.Send, manifest: Manifest, state: State) -> None:
        """Publish a message of the machine."""
        if isinstance(one, do.DrainAll):
            for device in state.devices:
                final = state.phase is Phase.FINISHED
                self.post(device, m.Drain(self.plan.run, one.reason, state.made_ms, final))
        elif isinstance(one, do.SendDrain):
            self.post(one.device, m.Drain(self.plan.run, one.reason, state.made_ms))
        elif isinstance(one, do.SendWelcome):
            beat_s = self._heartbeat_s * slowed(state.fleet_size)
            welcome = m.Welcome(self._session, heartbeat_s=beat_s, release=__version__)
            made = {"run": self.plan.run, "made_ms": state.made_ms, "earlier_ms": state.earlier_ms}
            prepared = preparation_of(self.plan)
            self.post(one.device, msgspec.structs.replace(welcome, **made, preparation=prepared))
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

    def fetch(self, one: do.Fetch, manifest: Manifest, state: State) -> None:
        """Start, or resume, receiving a device's model update.

        ``one``: the update announced, and whether to ask again at once; ``manifest``: the global model state that its
        attempt began from, for the checks of parts and sizes; ``state``: the coordinator's run state.
        """
        update = one.update
        seen = manifest | visible_parts(manifest, update.device, state.memory)
        own = Own(state.devices[update.device].claim, self._min_count, self._prototypes.has("candidates"))
        assignment = assignment_of(state, update.device, update.attempt)
        layers = ((assignment and assignment.period) or WHOLE_ROUND).layers
        name = transfer_name("u", update.attempt, update.device)
        self.uploads.fetch(update, seen, name, own, layers=layers, again=one.again)

    def on_need(self, device: str, need: m.Need, base: Callable[[Attempt], Manifest], state: State) -> None:
        """Serve a device's request for objects of its attempt's state, given by ``base``.

        An earlier process may have offered them. Nothing is served of attempts that no device is at work on.
        """
        if need.transfer not in self._downloads:
            for attempt, expected in in_progress(state).items():
                if transfer_name("d", attempt) == need.transfer:
                    self._serve(attempt, expected, base(attempt))
        if need.transfer in self._downloads:
            for failed in self._downloads[need.transfer].on_need(device, need, self._clock()):
                _LOG.warning("%s asked for what is not offered: %s", device, failed.reason)

    def away(self, device: str) -> None:
        """Stop other downloads from waiting for an offline or busy device; it may ask again."""
        for downloads in self._downloads.values():
            downloads.drop(device, self._clock())

    def tick(self) -> None:
        """Advance the transfers; the broker is connected."""
        for downloads in list(self._downloads.values()):
            downloads.on_tick(self._clock())
        self.uploads.on_tick()
        self.chunking.tick()

    def links(self, state: State) -> dict[str, Link]:
        """Links of the devices at work in the open attempt, as measured; none before its deadline is near."""
        if state.open is None or state.phase is not Phase.ROUND or math.isinf(state.open.deadline_at):
            return {}
        attempt, now = state.open.attempt, self._clock()
        near = now >= state.open.deadline_at - LOOK_S
        if not near and now - self._looked_at < LOOK_S * max(1.0, len(state.assignments) / LOOKED_AT):
            return {}
        self._looked_at = now
        downloads = self._downloads.get(transfer_name("d", attempt))
        moved = {
            device: Moved(
                downloads.payload_bytes(device) if downloads else 0,
                downloads.sent_bytes(device) if downloads else 0,
                self.uploads.received_bytes(device, attempt),
                waits=downloads is not None and downloads.waits(device),
            )
            for device, part in state.assignments.items()
            if part.status in OPEN
        }
        self._rates.look(now, attempt, moved)
        return self._rates.links() if near else {}

    def call(self) -> None:
        """Ask all devices for hellos: who is online, at which work, lacking which chunks."""
        self.publish(topics.call(self._fleet), b"")

    def end_transfers(self) -> None:
        """All attempts are closed: end their transfers."""
        self._downloads = {}
        self._offers = {}
        self.uploads.clear()

    async def flush(self, timeout_s: float) -> None:
        """Wait for messages in publication, at most ``timeout_s``."""
        await self._posts.wait(timeout_s)

    async def close(self) -> None:
        """Drop unsent messages."""
        self.end_transfers()
        await self.uploads.close()
        await self.chunking.close()
        await self._posts.close()

    def _report_upload(self, event: UpdateStored | UpdateInvalid | BaseException) -> None:
        if isinstance(event, UpdateStored):
            figures = event.figures | self._download_figures(event.device, event.attempt)
            event = msgspec.structs.replace(event, figures=figures)
        self._report(event)

    def _download_figures(self, device: str, attempt: Attempt) -> Figures:
        """Bytes of prototypes and of a single layer sent to a device."""
        downloads, figures = self._downloads.get(transfer_name("d", attempt)), Figures()
        if downloads is None:
            return figures
        if self._prototypes.local is not None:  # in the run's first round there are none yet
            figures["prototypes_down_bytes"] = counted(0, SENT)
        offered = self._offers[device].manifest if device in self._offers else {}
        for part, name in separate_figures(self.plan).items():
            if part in offered:
                figures[name] = counted(downloads.payload_bytes(device, offered[part].id), SENT)
        return figures

    def _offer(self, one: do.SendOffer, manifest: Manifest, state: State) -> None:
        transfer = transfer_name("d", one.attempt)
        if transfer not in self._downloads:
            working = in_progress(state)
            names = {transfer_name("d", attempt) for attempt in working}
            self._downloads = {name: found for name, found in self._downloads.items() if name in names}
            self._serve(one.attempt, working.get(one.attempt, [one.device]), manifest)
        offer = self._in_chunks(offer_for(one, manifest, state))
        refs = [*offer.manifest.values(), *(packed.ref for packed in offer.packed.values())]
        urls = self._urls("GET", one.device, transfer, {ref.id: ref.size for ref in refs})
        offer = msgspec.structs.replace(offer, urls=urls)
        self._offers[one.device] = offer
        self.post(one.device, offer)

    def _urls(self, method: Method, device: str, transfer: str, sizes: Mapping[str, int]) -> dict[str, str]:
        """Object id -> where a device may fetch or put it past the broker."""
        if self._endpoint is None:
            return {}
        return self._endpoint.urls(method, self._ids.get(device, device), transfer, sizes)

    def download(self, transfer: str) -> DiskSender | None:
        """The sender of a transfer to devices, if it is under way."""
        return self._downloads.get(transfer)

    def _repeat_offers(self) -> None:
        """Repeat the offers in progress, with chunks that the broker takes."""
        for name, downloads in self._downloads.items():
            downloads.restart()
            offers = {device: offer for device, offer in self._offers.items() if offer.transfer == name}
            self._chunks = self._sizer.of(offers, downloads.size_bytes)
            for device, offer in offers.items():
                self._offers[device] = again = self._in_chunks(offer)
                self.post(device, again)

    def _in_chunks(self, offer: m.Offer) -> m.Offer:
        return msgspec.structs.replace(offer, chunk_bytes=self._chunks[0], credit=self._chunks[1])

    def _serve(self, attempt: Attempt, expected: list[str], manifest: Manifest) -> None:
        """Serve the parts of an attempt."""
        name = transfer_name("d", attempt)
        sizes = {ref.id: ref.size for ref in served_parts(manifest).values()}
        send, count = partial(self._send_chunks, name), partial(self._count, attempt)
        self._chunks = self._sizer.of(expected, sum(sizes.values()))
        self._downloads[name] = DiskSender(name, sizes, self._store, send, expected, count, self._chunks[0])

    def _count(self, attempt: Attempt, device: str, sent: Sent) -> None:
        self.traffic.sent(device, attempt, sent)

    def post(self, device: str, message: m.DownMessage) -> None:
        """Send a device a message, signed if the fleet has an identity."""
        device = self._ids.get(device, device)
        if isinstance(message, m.Grant):
            message = msgspec.structs.replace(message, device=device)
        topic, body = topics.build("down", self._fleet, device), m.encode(message)
        self.publish(topic, body if self._seal is None else self._seal(topic, body))

    def publish(self, topic: str, payload: bytes) -> None:
        """Send without waiting; what the broker refuses is reported."""
        self._posts.spawn(self._transport.publish(topic, payload))

    def _send_chunks(self, transfer: str, device: str | None, message: bytes) -> None:
        topic = topics.build("shared-object", self._fleet, transfer=transfer)
        if device is not None:
            topic = topics.build("down-object", self._fleet, self._ids.get(device, device), transfer)
        self._posts.spawn(self._transport.publish(topic, message), self._chunks_refused)

    def _chunks_refused(self, error: BaseException) -> None:
        """Repeat offers with smaller chunks after a refusal for their size; report other errors."""
        try:
            if not isinstance(error, MessageSizeError):
                self._report(error)
            elif self.chunking.refused(error):
                self._repeat_offers()
        except Exception as worse:
            self._report(worse)
