"""Chunk size of each device, from the measured rate of its link.

A chunk costs every process about a millisecond whatever its size, so that a fast link is used up by large ones; on a
slow one they would take longer than a receiver waits before it asks again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

from edgefl.errors import MessageSizeError
from edgefl.protocol import topics
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, HEADER_BYTES, fitting_chunk_bytes
from edgefl.transport.interface import Probe, Transport

_LOG = logging.getLogger(__name__)
#: A chunk takes about as long: many fit into a receiver's patience (5 s), also when the link is shared for a while.
CHUNK_S = 0.1
#: Above it little is gained, and it is as much as EMQX admits by default.
LARGEST_BYTES = 8 * DEFAULT_CHUNK_BYTES
#: Uploads of less are no measure of the link.
MEASURED_BYTES = 2 * DEFAULT_CHUNK_BYTES
#: Chunks in flight, however large: with fewer the link idles while an answer is under way.
LEAST_CREDIT = 4
#: Bytes in flight to all devices of a download together: mosquitto copies a message for each that is to get it.
MOST_IN_FLIGHT = 512 * 2**20
#: Chunks are not made smaller: messages beside them (offers, bitmaps of what is missing) need as much.
LEAST_BYTES = 8 * 1024


class ChunkSizer:
    """Chunk sizes of devices. ``fixed``: bytes of every chunk, 0: by the link; ``credit``: smallest chunks in flight.

    ``limit``: largest size that the broker may accept, ``proven``: largest that it has accepted; ``wanted``: a size
    that a link would carry, still to be tried, 0 for none.
    """

    def __init__(self, fixed: int, credit: int) -> None:
        self._fixed = fixed
        self._credit = credit
        self._rates: dict[str, float] = {}
        self.limit = self.proven = fixed or LARGEST_BYTES
        self.wanted = 0

    def connected(self, max_payload: int) -> None:
        """Apply the payload limit in bytes announced by the broker."""
        self.limit = fitting_chunk_bytes(max_payload, self._fixed or LARGEST_BYTES)
        self.proven = min(self.proven, self.limit)

    def proved(self, size: int) -> None:
        """Note a size accepted by the broker; a size below the default is also the limit."""
        if size < min(self._fixed or DEFAULT_CHUNK_BYTES, self.limit):
            self.limit = size
        self.proven = size
        self.wanted = 0

    def capped(self, size: int) -> None:
        """Lower the limit to this size."""
        self.limit = self.proven = min(self.proven, size)
        self.wanted = 0

    def note(self, device: str, size: int, seconds: float) -> None:
        """Note a device's upload rate from ``size`` bytes and ``seconds`` since the request."""
        if size >= MEASURED_BYTES and seconds > 0:
            self._rates[device] = size / seconds

    def of(self, devices: Iterable[str], size_bytes: float = math.inf) -> tuple[int, int]:
        """(bytes of a chunk, chunks in flight to each) for the slowest of these devices.

        The bytes in flight stay the same, and are fewer for very many devices. ``size_bytes``: of the whole transfer.
        """
        rates = [self._rates.get(device, 0.0) for device in devices]
        if self._fixed:
            return self.limit, self._credit_of(self.limit, len(rates), size_bytes)
        slowest = min(rates, default=0.0)
        size = min(DEFAULT_CHUNK_BYTES, self.limit)
        while 2 * size <= min(self.limit, slowest * CHUNK_S):
            if 2 * size > self.proven:
                self.wanted = 2 * size
                break
            size *= 2
        return size, self._credit_of(size, len(rates), size_bytes)

    def _credit_of(self, chunk_bytes: int, devices: int, size_bytes: float) -> int:
        own = self.credit(chunk_bytes)
        if min(own * chunk_bytes, size_bytes) * devices <= MOST_IN_FLIGHT:
            return own
        return min(own, max(LEAST_CREDIT, MOST_IN_FLIGHT // (chunk_bytes * devices)))

    def credit(self, chunk_bytes: int) -> int:
        """Chunks of this size in flight; their bytes are the same for every size."""
        if self._fixed:
            return self._credit
        return min(self._credit, max(LEAST_CREDIT, self._credit * DEFAULT_CHUNK_BYTES // chunk_bytes))


class Chunking:
    """Search for the broker's largest accepted chunk size, before the first offer and before chunks grow.

    ``warn`` takes the text of a warning that chunks are smaller than wanted.
    """

    def __init__(self, transport: Transport, fleet: str, sizer: ChunkSizer, warn: Callable[[str], None]) -> None:
        self._transport = transport
        self._sizer = sizer
        self._warn = warn
        self._probe = Probe(transport, topics.build("probe", fleet, topics.COORDINATOR))
        self._growing: asyncio.Task[None] | None = None
        self.heard = self._probe.heard  # takes a probe that this coordinator sent to itself

    async def begin(self) -> None:
        """Find a chunk size accepted by the connected broker. Raises MessageSizeError when none is."""
        self._sizer.connected(self._transport.max_payload)
        wanted = self._sizer.of(())[0]
        least, found = min(wanted, LEAST_BYTES), self._sizer.limit
        if not self._transport.limits.certain:
            passing = await self._probe.largest(wanted, least, HEADER_BYTES)
            if passing is None:  # its rules do not let us try: chunks shrink when one is refused
                _LOG.info("chunks of %d bytes were not tried: %s", wanted, self._probe.reason)
            else:
                found = passing
        if found == 0:
            raise MessageSizeError(
                f"the broker takes no messages of {least + HEADER_BYTES:,} bytes: {self._probe.reason}",
                remedy="Raise its limit (mosquitto: message_size_limit, max_packet_size) to 16 KiB at least, best to"
                " 1 MiB.",
            )
        self._sizer.proved(found)
        if found < wanted:
            self._shrunk(wanted, found, self._probe.reason)

    def tick(self) -> None:
        """Start a trial of larger chunks if a link is fast enough."""
        if self._sizer.wanted and self._growing is None:
            self._growing = asyncio.ensure_future(self._grow(self._sizer.wanted))

    def refused(self, error: MessageSizeError) -> bool:
        """Shrink chunks after a refused message; True if they shrank. Raises the error at the smallest size."""
        now = self._sizer.of(())[0]
        if error.size > max(self._sizer.proven, now) + HEADER_BYTES:
            return False  # it was made when chunks were larger
        if error.size <= LEAST_BYTES + HEADER_BYTES:
            raise error
        found = max(LEAST_BYTES, (error.size - HEADER_BYTES) // 2)
        self._sizer.capped(found)
        self._shrunk(error.size - HEADER_BYTES, found, error.reason)
        return True

    async def close(self) -> None:
        """Cancel the trial of a larger size."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)

    def _shrunk(self, wanted: int, found: int, reason: str) -> None:
        self._warn(
            f"the broker takes no messages of {wanted + HEADER_BYTES:,} bytes ({reason or 'a smaller one passes'}):"
            f" chunks are of {found:,} bytes. Raise its limit, or set transfer.chunk_bytes={found} in the run file"
        )

    async def _grow(self, size: int) -> None:
        if await self._probe.passes(size + HEADER_BYTES):
            self._sizer.proved(size)
        else:
            _LOG.info("chunks of %d bytes do not pass the broker: %s", size, self._probe.reason)
            self._sizer.capped(size // 2)
        self._growing = None
