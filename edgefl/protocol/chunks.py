"""Chunks: pieces of objects on their way, each with a fixed header and a checksum.

Header, 52 bytes, little-endian: magic ``EFC`` (3), version (1), sha256 of the whole object (32), chunk index (4), bytes
of data (4), XXH3 of 64 bits of header and data (8); then the data. The XXH3 finds a damaged or truncated message, at a
tenth of what a crc32 costs; the object's sha256, checked when all chunks are here, is what proves the content. A
message holds one chunk or, where they are small, several: each costs those who handle it about a millisecond.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from edgefl.errors import ProtocolError
from edgefl.storage.objects import check_id

#: 96 KiB with header and topic fits the smallest hard limit of the common brokers (AWS IoT Core, 128 KiB a message),
#: with room for long topics. Larger chunks gain little: mosquitto moved 746 MB/s at 64 KiB, 496 at 1 MiB.
DEFAULT_CHUNK_BYTES = 96 * 1024
#: 16 x 96 KiB = 1.5 MiB in flight: 365 MB/s on loopback, and 60 Mbit/s on a link with 200 ms round trip. 60 receivers'
#: windows stay below mosquitto's default queue of 1000 messages, beyond which it drops QoS 1 without a word.
DEFAULT_CREDIT = 16
#: Largest chunk anyone may send: EMQX's default packet limit is 1 MB, and a window of 16 then costs 16 MB of memory.
MAX_CHUNK_BYTES = 1000 * 1000

_HEAD = struct.Struct("<3sB32sII")
_SUM = struct.Struct("<Q")
_MAGIC = b"EFC"
_VERSION = 2
HEADER_BYTES = _HEAD.size + _SUM.size


@dataclass(frozen=True)
class Chunk:
    """Chunk ``index`` (from 0) of the object ``object_id``. Decoded ``data`` is a view into the message."""

    object_id: str
    index: int
    data: bytes | memoryview


def fitting_chunk_bytes(max_payload: int, wanted: int = DEFAULT_CHUNK_BYTES) -> int:
    """The chunk size nearest to ``wanted`` whose messages fit a broker that admits ``max_payload`` bytes."""
    fitting = min(wanted, max_payload - HEADER_BYTES, MAX_CHUNK_BYTES)
    if fitting < 1:
        raise ProtocolError(f"the broker admits {max_payload} bytes a message: too little for a chunk")
    return fitting


def bundled(chunks: Iterable[Chunk], chunk_bytes: int) -> Iterator[bytes]:
    """The chunks, in their order, in as few messages as can be of ``chunk_bytes`` and a header at most."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        frame = encode_chunk(chunk)
        if waiting and size + len(frame) > chunk_bytes + HEADER_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(frame)
        size += len(frame)
    if waiting:
        yield waiting[0] if len(waiting) == 1 else b"".join(waiting)


def bundled_bytes(sizes: Iterable[int], chunk_bytes: int) -> tuple[int, int]:
    """(messages, their bytes) of whole objects of these sizes, bundled in this order."""
    messages = total = size = 0
    for whole in sizes:
        for begin in range(0, whole, chunk_bytes):
            frame = HEADER_BYTES + min(chunk_bytes, whole - begin)
            if not messages or size + frame > chunk_bytes + HEADER_BYTES:
                messages, size = messages + 1, 0
            size += frame
            total += frame
    return messages, total


def encode_chunk(chunk: Chunk) -> bytes:
    """A message of this chunk alone. Raises ProtocolError when it is empty, too large or badly named."""
    _check_length(len(chunk.data))
    if not 0 <= chunk.index < 2**32:
        raise ProtocolError(f"chunk index {chunk.index} is out of range")
    head = _HEAD.pack(_MAGIC, _VERSION, bytes.fromhex(check_id(chunk.object_id)), chunk.index, len(chunk.data))
    return b"".join((head, _SUM.pack(_checksum(head, chunk.data)), chunk.data))


def decode_chunks(payload: bytes) -> list[Chunk]:
    """The chunks in a message. Raises ProtocolError when one is malformed, damaged, oversized or of another version."""
    _check_length(len(payload) - HEADER_BYTES)
    view, begin, found = memoryview(payload), 0, list[Chunk]()
    while begin < len(view):
        head = view[begin : begin + HEADER_BYTES]
        if len(head) < HEADER_BYTES:
            raise ProtocolError(f"the header of a chunk has {len(head)} bytes where {HEADER_BYTES} should be")
        magic, version, name, index, length = _HEAD.unpack_from(head)
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError(f"not a chunk of version {_VERSION}: it begins with {bytes(head[:4]).hex()}")
        data = view[begin + HEADER_BYTES : begin + HEADER_BYTES + length]
        if not length or len(data) < length:
            raise ProtocolError(f"a chunk says that it carries {length} bytes; {len(data)} are there")
        if _checksum(head[: _HEAD.size], data) != _SUM.unpack_from(head, _HEAD.size)[0]:
            raise ProtocolError(f"chunk {index} of {name.hex()[:12]} is damaged: its checksum is wrong")
        found.append(Chunk(name.hex(), index, data))
        begin += HEADER_BYTES + length
    return found


def _checksum(head: bytes | memoryview, data: bytes | memoryview) -> int:
    found = xxhash.xxh3_64(head)
    found.update(data)
    return found.intdigest()


def _check_length(length: int) -> None:
    if not 1 <= length <= MAX_CHUNK_BYTES:
        raise ProtocolError(f"a chunk carries 1 to {MAX_CHUNK_BYTES} bytes of data, not {length}")
