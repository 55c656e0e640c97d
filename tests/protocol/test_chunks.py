"""Chunks on the wire: the exact header, damage of any bit, and the limits."""

from __future__ import annotations

import itertools

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.protocol.chunks import (
    DEFAULT_CHUNK_BYTES,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    Chunk,
    bundled,
    bundled_bytes,
    decode_chunks,
    encode_chunk,
    fitting_chunk_bytes,
)

NAME = "ab" * 32


def test_the_header_is_what_the_docstring_says():
    head = b"EFC" + b"\x02" + b"\xab" * 32 + (258).to_bytes(4, "little") + (4).to_bytes(4, "little")
    message = encode_chunk(Chunk(NAME, 258, b"data"))
    assert message == head + xxhash.xxh3_64_intdigest(head + b"data").to_bytes(8, "little") + b"data"
    assert len(message) == HEADER_BYTES + 4 == 56


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=200))
def test_round_trip(name, index, data):
    assert decode_chunks(encode_chunk(Chunk(name.hex(), index, data))) == [Chunk(name.hex(), index, data)]


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=40), st.integers(1, 1000))
def test_small_chunks_travel_together_and_no_message_is_larger_than_one_chunk(pieces, chunk_bytes):
    pieces = [piece[:chunk_bytes] for piece in pieces]
    chunks = [Chunk(NAME, index, piece) for index, piece in enumerate(pieces)]
    messages = list(bundled(iter(chunks), chunk_bytes))
    assert [one for message in messages for one in decode_chunks(message)] == chunks
    assert all(len(message) <= chunk_bytes + HEADER_BYTES for message in messages)
    for a, b in itertools.pairwise(messages):
        first = HEADER_BYTES + len(decode_chunks(b)[0].data)
        assert len(a) + first > chunk_bytes + HEADER_BYTES, "as much as fits"
    assert bundled_bytes(map(len, pieces), chunk_bytes) == (len(messages), sum(map(len, messages)))


def test_one_damaged_chunk_of_a_message_damages_it():
    message = b"".join([encode_chunk(Chunk(NAME, 0, b"one")), encode_chunk(Chunk(NAME, 1, b"two"))])
    for bad in (message[:-1], message + b"E", message + encode_chunk(Chunk(NAME, 2, b"x"))[:-1], message[:-1] + b"X"):
        with pytest.raises(ProtocolError):
            decode_chunks(bad)


def test_every_single_bit_is_covered_by_a_check():
    message = bytearray(encode_chunk(Chunk(NAME, 7, b"some data")))
    for bit in range(8 * len(message)):
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_chunks(bytes(message))
        message[bit // 8] ^= 1 << bit % 8


@given(st.binary(max_size=100))
def test_other_bytes_are_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        decode_chunks(payload)


@given(st.integers(0, 55))
def test_a_truncated_message_is_a_protocol_error(length):
    with pytest.raises(ProtocolError):
        decode_chunks(encode_chunk(Chunk(NAME, 0, b"data"))[:length])


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
        decode_chunks(bytes(HEADER_BYTES + MAX_CHUNK_BYTES + 1))


def test_the_default_fits_a_broker_with_128_kib_and_longest_names():
    topic = len("edgefl/1//d//down/o/") + 3 * 64
    assert HEADER_BYTES + DEFAULT_CHUNK_BYTES + topic < 128 * 1024


def test_the_chunk_size_follows_the_broker():
    assert fitting_chunk_bytes(128 * 1024) == DEFAULT_CHUNK_BYTES
    assert fitting_chunk_bytes(64 * 1024) == 64 * 1024 - 52
    assert fitting_chunk_bytes(2**28, 2**27) == MAX_CHUNK_BYTES
    with pytest.raises(ProtocolError, match="too little"):
        fitting_chunk_bytes(52)
