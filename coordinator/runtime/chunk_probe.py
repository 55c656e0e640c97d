"""Finds the chunk size that the broker takes, before the first offer and before chunks grow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.runtime.chunk_size import ChunkSizer
from edgefl.errors import MessageSizeError
from edgefl.protocol import topics
from edgefl.protocol.chunks import HEADER_BYTES
from edgefl.transport.base import Transport
from edgefl.transport.probe import Probe

_LOG = logging.getLogger(__name__)
#: Chunks are not made smaller: messages beside them (offers, bitmaps of what is missing) need as much.
LEAST_BYTES = 8 * 1024


class Chunking:
    """Size of the coordinator's chunks. ``warn`` takes the text of a warning that chunks are smaller than wanted."""

    def __init__(self, transport: Transport, fleet: str, sizer: ChunkSizer, warn: Callable[[str], None]) -> None:
        self._transport = transport
        self._sizer = sizer
        self._warn = warn
        self._probe = Probe(transport, topics.probe(fleet, topics.COORDINATOR))
        self._growing: asyncio.Task[None] | None = None

    def heard(self, payload: bytes) -> None:
        """A probe that this coordinator sent to itself has arrived."""
        self._probe.heard(payload)

    async def begin(self) -> None:
        """The broker is there: find a chunk size that it takes. Raises MessageSizeError when none does."""
        self._sizer.connected(self._transport.max_payload)
        wanted = self._sizer.of(())[0]
        if self._transport.limits.certain:
            self._sizer.proved(self._sizer.limit)
            return
        found = await self._probe.largest(wanted, min(wanted, LEAST_BYTES), HEADER_BYTES)
        if found is None:  # its rules do not let us try: chunks shrink when one is refused
            _LOG.info("chunks of %d bytes were not tried: %s", wanted, self._probe.reason)
            self._sizer.proved(self._sizer.limit)
        elif found == 0:
            raise none_fits(min(wanted, LEAST_BYTES), self._probe.reason)
        else:
            self._sizer.proved(found)
            if found < wanted:
                self.shrunk(wanted, found, self._probe.reason)

    def tick(self) -> None:
        """Try larger chunks where a link would carry them."""
        if self._sizer.wanted and self._growing is None:
            self._growing = asyncio.ensure_future(self._grow(self._sizer.wanted))

    def refused(self, error: MessageSizeError) -> bool:
        """The broker refused a message. Whether chunks are smaller now; raises the error when they are the smallest."""
        now = self._sizer.of(())[0]
        if error.size > max(self._sizer.proven, now) + HEADER_BYTES:
            return False  # it was made when chunks were larger
        if error.size <= LEAST_BYTES + HEADER_BYTES:
            raise error
        found = max(LEAST_BYTES, (error.size - HEADER_BYTES) // 2)
        self._sizer.capped(found)
        self.shrunk(error.size - HEADER_BYTES, found, error.reason)
        return True

    def shrunk(self, wanted: int, found: int, reason: str) -> None:
        """Warn that chunks shrink."""
        self._warn(
            f"the broker takes no messages of {wanted + HEADER_BYTES:,} bytes ({reason or 'a smaller one passes'}):"
            f" chunks are of {found:,} bytes. Raise its limit, or set transfer.chunk_bytes={found} in the run file"
        )

    async def close(self) -> None:
        """End what is being tried."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)

    async def _grow(self, size: int) -> None:
        if await self._probe.passes(size + HEADER_BYTES):
            self._sizer.proved(size)
        else:
            _LOG.info("chunks of %d bytes do not pass the broker: %s", size, self._probe.reason)
            self._sizer.capped(size // 2)
        self._growing = None


def none_fits(size: int, reason: str) -> MessageSizeError:
    """For a broker that takes not even the smallest chunks."""
    return MessageSizeError(
        f"the broker takes no messages of {size + HEADER_BYTES:,} bytes: {reason}",
        remedy="Raise its limit (mosquitto: message_size_limit, max_packet_size) to 16 KiB at least, best to 1 MiB.",
    )
