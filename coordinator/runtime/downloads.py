"""Parts on their way to the devices of one attempt: published once for all that start together, else to each alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from edgefl.protocol import topics
from edgefl.protocol.chunks import Chunk, bundled
from edgefl.protocol.messages import Need
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import chunk_count
from edgefl.transfer.instructions import Failed, Instruction, SendChunk
from edgefl.transfer.sender import Sender

Publish = Callable[[str, bytes], None]


class Downloads:
    """Serves the objects of one manifest. ``warn`` is told of devices that can not be served."""

    def __init__(
        self,
        transfer: str,
        manifest: Manifest,
        expected: Collection[str],
        *,
        store: ObjectStore,
        fleet: str,
        publish: Publish,
        warn: Callable[[str, str], None],
    ) -> None:
        self.transfer = transfer
        self._sizes = {ref.id: ref.size for ref in manifest.values()}
        self._expected = expected
        self._sender = Sender(transfer, self._sizes, expected)
        self._asked: dict[str, dict[str, int]] = {}  # device -> object -> bytes it lacked when it first asked
        self._store = store
        self._fleet = fleet
        self._publish = publish
        self._warn = warn

    def on_need(self, device: str, need: Need, now: float) -> None:
        """A device says what it lacks, or how far it is."""
        if need.transfer != self.transfer:
            return
        ignored = self._sender.dropped.total()
        instructions = self._sender.on_need(device, need, now)
        if self._sender.dropped.total() == ignored:
            asked = self._asked.setdefault(device, {})
            for name, bitmap in need.missing.items():
                if name in self._sizes and name not in asked:
                    asked[name] = lacking_bytes(bitmap, self._sizes[name], need.chunk_bytes)
        self._perform(instructions)

    def on_tick(self, now: float) -> None:
        """Time passed, and the broker is there."""
        self._perform(self._sender.on_tick(now))

    def restart(self) -> None:
        """Forget what was sent to each device: devices ask again, in chunks of another size."""
        self._sender = Sender(self.transfer, self._sizes, self._expected)

    def drop(self, device: str, now: float) -> None:
        """Nobody waits for this device any more; it may ask again."""
        self._perform(self._sender.drop(device, now))

    def payload_bytes(self, device: str, of: str = "") -> int:
        """Bytes of tensors the device lacked and was sent, repetitions after losses not counted; ``of`` one object."""
        asked = self._asked.get(device, {})
        return asked.get(of, 0) if of else sum(asked.values())

    def resent_bytes(self, device: str) -> int:
        """Bytes of the chunks that a device was sent more than once."""
        return self._sender.resent_bytes(device)

    def _perform(self, instructions: Iterable[Instruction]) -> None:
        due: dict[str | None, list[SendChunk]] = {}
        for instruction in instructions:
            if isinstance(instruction, SendChunk):
                due.setdefault(instruction.device, []).append(instruction)
            elif isinstance(instruction, Failed):
                self._warn(instruction.device, f"asked for what is not offered: {instruction.reason}")
        for device, chunks in due.items():
            topic = topics.shared_object(self._fleet, self.transfer)
            if device is not None:
                topic = topics.down_object(self._fleet, device, self.transfer)
            for message in bundled(map(self._read, chunks), self._sender.chunk_bytes):
                self._publish(topic, message)

    def _read(self, one: SendChunk) -> Chunk:
        data = self._store.read_chunk(one.object_id, self._sender.chunk_bytes, one.index)
        return Chunk(one.object_id, one.index, data)


def lacking_bytes(bitmap: bytes, size: int, chunk_bytes: int) -> int:
    """Bytes of the chunks whose bits are set; bits that belong to no chunk count nothing."""
    count = chunk_count(size, chunk_bytes)
    bits = int.from_bytes(bitmap, "little") & ((1 << count) - 1)
    last = bits >> (count - 1) if count else 0
    return bits.bit_count() * chunk_bytes - last * (count * chunk_bytes - size)
