"""Link rates of devices in the open attempt, from chunks sent and received by the coordinator's clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.state import Link
from edgefl.records import Attempt

#: A download says nothing of a link where the device waited for others in more than this share of the looks at it:
#: what is published once goes at the pace of the slowest.
MOST_WAITING = 0.5


class Moved(NamedTuple):
    """Bytes of an attempt's chunks so far. ``asked``: all that the device lacked when it first asked for them.

    ``waits``: the device has room for more, and waits for others.
    """

    asked: int = 0
    sent: int = 0
    received: int = 0
    waits: bool = False


class _Way(NamedTuple):
    """One direction: when bytes were first seen to move, and last, and how many there were then."""

    first_at: float = 0.0
    first_bytes: int = 0
    last_at: float = 0.0
    last_bytes: int = 0

    def noted(self, now: float, total: int) -> _Way:
        """The direction after ``total`` bytes by now. The first window, sent at once, says nothing of the link."""
        if not total or total == self.last_bytes:
            return self
        if total < self.last_bytes or not self.last_bytes:  # it begins, or begins again in chunks of another size
            return _Way(now, total, now, total)
        return self._replace(last_at=now, last_bytes=total)


class _Seen(NamedTuple):
    """A device's two directions, observations of its download, and those in which it waited."""

    down: _Way = _Way()
    up: _Way = _Way()
    looks: int = 0
    waiting: int = 0

    @property
    def ways(self) -> tuple[_Way, ...]:
        """The directions at the pace of the device's own link, not of others'."""
        return (self.up,) if self.waiting > MOST_WAITING * self.looks else (self.down, self.up)


class LinkRates:
    """Measured link rates: ``look`` records bytes moved, several times a second; ``links`` gives the rates."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._seen: dict[str, _Seen] = {}
        self._moved: dict[str, Moved] = {}

    def look(self, now: float, attempt: Attempt, moved: Mapping[str, Moved]) -> None:
        """Note how much has moved by now in the open attempt; another attempt begins from nothing."""
        if attempt != self._attempt:
            self._attempt, self._seen = attempt, {}
        self._moved = dict(moved)
        for device, one in moved.items():
            down, up, looks, waiting = self._seen.get(device, _Seen())
            here = 0 < one.sent < one.asked
            ways = down.noted(now, one.sent), up.noted(now, one.received)
            self._seen[device] = _Seen(*ways, looks + here, waiting + (here and one.waits))

    def links(self) -> dict[str, Link]:
        """Each device's link rate; none without two observations of its own pace."""
        found = {}
        for device, seen in self._seen.items():
            seconds = sum(way.last_at - way.first_at for way in seen.ways)
            size = sum(way.last_bytes - way.first_bytes for way in seen.ways)
            if seconds > 0 and size > 0 and device in self._moved:
                asked, sent, received, _ = self._moved[device]
                found[device] = Link(size / seconds, max(0, asked - sent), asked, received)
        return found
