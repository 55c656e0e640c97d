"""Chunk size of each device: what its link has been measured to carry in a fraction of a second.

A chunk costs every process about a millisecond whatever its size, so that a fast link is used up by large ones; on a
slow one they would take longer than a receiver waits before it asks again.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, fitting_chunk_bytes

#: A chunk takes about as long: many fit into a receiver's patience (5 s), also when the link is shared for a while.
CHUNK_S = 0.1
#: Above it little is gained, and it is as much as EMQX admits by default.
LARGEST_BYTES = 8 * DEFAULT_CHUNK_BYTES
#: Uploads of less are no measure of the link.
LEAST_BYTES = 2 * DEFAULT_CHUNK_BYTES
#: Chunks in flight, however large: with fewer the link idles while an answer is under way.
LEAST_CREDIT = 4


class ChunkSizer:
    """``fixed``: bytes of every chunk, 0: by the link. ``credit``: chunks of the smallest size in flight.

    ``limit``: what the broker may take, ``proven``: what it has been seen to take; ``wanted``: a size that a link would
    carry and that has not been tried, 0 for none.
    """

    def __init__(self, fixed: int, credit: int) -> None:
        self._fixed = fixed
        self._credit = credit
        self._rates: dict[str, float] = {}
        self.limit = self.proven = fixed or LARGEST_BYTES
        self.wanted = 0

    def connected(self, max_payload: int) -> None:
        """The limit that the broker announces is known."""
        self.limit = fitting_chunk_bytes(max_payload, self._fixed or LARGEST_BYTES)
        self.proven = min(self.proven, self.limit)

    def proved(self, size: int) -> None:
        """The broker takes chunks of this size. One that is smaller than was meant is also its limit."""
        if size < min(self._fixed or DEFAULT_CHUNK_BYTES, self.limit):
            self.limit = size
        self.proven = size
        self.wanted = 0

    def capped(self, size: int) -> None:
        """The broker takes no larger chunks than these."""
        self.limit = self.proven = min(self.proven, size)
        self.wanted = 0

    def note(self, device: str, size: int, seconds: float) -> None:
        """An upload of ``size`` bytes took so long. From when it was asked for: it may be of one chunk."""
        if size >= LEAST_BYTES and seconds > 0:
            self._rates[device] = size / seconds

    def of(self, devices: Iterable[str]) -> tuple[int, int]:
        """(bytes of a chunk, chunks in flight) that suit the slowest of these; what is in flight stays the same."""
        if self._fixed:
            return self.limit, self.credit(self.limit)
        slowest = min((self._rates.get(device, 0.0) for device in devices), default=0.0)
        size = min(DEFAULT_CHUNK_BYTES, self.limit)
        while 2 * size <= min(self.limit, slowest * CHUNK_S):
            if 2 * size > self.proven:
                self.wanted = 2 * size
                break
            size *= 2
        return size, self.credit(size)

    def credit(self, chunk_bytes: int) -> int:
        """Chunks of this size in flight: as many bytes for every size."""
        if self._fixed:
            return self._credit
        return min(self._credit, max(LEAST_CREDIT, self._credit * DEFAULT_CHUNK_BYTES // chunk_bytes))
