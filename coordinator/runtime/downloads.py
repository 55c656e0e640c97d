"""Parts on their way to the devices of one attempt: published once for all that start together, else to each alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from edgefl.protocol import topics
from edgefl.protocol.messages import Need
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore
from edgefl.storage.partials import chunk_count
from edgefl.transfer.disk_driver import DiskSender

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
