"""All chunks of a transfer numbered through, so that a set of them is one Python integer (bit i: chunk i)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import MAX_CHUNK_BYTES
from edgefl.protocol.messages import MAX_MESSAGE_BYTES
from edgefl.storage.objects import check_id
from edgefl.storage.partials import chunk_count, chunk_span

#: More chunks than this can't be asked for: their bitmap alone would fill the largest message (94 GB at 96 KiB each).
MAX_CHUNKS = MAX_MESSAGE_BYTES * 8


class Layout:
    """Numbers the chunks of ``sizes`` (object id -> bytes), object after object in that order."""

    def __init__(self, sizes: Mapping[str, int], chunk_bytes: int) -> None:
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ProtocolError(f"chunks of {chunk_bytes} bytes: 1 to {MAX_CHUNK_BYTES} are allowed")
        self.chunk_bytes = chunk_bytes
        self._sizes = dict(sizes)
        self._ids = [check_id(name) for name in self._sizes]
        self._first = {}
        position = 0
        for name, size in self._sizes.items():
            self._first[name] = position
            position += chunk_count(size, chunk_bytes)
        self._starts = list(self._first.values())
        if position > MAX_CHUNKS:
            raise ProtocolError(f"a transfer of {position} chunks: at most {MAX_CHUNKS} are allowed; use larger chunks")

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def number(self, name: str, index: int) -> int | None:
        """The number of chunk ``index`` of an object; None when there is no such object or chunk."""
        if name not in self._sizes or not 0 <= index < chunk_count(self._sizes[name], self.chunk_bytes):
            return None
        return self._first[name] + index

    def locate(self, number: int) -> tuple[str, int]:
        """(object id, index in it) of a chunk."""
        place = bisect_right(self._starts, number) - 1
        return self._ids[place], number - self._starts[place]

    def length(self, name: str, index: int) -> int:
        """Bytes in a chunk."""
        return chunk_span(self._sizes[name], self.chunk_bytes, index)[1]

    def whole(self, name: str) -> int:
        """The set of all chunks of an object."""
        return ((1 << chunk_count(self._sizes[name], self.chunk_bytes)) - 1) << self._first[name]

    def pack(self, missing: Mapping[str, bytes]) -> int:
        """Bitmaps per object as one set. Raises ProtocolError for an unknown object or a bitmap that does not fit."""
        chunks = 0
        for name, bitmap in missing.items():
            if name not in self._sizes:
                raise ProtocolError(f"object {name[:12]} is not part of this transfer")
            count = chunk_count(self._sizes[name], self.chunk_bytes)
            bits = int.from_bytes(bitmap, "little")
            if len(bitmap) != (count + 7) // 8 or bits >> count:
                raise ProtocolError(f"a bitmap of {len(bitmap)} bytes for the {count} chunks of {name[:12]}")
            chunks |= bits << self._first[name]
        return chunks

    def unpack(self, chunks: int) -> dict[str, bytes]:
        """The set as one bitmap per object; objects without any are left out."""
        missing = {}
        for name, first in self._first.items():
            count = chunk_count(self._sizes[name], self.chunk_bytes)
            if bits := (chunks >> first) & ((1 << count) - 1):
                missing[name] = bits.to_bytes((count + 7) // 8, "little")
        return missing


def lowest(chunks: int) -> int:
    """The smallest number in a set that is not empty."""
    return (chunks & -chunks).bit_length() - 1


def in_at_least(least: int, sets: Iterable[int]) -> int:
    """The chunks that are in at least ``least`` (>= 1) of the sets.

    Counts all chunks at once: ``planes[i]`` holds bit i of every chunk's count, as in a row of binary adders.
    """
    planes: list[int] = []
    for carry in sets:
        for place, plane in enumerate(planes):
            planes[place], carry = plane ^ carry, plane & carry
        if carry:
            planes.append(carry)
    if least >> len(planes):
        return 0
    more, equal = 0, -1
    for place in reversed(range(len(planes))):
        if least >> place & 1:
            equal &= planes[place]
        else:
            more |= equal & planes[place]
            equal &= ~planes[place]
    return more | equal
