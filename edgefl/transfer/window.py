"""Sets of chunks: which a transfer has, which each receiver lacks, was sent, and acknowledged; and its epochs.

A set of chunks is one Python integer: bit i stands for chunk i of the transfer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import MAX_CHUNK_BYTES
from edgefl.protocol.messages import MAX_MESSAGE_BYTES
from edgefl.storage.objects import check_id
from edgefl.storage.partials import chunk_count, chunk_span
from edgefl.transfer.instructions import STEP_BITS

#: More chunks than this can't be asked for: their bitmap alone would fill the largest message (94 GB at 96 KiB each).
MAX_CHUNKS = MAX_MESSAGE_BYTES * 8
#: Earlier incarnations of a device that are remembered: no device restarts more often within one transfer.
MAX_INCARNATIONS = 64


class ChunkIndex:
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


@dataclass
class SentChunks:
    """Chunks that a device has been sent in all epochs, and the bytes of those sent more than once."""

    chunks: int = 0
    again_bytes: int = 0

    def count(self, number: int, size: int) -> None:
        """A chunk of ``size`` bytes is sent."""
        bit = 1 << number
        self.again_bytes += size if self.chunks & bit else 0
        self.chunks |= bit


@dataclass
class ReceiverState:
    """Progress of one receiver, as its sender knows it: its window, and the chunks it still lacks."""

    credit: int
    todo: int  # set of chunks it asked for in this epoch and was not yet sent
    heard: float
    since: float  # when it asked
    in_step: bool
    history: SentChunks
    sent: int = 0  # in this epoch
    received: int = 0  # acknowledged in this epoch
    blocked_at: float | None = None  # since when it holds up the shared topic
    blocked_received: int = 0
    least: tuple[int, int] = (0, 0)  # (bytes, number) of the smallest chunk it was sent in this epoch
    probes: int = 0

    @property
    def has_room(self) -> bool:
        """Whether its window admits another chunk."""
        return self.sent - self.received < self.credit

    def take(self, number: int, size: int) -> None:
        """Count a chunk of ``size`` bytes as sent to it."""
        self.history.count(number, size)
        self.todo ^= 1 << number
        self.least = min(self.least, (size, number)) if self.sent else (size, number)
        self.sent += 1


class Epochs:
    """Epochs of devices: which are new, present or stale, also after restarts of a device.

    Incarnations are random, so nothing says which of two is the later one; a living receiver opens ever new epochs,
    which is what counts. A message that was overtaken by one of a later incarnation costs one stall, no more.
    """

    def __init__(self) -> None:
        self._present: dict[str, int] = {}
        self._last_steps: dict[str, dict[int, int]] = {}  # device -> incarnation -> last step

    def age(self, device: str, epoch: int) -> Literal["new", "present", "replaced", "stale"]:
        """``replaced``: the last epoch of a incarnation, after another incarnation has taken over."""
        incarnation, step = divmod(epoch, 1 << STEP_BITS)
        last = self._last_steps.get(device, {}).get(incarnation, -1)
        if step != last:
            return "new" if step > last else "stale"
        return "present" if self._present.get(device) == epoch else "replaced"

    def enter(self, device: str, epoch: int) -> None:
        """From now on this is the device's present epoch."""
        incarnation, step = divmod(epoch, 1 << STEP_BITS)
        steps = self._last_steps.setdefault(device, {})
        steps[incarnation] = step
        if len(steps) > MAX_INCARNATIONS:
            del steps[next(iter(steps))]
        self._present[device] = epoch
