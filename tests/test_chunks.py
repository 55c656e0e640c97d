"""Chunks on the wire: the exact header, damage of any bit, and the limits."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import (
    DEFAULT_CHUNK_BYTES,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    Chunk,
    decode_chunk,
    encode_chunk,
    fitting_chunk_bytes,
)

NAME = "ab" * 32


def test_the_header_is_what_the_docstring_says():
    head = b"EFC" + b"\x01" + b"\xab" * 32 + (258).to_bytes(4, "little")
    message = encode_chunk(Chunk(NAME, 258, b"data"))
    assert message == head + zlib.crc32(head + b"data").to_bytes(4, "little") + b"data"
    assert len(message) == HEADER_BYTES + 4 == 48


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=200))
def test_round_trip(name, index, data):
    assert decode_chunk(encode_chunk(Chunk(name.hex(), index, data))) == Chunk(name.hex(), index, data)


def test_every_single_bit_is_covered_by_a_check():
    message = bytearray(encode_chunk(Chunk(NAME, 7, b"some data")))
    for bit in range(8 * len(message)):
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_chunk(bytes(message))
        message[bit // 8] ^= 1 << bit % 8


@given(st.binary(max_size=100))
def test_other_bytes_are_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        decode_chunk(payload)


@given(st.integers(0, 47))
def test_a_truncated_message_is_a_protocol_error(length):
    with pytest.raises(ProtocolError):
        decode_chunk(encode_chunk(Chunk(NAME, 0, b"data"))[:length])


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(NAME, 0, b""),
        Chunk(NAME, 0, bytes(MAX_CHUNK_BYTES + 1)),
        Chunk(NAME, -1, b"d"),
        Chunk(NAME, 2**32, b"d"),
        Chunk("../../etc/passwd", 0, b"d"),
        Chunk(NAME.upper(), 0, b"d"),
    ],
)
def test_what_can_not_be_encoded(chunk):
    with pytest.raises(ProtocolError):
        encode_chunk(chunk)


def test_an_oversized_message_is_refused_before_its_checksum_is_computed():
    with pytest.raises(ProtocolError, match="carries 1 to"):
        decode_chunk(bytes(HEADER_BYTES + MAX_CHUNK_BYTES + 1))


def test_the_default_fits_a_broker_with_128_kib_and_longest_names():
    topic = len("edgefl/1//d//down/o/") + 3 * 64
    assert HEADER_BYTES + DEFAULT_CHUNK_BYTES + topic < 128 * 1024


def test_the_chunk_size_follows_the_broker():
    assert fitting_chunk_bytes(128 * 1024) == DEFAULT_CHUNK_BYTES
    assert fitting_chunk_bytes(64 * 1024) == 64 * 1024 - 44
    assert fitting_chunk_bytes(2**28, 2**27) == MAX_CHUNK_BYTES
    with pytest.raises(ProtocolError, match="too little"):
        fitting_chunk_bytes(44)
