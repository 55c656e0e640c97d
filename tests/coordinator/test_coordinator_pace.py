"""How large chunks are, by what a link has carried."""

from __future__ import annotations

import pytest

from coordinator.runtime.chunk_size import LEAST_CREDIT, MOST_IN_FLIGHT, ChunkSizer
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_CREDIT, HEADER_BYTES

UNIT = DEFAULT_CHUNK_BYTES
MB = 10**6


def sizer(max_payload: int = 2 * MB, fixed: int = 0, credit: int = DEFAULT_CREDIT) -> ChunkSizer:
    made = ChunkSizer(fixed, credit)
    made.connected(max_payload)
    return made


def test_an_unknown_link_gets_small_chunks() -> None:
    assert sizer().of(["a", "b"]) == (UNIT, DEFAULT_CREDIT)


@pytest.mark.parametrize(
    ("rate", "chunk", "credit"),
    [(32e3, 1, 16), (1 * MB, 1, 16), (2.1 * MB, 2, 8), (3 * MB, 2, 8), (4 * MB, 4, 4), (400 * MB, 8, 4)],
)
def test_a_chunk_takes_a_tenth_of_a_second_at_most_and_as_many_bytes_are_in_flight(
    rate: float, chunk: int, credit: int
):
    made = sizer()
    made.note("a", 10 * MB, 10 * MB / rate)
    assert made.of(["a"]) == (chunk * UNIT, credit)


def test_the_slowest_of_those_that_are_sent_the_same_decides() -> None:
    made = sizer()
    made.note("fast", 10 * MB, 0.1)
    made.note("slow", 10 * MB, 10.0)
    assert made.of(["fast"])[0] > made.of(["fast", "slow"])[0] == UNIT
    assert made.of(["fast", "new"]) == (UNIT, DEFAULT_CREDIT)
    made.note("slow", 10 * MB, 0.1)  # its link has become better
    assert made.of(["fast", "slow"]) == made.of(["fast"])


def test_small_uploads_say_nothing_of_a_link() -> None:
    made = sizer()
    made.note("a", UNIT, 0.0001)
    made.note("b", 10 * MB, 0.0)
    assert made.of(["a"]) == made.of(["b"]) == (UNIT, DEFAULT_CREDIT)


def test_what_the_broker_admits_is_the_limit() -> None:
    made = sizer(max_payload=255 * 1024)
    made.note("a", 10 * MB, 0.01)
    assert made.of(["a"]) == (2 * UNIT, 8)
    assert sizer(max_payload=50_000).of(["a"]) == (50_000 - HEADER_BYTES, DEFAULT_CREDIT)


def test_a_size_that_was_asked_for_is_kept() -> None:
    made = sizer(fixed=2048, credit=3)
    made.note("a", 10 * MB, 0.01)
    assert made.of(["a"]) == (2048, 3)


def test_few_chunks_in_flight_stay_few() -> None:
    made = sizer(credit=2)
    made.note("a", 10 * MB, 0.01)
    assert made.of(["a"]) == (8 * UNIT, 2)


def test_very_many_devices_have_less_in_flight_each() -> None:
    few, many, most = ([f"d{n}" for n in range(count)] for count in (300, 1000, 5000))
    assert sizer().of(few) == (UNIT, DEFAULT_CREDIT)
    assert sizer().of(many) == (UNIT, MOST_IN_FLIGHT // (1000 * UNIT))
    assert sizer().of(most) == (UNIT, LEAST_CREDIT)
    assert sizer(fixed=2048, credit=16).of(most) == (2048, 16)
    assert sizer(credit=2).of(most) == (UNIT, 2), "not more than the run file says"
    assert sizer().of(most, 100_000) == (UNIT, DEFAULT_CREDIT), "a small model is never more"
