"""Driver of one end of a transfer: performs its receiver's or sender's instructions on an object store.

Writing and hashing happen in the caller's thread: a chunk is 96 KiB, and hashes grow as chunks arrive in order.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, Chunk, bundled
from edgefl.protocol.messages import Need
from edgefl.records import ObjectRef
from edgefl.storage.partials import chunk_count
from edgefl.transfer.receiver import (
    Completed,
    Failed,
    Instruction,
    Receiver,
    SendChunk,
    StoreChunk,
    VerifyObject,
)
from edgefl.transfer.sender import Sender, Sent


@dataclass(frozen=True)
class Superseded:
    """End of a transfer whose object another one receives in other chunks: restart it with their size."""


End = Completed | Failed | Superseded


class Arriving(Protocol):
    """An object that arrives in chunks: ``edgefl.storage.partials.PartialObject``, or one in memory."""

    ref: ObjectRef
    abandoned: bool
    finished: bool  # in the store already

    def missing(self, chunk_bytes: int = 0) -> bytes:
        """Bitmap of the chunks that are missing."""
        ...

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Store one chunk."""
        ...

    def verify(self) -> bool:
        """Whether it is whole, and its sha256 is right."""
        ...


A_co = TypeVar("A_co", bound=Arriving, covariant=True)


class Objects(Protocol[A_co]):
    """The part of ``edgefl.storage.objects.ObjectStore`` that transfers use."""

    def has(self, name: str) -> bool:
        """Whether the object is finished."""
        ...

    def partial(self, ref: ObjectRef, chunk_bytes: int) -> A_co:
        """The object as far as it has arrived."""
        ...

    def read_chunk(self, name: str, chunk_bytes: int, index: int) -> bytes | memoryview:
        """The bytes of one chunk of a finished object."""
        ...


class DiskReceiver(Generic[A_co]):
    """Receives the objects ``refs`` into ``store``, as partial objects that are verified but not published.

    ``send`` publishes what it needs. Every event returns how the transfer ended, None while it goes on; after Completed
    it still answers a sender that missed the end. Until ``start`` and after ``pause`` it is not ``running``. Raises
    StoreError when the disk refuses.
    """

    def __init__(
        self, transfer: str, device: str, refs: Iterable[ObjectRef], store: Objects[A_co], send: Callable[[Need], None]
    ) -> None:
        self.transfer = transfer
        self.partials: dict[str, A_co] = {}  # object id -> what was not in the store when it started
        self.received_bytes = 0
        self._device = device
        self._refs = list({ref.id: ref for ref in refs}.values())
        self._store = store
        self._send = send
        self._receiver: Receiver | None = None
        self._earlier_duplicate_bytes = 0  # of receivers there were before this one
        self._aside: frozenset[str] = frozenset()

    @property
    def running(self) -> bool:
        """True between ``start`` and ``pause``: chunks are requested and accepted."""
        return self._receiver is not None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunks in which objects arrive; 0 while it does not run."""
        return self._receiver.chunk_bytes if self._receiver is not None else 0

    @property
    def stalls(self) -> int:
        """Consecutive requests without an answer."""
        return self._receiver.stalls if self._receiver is not None else 0

    @property
    def duplicate_bytes(self) -> int:
        """Bytes of chunks received more than once."""
        return self._earlier_duplicate_bytes + (self._receiver.duplicate_bytes if self._receiver is not None else 0)

    def start(self, chunk_bytes: int, credit: int, now: float) -> End | None:
        """Request missing chunks, from now on of ``chunk_bytes`` with ``credit`` in flight.

        Raises ProtocolError for sizes that make no sense.
        """
        self.pause()
        incarnation = secrets.randbelow(2**31)
        self._receiver = Receiver(self.transfer, self._device, self._refs, chunk_bytes, credit, incarnation=incarnation)
        self._receiver.set_aside(self._aside)
        partials = {ref.id: self._store.partial(ref, chunk_bytes) for ref in self._refs}
        self.partials = {name: partial for name, partial in partials.items() if not partial.finished}
        missing = {name: partial.missing(chunk_bytes) for name, partial in self.partials.items()}
        return self._perform(self._receiver.start(missing, now), now)

    def set_aside(self, names: Iterable[str]) -> None:
        """Ask for no chunks of these objects, and no others, from now on: they come another way, as chunks too."""
        self._aside = frozenset(names)
        if self._receiver is not None:
            self._receiver.set_aside(self._aside)

    def gap(self, name: str) -> tuple[int, int] | None:
        """Bytes, from and to, that are missing first of an object set aside; None when none is."""
        return self._receiver.gap(name) if self._receiver is not None else None

    def pause(self) -> None:
        """Take no chunks until ``start``; what has arrived stays on disk."""
        self._earlier_duplicate_bytes = self.duplicate_bytes
        self._receiver = None

    def on_chunk(self, chunk: Chunk, now: float) -> End | None:
        """A chunk arrived, on the shared topic or the device's own."""
        if self._receiver is None:
            return None
        instructions = self._receiver.on_chunk(chunk.object_id, chunk.index, len(chunk.data), now)
        return self._perform(instructions, now, chunk.data)

    def on_tick(self, now: float) -> None:
        """Ask again when nothing came for too long."""
        if self._receiver is not None:
            self._perform(self._receiver.on_tick(now), now)

    def on_unheard(self, now: float) -> None:
        """Call in place of ``on_tick`` while the last request has not reached the broker: silence does not count."""
        if self._receiver is not None:
            self._receiver.on_unheard(now)

    def ask_again(self, now: float) -> None:
        """Request all missing chunks at once, as after a reconnection."""
        if self._receiver is not None:
            self._perform(self._receiver.on_stall(now), now)

    def _perform(self, instructions: list[Instruction], now: float, data: bytes | memoryview = b"") -> End | None:
        end: End | None = None
        for instruction in instructions:
            if isinstance(instruction, Need):
                self._send(instruction)
            elif isinstance(instruction, StoreChunk | VerifyObject):
                partial = self.partials[instruction.object_id]
                if partial.abandoned:
                    return Superseded()
                if isinstance(instruction, StoreChunk):
                    partial.write(instruction.index, data)
                    self.received_bytes += len(data)
                elif self._receiver is not None:
                    verdict = self._receiver.on_verified(partial.ref.id, partial.verify(), now)
                    end = end or self._perform(verdict, now)
            elif isinstance(instruction, Completed | Failed):
                end = instruction
        return end


class DiskSender:
    """Sends the objects ``sizes`` (id -> bytes) of ``store`` to requesting devices.

    ``publish`` takes the device that a message of chunks is for, None for all of them on the shared topic, and the
    message. ``expected``: devices that will ask; ``on_sent`` hears which device was sent how many bytes. Raises
    StoreError when an object cannot be read.
    """

    def __init__(
        self,
        transfer: str,
        sizes: Mapping[str, int],
        store: Objects[Arriving],
        publish: Callable[[str | None, bytes], None],
        expected: Collection[str] = (),
        on_sent: Callable[[str, Sent], None] = lambda device, sent: None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self.transfer = transfer
        self._on_sent = on_sent
        self._sizes = sizes
        self._store = store
        self._publish = publish
        self._expected = expected
        self._asked: dict[str, dict[str, int]] = {}  # device -> object -> bytes it lacked when it first asked
        self._sender = Sender(transfer, sizes, expected, chunk_bytes)
        self._last: tuple[tuple[object, ...], list[bytes]] = (), []  # chunks, and the message that was made of them

    def restart(self) -> None:
        """Forget all progress: devices request again, in chunks of another size."""
        self._sender = Sender(self.transfer, self._sizes, self._expected)

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(self._sizes.values())

    def serves(self, name: str) -> bool:
        """True for an object of this transfer."""
        return name in self._sizes

    def on_asked(self, device: str, name: str, size: int) -> None:
        """A device fetches another way the ``size`` bytes that it lacks of an object."""
        self._asked.setdefault(device, {}).setdefault(name, size)

    def on_passed(self, device: str, name: str, begin: int, end: int) -> None:
        """Bytes of an object, from and to, went to a device another way."""
        self._sender.on_passed(device, name, begin, end)
        self._tell_sent()

    def on_need(self, device: str, need: Need, now: float) -> list[Failed]:
        """Handle a device's request or acknowledgement; the failures for objects that cannot be sent."""
        ignored = self._sender.dropped.total()
        failed = self._perform(self._sender.on_need(device, need, now))
        if self._sender.dropped.total() == ignored and not need.done:  # else its size of chunks is not checked
            asked = self._asked.setdefault(device, {})
            for name, bitmap in need.missing.items():
                if name in self._sizes and name not in asked:
                    asked[name] = lacking_bytes(bitmap, self._sizes[name], need.chunk_bytes)
        return failed

    def on_tick(self, now: float) -> None:
        """Call regularly while the transport is connected."""
        self._perform(self._sender.on_tick(now))

    def drop(self, device: str, now: float) -> None:
        """Drop a device, so that others no longer wait for it; it may ask again."""
        self._perform(self._sender.drop(device, now))

    def payload_bytes(self, device: str, of: str = "") -> int:
        """Bytes of tensors the device lacked and was sent, repetitions after losses not counted; ``of`` one object."""
        asked = self._asked.get(device, {})
        return asked.get(of, 0) if of else sum(asked.values())

    def sent_bytes(self, device: str) -> int:
        """Bytes of chunks sent to a device so far, each once."""
        return min(self._sender.sent_bytes(device), self.payload_bytes(device))

    def waits(self, device: str) -> bool:
        """True if slower receivers hold the device back."""
        return self._sender.waits(device)

    def _perform(self, instructions: list[Instruction]) -> list[Failed]:
        chunks: dict[str | None, list[SendChunk]] = {}
        for instruction in instructions:
            if isinstance(instruction, SendChunk):
                chunks.setdefault(instruction.device, []).append(instruction)
        for device, those in chunks.items():
            for message in self._bundled(those):
                self._publish(device, message)
        self._tell_sent()
        return [one for one in instructions if isinstance(one, Failed)]

    def _bundled(self, chunks: Sequence[SendChunk]) -> list[bytes]:
        """Messages of chunks. Of small models many devices ask for the same one, made once."""
        size = self._sender.chunk_bytes
        key = (size, *((one.object_id, one.index) for one in chunks))
        if key != self._last[0]:
            messages = list(bundled(map(self._read, chunks), size))
            self._last = (key, messages) if len(messages) == 1 else ((), [])
            return messages
        return self._last[1]

    def _tell_sent(self) -> None:
        for name, sent in self._sender.take_sent().items():
            self._on_sent(name, sent)

    def _read(self, chunk: SendChunk) -> Chunk:
        data = self._store.read_chunk(chunk.object_id, self._sender.chunk_bytes, chunk.index)
        return Chunk(chunk.object_id, chunk.index, data)


def lacking_bytes(bitmap: bytes, size: int, chunk_bytes: int) -> int:
    """Bytes of the chunks set in ``bitmap``; bits beyond the last chunk are ignored."""
    count = chunk_count(size, chunk_bytes)
    bits = int.from_bytes(bitmap, "little") & ((1 << count) - 1)
    last = bits >> (count - 1) if count else 0
    return bits.bit_count() * chunk_bytes - last * (count * chunk_bytes - size)
