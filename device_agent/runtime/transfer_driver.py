"""Objects in and out: joins the pure transfer machines to the store and to whoever publishes.

Hashing and writing happen in the event loop: a chunk is 96 KiB, and hashes grow as chunks arrive in order.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from edgefl.errors import StoreError
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_CREDIT, Chunk, bundled, decode_chunks
from edgefl.protocol.messages import Grant, Need, Offer, Update
from edgefl.records import ObjectRef, Refusal
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import PartialObject
from edgefl.transfer.instructions import Completed, Failed, Instruction, SendChunk, SendNeed, StoreChunk, VerifyObject
from edgefl.transfer.receiver import Receiver
from edgefl.transfer.sender import Sender


class Download:
    """Fetches what is missing of an offer's manifest. Calls ``done`` or ``failed``, once.

    ``done`` is given the objects, which are right but not in the store yet, and the bytes fetched.

    Afterwards it still answers a sender that did not hear of the end, until ``stop``.
    """

    def __init__(
        self,
        offer: Offer,
        device: str,
        store: ObjectStore,
        send: Callable[[Need], None],
        done: Callable[[list[PartialObject], int], None],
        failed: Callable[[Refusal], None],
    ) -> None:
        self.offer = offer
        self._refs = wanted(offer, store)
        self.fetched_bytes = 0
        self._store = store
        self._send = send
        self._done = done
        self._failed = failed
        self._partials: dict[str, PartialObject] = {}
        self._arrived: Chunk | None = None
        self._ended = False
        self._receiver = Receiver(
            offer.transfer,
            device,
            list({ref.id: ref for ref in self._refs}.values()),
            offer.chunk_bytes or DEFAULT_CHUNK_BYTES,
            offer.credit or DEFAULT_CREDIT,
            incarnation=secrets.randbelow(2**31),
        )

    def start(self, now: float) -> None:
        """Look at what is here and ask for the rest. Raises nothing: a refusing disk goes to ``failed``."""
        try:
            missing = {}
            for ref in self._refs:
                if not self._store.has(ref.id):
                    chunk_bytes = self.offer.chunk_bytes or DEFAULT_CHUNK_BYTES
                    self._partials[ref.id] = self._store.partial(ref, chunk_bytes)
                    missing[ref.id] = self._partials[ref.id].missing(chunk_bytes)
            self._carry_out(self._receiver.start(missing, now), now)
        except StoreError as error:
            self._fail("disk", error.message)

    def again(self, now: float) -> None:
        """Ask again at once, as after a reconnection."""
        self._carry_out(self._receiver.on_stall(now), now)

    def chunk(self, transfer: str, payload: bytes, now: float) -> None:
        """Chunks arrived on one of the topics this device listens to. Raises ProtocolError for malformed ones."""
        if transfer != self.offer.transfer or (self._ended and not self._receiver.finished):
            return
        try:
            for arrived in decode_chunks(payload):
                self._arrived = arrived
                self._carry_out(self._receiver.on_chunk(arrived.object_id, arrived.index, len(arrived.data), now), now)
        except StoreError as error:
            self._fail("disk", error.message)

    def tick(self, now: float) -> None:
        """Time passed: ask again when nothing came for long."""
        if not self._ended:
            self._carry_out(self._receiver.on_tick(now), now)

    def wait(self, now: float) -> None:
        """Time passed, but the sender can not have heard what was said: nothing is late."""
        self._receiver.on_unheard(now)

    def stop(self) -> None:
        """Nobody needs it any more; what has arrived stays on disk."""
        self._ended = True
        self._receiver.finished = False

    def _carry_out(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendNeed):
                self._send(instruction.need)
            elif isinstance(instruction, StoreChunk) and self._arrived is not None:
                self._partials[instruction.object_id].write(instruction.index, self._arrived.data)
                self.fetched_bytes += len(self._arrived.data)
            elif isinstance(instruction, VerifyObject):
                ok = self._partials[instruction.object_id].verify()
                self._carry_out(self._receiver.on_verified(instruction.object_id, ok, now), now)
            elif isinstance(instruction, Completed) and not self._ended:
                self._ended = True
                self._done(list(self._partials.values()), self.fetched_bytes)
            elif isinstance(instruction, Failed):
                self._fail("transfer", f"object {instruction.object_id[:12]}: {instruction.reason}")

    def _fail(self, reason: str, detail: str) -> None:
        if not self._ended:
            self._ended = True
            self._failed(Refusal(reason, detail=detail))


def wanted(offer: Offer, store: ObjectStore) -> list[ObjectRef]:
    """The objects to have before training: each part's own, or the packed one where what that is based on is here."""
    refs = []
    for part, ref in offer.manifest.items():
        packed = offer.packed.get(part)
        based = packed is not None and (not packed.base or store.has(packed.base))
        refs.append(packed.ref if packed is not None and based and not store.has(ref.id) else ref)
    return refs


class Upload:
    """Serves the objects of one update to the coordinator, as it asks for them."""

    def __init__(self, update: Update, transfer: str, store: ObjectStore, publish: Callable[[bytes], None]) -> None:
        self.transfer = transfer
        self.update = update
        self._store = store
        self._publish = publish
        self._sender = Sender(transfer, {ref.id: ref.size for ref in update.manifest.values()})

    def grant(self, device: str, grant: Grant, now: float) -> str:
        """The coordinator lacks these, or has got these. What cannot be served, as a text; "" when all can."""
        return self._carry_out(self._sender.on_need(device, grant, now))

    def tick(self, now: float) -> None:
        """Time passed: ask for an answer when there was none for long. Only while connected."""
        self._carry_out(self._sender.on_tick(now))

    def _carry_out(self, instructions: list[Instruction]) -> str:
        chunks = (self._read(one) for one in instructions if isinstance(one, SendChunk))
        for message in bundled(chunks, self._sender.chunk_bytes):
            self._publish(message)
        failed = [one for one in instructions if isinstance(one, Failed)]
        return f"object {failed[-1].object_id[:12]}: {failed[-1].reason}" if failed else ""

    def _read(self, one: SendChunk) -> Chunk:
        return Chunk(
            one.object_id, one.index, self._store.read_chunk(one.object_id, self._sender.chunk_bytes, one.index)
        )
