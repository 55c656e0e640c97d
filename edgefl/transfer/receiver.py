"""Receiver of a transfer: missing chunks, acknowledgements, repeated requests. See ``edgefl.transfer``."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_CREDIT, MAX_CHUNK_BYTES
from edgefl.protocol.messages import MAX_MESSAGE_BYTES, Need
from edgefl.records import ObjectRef
from edgefl.storage.objects import check_id
from edgefl.storage.partials import chunk_count, chunk_span

#: Largest credit a sender grants, whatever the receiver asks: 256 x 96 KiB = 24 MiB in flight, a quarter of mosquitto's
#: default queue.
MAX_CREDIT = 256
#: An epoch is incarnation << 32 | step: the receiver's incarnation is random, new after a restart; the step counts up.
STEP_BITS = 32
#: More chunks than this can't be asked for: their bitmap alone would fill the largest message (94 GB at 96 KiB each).
MAX_CHUNKS = MAX_MESSAGE_BYTES * 8
#: Silence after which a receiver asks again: longer than the sender's GATHER_S + PACE_STALL_S, so that another's stall
#: is not taken for a loss. Doubles with each silence in a row, up to MAX_STALL_S, so that any link gets through.
STALL_S = 5.0
MAX_STALL_S = 60.0
#: At 256 kbit/s a chunk of 384 KiB, the largest that a link has been thought fit for, takes 12 s: what is on its way is
#: not asked for again before one and a half times as long. Bytes a second.
SLOW_LINK = 32_000
#: A chunk that comes after it was asked for again so often (5 and 15 s after the last one) may be late by a slow link;
#: a longer silence was a cut, or a sender that was away: no measure of the link.
SLOW_STALLS = 2
#: A finished receiver that is still sent chunks repeats its ``done``, at most this often.
REPEAT_S = 1.0
#: Wrong hashes of one object after which the sender's copy must be taken as damaged.
MAX_WRONG_HASHES = 3


@dataclass(frozen=True)
class SendChunk:
    """Read a chunk and publish it: to ``device``, or on the shared topic when that is None."""

    device: str | None
    object_id: str
    index: int


@dataclass(frozen=True)
class StoreChunk:
    """Write the chunk just received. Comes before the Need that acknowledges it."""

    object_id: str
    index: int


@dataclass(frozen=True)
class VerifyObject:
    """All chunks of the object are stored: check its sha256 and call ``on_verified``."""

    object_id: str


@dataclass(frozen=True)
class Completed:
    """End of a transfer: the receiver has verified everything. ``device``: its id in both directions."""

    device: str


@dataclass(frozen=True)
class Failed:
    """The transfer can't be finished for this device: the sender lacks the object, or holds a damaged one."""

    device: str
    object_id: str
    reason: str


#: A Need is to be published to the sender of the transfer.
Instruction: TypeAlias = Need | SendChunk | StoreChunk | VerifyObject | Completed | Failed


class ChunkIndex:
    """Numbering of the chunks of ``sizes`` (object id -> bytes), object after object."""

    def __init__(self, sizes: Mapping[str, int], chunk_bytes: int) -> None:
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ProtocolError(f"chunks of {chunk_bytes} bytes: 1 to {MAX_CHUNK_BYTES} are allowed")
        self.chunk_bytes = chunk_bytes
        self._sizes = dict(sizes)
        self._spans: dict[str, tuple[int, int]] = {}  # object id -> number of its first chunk, how many it has
        end = 0
        for name, size in self._sizes.items():
            self._spans[check_id(name)] = end, chunk_count(size, chunk_bytes)
            end += self._spans[name][1]
        self._ids, self._starts = list(self._sizes), [first for first, _ in self._spans.values()]
        if end > MAX_CHUNKS:
            raise ProtocolError(f"a transfer of {end} chunks: at most {MAX_CHUNKS} are allowed; use larger chunks")

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def number(self, name: str, index: int) -> int | None:
        """The number of chunk ``index`` of an object; None when there is no such object or chunk."""
        first, count = self._spans.get(name, (0, 0))
        return first + index if 0 <= index < count else None

    def locate(self, number: int) -> tuple[str, int]:
        """(object id, index in it) of a chunk."""
        place = bisect_right(self._starts, number) - 1
        return self._ids[place], number - self._starts[place]

    def length(self, name: str, index: int) -> int:
        """Bytes in a chunk."""
        return chunk_span(self._sizes[name], self.chunk_bytes, index)[1]

    def whole(self, name: str) -> int:
        """All chunks of an object as a bit set."""
        first, count = self._spans[name]
        return ((1 << count) - 1) << first

    def pack(self, missing: Mapping[str, bytes]) -> int:
        """Bitmaps per object as one set. Raises ProtocolError for an unknown object or a bitmap that does not fit."""
        chunks = 0
        for name, bitmap in missing.items():
            if name not in self._spans:
                raise ProtocolError(f"object {name[:12]} is not part of this transfer")
            first, count = self._spans[name]
            bits = int.from_bytes(bitmap, "little")
            if len(bitmap) != (count + 7) // 8 or bits >> count:
                raise ProtocolError(f"a bitmap of {len(bitmap)} bytes for the {count} chunks of {name[:12]}")
            chunks |= bits << first
        return chunks

    def runs(self, name: str, chunks: int) -> Iterator[tuple[int, int]]:
        """Bytes of an object, from and to, of each of the chunks in a row that the set holds."""
        bits, end = (chunks & self.whole(name)) >> self._spans[name][0], 0
        while bits:
            begin = (bits & -bits).bit_length() - 1
            count = (~(bits >> begin) & (bits >> begin) + 1).bit_length() - 1
            bits, end = bits >> begin + count << begin + count, begin + count
            yield begin * self.chunk_bytes, min(self._sizes[name], end * self.chunk_bytes)

    def unpack(self, chunks: int) -> dict[str, bytes]:
        """The set as one bitmap per object; objects without any are left out."""
        missing = {}
        for name, (first, count) in self._spans.items():
            if bits := (chunks >> first) & ((1 << count) - 1):
                missing[name] = bits.to_bytes((count + 7) // 8, "little")
        return missing


class Receiver:
    """Fetches ``refs`` over one transfer. ``device`` is the device's id, also when the coordinator receives.

    ``incarnation``: a random number below 2**31, so that epochs of this receiver and of one before a restart differ.
    ``dropped`` counts by reason what was ignored. Two parts with the same object count as one.
    """

    def __init__(
        self,
        transfer: str,
        device: str,
        refs: Iterable[ObjectRef],
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        credit: int = DEFAULT_CREDIT,
        *,
        incarnation: int,
    ) -> None:
        self.transfer = transfer
        self.device = device
        self.credit = max(1, min(credit, MAX_CREDIT))
        self.dropped: Counter[str] = Counter()
        self.duplicate_bytes = 0  # of chunks that arrived though they were here already
        self.received = 0  # wanted chunks that arrived, in all epochs
        self.finished = False
        self.stalls = 0  # in a row, without a chunk between them
        self._index = ChunkIndex({ref.id: ref.size for ref in refs}, chunk_bytes)
        self._epoch = incarnation << STEP_BITS
        self._lacking = 0  # set of chunks
        self._aside = 0  # set of chunks that come another way, and are not asked for
        self._unverified: set[str] = set()
        self._wrong_hashes: Counter[str] = Counter()
        self._in_epoch = 0
        self._acknowledged = 0
        self._silent_since = 0.0  # the last chunk, or the last time it asked
        self._last_at = 0.0  # the last chunk, or the first time it asked
        self._gap_s = 0.0  # between chunks, of late
        self._said_done = 0.0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self._index.chunk_bytes

    def start(self, missing: Mapping[str, bytes], now: float) -> list[Instruction]:
        """Begin. ``missing``: ``PartialObject.missing()`` of every object that is not finished; the others are here."""
        self._last_at = now
        self._lacking = self._index.pack(missing)
        self._unverified = set(missing)
        complete = [name for name in missing if not self._lacking & self._index.whole(name)]
        instructions: list[Instruction] = [VerifyObject(name) for name in complete]
        if self._wanted:
            instructions.append(self._open_epoch(now))
        elif not missing:
            instructions += self._finish(now)
        return instructions

    def set_aside(self, names: Iterable[str]) -> None:
        """Ask for no chunks of these objects from now on, which come another way; of others as usual."""
        self._aside = 0
        for name in names:
            self._aside |= self._index.whole(name)

    def gap(self, object_id: str) -> tuple[int, int] | None:
        """Bytes, from and to, of an object set aside that are missing first; None when none is."""
        return next(self._index.runs(object_id, self._lacking & self._aside), None)

    @property
    def _wanted(self) -> int:
        """Set of chunks to ask for."""
        return self._lacking & ~self._aside

    def on_chunk(self, object_id: str, index: int, size: int, now: float) -> list[Instruction]:
        """A chunk of ``size`` bytes arrived, on the shared topic or the device's own."""
        if self.finished:
            self.dropped["finished"] += 1
            self.duplicate_bytes += size
            return self._repeat_done(now) if now - self._said_done >= REPEAT_S else []
        number = self._index.number(object_id, index)
        if number is None:
            self.dropped["index_out_of_range" if object_id in self._index else "unknown_object"] += 1
            return []
        if size != self._index.length(object_id, index):
            self.dropped["wrong_size"] += 1
            return []
        if not self._lacking >> number & 1:
            self.dropped["duplicate"] += 1
            self.duplicate_bytes += size
            self._silent_since = now  # what was asked for twice is arriving: the rest is behind it
            return []
        self._lacking ^= 1 << number
        self.received += 1
        if not self._aside >> number & 1:  # else it says nothing of what was asked for
            self._in_epoch += 1
            if self.stalls <= SLOW_STALLS:
                self._gap_s = max(now - self._last_at, self._gap_s / 2)
            self._silent_since = self._last_at = now
        self.stalls = 0
        instructions: list[Instruction] = [StoreChunk(object_id, index)]
        if not self._lacking & self._index.whole(object_id):
            instructions.append(VerifyObject(object_id))
        if self._wanted and self._in_epoch - self._acknowledged >= max(1, self.credit // 2):
            self._acknowledged = self._in_epoch
            instructions.append(self._need(received=self._in_epoch))
        return instructions

    def on_verified(self, object_id: str, ok: bool, now: float) -> list[Instruction]:
        """Handle the result of an object's sha256 check; a wrong object is requested again, a few times."""
        if object_id not in self._unverified or self._lacking & self._index.whole(object_id):
            self.dropped["unexpected_verdict"] += 1
            return []
        if ok:
            self._unverified.discard(object_id)
            return [] if self._unverified else self._finish(now)
        self._wrong_hashes[object_id] += 1
        if self._wrong_hashes[object_id] >= MAX_WRONG_HASHES:
            return [Failed(self.device, object_id, f"{MAX_WRONG_HASHES} times the sha256 was wrong")]
        self._lacking |= self._index.whole(object_id)
        self._aside &= ~self._index.whole(object_id)  # what came another way was wrong
        return [self._open_epoch(now)]

    def on_tick(self, now: float) -> list[Instruction]:
        """Call about twice a second: opens a new epoch when nothing has come for too long."""
        # A slow link has shown its pace by the chunks before, and a large chunk takes its time.
        least = max(STALL_S, 2 * self._gap_s, 1.5 * self._index.chunk_bytes / SLOW_LINK)
        patience = min(MAX_STALL_S, least * 2 ** min(self.stalls, 16))
        if self.finished or not self._wanted or now - self._silent_since < patience:
            return []
        self.stalls += 1
        return [self._open_epoch(now)]

    def on_unheard(self, now: float) -> None:
        """Call in place of ``on_tick`` while the last Need has not reached the broker: silence does not count."""
        self._silent_since = self._last_at = now

    def on_stall(self, now: float) -> list[Instruction]:
        """Open a new epoch at once: after a reconnect, or when the sender announces the transfer again."""
        if self.finished:
            return self._repeat_done(now)
        return [self._open_epoch(now)] if self._wanted else []

    def _open_epoch(self, now: float) -> Need:
        self._epoch += 1
        self._in_epoch = self._acknowledged = 0
        self._silent_since = now
        return self._need(missing=self._index.unpack(self._wanted))

    def _finish(self, now: float) -> list[Instruction]:
        self.finished = True
        return [*self._repeat_done(now), Completed(self.device)]

    def _repeat_done(self, now: float) -> list[Instruction]:
        self._said_done = now
        return [self._need(received=self._in_epoch, done=True)]

    def _need(self, *, received: int = 0, missing: dict[str, bytes] | None = None, done: bool = False) -> Need:
        return Need(
            device=self.device,
            transfer=self.transfer,
            epoch=self._epoch,
            chunk_bytes=self._index.chunk_bytes,
            credit=self.credit,
            received=received,
            missing=missing or {},
            done=done,
        )
