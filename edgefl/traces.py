"""Traces of a simulated fleet: when each device is there, and how fast its link is. Pure.

A device follows one of few patterns, shifted in time, and begins it again at its end. Times are whole milliseconds of
the run's virtual time, so that an edge is at the same moment from wherever it is looked for.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from edgefl.records import Attempt, Speed

Need = Literal["idle", "wifi", "charging"]
NEEDS: tuple[Need, ...] = get_args(Need)
DAY_MS = 86_400_000
#: Mean seconds with a state and without it, of synthetic patterns. A choice: with all three a device is there for a
#: fifth of the time, 36 minutes in the mean. No rhythm of the day.
_MEANS: dict[Need, tuple[float, float]] = {"idle": (3000, 600), "wifi": (32_400, 10_800), "charging": (10_800, 21_600)}
#: Synthetic patterns, and the length of each. With shifts of their own they are a million devices' without equal times.
_PATTERNS, _WEEK_MS = 200, 7 * DAY_MS
#: Bytes a second down and up of a device whose profile says nothing: 10 and 4 Mbit/s. A choice, as the spreads are:
#: the standard deviation of the logarithm among devices, and the share of the mean from round to round.
_LINK, _AMONG, _BETWEEN = (1_250_000.0, 500_000.0), 0.5, 0.3
#: A link is never slower than this share of its mean.
_SLOWEST = 0.1
Indices = npt.NDArray[np.int64]
#: Places of devices in the order of their names.
Places = slice | list[int]
ALL = slice(None)
#: Apart from the run's other draws with its seed.
_TAG = zlib.crc32(b"traces")


class Change(NamedTuple):
    """A state of a device begins or ends, in milliseconds since its pattern's begin."""

    at_ms: int
    state: Need
    value: bool


class Pattern(NamedTuple):
    """``edges``: where it alternates between away and there, from away, or ``inverted`` from there.

    ``begins_ms``: time of the day of its begin; shifts are multiples of ``turn_ms``.
    """

    span_ms: int
    edges: tuple[int, ...]
    inverted: bool = False
    begins_ms: int = 0
    turn_ms: int = 1


class LinkSpeed(NamedTuple):
    """Bytes a second down and up: means, and standard deviations from round to round."""

    down: float
    down_sigma: float
    up: float
    up_sigma: float


def pattern_of(changes: Iterable[Change], span_ms: int, needs: Sequence[Need]) -> Pattern:
    """The pattern of a device that is there while it has all these states; before their first change it has none."""
    has, there, edges = dict.fromkeys(NEEDS, False), not needs, [0] if not needs else []
    for at_ms, state, value in sorted(changes, key=lambda one: one.at_ms):
        has[state] = value
        if all(has[need] for need in needs) is not there:
            there = not there
            edges.append(at_ms)
    edges += [span_ms] if there else []
    around = len(edges) > 1 and edges[0] == 0 and edges[-1] == span_ms
    return Pattern(span_ms, tuple(edges[1:-1] if around else edges), around)


def synthetic(seed: int, needs: Sequence[Need]) -> list[Pattern]:
    """Patterns whose states come and go independently, for exponentially distributed times."""
    draw = np.random.default_rng((seed, _TAG))
    found = []
    for _ in range(_PATTERNS):
        changes = list[Change]()
        for state, means in _MEANS.items():
            at, value = 0.0, bool(draw.random() < means[0] / sum(means))
            while at < _WEEK_MS:
                changes.append(Change(int(at), state, value))
                at += 1 + 1000 * draw.exponential(means[not value])
                value = not value
        found.append(pattern_of(changes, _WEEK_MS, needs))
    return found


class Traces:
    """Traces of the devices ``names``, which are sorted. ``links``: speeds that devices draw from; none: synthetic."""

    def __init__(
        self, names: Sequence[str], patterns: Sequence[Pattern], seed: int, links: Sequence[LinkSpeed] = ()
    ) -> None:
        self.names = names
        self._seed, self._links = seed, links
        draw, count = np.random.default_rng((seed, _TAG, 1)), len(names)
        self._pattern = draw.integers(len(patterns), size=count)
        spans, turns, begins = (
            np.array([getattr(one, field) for one in patterns], np.int64)[self._pattern]
            for field in ("span_ms", "turn_ms", "begins_ms")
        )
        self._span = spans
        self._offset = (draw.random(count) * (spans // turns + 1)).astype(np.int64) * turns - begins
        self._link = draw.integers(len(links), size=count) if links else np.exp(_AMONG * draw.standard_normal(count))
        self._far = 1 + max(one.span_ms for one in patterns)
        self._edges = np.concatenate(
            [np.array(one.edges, np.int64) + place * self._far for place, one in enumerate(patterns)]
        )
        self._count = np.array([len(one.edges) for one in patterns])[self._pattern]
        first = np.cumsum([0, *(len(one.edges) for one in patterns)])
        self._first = first[self._pattern]
        self._odd: npt.NDArray[np.bool_] = np.array([one.inverted for one in patterns])[self._pattern]

    def there(self, at_ms: int, places: Places = ALL) -> npt.NDArray[np.bool_]:
        """Availability of the devices at these places."""
        found: npt.NDArray[np.bool_] = (self._passed(at_ms, places)[1] % 2 == 1) != self._odd[places]
        return found

    def next_edges(self, at_ms: int, places: Places = ALL) -> npt.NDArray[np.float64]:
        """When each of the devices comes or leaves next, after ``at_ms``; infinity: never."""
        local, passed = self._passed(at_ms, places)
        first, count, base = self._first[places], self._count[places], self._pattern[places] * self._far
        wraps = passed >= count
        place = np.minimum(first + np.where(wraps, 0, passed), max(0, len(self._edges) - 1))
        edges = self._edges[place] if len(self._edges) else np.zeros_like(first)
        found = at_ms + edges - base + np.where(wraps, self._span[places], 0) - local
        return np.where(count > 0, found, math.inf)

    def _passed(self, at_ms: int, places: Places) -> tuple[Indices, Indices]:
        """Time within each device's pattern, and edges passed by then."""
        local = (at_ms + self._offset[places]) % self._span[places]
        passed = np.searchsorted(self._edges, local + self._pattern[places] * self._far, side="right")
        return local, passed - self._first[places]

    def with_link(self, place: int, speed: Speed) -> Speed:
        """The speed of a device with its link's means."""
        if self._links:
            link = self._links[self._link[place]]
            return msgspec.structs.replace(speed, down_bytes=link.down, up_bytes=link.up)
        down, up = (own or usual for own, usual in zip((speed.down_bytes, speed.up_bytes), _LINK, strict=True))
        factor = float(self._link[place])
        return msgspec.structs.replace(speed, down_bytes=factor * down, up_bytes=factor * up)

    def drawn(self, place: int, speed: Speed, attempt: Attempt) -> tuple[float, float]:
        """Bytes a second down and up of a device in one attempt; ``speed``: with its link's means."""
        means = np.array([speed.down_bytes, speed.up_bytes])
        sigmas = _BETWEEN * means
        if self._links:
            link = self._links[self._link[place]]
            sigmas = np.array([link.down_sigma, link.up_sigma])
        draw = np.random.default_rng((self._seed, _TAG, place, attempt.stage, attempt.round, attempt.attempt))
        down, up = np.maximum(draw.normal(means, sigmas), _SLOWEST * means).tolist()
        return down, up
