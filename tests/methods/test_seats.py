"""Seats of clusters: one chance for every device, and two of a cluster together where that is possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.methods import select

DRAWS = 20_000


class Scripted:
    """A generator without chance: orders stay as they are, integers are those given, then 0."""

    def __init__(self, *integers: int) -> None:
        self.integers_left = list(integers)

    def integers(self, high: int) -> int:
        return self.integers_left.pop(0) % high if self.integers_left else 0

    def permutation(self, what) -> np.ndarray:
        return np.arange(what) if isinstance(what, int) else np.array(what)


def seats(sizes: dict[int, int], count: int, *integers: int) -> dict[int, int]:
    return select.seats(sizes, count, Scripted(*integers))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [((10, 10, 10), 6), ((20, 8, 2), 6), ((12, 5, 1), 4), ((27, 2, 1), 6), ((5, 3, 2), 5), ((8, 6, 4, 2), 7)],
)
def test_every_device_has_one_chance_and_company_whatever_its_clusters_size(sizes, count):
    """A cluster of n expects n * count / total seats; the bound is five deviations of a mean of so many draws."""
    rng = np.random.default_rng(7)
    clusters = dict(enumerate(sizes))
    drawn = np.array([list(select.seats(clusters, count, rng).values()) for _ in range(DRAWS)])
    expected = np.array(sizes) * count / sum(sizes)
    bound = 5 * drawn.std(axis=0) / np.sqrt(DRAWS)
    assert (abs(drawn.mean(axis=0) - expected) <= bound + 1e-12).all(), drawn.mean(axis=0) / sizes
    assert not ((drawn == 1) & (np.array(sizes) > 1)).any()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_seats_are_all_given_and_a_device_alone_had_nobody_to_exchange_with(sizes, count, seed):
    clusters = dict(enumerate(sizes))
    given_seats = select.seats(clusters, count, np.random.default_rng(seed))
    assert list(given_seats) == list(clusters)
    assert sum(given_seats.values()) == min(count, sum(sizes))
    assert all(0 <= given_seats[m] <= size for m, size in clusters.items())
    alone = [m for m, seat in given_seats.items() if seat == 1 < clusters[m]]
    room = [m for m, seat in given_seats.items() if m not in alone and 0 < seat < clusters[m]]
    assert len(alone) <= 1
    # One other cluster with two seats, where this one has no third device: 0 and 3 is possible, 3 and 0 is not.
    assert not alone or not room or (len(room) == 1 and given_seats[room[0]] == 2 == clusters[alone[0]])
    assert given_seats == select.seats(dict(reversed(clusters.items())), count, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("sizes", "count", "integers", "expected"),
    [
        # Fair are 3, 2, 1 of 6: the single seat and one of three (n = 2): both to the third cluster by 0, none by 1.
        ({0: 6, 1: 4, 2: 2}, 6, (0, 0), {0: 2, 1: 2, 2: 2}),
        ({0: 6, 1: 4, 2: 2}, 6, (0, 1), {0: 4, 1: 2, 2: 0}),
        ({0: 6, 1: 6}, 6, (), {0: 3, 1: 3}),
        # One each: the first two share (1 of 2), then the third has them all (0 of 3) or none.
        ({0: 4, 1: 4, 2: 4}, 3, (0, 1, 0), {0: 0, 1: 0, 2: 3}),
        ({0: 4, 1: 4, 2: 4}, 3, (0, 0, 1), {0: 3, 1: 0, 2: 0}),
        # Fair are 2.5, 1.5, 1: 2, 2, 1. Two others with two seats: the first gives both, or the second takes one.
        ({0: 5, 1: 3, 2: 2}, 5, (0, 1), {0: 0, 1: 3, 2: 2}),
        ({0: 5, 1: 3, 2: 2}, 5, (0, 0), {0: 2, 1: 3, 2: 0}),
        # The start moves the ends: (25 + 5) // 10 = 3, (40 + 5) // 10 = 4; of the two single ones one has both.
        ({0: 5, 1: 3, 2: 2}, 5, (5, 0), {0: 3, 1: 2, 2: 0}),
        ({0: 0, 1: 1, 2: 3}, 9, (), {0: 0, 1: 1, 2: 3}),
        ({0: 1, 1: 1}, 1, (0,), {0: 0, 1: 1}),
        ({0: 1, 1: 1}, 1, (1,), {0: 1, 1: 0}),
        ({0: 3}, 1, (), {0: 1}),
        ({}, 3, (), {}),
    ],
)
def test_seats_by_hand(sizes, count, integers, expected):
    assert seats(sizes, count, *integers) == expected
